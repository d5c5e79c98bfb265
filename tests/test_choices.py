"""Several choices of one prompt: each as a request of its own with its own seed, and the prompt computed once."""

import hashlib
import random

import pytest

from protocol.sampling import RowSampling, choice_seed
from tests.checksum_reference import check_outputs, continuation
from tests.simulation import Simulation

# The checksum model's logits are one for one token and zero for 999: about every second token is the hash of all before it, so that a
# wrong block shows, and the others follow from the seed.
WARM = 0.15


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


def more_seeds(seed: int, n: int) -> list[int]:
    return [choice_seed(seed, index) for index in range(1, n)]


def alone(prompt: list[int], count: int, seed: int) -> list[int]:
    sim = Simulation()
    sim.add(0, prompt, count, sampling=RowSampling(WARM, seed=seed))
    sim.run()
    return sim.outputs[0]


def test_seeds_of_choices_are_the_documented_hash():
    data = (5).to_bytes(8, "little", signed=True) + (3).to_bytes(8, "little", signed=True)
    assert choice_seed(5, 3) == int.from_bytes(hashlib.sha256(data).digest()[:8], "little", signed=True)
    assert choice_seed(-(2**63), 0) == -(2**63)
    assert len({choice_seed(seed, index) for seed in (0, 1, -1) for index in range(128)}) == 3 * 128


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 5, 37])
def test_each_choice_equals_the_request_alone_with_its_seed(depth, enable_prefix_caching, length):
    prompt = prompt_of(random.Random(length), length)
    sim = Simulation(max_pipeline_depth=depth, enable_prefix_caching=enable_prefix_caching, max_step_tokens=16)
    sim.add(0, prompt, 12, sampling=RowSampling(WARM, seed=7), more_seeds=more_seeds(7, 5))
    sim.run()
    assert [sim.outputs[index] for index in range(5)] == [alone(prompt, 12, choice_seed(7, index)) for index in range(5)]
    assert len({tuple(tokens) for tokens in sim.outputs.values()}) == 5


def test_greedy_choices_are_the_same():
    sim = Simulation()
    sim.add(0, [1, 2, 3, 4, 5, 6], 9, more_seeds=[1, 2])
    sim.run()
    assert sim.outputs == dict.fromkeys(range(3), continuation([1, 2, 3, 4, 5, 6], 9))


@pytest.mark.parametrize("max_tokens", [1, 20])
@pytest.mark.parametrize("step_tokens", [8, 512])
def test_the_prompt_is_computed_once(max_tokens, step_tokens):
    """Full blocks of it; the tokens behind the last full block, at least one, are each choice's own."""
    prompt = prompt_of(random.Random(0), 43)
    sim = Simulation(max_step_tokens=step_tokens, max_pipeline_depth=4)
    sim.add(0, prompt, max_tokens, more_seeds=list(range(5)))
    sim.run()
    assert sim.scheduler.num_prompt_tokens == 6 * 43
    assert sim.scheduler.num_prompt_tokens - sim.scheduler.num_cached_tokens == 43 + 5 * 3


def test_without_a_prefix_cache_every_choice_computes_it():
    sim = Simulation(enable_prefix_caching=False)
    sim.add(0, [7] * 43, 5, more_seeds=[1, 2])
    sim.run()
    assert sim.scheduler.num_prompt_tokens == 3 * 43 and sim.scheduler.num_cached_tokens == 0


def test_choices_held_back_are_in_nobodys_way():
    sim = Simulation(num_rows=4, max_step_tokens=8, num_blocks=512)
    sim.add(0, [5] * 400, 3, more_seeds=[1, 2, 3])
    sim.step()
    sim.add(10, [6] * 4, 2)
    while 10 not in sim.finished:
        sim.step()
    assert len(sim.scheduler.waiting) == 3 and not sim.finished.keys() & range(4)
    sim.run()
    assert sim.outputs[3] == continuation([5] * 400, 3)


def test_choices_run_side_by_side_once_the_prompt_is_computed():
    sim = Simulation(max_step_tokens=16)
    sim.add(0, [4] * 31, 40, more_seeds=[1, 2, 3])
    sim.run()
    assert sim.scheduler.deltas.next_step < 2 * 40 and len(sim.finished) == 4


def test_when_the_first_choice_ends_early_the_next_computes_the_prompt_for_the_others():
    prompt = prompt_of(random.Random(1), 81)
    sim = Simulation(max_step_tokens=16, max_pipeline_depth=2)
    sim.add(0, prompt, 4, more_seeds=[1, 2, 3])
    for victim in (0, 1):
        sim.step()
        sim.abort(victim)
        sim.scheduler.check()
    sim.run()
    assert [sim.outputs[index] for index in (2, 3)] == [continuation(prompt, 4)] * 2
    assert sim.scheduler.num_prompt_tokens - sim.scheduler.num_cached_tokens <= 81 + 81 + 16 + 1


def test_choices_end_independently():
    expected = [alone([9] * 10, 30, choice_seed(3, index)) for index in range(4)]
    sim = Simulation()
    sim.add(0, [9] * 10, 30, (expected[1][4],), RowSampling(WARM, seed=3), more_seeds=more_seeds(3, 4))
    sim.run()
    for index, tokens in enumerate(expected):
        end = tokens.index(expected[1][4]) + 1 if expected[1][4] in tokens else 30
        assert sim.outputs[index] == tokens[:end]
        assert sim.finished[index] == ("stop" if expected[1][4] in tokens else "length")
    assert len(sim.outputs[1]) <= 5


@pytest.mark.parametrize("num_steps", range(0, 12, 2))
def test_an_abort_in_the_middle_leaves_nothing(num_steps):
    sim = Simulation(max_step_tokens=16, max_pipeline_depth=4, num_rows=3)
    sim.add(0, [3] * 50, 40, more_seeds=[1, 2, 3, 4])
    for _ in range(num_steps):
        sim.step()
    for index in range(5):
        sim.abort(index)
        sim.scheduler.check()
    sim.run()
    assert not sim.finished and not sim.scheduler.waiting.unstarted


def test_a_request_of_several_choices_is_refused_as_a_whole():
    sim = Simulation(num_rows=1, max_queued_requests=4)
    sim.add(0, [1] * 9, 50)
    sim.step()
    sim.add(1, [2], 5)
    refused = sim.add(10, [3] * 9, 5, more_seeds=[1, 2, 3])
    assert (refused.handle, refused.code) == (10, 503) and len(sim.scheduler.requests) == 2
    assert sim.add(10, [3] * 9, 5, more_seeds=[1, 2]) is None
    sim.run()


def test_no_choice_may_have_a_handle_in_use():
    sim = Simulation()
    sim.add(10, [3] * 9, 5, more_seeds=[1, 2])
    for handle, seeds in ((12, []), (9, [4])):
        refused = sim.add(handle, [1], 5, more_seeds=seeds)
        assert (refused.code, refused.message) == (400, f"handle {max(handle, 10)} is in use")
    sim.run()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_of_choices_and_aborts_in_a_small_pool(seed, depth):
    """Preemption, eviction and choices at once; every choice gives its own tokens, and nothing is left."""
    rng = random.Random(100 * depth + seed)
    sim = Simulation(
        num_rows=rng.choice([2, 5, 16]), num_blocks=rng.choice([14, 24, 200]), block_size=4, max_model_len=48,
        max_step_tokens=rng.choice([3, 16, 512]), max_pipeline_depth=depth,
    )  # fmt: skip
    prompts, aborted = {}, set()
    for first in range(0, 160, 8):
        n = rng.choice([1, 1, 2, 5, 8])
        prompt, count = prompt_of(rng, rng.randint(1, 40)), rng.randint(1, 20)
        sim.add(first, prompt, count, more_seeds=[0] * (n - 1), priority=rng.choice([0, 0, 1, -1]))
        prompts |= {first + index: (prompt, min(count, 48 - len(prompt))) for index in range(n)}
        aborted |= sim.churn(rng, list(prompts), 0.3)
    sim.run()
    check_outputs(sim.outputs, prompts, aborted)


@pytest.mark.parametrize("num_places", [0, 100])
def test_choices_that_do_not_fit_the_pool_together_come_one_after_the_other(num_places):
    """A pool of one context and a bit: four choices of a prompt that fills most of it, beside other requests."""
    prompt = prompt_of(random.Random(1), 30)
    sim = Simulation(num_rows=8, num_blocks=13, block_size=4, max_model_len=48, num_host_blocks=num_places, max_step_tokens=16)
    sim.add(0, prompt, 18, sampling=RowSampling(WARM, seed=7), more_seeds=more_seeds(7, 4))
    sim.add(10, [5, 6], 10)
    sim.run()
    assert [sim.outputs[index] for index in range(4)] == [alone(prompt, 18, choice_seed(7, index)) for index in range(4)]
    assert sim.outputs[10] == continuation([5, 6], 10)
