"""What every process did when, for the benches: fixed-size records of spans, one file for each process.

All stamps are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share. A record is one write, so nothing is lost when a
process is ended. A span takes 1.5 µs on a slow shared core, and 0.4 µs where tracing is off.
"""

import os
import struct
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".spans"
_RECORD = struct.Struct("<iiqq")


class Span(IntEnum):
    """What is recorded of a step."""

    TURN = 0  # scheduler: one turn of its loop; the step is the newest sent
    CONFIRM = 1  # scheduler: a result taken in and its tokens handed on
    PLAN = 2
    SEND = 3
    RECEIVE = 4  # worker: a delta that has arrived is read and decoded
    APPLY = 5  # worker: batch and rows are brought up to date
    LAUNCH = 6  # worker with a GPU: kernels or a graph are launched
    PUBLISH = 7  # worker: the copy of the tokens is started
    DEVICE = 8  # the step itself; on a CPU the main thread runs it
    COPY = 9  # result thread: waits for the tokens
    RETURN = 10  # result thread: sends them


class SpanRecord(NamedTuple):
    """One span of one step."""

    span: Span
    step: int
    begin_ns: int
    end_ns: int


class OpenSpan:
    """A span that ends with its `with` block. Its step may be set inside; without one it is not recorded."""

    def __init__(self, trace: "Trace", span: Span, step: int | None):
        self.trace, self.span, self.step = trace, span, step

    def __enter__(self) -> "OpenSpan":
        self.begin_ns = time.monotonic_ns()
        return self

    def __exit__(self, *_: object) -> None:
        if self.step is not None:
            self.trace.record(self.span, self.step, self.begin_ns, time.monotonic_ns())


class Trace:
    """Appends to one file, from any number of threads."""

    is_on = True

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def span(self, span: Span, step: int | None = None) -> OpenSpan:
        """To be used as `with trace.span(Span.PLAN, step):`."""
        return OpenSpan(self, span, step)

    def record(self, span: Span, step: int, begin_ns: int, end_ns: int) -> None:
        """Write one record."""
        os.write(self.fd, _RECORD.pack(span, step, begin_ns, end_ns))


class _NoSpan:
    step: int | None = None

    def __enter__(self) -> "_NoSpan":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class NoTrace:
    """Tracing switched off: records nothing."""

    is_on = False
    _nothing = _NoSpan()

    def span(self, span: Span, step: int | None = None) -> _NoSpan:
        """A `with` block that does nothing."""
        return self._nothing

    def record(self, span: Span, step: int, begin_ns: int, end_ns: int) -> None:
        """Nothing."""


def open_trace(folder: str | None, process: str) -> Trace | NoTrace:
    """The trace of a process, in a folder that is made where it is missing; without a folder tracing is off. Raises OSError."""
    if folder is None:
        return NoTrace()
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Trace(Path(folder) / (process + SUFFIX))


def read_trace(folder: str | Path) -> Iterator[SpanRecord]:
    """The records of all processes, each file's in the order of their ends. A record cut short at the end of a file is left out."""
    for path in sorted(Path(folder).glob("*" + SUFFIX)):
        data = path.read_bytes()
        whole = len(data) - len(data) % _RECORD.size
        for span, step, begin_ns, end_ns in _RECORD.iter_unpack(data[:whole]):
            yield SpanRecord(Span(span), step, begin_ns, end_ns)
