"""The trace of a run: complete and consistent across processes; and what is computed from it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import launch
from protocol.trace import Span, Trace, open_trace, read_trace
from tests.bench.chrome_trace import chrome_events
from tests.bench.timelines import Spans, Timeline
from tests.bench.traced import mixed_requests, trace_runs
from tests.checksum_reference import continuation
from tests.engine_process import EngineProcess
from worker import device_trace

FLAGS = ["--executor", "checksum", "--num-threads", "1", "--max-num-seqs", "8"]
REQUESTS = mixed_requests(8, 40)
ONCE_A_STEP = set(Span) - {Span.TURN, Span.LAUNCH, Span.COPY}  # the last two need a GPU


@pytest.fixture(scope="module", params=[1, 4])
def depth(request):
    """Steps sent ahead."""
    return request.param


@pytest.fixture(scope="module")
def run(depth):
    """A batch of requests on an engine of its own."""
    (found,) = trace_runs([*FLAGS, "--max-pipeline-depth", str(depth)], [REQUESTS])
    return found


def in_order(*times: np.ndarray) -> bool:
    return all((earlier <= later).all() for earlier, later in zip(times, times[1:]))


def test_every_step_is_recorded_once_in_every_place(run):
    steps = run.timeline[Span.DEVICE].step
    assert len(steps) >= max(request.new for request in REQUESTS) and (np.diff(steps) == 1).all()
    for span in ONCE_A_STEP:
        assert run.timeline[span].step.tolist() == steps.tolist(), span.name
    assert not len(run.timeline[Span.LAUNCH]) and not len(run.timeline[Span.COPY])
    assert run.outputs == [continuation(request.prompt, request.new) for request in REQUESTS]


def test_a_step_passes_its_places_in_order(run):
    spans = run.timeline.spans
    for span in spans.values():
        assert in_order(span.begin, span.end)
    assert in_order(spans[Span.PLAN].end, spans[Span.SEND].begin, spans[Span.RECEIVE].begin)
    assert in_order(spans[Span.RECEIVE].end, spans[Span.APPLY].begin)
    assert in_order(spans[Span.APPLY].end, spans[Span.DEVICE].begin)
    assert in_order(spans[Span.DEVICE].end, spans[Span.PUBLISH].begin, spans[Span.RETURN].begin, spans[Span.CONFIRM].begin)


def test_what_a_thread_does_never_overlaps(run):
    for kinds in [(Span.CONFIRM, Span.PLAN, Span.SEND), (Span.RECEIVE, Span.APPLY, Span.DEVICE, Span.PUBLISH), (Span.RETURN,)]:
        bars = sorted(row[1:] for kind in kinds for row in run.timeline[kind].rows())
        assert all(end <= begin for (_, end), (begin, _) in zip(bars, bars[1:])), kinds


def test_the_chrome_trace_holds_every_span_and_message(run):
    events = json.loads(json.dumps(chrome_events("run", 0, run.timeline)))
    steps = len(run.timeline[Span.DEVICE])
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, run.timeline.spans.values()))
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M")
    for phase in "be":
        assert len({event["id"] for event in events if event["ph"] == phase}) == 2 * steps


def test_planning_ahead_is_seen_in_the_trace(run, depth):
    """Before its predecessor is confirmed, except with one step at a time, and at the end of the prompts."""
    planned, confirmed = run.timeline[Span.PLAN].begin[1:], run.timeline[Span.CONFIRM].begin[:-1]
    assert np.mean(planned < confirmed) == (pytest.approx(1, abs=0.2) if depth > 1 else 0)


def test_a_thousand_records_of_two_processes_are_read_back(tmp_path):
    for process in ("a", "b"):
        trace = open_trace(str(tmp_path / "new"), process)
        for step in range(500):
            trace.record(Span.PLAN, step, step, 2**40 + step)
    with open(tmp_path / "new" / "b.spans", "ab") as file:
        file.write(b"cut short")
    expected = [(Span.PLAN, step, step, 2**40 + step) for step in range(500)]
    assert list(read_trace(tmp_path / "new")) == expected * 2


def test_a_span_without_a_step_is_not_recorded(tmp_path):
    trace = open_trace(str(tmp_path), "a")
    with trace.span(Span.PLAN):
        pass
    with trace.span(Span.PLAN) as span:
        span.step = 3
    assert [record.step for record in read_trace(tmp_path)] == [3]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trace, "record", None)
    trace = open_trace(None, "a")
    with trace.span(Span.PLAN, 1) as span:
        span.step = 2
    trace.record(Span.PLAN, 1, 2, 3)
    assert not trace.is_on and not list(tmp_path.iterdir())


def test_tracing_is_off_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--executor", "checksum", "--zmq-listen", f"ipc://{tmp_path}/s"]
    assert launch.make_config(launch.parse_arguments(arguments), {}).trace_dir is None
    config = launch.make_config(launch.parse_arguments([*arguments, "--trace", "here"]), {})
    assert config.trace_dir == str(tmp_path / "here")  # the children run elsewhere


def test_an_unusable_folder_ends_the_start_with_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    process = EngineProcess(*FLAGS, "--trace", str(tmp_path / "file"))
    try:
        assert process.process.wait(20) == 2
        assert str(tmp_path / "file") in process.reason()
    finally:
        process.kill_all()


def test_idle_share_and_host_time_of_a_hand_made_trace():
    def spans(*rows: tuple[int, int]) -> Spans:
        table = np.array(rows, dtype=np.int64).reshape(-1, 2) * 1_000_000
        return Spans(np.arange(len(rows)), table[:, 0], table[:, 1])

    empty = {span: spans() for span in Span}
    timeline = Timeline({
        **empty, Span.DEVICE: spans((0, 4), (5, 9), (12, 20)), Span.TURN: spans((0, 1), (5, 7)), Span.APPLY: spans((0, 3), (4, 7)),
        Span.SEND: spans((0, 1), (2, 3)), Span.RECEIVE: spans((1, 1), (7, 7)),
    })  # fmt: skip
    assert timeline.idle_gaps_ms().tolist() == [1, 3]
    assert timeline.idle_share() == 4 / 20
    assert timeline.step_ms().tolist() == [5, 7]
    assert timeline.host_ms_per_step() == {"scheduler": 1, "worker": 2}
    assert timeline.channel("delta").rows() == [(0, 0, 1_000_000), (1, 2_000_000, 7_000_000)]


class FakeEvent:
    """A CUDA event on a device whose clock is 1 s ahead of the host's; `now_ns` is the host's time."""

    now_ns = 0

    def record(self) -> None:
        self.device_ns = FakeEvent.now_ns + 1_000_000_000

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "FakeEvent") -> float:
        return (later.device_ns - self.device_ns) / 1e6


def test_device_steps_are_mapped_onto_the_hosts_clock(tmp_path, monkeypatch):
    """Two steps in flight, settled in order, one of them after the anchor was set anew."""
    monkeypatch.setattr(device_trace.torch.cuda, "Event", lambda enable_timing: FakeEvent())
    monkeypatch.setattr(device_trace, "time", SimpleNamespace(monotonic_ns=lambda: FakeEvent.now_ns))
    timer = device_trace.step_timer(open_trace(str(tmp_path), "worker-0"), on_gpu=True)
    for step in (1, 2):
        with timer.step(step):
            FakeEvent.now_ns += 2_000_000
        FakeEvent.now_ns += 500_000
        timer.anchor()
    timer.settle()
    timer.settle()
    device = [record[1:] for record in read_trace(tmp_path) if record.span is Span.DEVICE]
    assert device == [(1, 0, 2_000_000), (2, 2_500_000, 4_500_000)]
