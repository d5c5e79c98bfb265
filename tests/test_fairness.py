"""No request waits for another's length: streams go on beside long prompts, and short prompts pass them. Time is counted in steps."""

import pytest

from tests.checksum_reference import continuation
from tests.simulation import Simulation
from tests.step_watch import StepWatch
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 512


def steps_to(sim: Simulation, handle: int, num_tokens: int) -> int:
    """Steps confirmed until the request has so many tokens."""
    steps = 0
    while len(sim.outputs[handle]) < num_tokens:
        assert sim.step()
        steps += 1
    return steps


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_blocks", [4096, 700])
def test_a_stream_gets_a_token_in_every_step_while_long_prompts_arrive(num_blocks, depth):
    """The bar is five full steps between two tokens. A pool of 700 blocks holds two of the prompts at a time."""
    sim = Simulation(num_rows=16, num_blocks=num_blocks, block_size=16, max_step_tokens=BUDGET, max_pipeline_depth=depth)
    watch = StepWatch(sim)
    sim.add(0, [5, 6, 7], 500)
    steps_to(sim, 0, 50)
    gaps, arrived = [], 0
    while 0 not in sim.finished:
        running = sum(handle not in sim.finished for handle in sim.outputs) - 1
        if running < 8:  # back to back: never is there nothing to compute
            arrived += 1
            sim.add(arrived, [arrived % 1000] * 4000, 2)
        gaps.append(steps_to(sim, 0, len(sim.outputs[0]) + 1))
    assert max(gaps) == 1
    sim.run()
    assert arrived > 40 and sum(count >= BUDGET for count in watch.tokens) > 300, "the steps were not full"
    assert sim.outputs[0] == continuation([5, 6, 7], 500)
    assert all(sim.outputs[i] == continuation([i % 1000] * 4000, 2) for i in range(1, arrived + 1, 9))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("budget", [16, 64])
def test_a_short_prompt_gets_its_first_token_long_before_a_prompt_of_50_budgets_is_done(budget, depth):
    sim = Simulation(num_rows=4, num_blocks=300, block_size=16, max_step_tokens=budget, max_pipeline_depth=depth)
    sim.add(0, [1] * (50 * budget), 3)
    for _ in range(3):
        sim.step()
    sim.add(1, [2] * 20, 3)
    # Half of each step's budget is the newcomer's, behind the steps in flight.
    assert steps_to(sim, 1, 1) <= -(-20 // (budget // 2)) + depth
    assert sim.outputs[0] == []
    sim.run()
    assert (sim.outputs[0], sim.outputs[1]) == (continuation([1] * (50 * budget), 3), continuation([2] * 20, 3))


def test_a_long_prompt_is_done_within_twice_its_own_steps_beside_endless_short_ones():
    """The other side of the bargain: the oldest prompt keeps half of the budget."""
    sim = Simulation(num_rows=64, num_blocks=2000, block_size=16, max_step_tokens=64)
    sim.add(0, [1] * 1280, 1)
    steps = arrived = 0
    while 0 not in sim.finished:
        while len(sim.scheduler.waiting) + sim.scheduler.table.num_running < 64:
            arrived += 1
            sim.add(arrived, [arrived % 1000, arrived // 1000] * 10, 1)
        sim.step()
        steps += 1
    assert steps <= 2 * 1280 / 64 + 2
    assert arrived > 100


@pytest.mark.parametrize("depth", [1, 4])
def test_rows_beyond_the_budget_decode_on_beside_a_stream_of_prompts(depth):
    """40 rows decode with a budget of 32 while prompts of 200 tokens arrive: all keep their solo tokens."""
    sim = Simulation(num_rows=48, num_blocks=4000, max_step_tokens=32, max_pipeline_depth=depth)
    for handle in range(40):
        sim.add(handle, [handle, 1], 60)
    for handle in range(40, 60):
        sim.add(handle, [handle] * 200, 5)
        sim.step()
        sim.step()
    sim.run()
    assert all(sim.outputs[handle] == continuation([handle, 1], 60) for handle in range(40))
    assert all(sim.outputs[handle] == continuation([handle] * 200, 5) for handle in range(40, 60))
