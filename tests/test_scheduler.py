"""The scheduler around the checksum model: right tokens, exact counts, and every block and row back at idle."""

import random

import numpy as np
import pytest

from protocol.messages import AddRequest, encode, pack
from scheduler.blocks import BlockPool
from scheduler.policy import plan_step, share_budget
from tests.checksum_reference import continuation
from tests.simulation import GREEDY, Simulation


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(25))
def test_random_mixes_give_every_request_its_own_tokens(seed, depth):
    rng = random.Random(1000 * depth + seed)
    sim = Simulation(
        num_rows=rng.choice([1, 3, 8, 20]), num_blocks=rng.choice([40, 60, 400]), block_size=rng.choice([1, 4, 16]),
        max_model_len=40, max_step_tokens=rng.choice([1, 5, 16, 512]), max_pipeline_depth=depth,
    )  # fmt: skip
    requests, aborted = {}, set()
    for handle in range(40):
        while rng.random() < 0.5:
            sim.step()
            sim.scheduler.check()
        prompt = prompt_of(rng, rng.randint(1, 38))
        count, end_ids = rng.randint(1, 40), tuple(prompt_of(rng, rng.choice([0, 0, 30])))
        requests[handle] = (prompt, count, end_ids)
        assert sim.add(handle, prompt, count, end_ids) is None
        if rng.random() < 0.3:
            victim = rng.choice(list(requests))
            sim.abort(victim)
            if victim not in sim.finished:
                aborted.add(victim)
            sim.scheduler.check()
    sim.run()
    for handle, (prompt, count, end_ids) in requests.items():
        expected = continuation(prompt, min(count, 40 - len(prompt)), end_ids)
        if handle in aborted:
            assert sim.outputs[handle] == expected[: len(sim.outputs[handle])]
        else:
            assert sim.outputs[handle] == expected
            assert sim.finished[handle] == ("stop" if expected[-1] in end_ids else "length")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_preemption_keeps_tokens_in_flight_once(depth):
    """A pool for three sequences and eight requests: preempted again and again, with tokens in flight when depth allows."""
    rng = random.Random(depth)
    sim = Simulation(num_blocks=45, block_size=16, num_rows=8, max_model_len=241, max_pipeline_depth=depth)
    prompts = [prompt_of(rng, 40) for _ in range(8)]
    for handle, prompt in enumerate(prompts):
        sim.add(handle, prompt, 200)
    while sim.step():
        sim.scheduler.check()
    sim.check_idle()
    assert sim.scheduler.num_preemptions > 0
    assert (sim.most_draining > 0) == (depth > 1)
    for handle, prompt in enumerate(prompts):
        assert sim.outputs[handle] == continuation(prompt, 200)


def test_a_storm_of_preemptions_does_not_cascade():
    """A pool for 6 sequences, 64 requests: each is preempted a few times at most, and the oldest always moves on."""
    sim = Simulation(num_blocks=6 * 27, block_size=16, num_rows=64, max_model_len=420, max_step_tokens=512)
    for handle in range(64):
        sim.add(handle, [handle] * 20, 400)
    num_steps = 0
    while sim.step():
        num_steps += 1
    assert len(sim.finished) == 64
    assert sim.scheduler.num_preemptions / 64 < 10
    assert num_steps < 64 * 420 / 4, "the pool holds six sequences, so at least four tokens a step"
    assert all(sim.outputs[handle] == continuation([handle] * 20, 400) for handle in range(64))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_forward_pass_goes_past_max_tokens(max_tokens, depth):
    sim = Simulation(max_pipeline_depth=depth)
    sim.add(0, [1, 2, 3], max_tokens)
    sim.run()
    assert sim.scheduler.deltas.next_step == max_tokens  # one prompt step, then one step a token
    assert len(sim.outputs[0]) == max_tokens


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_wastes_at_most_the_steps_in_flight(depth):
    expected = continuation([1, 2, 3], 20)
    sim = Simulation(max_pipeline_depth=depth)
    sim.add(0, [1, 2, 3], 20, end_ids=[expected[9]])
    sim.run()
    assert sim.outputs[0] == continuation([1, 2, 3], 20, (expected[9],))
    assert sim.finished[0] == "stop"
    assert sim.scheduler.deltas.next_step == len(sim.outputs[0]) + depth - 1


def test_a_stop_on_the_last_allowed_token_costs_no_extra_step():
    expected = continuation([5], 6)
    sim = Simulation(max_pipeline_depth=4)
    sim.add(0, [5], 6, end_ids=[expected[5]])
    sim.run()
    assert (sim.finished[0], sim.scheduler.deltas.next_step) == ("stop", 6)


def test_the_message_of_a_steady_decode_step_is_small_and_of_constant_size():
    sizes = {}
    for num_rows in (1, 64):
        sim = Simulation(num_rows=64, num_blocks=64 * 8, block_size=128, max_step_tokens=1024)
        for handle in range(num_rows):
            sim.add(handle, [handle, 7], 100)
        sim.run()
        sizes[num_rows] = set(sim.message_sizes[20:80])
    assert sizes[1] == sizes[64] and len(sizes[1]) == 1
    assert max(sizes[1]) < 100


def test_decoding_rows_run_in_every_step_beside_long_prompts():
    """A budget smaller than the batch starves neither side."""
    sim = Simulation(num_rows=12, num_blocks=800, max_step_tokens=8)
    for handle in range(10):
        sim.add(handle, [handle], 60)
    for _ in range(20):
        sim.step()
    before = {handle: len(sim.outputs[handle]) for handle in range(10)}
    sim.add(10, [3] * 300, 2)
    for _ in range(20):
        sim.step()
    assert all(len(sim.outputs[handle]) >= before[handle] + 19 for handle in range(10))
    sim.run()
    assert sim.outputs[10] == continuation([3] * 300, 2)


def test_a_short_prompt_passes_a_long_one():
    sim = Simulation(num_rows=4, num_blocks=1000, max_step_tokens=32)
    sim.add(0, [1] * 1600, 1)
    sim.step()
    sim.add(1, [2] * 20, 1)
    for _ in range(4):
        sim.step()
    assert 1 in sim.finished and 0 not in sim.finished
    sim.run()


@pytest.mark.parametrize(("length", "max_tokens", "expected"), [(38, 5, 2), (39, 1, 1), (39, 5, 1)])
def test_the_context_limit_ends_a_request_with_length(length, max_tokens, expected):
    sim = Simulation(max_model_len=40)
    sim.add(0, [1] * length, max_tokens)
    sim.run()
    assert (len(sim.outputs[0]), sim.finished[0]) == (expected, "length")


def test_resubmitted_tokens_are_continued_not_repeated():
    expected = continuation([4, 5, 6], 10)
    sim = Simulation()
    sim.add(0, [4, 5, 6], 10, generated=expected[:4])
    sim.run()
    assert sim.outputs[0] == expected[4:]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": pack([])}, "empty"),
        ({"prompt": pack([1] * 40)}, "context length 40"),
        ({"prompt": pack([5, 1000, 7])}, "between 0 and 999"),
        ({"prompt": pack([-1])}, "between 0 and 999"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"end_ids": list(range(100))}, "end ids"),
    ],
)
def test_a_bad_request_is_refused_and_costs_its_neighbour_nothing(change, reason):
    sim = Simulation(max_model_len=40)
    sim.add(0, [1, 2], 5)
    good = dict(handle=1, prompt=pack([1]), generated=b"", max_tokens=3, end_ids=[], sampling=GREEDY)
    refused = sim.scheduler.add(0, AddRequest(**{**good, **change}))
    assert refused.code == 400 and reason in refused.message
    sim.run()
    assert sim.outputs[0] == continuation([1, 2], 5)


def test_a_full_queue_refuses_with_its_size():
    sim = Simulation(num_rows=1, max_queued_requests=3)
    refusals = [sim.add(handle, [1], 2) for handle in range(5)]
    assert [refusal is None for refusal in refusals] == [True, True, True, False, False]
    assert refusals[3].code == 503 and "3 requests wait" in refusals[3].message
    sim.run()
    assert sim.add(5, [1], 2) is None


def test_aborting_unknown_waiting_and_repeated_requests_is_harmless():
    sim = Simulation(num_rows=1)
    sim.add(0, [9] * 30, 50)
    sim.step()
    for handle in range(1, 51):
        sim.add(handle, [handle], 5)
    for handle in random.Random(0).sample(range(1, 51), 50) + [3, 3, 999]:
        sim.abort(handle)
        sim.scheduler.check()
    assert len(sim.scheduler.waiting) == 0
    sim.run()
    assert sim.outputs[0] == continuation([9] * 30, 50)


def test_a_row_given_out_again_never_receives_its_last_owners_token():
    """Short requests come and go on every row while long ones run, with a pipeline four deep."""
    rng = random.Random(7)
    sim = Simulation(num_rows=6, num_blocks=400, max_pipeline_depth=4)
    requests = {handle: (prompt_of(rng, 5), 300) for handle in range(3)}
    requests |= {handle: (prompt_of(rng, rng.randint(1, 9)), rng.randint(1, 3)) for handle in range(3, 200)}
    for handle, (prompt, count) in requests.items():
        sim.add(handle, prompt, count)
    sim.run()
    assert all(sim.outputs[handle] == continuation(*request) for handle, request in requests.items())


def test_a_frontend_that_is_gone_takes_only_its_own_requests_along():
    sim = Simulation()
    for frontend in (0, 1):
        for handle in range(6):
            sim.scheduler.add(frontend, AddRequest(handle, pack([handle + 1]), b"", 20, [], GREEDY))
    sim.outputs = {handle: [] for handle in range(6)}
    sim.results.append(sim.worker.run(encode(sim.scheduler.plan().delta)))
    sim.scheduler.abort_frontend(1)
    sim.scheduler.check()
    sim.run()
    assert all(sim.outputs[handle] == continuation([handle + 1], 20) for handle in range(6))


def test_the_block_pool_stays_balanced_under_random_use():
    rng = random.Random(3)
    pool, held = BlockPool(50), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.give(held.pop(rng.randrange(len(held))))
        elif (count := rng.randint(0, 6)) <= pool.num_free:
            held.append(pool.take(count))
        pool.check()
        assert pool.num_free == 50 - sum(map(len, held))
    with pytest.raises(AssertionError, match="twice"):
        blocks = pool.take(1)
        pool.give(blocks)
        pool.give(blocks)


def test_shares_of_the_budget_are_exact_and_bounded():
    rng = np.random.default_rng(0)
    for _ in range(500):
        wanted = rng.integers(1, 50, size=rng.integers(0, 10))
        room = int(rng.integers(1, 80))
        sizes = share_budget(wanted, room)
        assert (sizes <= wanted).all() and sizes.sum() == min(room, wanted.sum())
        if len(wanted):
            assert sizes[0] >= min(wanted[0], room // 2)


def test_a_step_never_exceeds_the_buffers_made_for_it():
    rng = np.random.default_rng(1)
    for _ in range(500):
        num_rows, budget = int(rng.integers(1, 40)), int(rng.integers(1, 60))
        num_decoding = int(rng.integers(0, num_rows + 1))
        prompts = rng.integers(1, 100, size=num_rows - num_decoding)
        step = plan_step(np.arange(num_decoding), np.arange(len(prompts)), prompts, budget)
        assert len(step.decode_rows) == num_decoding
        assert num_decoding + step.chunk_sizes.sum() <= max(budget, num_rows + max(budget // 4, 1)) <= num_rows + budget
        assert len(prompts) == 0 or len(step.chunk_rows) > 0
