"""GGUF files against the safetensors original they were written from."""

import gguf
import pytest
import torch

from tests.checkpoints import tiny_model
from tests.paged_driver import PagedDriver
from tests.test_models import LLAMA3, MOE, random_tokens
from worker.loading import load_model

# Q8_0 has blocks of 32 values; all experts are chosen, since a rounded router may choose others.
MOE_OF_32 = MOE | {"moe_intermediate_size": 64, "norm_topk_prob": True, "num_experts_per_tok": 8}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def pairs_from_halves(values, num_heads):
    """llama.cpp's order of q's and k's rows, by the definition: row 2i of a head is our row i, row 2i + 1 our row i + F / 2."""
    F = len(values) // num_heads
    return torch.stack([values[h * F + j // 2 + (j % 2) * (F // 2)] for h in range(num_heads) for j in range(F)])


def unstacked(state):
    """transformers holds the gate and up projections of all experts in one tensor."""
    for name, tensor in state.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for part, values in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"{stem}.{part}_proj.weight", values
        else:
            yield (f"{name}.weight" if name.endswith("experts.down_proj") else name), tensor


def write_gguf(path, arch, model, quantisation, rope=None, extra=None):
    """Write a model of transformers as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if rope:
        rope(writer)
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, tensor in unstacked(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ".q_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_key_value_heads)
        kind = quantisation if tensor.ndim >= 2 and not name.endswith("mlp.gate.weight") else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path):
    return load_model(str(path), "auto", "cpu", None)


@torch.no_grad()
def assert_same_logits(path, model, tolerance, prompt_len=40):
    prompt = random_tokens(prompt_len)
    got = PagedDriver(load(path)).run({0: prompt})[0]
    expected = model(torch.tensor([prompt])).logits[0, -1]
    assert (got - expected).norm() < tolerance * expected.norm()


F32, F16, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch, config", [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    ("qwen3_moe", MOE | {"norm_topk_prob": True}),
    ("qwen3_moe", MOE | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
], ids=["llama", "llama_biases", "qwen2", "qwen3", "qwen3_moe", "qwen3_moe_dense_last"])  # fmt: skip
def test_every_architecture_equals_its_original(arch, config, tied, tmp_path):
    model = tiny_model(arch, tie_word_embeddings=tied, **config)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", arch.replace("_", ""), model, F32), model, 1e-4)


@pytest.mark.parametrize("quantisation, tolerance", [(F16, 2e-3), (Q8, 5e-2)])
@pytest.mark.parametrize("arch, config", [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("qwen3_moe", MOE_OF_32)])
def test_quantised_files_stay_within_their_precision(arch, config, quantisation, tolerance, tmp_path):
    model = tiny_model(arch, initializer_range=0.1, **config)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", arch.replace("_", ""), model, quantisation), model, tolerance)


def llama3_divisors(head_dim):
    """The factors that llama.cpp's converter stores for Llama 3's scaling."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * torch.pi * 10000.0 ** (i / head_dim)
        low = LLAMA3["original_max_position_embeddings"] / LLAMA3["low_freq_factor"]
        high = LLAMA3["original_max_position_embeddings"] / LLAMA3["high_freq_factor"]
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(LLAMA3["factor"])
        else:
            smooth = (64 / wavelength - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return torch.tensor(divisors)


def test_rope_frequency_factors_are_honoured(tmp_path):
    model = tiny_model("llama", rope_parameters=LLAMA3)
    path = write_gguf(tmp_path / "model.gguf", "llama", model, F32, extra={"rope_freqs.weight": llama3_divisors(16)})
    assert_same_logits(path, model, 1e-4, prompt_len=150)


def test_yarn_metadata_is_honoured(tmp_path):
    model = tiny_model("qwen3", max_position_embeddings=64, rope_parameters={"rope_type": "yarn", "factor": 4.0})

    def rope(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    path = write_gguf(tmp_path / "model.gguf", "qwen3", model, F32, rope)
    assert load(path).max_model_len == 256
    assert_same_logits(path, model, 1e-4, prompt_len=150)


def test_tensors_without_a_place_are_named(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", tiny_model(), F32, extra={"blk.0.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ValueError, match="no place for blk.0.attn_sinks.weight"):
        load(path)


def test_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "gemma", tiny_model(), F32)
    with pytest.raises(ValueError, match="gemma is not supported; supported are llama, qwen2, qwen3, qwen3moe"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -64])
def test_a_file_that_is_cut_short_is_named(keep, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", tiny_model(), F32)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.gguf.*cut short"):
        load(path)


def test_a_pointer_file_is_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n")
    with pytest.raises(ValueError, match="model.gguf.*git-lfs pointer"):
        load(path)
