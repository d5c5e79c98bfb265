"""What the trace of a run says: where each step was when, messages on their way, work on the host, the device's idle gaps."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.trace import Span, read_trace

SCHEDULER_WORK = (Span.TURN,)
WORKER_WORK = (Span.RECEIVE, Span.APPLY, Span.LAUNCH, Span.PUBLISH)
STEADY_SHARE = 0.8  # of a run's steps, in the middle: without the first prompts and the last stragglers

# A message is sent when its sending begins, and received when its receiver turns to it: queueing is part of the channel.
CHANNELS = {"delta": (Span.SEND, Span.RECEIVE), "result": (Span.RETURN, Span.CONFIRM)}


@dataclass(frozen=True)
class Spans:
    """Spans of one kind in the order of their beginning. Times in nanoseconds of CLOCK_MONOTONIC."""

    step: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    def rows(self) -> list[tuple[int, int, int]]:
        """Step, begin and end of each."""
        return list(zip(self.step.tolist(), self.begin.tolist(), self.end.tolist(), strict=True))

    @property
    def total_ms(self) -> float:
        """The sum of all durations."""
        return float((self.end - self.begin).sum()) / 1e6

    def within(self, begin_ns: int, end_ns: int) -> "Spans":
        """Those that lie in a window whole."""
        inside = (self.begin >= begin_ns) & (self.end <= end_ns)
        return Spans(self.step[inside], self.begin[inside], self.end[inside])


class Timeline:
    """All spans of a run, by kind."""

    def __init__(self, spans: dict[Span, Spans]):
        self.spans = spans

    @classmethod
    def read(cls, folder: str | Path) -> "Timeline":
        """From the files that the processes wrote."""
        found: dict[Span, list[tuple[int, int, int]]] = {span: [] for span in Span}
        for record in read_trace(folder):
            found[record.span].append(record[1:])
        columns = {span: np.array(sorted(rows, key=lambda row: row[1]), np.int64).reshape(-1, 3) for span, rows in found.items()}
        return cls({span: Spans(*table.T) for span, table in columns.items()})

    def __getitem__(self, span: Span) -> Spans:
        return self.spans[span]

    def within(self, begin_ns: int, end_ns: int) -> "Timeline":
        """The part that lies in a window."""
        return Timeline({span: spans.within(begin_ns, end_ns) for span, spans in self.spans.items()})

    def steady(self) -> "Timeline":
        """The middle of the run, from the beginning of one device step to the end of another."""
        device = self[Span.DEVICE]
        assert len(device) >= 10, f"{len(device)} steps are too few to look at"
        cut = int(len(device) * (1 - STEADY_SHARE) / 2)
        return self.within(int(device.begin[cut]), int(device.end[-1 - cut]))

    def channel(self, name: str) -> Spans:
        """The way of each message from its sender to its receiver: `delta` or `result`."""
        sent, received = (self[span] for span in CHANNELS[name])
        step, at_sender, at_receiver = np.intersect1d(sent.step, received.step, return_indices=True)
        return Spans(step, sent.begin[at_sender], received.begin[at_receiver])

    def host_ms_per_step(self) -> dict[str, float]:
        """Milliseconds that the scheduler and the worker's main thread work for a step. A CPU's own step does not count as work."""
        steps = len(self[Span.DEVICE])
        work = {"scheduler": SCHEDULER_WORK, "worker": WORKER_WORK}
        return {process: sum(self[span].total_ms for span in kinds) / steps for process, kinds in work.items()}

    def idle_gaps_ms(self) -> np.ndarray:
        """The device's pause before each step but the first. Pauses within a step, between its kernels, are not seen here; on a GPU
        the copies of a step's tokens and of its host values count as pause.
        """
        device = self[Span.DEVICE]
        return np.maximum(device.begin[1:] - device.end[:-1], 0) / 1e6

    def idle_share(self) -> float:
        """The share of the time in which the device ran no step."""
        device = self[Span.DEVICE]
        return float(self.idle_gaps_ms().sum() * 1e6 / (device.end[-1] - device.begin[0]))

    def step_ms(self) -> np.ndarray:
        """From the beginning of each step on the device to the beginning of the next."""
        return np.diff(self[Span.DEVICE].begin) / 1e6
