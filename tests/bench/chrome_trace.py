"""A run in the Chrome trace format, which ui.perfetto.dev and chrome://tracing show. Times in microseconds from the first span."""

from protocol.trace import Span
from tests.bench.timelines import CHANNELS, Timeline

THREADS = {
    "scheduler": (Span.TURN, Span.CONFIRM, Span.PLAN, Span.SEND),
    "worker host": (Span.RECEIVE, Span.APPLY, Span.LAUNCH, Span.PUBLISH),
    "device": (Span.DEVICE,),
    "result thread": (Span.COPY, Span.RETURN),
}


def chrome_events(name: str, pid: int, timeline: Timeline) -> list[dict]:
    """A run as one process of a Chrome trace. Messages may overlap, so the channels are asynchronous events."""
    origin = min(int(spans.begin[0]) for spans in timeline.spans.values() if len(spans))
    events = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}]

    def microseconds(ns: int) -> float:
        return (int(ns) - origin) / 1e3

    for tid, (thread, kinds) in enumerate(THREADS.items()):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}})
        for kind in kinds:
            for step, begin, end in timeline[kind].rows():
                times = {"ts": microseconds(begin), "dur": (end - begin) / 1e3}
                events.append({"ph": "X", "name": kind.name.lower(), "pid": pid, "tid": tid, **times, "args": {"step": step}})
    for channel in CHANNELS:
        for step, begin, end in timeline.channel(channel).rows():
            what = {"cat": "channel", "name": f"channel: {channel}", "id": f"{pid}.{channel}.{step}", "args": {"step": step}}
            events += [{"ph": ph, "pid": pid, "tid": len(THREADS), "ts": microseconds(ns), **what} for ph, ns in (("b", begin), ("e", end))]
    return events
