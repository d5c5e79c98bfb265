"""When steps run on the device, on the host's clock. Two timers with one interface: the main thread opens steps, the result thread
settles them in the same order once they are done.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.trace import NoTrace, Span, Trace

ANCHOR_TRIES = 5


class StepTimer(Protocol):
    """Records where a step's time goes while it is launched and run."""

    def step(self, step: int) -> AbstractContextManager[object]:
        """To be entered around the launch of a step."""

    def settle(self) -> None:
        """Record the oldest unsettled step, which is done."""

    def anchor(self) -> None:
        """Set the device's clock by the host's. For idle moments: it waits for the device."""


class HostTimer:
    """For a CPU, which runs a step where it is launched; and for tracing switched off."""

    def __init__(self, trace: Trace | NoTrace):
        self.trace = trace

    def step(self, step: int) -> AbstractContextManager[object]:
        """The step is the run itself."""
        return self.trace.span(Span.DEVICE, step)

    def settle(self) -> None:
        """Nothing is left to record."""

    def anchor(self) -> None:
        """There is one clock only."""


@dataclass(frozen=True)
class Anchor:
    """One instant on both clocks."""

    event: torch.cuda.Event
    host_ns: int

    def on_host(self, event: torch.cuda.Event) -> int:
        """When an event happened, in nanoseconds of the host's clock. CUDA says it in float32 ms: 1 µs coarse after 10 s."""
        return self.host_ns + round(self.event.elapsed_time(event) * 1e6)


class CudaTimer:
    """Two timing events around each step. A step that waits for its own launches counts as running.

    The two clocks may drift apart, so the anchor is set anew whenever the worker is idle.
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        self.unsettled: deque[tuple[int, Anchor, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.anchor()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The launch on the host, and events before and after it on the stream."""
        begin, end = _event(), _event()
        with self.trace.span(Span.LAUNCH, step):
            begin.record()
            yield
            end.record()
        self.unsettled.append((step, self._anchor, begin, end))

    def settle(self) -> None:
        """Record the oldest step; its end event has happened."""
        step, anchor, begin, end = self.unsettled.popleft()
        self.trace.record(Span.DEVICE, step, anchor.on_host(begin), anchor.on_host(end))

    def anchor(self) -> None:
        """Keep the tightest of a few tries: the event happens between two looks at the host's clock."""
        tries = []
        for _ in range(ANCHOR_TRIES):
            event, before = _event(), time.monotonic_ns()
            event.record()
            event.synchronize()
            after = time.monotonic_ns()
            tries.append((after - before, Anchor(event, (before + after) // 2)))
        self._anchor = min(tries, key=lambda found: found[0])[1]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def step_timer(trace: Trace | NoTrace, on_gpu: bool) -> StepTimer:
    """The timer for a device; events are recorded only where somebody wants them."""
    return CudaTimer(trace) if on_gpu and trace.is_on else HostTimer(trace)
