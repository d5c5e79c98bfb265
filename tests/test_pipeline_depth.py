"""The depth of the pipeline follows what is measured."""

import pytest

from scheduler.clock import StepClock
from scheduler.policy import pipeline_depth
from tests.checksum_reference import continuation
from tests.simulation import Simulation


def run_pipeline(clock: StepClock, step_s: float, round_trip_s: float, depth: int, num_steps: int) -> None:
    """A worker that takes step_s for each step, behind channels that take half a round trip each way."""
    arrivals: list[tuple[float, int]] = []
    now, worker_free, sent = 0.0, 0.0, 0
    while sent < num_steps or arrivals:
        while sent < num_steps and len(arrivals) < depth:
            worker_free = max(worker_free, now + round_trip_s / 2) + step_s
            arrivals.append((worker_free + round_trip_s / 2, sent))
            clock.sent(sent, now, len(arrivals))
            sent += 1
        now, step = arrivals.pop(0)
        clock.confirmed(step, now, len(arrivals))


@pytest.mark.parametrize(("step_ms", "round_trip_ms"), [(0.5, 0.2), (28.0, 0.5), (3.5, 0.15)])
def test_step_time_and_round_trip_are_found(step_ms, round_trip_ms):
    clock = StepClock()
    for _ in range(20):  # bursts, each into an empty pipeline
        run_pipeline(clock, step_ms / 1e3, round_trip_ms / 1e3, depth=4, num_steps=50)
    assert clock.step_s == pytest.approx(step_ms / 1e3, rel=0.02)
    assert clock.round_trip_s == pytest.approx(round_trip_ms / 1e3, rel=0.1)


def test_short_steps_ask_for_more_depth_and_waiting_requests_for_less():
    assert pipeline_depth(4, step_s=0.5e-3, round_trip_s=0.2e-3, has_waiting=False) == 4
    assert pipeline_depth(8, step_s=0.6e-3, round_trip_s=0.1e-3, has_waiting=False) == 3
    assert pipeline_depth(4, step_s=28e-3, round_trip_s=0.5e-3, has_waiting=False) == 2
    assert pipeline_depth(4, step_s=0.5e-3, round_trip_s=0.2e-3, has_waiting=True) == 2


@pytest.mark.parametrize("has_waiting", [True, False])
@pytest.mark.parametrize("step_s", [0.0, 1e-4, 1.0])
def test_the_limit_is_never_passed_and_one_stays_synchronous(step_s, has_waiting):
    assert all(pipeline_depth(most, step_s, 0.01, has_waiting) <= most for most in range(1, 9))
    assert pipeline_depth(1, step_s, 0.01, has_waiting) == 1


def test_a_stepwise_request_is_planned_once_its_last_token_is_here_and_others_go_on_ahead():
    sim = Simulation(max_pipeline_depth=4)
    sim.add(0, [1, 2], 6, is_stepwise=True)
    sim.add(1, [3, 4], 30)
    sim.run()
    assert (sim.outputs[0], sim.outputs[1]) == (continuation([1, 2], 6), continuation([3, 4], 30))
    alone = Simulation(max_pipeline_depth=4)
    alone.add(0, [1, 2], 6, is_stepwise=True)
    while alone.step():
        assert len(alone.results) <= 1
        alone.scheduler.check()
    assert alone.outputs[0] == continuation([1, 2], 6)
