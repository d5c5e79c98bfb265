"""How many forward passes a request costs, exactly.

The pass over the end of the prompt samples the first token, each further pass one more, and the last token is never run: k tokens cost
k passes over prompt + k - 1 tokens. The limit is known when a step is planned, so no depth adds a pass to it. An end id is known only
once its token has come back: the depth - 1 steps sent meanwhile have run the row in vain, save those that the limit forbids.
"""

import pytest

from tests.checksum_reference import continuation
from tests.simulation import Simulation
from tests.step_watch import StepWatch
from tests.threads import one_thread  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [1, 2, 3, 4, 5, 6, 7]
DEPTHS = [1, 2, 4]


def run_one(depth: int, max_tokens: int, end_ids: tuple[int, ...] = (), **limits) -> tuple[Simulation, StepWatch]:
    sim = Simulation(max_pipeline_depth=depth, **limits)
    watch = StepWatch(sim)
    sim.add(0, PROMPT, max_tokens, end_ids)
    sim.run()
    assert sim.outputs[0] == continuation(PROMPT, max_tokens, end_ids)
    assert watch.num_passes == len(watch.tokens), "a step that runs nothing was sent"
    return sim, watch


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_the_limit_costs_one_pass_a_token(max_tokens, depth):
    sim, watch = run_one(depth, max_tokens)
    assert watch.num_passes == max_tokens
    assert sum(watch.tokens) == len(PROMPT) + max_tokens - 1
    assert sim.finished[0] == "length"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_an_end_id_in_the_last_step_costs_nothing_more(max_tokens, depth):
    sim, watch = run_one(depth, max_tokens, (continuation(PROMPT, max_tokens)[-1],))
    assert watch.num_passes == max_tokens
    assert sum(watch.tokens) == len(PROMPT) + max_tokens - 1
    assert sim.finished[0] == "stop"


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("stop_at", "max_tokens"), [(s, m) for s in (1, 2, 3, 5) for m in (2, 3, 5, 50) if s < m])
def test_an_end_id_before_the_limit_costs_the_steps_in_flight(stop_at, max_tokens, depth):
    sim, watch = run_one(depth, max_tokens, (continuation(PROMPT, stop_at)[-1],))
    assert len(sim.outputs[0]) == stop_at
    assert watch.num_passes == min(stop_at + depth - 1, max_tokens)
    assert sum(watch.tokens) == len(PROMPT) + watch.num_passes - 1


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("budget", "prompt_passes"), [(1, 7), (2, 4), (3, 3), (6, 2), (7, 1)])
def test_a_prompt_in_chunks_costs_one_pass_a_chunk(budget, prompt_passes, depth):
    _, watch = run_one(depth, 3, max_step_tokens=budget)
    assert watch.num_passes == prompt_passes + 2
    assert sum(watch.tokens) == len(PROMPT) + 2


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cached_prefix_is_not_run_again(depth):
    sim, watch = run_one(depth, 3)
    before = len(watch.tokens)
    sim.add(1, PROMPT, 3)
    sim.run()
    assert len(watch.tokens) == before + 3
    assert sum(watch.tokens[before:]) == len(PROMPT) - 4 + 2  # one block of four is cached


@pytest.mark.parametrize("depth", DEPTHS)
def test_requests_that_run_together_cost_the_passes_of_the_longest(depth):
    """Rows that have reached their limit are left out of the steps of those that go on."""
    sim = Simulation(max_pipeline_depth=depth)
    watch = StepWatch(sim)
    for handle, max_tokens in enumerate([1, 2, 3, 5]):
        sim.add(handle, [handle, 9], max_tokens)
    sim.run()
    assert watch.tokens == [8, 3, 2, 1, 1]


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_abort_costs_no_step_after_it(depth):
    sim = Simulation(max_pipeline_depth=depth)
    watch = StepWatch(sim)
    sim.add(0, PROMPT, 50)
    for _ in range(3):
        sim.step()
    sim.abort(0)
    sim.run()
    assert len(sim.outputs[0]) == 3
    assert watch.num_passes == 3 + depth - 1
