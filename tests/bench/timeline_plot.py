"""The picture of `timeline.py`: kernels per step, the device's idle gaps, and a few steps of every process on one time axis."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from protocol.trace import Span
from tests.bench.timelines import Spans, Timeline

matplotlib.use("agg")

STEPS_SHOWN = 4  # of the slower run; the other is drawn on the same scale
CHANNEL_TRACKS = 4  # messages on their way at the same time
RUN_COLORS = ("#c2452d", "#1f6fb2")
IDLE_COLOR = "#f6c9c0"
COLORS = {
    Span.CONFIRM: "#8e6bb0", Span.PLAN: "#5a3d8a", Span.SEND: "#b9a3d3",
    Span.RECEIVE: "#f2b35a", Span.APPLY: "#d98a1e", Span.LAUNCH: "#8f5a10", Span.PUBLISH: "#f7d9a8",
    Span.DEVICE: "#2f8f4e", Span.COPY: "#bfd8e8", Span.RETURN: "#3d8bb8",
}  # fmt: skip
CHANNEL_COLOR = "#8a8f98"
LANES: tuple[tuple[str, tuple[Span, ...] | str], ...] = (
    ("scheduler", (Span.TURN, Span.CONFIRM, Span.PLAN, Span.SEND)),
    ("channel: deltas", "delta"),
    ("worker host", (Span.RECEIVE, Span.APPLY, Span.LAUNCH, Span.PUBLISH)),
    ("device", (Span.DEVICE,)),
    ("result thread", (Span.COPY, Span.RETURN)),
    ("channel: results", "result"),
)
TURN_COLOR = "#e4dcee"


def draw(
    path: Path, title: str, timelines: dict[str, Timeline], kernels: dict[str, dict[str, float]], busy_ms: dict[str, float]
) -> None:
    """Write the PNG. Timelines hold the steady part of each run; without kernels their panel is left out.

    busy_ms says of a run how long kernels run in a step; of a run that it leaves out nothing is said.
    """
    figure = Figure(figsize=(14, 5.2 + 2.9 * len(timelines)), layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold")
    grid = figure.add_gridspec(1 + len(timelines), 3, height_ratios=[1.25, *[1] * len(timelines)])
    if kernels:
        _draw_kernels(figure.add_subplot(grid[0, 0]), kernels)
    _draw_gaps(figure.add_subplot(grid[0, 1 if kernels else 0 :]), timelines)
    span_ms = STEPS_SHOWN * max(float(np.median(timeline.step_ms())) for timeline in timelines.values())
    for row, (name, timeline) in enumerate(timelines.items(), start=1):
        _draw_lanes(figure.add_subplot(grid[row, :]), name, timeline, span_ms, busy_ms.get(name))
    kinds = [kind for kind in COLORS if any(len(timeline[kind]) for timeline in timelines.values())]
    handles = [Patch(color=COLORS[kind], label=kind.name.lower()) for kind in kinds]
    extra = [Patch(color=TURN_COLOR, label="rest of the turn"), Patch(color=CHANNEL_COLOR, label="message under way")]
    handles += [*extra, Patch(color=IDLE_COLOR, label="device idle")]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False)
    note = "" if kernels else "Kernels per step are counted on a GPU only."
    figure.text(0.995, 0.003, note, ha="right", va="bottom", fontsize=8, color="#666666")
    figure.savefig(path, dpi=110)


def _draw_kernels(axes: Axes, kernels: dict[str, dict[str, float]]) -> None:
    place = np.arange(len(kernels))
    for offset, field, color in ((-0.2, "kernels", "#2f8f4e"), (0.2, "launches", "#8f5a10")):
        bars = axes.bar(place + offset, [row[field] for row in kernels.values()], 0.38, color=color, label=field)
        axes.bar_label(bars, fmt="%.0f", fontsize=9)
    axes.set_xticks(place, [f"{name}\nbusy {row['busy_ms']:.3f} ms" for name, row in kernels.items()])
    axes.set_ylabel("per step")
    axes.set_title("Kernels on the device, launches by the host")
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_gaps(axes: Axes, timelines: dict[str, Timeline]) -> None:
    for color, (name, timeline) in zip(RUN_COLORS, timelines.items(), strict=True):
        gaps_us = np.maximum(timeline.idle_gaps_ms() * 1e3, 0.1)
        label = f"{name} — idle {timeline.idle_share():.1%}, median gap {np.median(gaps_us):.1f} µs"
        axes.plot(np.arange(1, len(gaps_us) + 1), gaps_us, ".", markersize=4, color=color, alpha=0.8, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step of the steady part")
    axes.set_ylabel("idle before the step, µs")
    axes.set_title("Device idle gaps over time")
    axes.grid(axis="y", alpha=0.3)
    axes.set_ymargin(0.3)
    axes.legend(loc="upper right", frameon=True, framealpha=0.9)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lanes(axes: Axes, name: str, timeline: Timeline, span_ms: float, busy_ms: float | None) -> None:
    """One lane for each place where a step is worked on, from the beginning of the middle step on the device."""
    device = timeline[Span.DEVICE]
    origin = int(device.begin[len(device) // 2])
    window = (0.0, span_ms)
    for y, (_, content) in zip(range(len(LANES) - 1, -1, -1), LANES, strict=True):
        if isinstance(content, str):
            _draw_channel(axes, y, timeline, content, origin, window)
            continue
        if content == (Span.DEVICE,):
            axes.broken_barh([window], (y - 0.4, 0.8), facecolor=IDLE_COLOR)
        for kind in content:
            shown = _shown(timeline[kind], origin, window)
            edge = {"edgecolor": "white", "linewidth": 0.8} if kind is Span.DEVICE else {}
            axes.broken_barh([bar for _, bar in shown], (y - 0.4, 0.8), facecolor=COLORS.get(kind, TURN_COLOR), **edge)
            if kind is Span.DEVICE:
                _number(axes, y, shown, window)
    axes.set_yticks(range(len(LANES) - 1, -1, -1), [lane for lane, _ in LANES])
    axes.set_xlim(*window)
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.set_xlabel("ms")
    step_ms = float(np.median(timeline.step_ms()))
    kernels = "" if busy_ms is None else f", kernels run {min(1.0, busy_ms / step_ms):.0%} of the time"
    axes.set_title(f"{name}: {step_ms:.3f} ms a step, device idle {timeline.idle_share():.1%} between steps{kernels}", loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_channel(axes: Axes, y: int, timeline: Timeline, channel: str, origin: int, window: tuple[float, float]) -> None:
    height = 0.8 / CHANNEL_TRACKS
    for step, bar in _shown(timeline.channel(channel), origin, window):
        axes.broken_barh([bar], (y - 0.4 + step % CHANNEL_TRACKS * height, height * 0.85), facecolor=CHANNEL_COLOR)


def _number(axes: Axes, y: int, shown: list[tuple[int, tuple[float, float]]], window: tuple[float, float]) -> None:
    """Write the steps' numbers where they fit."""
    for step, (begin, length) in shown:
        left, right = max(begin, window[0]), min(begin + length, window[1])
        if right - left > 0.03 * (window[1] - window[0]):
            axes.text((left + right) / 2, y, str(step), ha="center", va="center", color="white", fontsize=8)


def _shown(spans: Spans, origin: int, window: tuple[float, float]) -> list[tuple[int, tuple[float, float]]]:
    """Step, (begin, length) in ms of the spans that reach into the window."""
    bars = [(step, ((begin - origin) / 1e6, (end - begin) / 1e6)) for step, begin, end in spans.rows()]
    return [(step, (begin, length)) for step, (begin, length) in bars if begin < window[1] and begin + length > window[0]]
