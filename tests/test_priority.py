"""Priorities: who starts first, who gives way to whom, and that the most urgent always moves on."""

import random

import pytest

from tests.checksum_reference import check_outputs, continuation
from tests.simulation import Simulation


def start_order(sim: Simulation) -> list[int]:
    """Handles in the order of their first tokens."""
    order: list[int] = []
    while sim.step():
        sim.scheduler.check()
        order += [handle for handle, tokens in sim.outputs.items() if tokens and handle not in order]
    return order


def test_the_queue_is_in_order_of_priority_then_arrival():
    sim = Simulation(num_rows=1)
    priorities = [0, 3, -2, 0, 3, -2, 2**31 - 1, -(2**31)]
    for handle, priority in enumerate(priorities):
        sim.add(handle, [handle], 2, priority=priority)
    assert start_order(sim) == sorted(range(8), key=lambda handle: (priorities[handle], handle))


def test_equal_priorities_are_first_come_first_served():
    sim = Simulation(num_rows=1)
    for handle in range(6):
        sim.add(handle, [handle], 2, priority=5)
    assert start_order(sim) == list(range(6))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_urgent_request_takes_the_row_of_the_last_in_rank(depth):
    sim = Simulation(num_rows=3, max_pipeline_depth=depth)
    for handle, priority in enumerate([0, 2, 1]):
        sim.add(handle, [handle] * 3, 40, priority=priority)
    for _ in range(8):
        sim.step()
    before = {handle: len(sim.outputs[handle]) for handle in (0, 2)}
    sim.add(3, [9], 10, priority=-1)
    while 3 not in sim.finished:
        sim.step()
        sim.scheduler.check()
    assert sim.scheduler.num_preemptions == 1
    assert all(len(sim.outputs[handle]) > before[handle] + 8 for handle in (0, 2))
    sim.run()
    assert [sim.outputs[handle] for handle in range(4)] == [continuation([h] * 3, 40) for h in range(3)] + [continuation([9], 10)]


@pytest.mark.parametrize("priority", [0, 1])
def test_a_request_that_is_not_more_urgent_takes_nobodys_row(priority):
    sim = Simulation(num_rows=2)
    for handle in range(2):
        sim.add(handle, [handle], 30)
    sim.step()
    sim.add(2, [2], 3, priority=priority)
    sim.run()
    assert sim.scheduler.num_preemptions == 0


def test_no_row_is_taken_where_there_is_room():
    sim = Simulation(num_rows=3)
    for handle in range(2):
        sim.add(handle, [handle], 30)
    sim.step()
    sim.add(2, [2], 3, priority=-1)
    sim.run()
    assert sim.scheduler.num_preemptions == 0


def test_an_urgent_request_takes_as_many_blocks_as_it_needs_and_no_more():
    """Five rows of 4 blocks in a pool of 20; 7 blocks are needed, so two rows have to go, the newest ones."""
    sim = Simulation(num_rows=8, num_blocks=20, block_size=4, max_model_len=32)
    for handle in range(5):
        sim.add(handle, [100 + handle] * 9, 7, priority=1)
    for _ in range(4):
        sim.step()
    assert sim.scheduler.table.num_running >= 4
    running = sim.scheduler.table.num_running
    sim.add(9, [7] * 17, 4)
    while 9 not in sim.finished:
        sim.step()
        sim.scheduler.check()
    assert 0 < sim.scheduler.num_preemptions < running
    sim.run()
    assert all(sim.outputs[handle] == continuation([100 + handle] * 9, 7) for handle in range(5))
    assert sim.outputs[9] == continuation([7] * 17, 4)


def test_nobody_is_preempted_in_vain():
    """An urgent request that would not fit beside its equals, with all others gone, waits for its equals."""
    sim = Simulation(num_rows=8, num_blocks=12, block_size=4, max_model_len=48)
    sim.add(0, [1] * 30, 8)
    sim.add(1, [2] * 3, 4, priority=1)
    for _ in range(3):
        sim.step()
    assert sim.scheduler.table.num_running == 2
    sim.add(2, [3] * 30, 8)
    sim.run()
    assert sim.scheduler.num_preemptions == 0
    assert sim.outputs[2] == continuation([3] * 30, 8)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_when_blocks_run_out_the_last_in_rank_gives_way(depth):
    """Growing rows: the urgent one, which came last, is never preempted; the oldest of the others only behind all newer ones."""
    sim = Simulation(num_rows=8, num_blocks=30, block_size=4, max_model_len=60, max_pipeline_depth=depth)
    preempted: list[int] = []
    take_away = sim.scheduler._preempt
    sim.scheduler._preempt = lambda row: (preempted.append(int(sim.scheduler.table.handle_R[row])), take_away(row))
    for handle in range(5):
        sim.add(handle, [handle] * 4, 50, priority=1)
    sim.add(5, [5] * 4, 50)
    while sim.step():
        sim.scheduler.check()
    assert preempted and not {0, 5} & set(preempted)
    assert all(sim.outputs[handle] == continuation([handle] * 4, 50) for handle in range(6))


def test_the_most_urgent_moves_on_in_a_storm():
    """A pool for three full contexts and 40 requests of five classes: a stream of urgent ones costs others time, nobody a token."""
    rng = random.Random(4)
    sim = Simulation(num_rows=16, num_blocks=45, block_size=4, max_model_len=60)
    prompts = {handle: [handle] * rng.randint(1, 20) for handle in range(40)}
    num_steps = 0
    for handle, prompt in prompts.items():
        sim.add(handle, prompt, 40, priority=rng.randint(-2, 2))
        for _ in range(3):
            sim.step()
            num_steps += 1
    while sim.step():
        num_steps += 1
    sim.check_idle()
    assert all(sim.outputs[handle] == continuation(prompt, 40) for handle, prompt in prompts.items())
    assert sim.scheduler.num_preemptions / 40 < 10
    assert num_steps < 40 * 60 / 2, "the pool holds three, so at least two tokens a step"


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(15))
def test_random_mixes_of_priorities_give_every_request_its_own_tokens(seed, depth):
    rng = random.Random(10 * seed + depth)
    sim = Simulation(
        num_rows=rng.choice([1, 3, 12]), num_blocks=rng.choice([40, 60, 200]), block_size=rng.choice([1, 4]), max_model_len=40,
        max_step_tokens=rng.choice([1, 5, 64]), max_pipeline_depth=depth,
    )  # fmt: skip
    requests, aborted = {}, set()
    for handle in range(50):
        prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 38))]
        requests[handle] = (prompt, min(rng.randint(1, 30), 40 - len(prompt)))
        sim.add(handle, *requests[handle], priority=rng.randint(-1, 1))
        aborted |= sim.churn(rng, list(requests), 0.2)
    sim.run()
    check_outputs(sim.outputs, requests, aborted)
