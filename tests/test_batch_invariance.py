"""The rule that covers most faults: a greedy or seeded request returns the ids of its solo run, whatever runs beside it.

In-process, through the real scheduler, deltas, rows and model; the solo reference of greedy requests is transformers' generate.
"""

import random
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from tests.simulation import GREEDY, Simulation
from worker.loading import load_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "llama-yarn": ("llama", {"max_position_embeddings": 128, "rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-odd-heads": ("qwen3", {"hidden_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": None}),
}
NUM_REQUESTS, NEW_TOKENS, LONGEST_PROMPT = 16, 12, 90


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of each variant, made on first use."""

    @cache
    def folder(name: str) -> Path:
        arch, overrides = VARIANTS[name]
        return tiny_checkpoint(tmp_path_factory.mktemp(name), arch, **overrides)

    return folder


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(512) for _ in range(rng.choice([1, 5, 16, 17, 40, LONGEST_PROMPT]))] for _ in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def solo(checkpoints):
    """transformers' greedy tokens of each variant's prompts; a fresh model per prompt where its rope remembers lengths."""

    @cache
    def tokens(name: str) -> list[list[int]]:
        load = partial(AutoModelForCausalLM.from_pretrained, checkpoints(name), dtype=torch.float32)
        if "dynamic" in name:
            return [generate(load(), prompt) for prompt in make_prompts()]
        model = load()
        return [generate(model, prompt) for prompt in make_prompts()]

    return tokens


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = dict(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def simulate(folder: Path, **limits) -> Simulation:
    model = load_model(str(folder), "float32", "cpu", 128)
    return Simulation(model, **{"num_rows": 16, "block_size": 8, **limits})


def run_all(sim: Simulation, prompts: list[list[int]], samplings: list[RowSampling]) -> list[list[int]]:
    for handle, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        assert sim.add(handle, prompt, NEW_TOKENS, sampling=sampling) is None
    sim.run()
    return [sim.outputs[handle] for handle in range(len(prompts))]


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_requests_equal_transformers_in_every_way_of_running_them(name, checkpoints, solo):
    prompts, expected = make_prompts(), solo(name)
    greedy = [GREEDY] * NUM_REQUESTS
    folder = checkpoints(name)
    for depth, chunk in [(1, 512), (2, 16), (4, 512)]:
        sim = simulate(folder, max_pipeline_depth=depth, max_step_tokens=chunk)
        assert run_all(sim, prompts, greedy) == expected, f"depth {depth}, chunk {chunk}"
    alone = simulate(folder, num_rows=1, max_pipeline_depth=2, max_step_tokens=16)
    assert run_all(alone, prompts, greedy) == expected
    # A pool of 128 + 8 tokens: the longest request fits, several at once do not.
    tight = simulate(folder, num_blocks=17, max_pipeline_depth=4, max_step_tokens=512)
    assert run_all(tight, prompts, greedy) == expected
    assert tight.scheduler.num_preemptions > 0


def seeded(i: int) -> RowSampling:
    """A different mix of filters for each request; every third is greedy."""
    if i % 3 == 0:
        return GREEDY
    top_k, top_p, min_p = (0, 5, 40)[i % 3], (1.0, 0.9)[i % 2], (0.0, 0.05)[i // 2 % 2]
    return RowSampling(temperature=0.7 + i / 10, top_k=top_k, top_p=top_p, min_p=min_p, seed=i - 8)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_seeded_requests_are_the_same_alone_in_a_batch_and_after_a_preemption(name, checkpoints):
    prompts, samplings = make_prompts(), [seeded(i) for i in range(NUM_REQUESTS)]
    folder = checkpoints(name)
    alone = run_all(simulate(folder, num_rows=1), prompts, samplings)
    assert run_all(simulate(folder, max_pipeline_depth=4), prompts, samplings) == alone
    tight = simulate(folder, num_blocks=17, max_pipeline_depth=4)
    assert run_all(tight, prompts, samplings) == alone
    assert tight.scheduler.num_preemptions > 0
    assert len({tuple(output) for output in alone}) == NUM_REQUESTS


def test_equal_seeds_and_prompts_in_one_batch_give_equal_tokens_and_other_seeds_others(checkpoints):
    samplings = [RowSampling(temperature=1.0, seed=seed) for seed in (5, 5, 6, -5)]
    first, second, other, negative = run_all(simulate(checkpoints("llama")), [[1, 2, 3]] * 4, samplings)
    assert first == second
    assert len({tuple(first), tuple(other), tuple(negative)}) == 3
