"""Penalties, biases and bans against transformers' processors: on random logits, and in whole requests however they are run."""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from kernels import reference
from protocol.controls import MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS, MAX_BIASES, RowControls
from protocol.messages import NO_TOKEN, AddRequest, RowJoin, StepDelta, pack
from protocol.sampling import RowSampling
from tests.checkpoints import tiny_checkpoint, tiny_model
from tests.checksum_reference import continuation
from tests.simulation import GREEDY, Simulation
from worker.controls import Controls
from worker.loading import load_model
from worker.rows import SamplingKind
from worker.staging import HostStaging

VOCAB, NEW_TOKENS = 512, 14


@dataclass
class Asked:
    """A request, with its controls as Python has them."""

    prompt: list[int]
    sampling: RowSampling = GREEDY
    biases: dict[int, float] = field(default_factory=dict)
    allowed: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    end_ids: list[int] = field(default_factory=list)

    @property
    def controls(self) -> RowControls | None:
        """What the door would make of them."""
        needs_tokens = self.sampling.has_penalty or bool(self.bad_words)
        early_ends = self.end_ids if self.sampling.min_tokens else []
        if not (needs_tokens or self.biases or self.allowed or early_ends):
            return None
        values = np.array(list(self.biases.values()), dtype="<f4").tobytes()
        words = list(map(pack, self.bad_words))
        return RowControls(pack(list(self.biases)), values, pack(self.allowed), words, pack(early_ends), needs_tokens)


def controlled(asked: Asked, output: list[int], logits_V: Tensor) -> Tensor:
    """The logits after this output: by transformers' processors where it has them, by the definition elsewhere."""
    sampling, seen, scores_1V = asked.sampling, torch.tensor([asked.prompt + output]), logits_V[None].clone()
    scores_1V = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores_1V)
    for token in set(output):
        scores_1V[0, token] -= sampling.frequency_penalty * output.count(token)
        scores_1V[0, token] -= sampling.presence_penalty
    for token, bias in asked.biases.items():
        scores_1V[0, token] += bias
    if asked.allowed:
        scores_1V = SuppressTokensLogitsProcessor(sorted(set(range(len(logits_V))) - set(asked.allowed)))(seen, scores_1V)
    if asked.end_ids:
        ends = MinNewTokensLengthLogitsProcessor(len(asked.prompt), sampling.min_tokens, asked.end_ids, device="cpu")
        scores_1V = ends(seen, scores_1V)
    if asked.bad_words:  # the processor wants more tokens than a word has
        scores_1V = NoBadWordsLogitsProcessor(asked.bad_words)(torch.tensor([[NO_TOKEN] * MAX_BAD_WORD_TOKENS + output]), scores_1V)
    return scores_1V[0]


# ---- on random logits ---------------------------------------------------------------------------------------------


def random_request(rng: random.Random, vocab: int) -> tuple[Asked, list[int]]:
    """Any mixture of controls, and an output so far that some of them are about."""
    prompt, output = ([rng.randrange(vocab) for _ in range(rng.randrange(1, 30))] for _ in range(2))

    def maybe(value, other):
        return value if rng.random() < 0.6 else other

    sampling = RowSampling(
        repetition_penalty=maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        min_tokens=maybe(len(output) + rng.choice([0, 1, 5]), 0),
    )
    asked = Asked(prompt, sampling, end_ids=maybe([vocab - 1, 2], []))
    asked.biases = maybe({rng.randrange(vocab): rng.uniform(-100, 100) for _ in range(rng.randrange(MAX_BIASES))}, {})
    asked.allowed = maybe(sorted(rng.sample(range(vocab), 40)), [])
    starts = [[], output[-3:], output[-1:], [7] * 5, [vocab - 1, *output[-2:]], output[-15:], prompt[-2:] + output[:1]]
    asked.bad_words = maybe([[*start, rng.randrange(vocab)] for start in starts], [])
    return asked, output


def joined(asked: Asked, row: int, output: list[int]) -> RowJoin:
    """The row given to the request after this output."""
    controls = msgspec.structs.replace(asked.controls or RowControls(), tokens=pack(asked.prompt + output))
    return RowJoin(row, 1, len(asked.prompt), 0, b"", asked.sampling, controls)


@pytest.mark.parametrize("known", ["all", "some", "none"])
def test_logits_equal_transformers_whatever_part_of_the_output_came_before_the_join(known):
    """Joins overwrite each other's rows, and samples of rows without controls lie between."""
    rng, vocab, num_rows = random.Random(known), 97, 70
    state, staging = Controls(num_rows, vocab, torch.device("cpu")), HostStaging()
    state.tally_RV.fill_(99), state.bias_RV.fill_(torch.nan)  # memory as it may be found
    for trial in range(3):
        requests = [random_request(rng, vocab) for _ in range(num_rows)]
        split = {"all": 10**6, "some": 3, "none": 0}[known]
        state.join([joined(asked, row, output[:split]) for row, (asked, output) in enumerate(requests)], staging)
        for row, (_, output) in enumerate(requests):
            for token in output[split:]:
                samples = torch.tensor([1], dtype=torch.int32), torch.tensor([num_rows, row]).int(), torch.tensor([5, token]).int()
                state.count(*samples)
        logits_NV = torch.randn(2 * num_rows, vocab, generator=torch.Generator().manual_seed(trial)) * 5
        wanted_NV = logits_NV.clone()
        rows_N, positions_N = torch.full((2 * num_rows,), num_rows).int(), torch.zeros(2 * num_rows).int()
        samples_C = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(trial))[:num_rows].int()
        for row, (sample, (asked, output)) in enumerate(zip(samples_C.tolist(), requests, strict=True)):
            rows_N[sample], positions_N[sample] = row, len(asked.prompt) + len(output)
            wanted_NV[sample] = controlled(asked, output, logits_NV[sample])
        others = sorted(set(range(2 * num_rows)) - set(samples_C.tolist()))
        before_NV = logits_NV.clone()
        state.apply(logits_NV, samples_C, rows_N, positions_N)
        torch.testing.assert_close(logits_NV, wanted_NV, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits_NV[others], before_NV[others])


def test_a_row_without_a_token_is_not_counted():
    state = Controls(2, 10, torch.device("cpu"))
    state.join([joined(Asked([1], RowSampling(frequency_penalty=1.0)), row, []) for row in range(2)], HostStaging())
    state.count(torch.tensor([0, 1]).int(), torch.tensor([0, 1]).int(), torch.tensor([NO_TOKEN, 4]).int())
    assert state.tally_RV[:2].tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 2, 0, 0, 0, 0, 0]]


# ---- in whole requests --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@cache
def language_model():
    return tiny_model("llama")


@torch.inference_mode()
def slow_output(asked: Asked) -> list[int]:
    """Token by token, the whole text each time, alone."""
    output, chosen_1 = [], torch.zeros(1, dtype=torch.int32)
    s = asked.sampling
    while len(output) < NEW_TOKENS and not (output and output[-1] in asked.end_ids):
        ids = asked.prompt + output
        logits_V = controlled(asked, output, language_model()(torch.tensor([ids])).logits[0, -1].float())
        columns = [torch.tensor([value]) for value in (s.temperature, s.top_k, s.top_p, s.min_p, s.seed, len(ids))]
        reference.sample(logits_V[None], *columns, VOCAB, chosen_1)
        output.append(int(chosen_1))
    return output


@cache
def requests_and_outputs() -> tuple[list[Asked], list[list[int]]]:
    """16 requests, every fourth without controls; what the others control is what they would have said without."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 17, 40, 90]))] for _ in range(16)]
    plain = [slow_output(Asked(prompt)) for prompt in prompts]
    requests = [_asked(i, prompt, output, rng) for i, (prompt, output) in enumerate(zip(prompts, plain, strict=True))]
    outputs = [slow_output(asked) if asked.controls else output for asked, output in zip(requests, plain, strict=True)]
    for asked, output, other in zip(requests, outputs, plain, strict=True):
        assert (output == other) == (asked.controls is None), "a control that changes nothing"
    return requests, outputs


def _asked(i: int, prompt: list[int], plain: list[int], rng: random.Random) -> Asked:
    words = [plain[:1], plain[2:4], plain[5:9]]
    match i % 8:
        case 1:
            return Asked(prompt, RowSampling(repetition_penalty=1.8))
        case 2:
            return Asked(prompt, RowSampling(temperature=0.8, seed=i, presence_penalty=1.5, frequency_penalty=-1.0, top_p=0.95))
        case 3:
            return Asked(prompt, biases={token: rng.uniform(-20, 20) for token in rng.sample(range(VOCAB), 100)})
        case 5:
            return Asked(prompt, bad_words=words)
        case 6:
            return Asked(prompt, RowSampling(min_tokens=9), end_ids=plain[:4])
        case 7:
            everything = RowSampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=6)
            return Asked(prompt, everything, {plain[3]: 30.0}, list(range(0, VOCAB, 3)) + plain[3:4], words, [plain[3]])
    return Asked(prompt)


def simulate(folder: Path, **limits) -> Simulation:
    model = load_model(str(folder), "float32", "cpu", 128)
    return Simulation(model, **{"num_rows": 16, "block_size": 8, **limits})


def add(sim: Simulation, handle: int, asked: Asked, **fields) -> None:
    fields = {"end_ids": asked.end_ids, "sampling": asked.sampling, "controls": asked.controls, **fields}
    assert sim.add(handle, asked.prompt, NEW_TOKENS, **fields) is None


def run_all(sim: Simulation, requests: list[Asked]) -> list[list[int]]:
    for handle, asked in enumerate(requests):
        add(sim, handle, asked)
    sim.run()
    return [sim.outputs[handle] for handle in range(len(requests))]


@pytest.mark.parametrize("depth, chunk", [(1, 512), (2, 16), (4, 512)])
def test_controls_give_the_slow_tokens_beside_others_at_any_depth(depth, chunk, checkpoint):
    requests, outputs = requests_and_outputs()
    assert run_all(simulate(checkpoint, max_pipeline_depth=depth, max_step_tokens=chunk), requests) == outputs


def test_controls_give_the_slow_tokens_alone_in_a_row_that_all_requests_use_in_turn(checkpoint):
    requests, outputs = requests_and_outputs()
    assert run_all(simulate(checkpoint, num_rows=1, max_step_tokens=16), requests) == outputs


def test_controls_survive_preemption(checkpoint):
    requests, outputs = requests_and_outputs()
    tight = simulate(checkpoint, num_blocks=17, max_pipeline_depth=4, max_step_tokens=512)
    assert run_all(tight, requests) == outputs
    assert tight.scheduler.num_preemptions > 0


def test_controls_count_what_was_delivered_before_a_fault(checkpoint):
    requests, outputs = requests_and_outputs()
    sim = simulate(checkpoint)
    for handle, (asked, output) in enumerate(zip(requests, outputs, strict=True)):
        add(sim, handle, asked, generated=output[:5])
    sim.run()
    assert [sim.outputs[handle] for handle in range(16)] == [output[5:] for output in outputs]


def test_every_choice_of_a_request_has_its_controls(checkpoint):
    asked = Asked([5, 6, 7], RowSampling(temperature=1.0, seed=1, presence_penalty=2.0), bad_words=[[9]], allowed=list(range(40)))
    sim = simulate(checkpoint)
    add(sim, 0, asked, more_seeds=[2, 3])
    for handle, seed in enumerate([1, 2, 3], start=3):
        add(sim, handle, asked, sampling=msgspec.structs.replace(asked.sampling, seed=seed))
    sim.run()
    outputs = [sim.outputs[handle] for handle in range(6)]
    assert outputs[:3] == outputs[3:] and len(set(map(tuple, outputs))) == 3
    assert all(token < 40 and token != 9 for output in outputs for token in output)


def test_controls_are_the_same_with_a_cached_prefix(checkpoint):
    requests, outputs = requests_and_outputs()
    sim = simulate(checkpoint)
    assert run_all(sim, requests) == outputs
    for handle, asked in enumerate(requests, start=16):
        add(sim, handle, asked)
    sim.run()
    assert [sim.outputs[handle] for handle in range(16, 32)] == outputs and max(sim.num_cached.values()) >= 88


@pytest.mark.parametrize("min_tokens", [1, 2, 7])
def test_an_end_that_is_wanted_most_comes_right_after_min_tokens(min_tokens):
    """With the last id of the vocabulary as the end, too."""
    sim = Simulation()
    end = sim.limits.vocab_size - 1
    add(sim, 0, Asked([1] * 50, RowSampling(min_tokens=min_tokens), biases={end: 100.0}, end_ids=[end]))
    add(sim, 1, Asked([1] * 50, biases={end: 100.0}, end_ids=[end]))
    sim.run()
    assert len(sim.outputs[0]) == min_tokens + 1 and sim.outputs[0][-1] == end and end not in sim.outputs[0][:-1]
    assert sim.outputs[1] == [end] and sim.finished == {0: "stop", 1: "stop"}


def test_a_request_that_may_say_nothing_ends_with_an_error_alone():
    sim = Simulation()
    add(sim, 0, Asked([1], allowed=[5], bad_words=[[5, 5]]))
    add(sim, 1, Asked([1], biases={7: 100.0}))
    sim.run()
    assert sim.outputs == {0: [5], 1: [7] * NEW_TOKENS} and sim.finished == {0: "error", 1: "length"}


def test_only_rows_with_controls_cost_a_step_anything():
    sim = Simulation()
    for handle, asked in enumerate([Asked([1]), Asked([2], biases={7: 1.0}), Asked([3]), Asked([4], bad_words=[[8]])]):
        add(sim, handle, asked)
    delta = sim.scheduler.plan().delta
    assert [join.controls is None for join in delta.joins] == [True, False, True, False]
    batch = sim.worker.executor.batch
    step = batch.apply(delta)
    assert step.controlled_C.tolist() == [1, 3] and step.kind is SamplingKind.FILTERED
    decode = batch.apply(StepDelta(1, decode_on=[0, 2, 3]))
    assert decode.controlled_C.tolist() == [2] and decode.kind is SamplingKind.FILTERED
    without = batch.apply(StepDelta(2, decode_off=[3]))
    assert len(without.controlled_C) == 0 and without.kind is SamplingKind.GREEDY


@pytest.mark.parametrize(
    ("controls", "reason"),
    [
        (RowControls(bias_ids=pack([1000]), bias_values=b"\0" * 4), "between 0 and 999"),
        (RowControls(bias_ids=pack([1]), bias_values=b""), "as many ids as values"),
        (RowControls(allowed_ids=pack([-1])), "between 0 and 999"),
        (RowControls(allowed_ids=b"abc"), "packed"),
        (RowControls(end_ids=pack([5000])), "between 0 and 999"),
        (RowControls(end_ids=pack([1] * 65)), "64 end ids"),
        (RowControls(bad_words=[pack([1, 2000])]), "between 0 and 999"),
        (RowControls(bad_words=[b""]), "of 1 to 16 tokens"),
        (RowControls(bad_words=[pack([1] * 17)]), "of 1 to 16 tokens"),
        (RowControls(bad_words=[pack([1])] * (MAX_BAD_SEQUENCES + 1)), "128 bad words"),
    ],
)
def test_the_scheduler_refuses_what_would_break_the_worker(controls, reason):
    sim = Simulation()
    refused = sim.scheduler.add(0, AddRequest(0, pack([1]), b"", 5, [], GREEDY, controls=controls))
    assert refused.code == 400 and reason in refused.message


def test_a_thousand_owners_of_two_rows_leave_nothing_of_their_controls():
    """Every other one is forced to a token of its own and penalised for it; those between get the model's choice."""
    sim = Simulation(num_rows=2, num_blocks=20, max_model_len=30)
    for handle in range(1000):
        forced = pack([handle % 997]), np.float32([50.0]).tobytes()
        if handle % 2:
            sim.add(handle, [handle % 7, 5], 3)
        else:
            controls = RowControls(*forced, needs_tokens=True)
            sim.add(handle, [handle % 7, 5], 3, sampling=RowSampling(repetition_penalty=2.0), controls=controls)
    sim.run()
    for handle, output in sim.outputs.items():
        assert output == ([handle % 997] * 3 if handle % 2 == 0 else continuation([handle % 7, 5], 3)), handle
