"""The queue's limits and its timeout, with a clock of the test's own; and what the scheduler can be asked for."""

import pytest

from scheduler.clock import StepClock
from tests.checksum_reference import continuation
from tests.simulation import Simulation


def busy(**limits) -> Simulation:
    """One row, taken for 30 steps."""
    sim = Simulation(num_rows=1, **limits)
    sim.add(0, [9], 30, now=100.0)
    sim.step()
    return sim


# ---- limits -------------------------------------------------------------------------------------------------------


def test_waiting_prompt_tokens_are_limited():
    sim = busy(max_queued_tokens=100)
    assert sim.add(1, [1] * 60, 2) is None and sim.add(2, [2] * 40, 2) is None
    refused = sim.add(3, [3], 2)
    assert refused.code == 503 and "100 prompt tokens wait, 1 more would exceed 100" in refused.message
    assert (sim.scheduler.refusals.queue_tokens, sim.scheduler.refusals.queue_requests) == (1, 0)
    sim.abort(1)
    assert sim.add(3, [3] * 60, 2) is None
    sim.run()
    assert sim.scheduler.waiting.num_tokens == 0


def test_an_empty_queue_takes_a_request_beyond_its_limits():
    sim = busy(max_queued_tokens=10, max_queued_requests=2)
    assert sim.add(1, [1] * 60, 2, more_seeds=[1, 2, 3]) is None
    assert sim.add(9, [1], 2).code == 503
    sim.run()
    assert sim.outputs[4] == continuation([1] * 60, 2)


def test_a_prompt_of_several_choices_counts_once():
    sim = busy(max_queued_tokens=100)
    sim.add(1, [1] * 61, 2, more_seeds=[1, 2, 3])
    assert sim.scheduler.waiting.num_tokens == 61
    assert sim.add(9, [1] * 39, 2) is None
    sim.run()


def test_choices_that_wait_for_a_row_count_with_what_is_left_to_compute():
    sim = Simulation(num_rows=1, block_size=4)
    sim.add(0, [1] * 61, 30, more_seeds=[1, 2, 3])
    for _ in range(5):
        sim.step()
    assert (sim.scheduler.table.num_running, sim.scheduler.waiting.num_tokens) == (1, 3)
    sim.run()


def test_refusals_are_counted_by_reason():
    sim = busy(max_queued_requests=1)
    sim.add(1, [1], 2)
    sim.add(2, [1], 2)
    sim.run()
    sim.add(3, [], 2)
    refusals = sim.scheduler.refusals
    assert (refusals.invalid, refusals.queue_requests, refusals.queue_tokens, refusals.queue_timeout) == (1, 1, 0, 0)


# ---- timeout ------------------------------------------------------------------------------------------------------


def test_a_request_that_never_started_is_refused_in_time_with_limit_and_time():
    sim = busy(queue_timeout_s=5.0)
    sim.add(1, [1], 2, now=101.0)
    sim.add(2, [2], 2, now=102.5)
    assert sim.scheduler.deadline == 106.0 and sim.scheduler.expire(105.9) == []
    ((frontend, refused),) = sim.scheduler.expire(106.5)
    assert (frontend, refused.handle, refused.code) == (0, 1, 503)
    assert refused.message == "the request waited 5.5 s; --queue-timeout is 5 s"
    assert sim.scheduler.deadline == 107.5 and sim.scheduler.refusals.queue_timeout == 1
    sim.scheduler.check()
    sim.run()
    assert sim.scheduler.deadline is None and sim.outputs[2] == continuation([2], 2)


def test_without_a_timeout_nothing_is_ever_due():
    sim = busy()
    sim.add(1, [1], 2)
    assert sim.scheduler.deadline is None and sim.scheduler.expire(1e9) == []
    sim.run()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_preempted_request_never_times_out(depth):
    sim = Simulation(num_rows=1, max_pipeline_depth=depth, queue_timeout_s=1.0)
    sim.add(0, [1], 30, priority=1, now=0.0)
    for _ in range(5):
        sim.step()
    sim.add(1, [2], 30, now=0.0)
    for _ in range(5):
        sim.step()
    assert sim.scheduler.num_preemptions == 1 and 0 in [request.handle for request in sim.scheduler.waiting]
    assert sim.scheduler.deadline is None and sim.scheduler.expire(1e9) == []
    sim.run()
    assert sim.outputs[0] == continuation([1], 30)


def test_urgent_requests_do_not_hide_the_deadline_of_those_behind_them():
    sim = busy(queue_timeout_s=5.0)
    sim.scheduler.table.priority_R[:] = -9  # so that nobody takes its row
    sim.add(1, [1], 2, priority=3, now=101.0)
    sim.add(2, [2], 2, priority=-3, now=102.0)
    assert [refused.handle for _, refused in sim.scheduler.expire(106.0)] == [1]
    sim.run()


def test_a_request_of_several_choices_times_out_whole_or_not_at_all():
    sim = busy(queue_timeout_s=5.0)
    sim.add(1, [1] * 9, 2, more_seeds=[1, 2], now=101.0)
    assert [refused.handle for _, refused in sim.scheduler.expire(106.0)] == [1, 2, 3]
    sim.scheduler.check()
    sim.abort(0)
    sim.add(11, [1] * 9, 20, more_seeds=[1, 2], now=200.0)
    sim.step()  # the first of them has the only row
    assert sim.scheduler.deadline is None and sim.scheduler.expire(1e9) == []
    sim.run()
    assert sim.outputs[13] == continuation([1] * 9, 20)


# ---- gaps ---------------------------------------------------------------------------------------------------------


def test_the_step_gap_is_the_time_with_work_and_nothing_in_flight():
    clock = StepClock()
    clock.sent(0, 1.0, 1)
    clock.sent(1, 1.1, 2)
    clock.confirmed(0, 2.0, 1)
    clock.sent(2, 2.5, 2)  # a step was in flight all the time: no gap
    assert clock.gap_s == 0.0
    clock.confirmed(1, 3.0, 1)
    clock.confirmed(2, 4.0, 0)
    clock.sent(3, 4.25, 1)
    assert clock.gap_s == 0.25
    clock.confirmed(3, 5.0, 0)
    clock.rested()  # nothing to do
    clock.sent(4, 60.0, 1)
    assert clock.gap_s == 0.25
