"""Log-probabilities of tokens and prompts, whatever runs beside them: those of one plain forward pass over the whole text."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.controls import RowControls
from protocol.logprobs import MAX_LOGPROBS, NUM_WORDS, SCORE_BYTES, read_score
from protocol.messages import pack
from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint
from tests.scenarios import TINY
from tests.simulation import GREEDY, Simulation
from worker.loading import load_model
from worker.logprobs import AT_ONCE, write_scores

PROMPTS = [[(7 * i + 3 * j) % 96 for j in range(length)] for i, length in enumerate([1, 2, 7, 8, 9, 16, 17, 40, 33, 5])]
WARM = RowSampling(temperature=0.8, top_k=5, top_p=0.9, seed=3)
CONTROLS = RowControls(bias_ids=pack([5]), bias_values=np.float32([100.0]).tobytes(), needs_tokens=True)
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("scored"), "qwen3", **TINY))


@pytest.fixture(scope="module")
def plain(folder):
    """transformers' log-probabilities after each token of a text, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)

    return logprobs


def simulation(folder: str, **limits) -> Simulation:
    return Simulation(load_model(folder, "float32", "cpu", 64), **{"num_rows": 4, "block_size": 8, "num_blocks": 60, **limits})


def check_scores(data: list[bytes], tokens: list[int], logprobs_LV: torch.Tensor) -> None:
    """data[i] scores tokens[i] by logprobs_LV[i]."""
    assert len(data) == len(tokens) == len(logprobs_LV)
    for score, token, logprobs_V in zip(data, tokens, logprobs_LV):
        got = read_score(token, score, MAX_LOGPROBS)
        assert got.logprob == pytest.approx(logprobs_V[token].item(), abs=1e-3)
        assert abs((logprobs_V > logprobs_V[token]).sum().item() + 1 - got.rank) <= 1  # a near-tie may go either way
        best_K, _ = logprobs_V.topk(MAX_LOGPROBS)
        assert [value for _, value in got.top] == pytest.approx(best_K.tolist(), abs=1e-3)
        assert all(logprobs_V[i].item() == pytest.approx(value, abs=1e-3) for i, value in got.top)
        assert len({i for i, _ in got.top}) == MAX_LOGPROBS


def split(data: bytes) -> list[bytes]:
    return [data[start : start + SCORE_BYTES] for start in range(0, len(data), SCORE_BYTES)]


def check_all(sim: Simulation, plain, handles, prompts=PROMPTS) -> None:
    for handle in handles:
        prompt, output = prompts[handle], sim.outputs[handle]
        logprobs_LV = plain(prompt + output)
        check_scores(sim.scores[handle], output, logprobs_LV[len(prompt) - 1 : -1])
        check_scores(split(sim.prompt_scores.get(handle, b"")), prompt[1:], logprobs_LV[: len(prompt) - 1])


@pytest.mark.parametrize("limits", [
    {"max_pipeline_depth": 1}, {"max_pipeline_depth": 2, "max_step_tokens": 16}, {"max_pipeline_depth": 4, "max_step_tokens": 7},
    {"num_rows": 1}, {"num_rows": 10, "max_step_tokens": 512}, {"num_blocks": 9, "max_pipeline_depth": 4, "num_rows": 8},
    {"num_blocks": 9, "max_pipeline_depth": 3, "num_rows": 8, "num_host_blocks": 100},
    {"num_blocks": 9, "max_step_tokens": 5, "num_rows": 8, "enable_prefix_caching": False},
])  # fmt: skip
def test_scores_are_those_of_a_plain_pass_over_the_text(limits, folder, plain):
    """Chunks end around the borders of blocks, requests that do not ask run beside, pools are tight."""
    sim = simulation(folder, **limits)
    for handle, prompt in enumerate(PROMPTS):
        asks = handle % 3 != 1
        sim.add(handle, prompt, NEW, sampling=[GREEDY, WARM][handle % 2], is_scored=asks, is_prompt_scored=asks)
    sim.run()
    asking = [handle for handle in range(len(PROMPTS)) if handle % 3 != 1]
    check_all(sim, plain, asking)
    assert sim.scores.keys() == set(asking) and sim.prompt_scores.keys() <= set(asking)
    if limits.get("num_blocks") and limits.get("max_pipeline_depth"):
        assert sim.scheduler.num_preemptions > 0


def test_those_who_do_not_ask_get_the_same_tokens_beside_those_who_do(folder):
    outputs = []
    for asks in (False, True):
        sim = simulation(folder, num_rows=10)
        for handle, prompt in enumerate(PROMPTS):
            sim.add(handle, prompt, NEW, sampling=[GREEDY, WARM][handle % 2], is_scored=asks and handle % 2 == 0)
        sim.run()
        outputs.append(sim.outputs)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("salt", [b"", b"other"])
def test_a_cached_prefix_leaves_no_prompt_token_unscored(salt, folder, plain):
    sim = simulation(folder)
    prompt = PROMPTS[7][:28]  # three blocks and a half
    for handle in range(4):
        sim.add(handle, prompt, NEW, salt=salt, is_scored=True, is_prompt_scored=handle < 3)
        if handle != 1:
            sim.run()
    for handle in range(3):
        logprobs_LV = plain(prompt + sim.outputs[handle])
        check_scores(split(sim.prompt_scores[handle]), prompt[1:], logprobs_LV[: len(prompt) - 1])
    check_scores(sim.scores[3], sim.outputs[3], logprobs_LV[len(prompt) - 1 : -1])
    assert [sim.num_cached[handle] for handle in range(4)] == [0, 0, 0, 24]


def test_another_salt_finds_no_block_of_a_scored_request(folder):
    sim = simulation(folder)
    for handle, (salt, is_prompt_scored) in enumerate([(b"a", True), (b"b", True), (b"", False), (b"b", False)]):
        sim.add(handle, PROMPTS[7], 2, salt=salt, is_prompt_scored=is_prompt_scored)
        sim.run()
    assert [sim.num_cached[handle] for handle in range(4)] == [0, 0, 0, 32]


@pytest.mark.parametrize("sampling", [
    GREEDY, RowSampling(temperature=0.5, seed=1), RowSampling(temperature=2.0, seed=1), RowSampling(temperature=1.0, top_p=0.1, seed=1),
    RowSampling(repetition_penalty=1.8, presence_penalty=1.5, frequency_penalty=-1.0),
])  # fmt: skip
def test_scores_are_the_models_own_whatever_changes_the_choice(sampling, folder, plain):
    sim = simulation(folder)
    sim.add(0, PROMPTS[4], NEW, sampling=sampling, controls=CONTROLS, is_scored=True)
    sim.run()
    assert sim.outputs[0].count(5) > NEW // 2, "the bias has forced it"
    check_scores(sim.scores[0], sim.outputs[0], plain(PROMPTS[4] + sim.outputs[0])[len(PROMPTS[4]) - 1 : -1])


def test_of_several_choices_each_has_its_own_scores_and_the_first_the_prompts(folder, plain):
    sim = simulation(folder, num_rows=3)
    sim.add(0, PROMPTS[6], NEW, sampling=WARM, more_seeds=[11, 12, 13], is_scored=True, is_prompt_scored=True)
    sim.run()
    for handle in range(4):
        logprobs_LV = plain(PROMPTS[6] + sim.outputs[handle])
        check_scores(sim.scores[handle], sim.outputs[handle], logprobs_LV[len(PROMPTS[6]) - 1 : -1])
    assert sim.prompt_scores.keys() == {0} and len(split(sim.prompt_scores[0])) == len(PROMPTS[6]) - 1
    assert len({tuple(tokens) for tokens in sim.outputs.values()}) > 1


@pytest.mark.parametrize("depth", [1, 4])
def test_a_stop_drops_scores_as_it_drops_tokens(depth, folder):
    sim = simulation(folder, max_pipeline_depth=depth)
    sim.add(0, PROMPTS[4], NEW)
    sim.run()
    end = sim.outputs[0][3]
    sim.add(1, PROMPTS[4], NEW, end_ids=[end], is_scored=True)
    sim.run()
    assert len(sim.scores[1]) == len(sim.outputs[1]) == sim.outputs[0].index(end) + 1


def test_scores_equal_float64_arithmetic_for_any_vocabulary():
    generator = torch.Generator().manual_seed(0)
    for vocab, count in [(3, 2), (MAX_LOGPROBS, 5), (1000, 2 * AT_ONCE + 3)]:
        logits_XV = 10 * torch.randn(count, vocab, generator=generator)
        tokens_X = torch.randint(vocab, (count,), generator=generator).int()
        scores_XW = torch.zeros(count, NUM_WORDS, dtype=torch.int32)
        write_scores(logits_XV, tokens_X, scores_XW)
        logprobs_XV = logits_XV.double().log_softmax(dim=1)
        for score_W, token, logprobs_V in zip(scores_XW, tokens_X.tolist(), logprobs_XV):
            got = read_score(token, score_W.numpy().tobytes(), 7)
            values, ids = logprobs_V.sort(descending=True)
            assert got.logprob == pytest.approx(logprobs_V[token].item(), abs=1e-4)
            assert got.rank == ids.tolist().index(token) + 1
            assert [i for i, _ in got.top] == ids.tolist()[:7]
            assert [value for _, value in got.top] == pytest.approx(values.tolist()[:7], abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_in_half_precision_choose_a_best_token(dtype, temperature, folder):
    sim = Simulation(load_model(folder, dtype, "cpu", 64), num_rows=4, block_size=8)
    for handle, prompt in enumerate(PROMPTS):
        sim.add(handle, prompt, NEW, sampling=RowSampling(temperature=temperature, top_p=0.9, seed=handle), is_scored=True)
    sim.run()
    scores = [read_score(token, score, 1) for handle in sim.outputs for token, score in zip(sim.outputs[handle], sim.scores[handle])]
    assert len(scores) == NEW * len(PROMPTS)
    assert all(np.isfinite(score.logprob) and score.rank == 1 for score in scores)
