"""What all processes do during decode steps, on one clock: before (op by op, one step at a time) and after (all that we have).

Writes FOLDER/timeline.json, for chrome://tracing or ui.perfetto.dev, and FOLDER/timeline.png: kernels per step (on a GPU, counted
by `kernel_count.py`), the device's idle gaps, and a few steps of every process. Prints a table for people, then one JSON line.

usage: python tests/bench/timeline.py [--model PATH] [--batch 16] [--steps 300] [--out FOLDER] [--flags "--load-format dummy"]
"""

import argparse
import json
import shlex
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from launch import resolve_model  # noqa: E402
from tests.bench.chrome_trace import chrome_events  # noqa: E402
from tests.bench.overhead import configurations, count_kernels  # noqa: E402
from tests.bench.report import facts, quantiles  # noqa: E402
from tests.bench.timeline_plot import draw  # noqa: E402
from tests.bench.timelines import CHANNELS, Timeline  # noqa: E402
from tests.bench.traced import PROMPT_IDS, Request, has_gpu, trace_runs  # noqa: E402

PROMPT_TOKENS = 64


def decode_requests(batch: int, steps: int) -> list[Request]:
    """Requests that decode side by side from the first step to the last."""
    return [Request([PROMPT_IDS[(i + j) % len(PROMPT_IDS)] for j in range(PROMPT_TOKENS)], steps) for i in range(batch)]


def summary(timeline: Timeline) -> dict[str, object]:
    """The figures of the steady part."""
    channels = {name: timeline.channel(name) for name in CHANNELS}
    return {
        "step_ms": quantiles(timeline.step_ms().tolist(), 4),
        "idle_share": round(timeline.idle_share(), 4),
        "gap_us": quantiles((timeline.idle_gaps_ms() * 1e3).tolist(), 2),
        "channel_us": {name: quantiles(((spans.end - spans.begin) / 1e3).tolist(), 1) for name, spans in channels.items()},
        **{f"{process}_ms": round(ms, 4) for process, ms in timeline.host_ms_per_step().items()},
    }


def print_table(results: dict[str, dict], kernels: dict[str, dict[str, float]]) -> None:
    """The steps, then the kernels."""
    print(f"{'':<26}{'step ms':>10}{'gap µs':>10}{'idle':>8}{'scheduler ms':>14}{'worker ms':>11}")
    for name, row in results.items():
        figures = f"{row['step_ms']['p50']:>10.3f}{row['gap_us']['p50']:>10.1f}{row['idle_share']:>8.1%}"
        print(f"{name:<26}{figures}{row['scheduler_ms']:>14.3f}{row['worker_ms']:>11.3f}")
    for name, row in kernels.items():
        print(f"{name}: {row['kernels']:.0f} kernels from {row['launches']:.0f} launches, {row['busy_ms']:.3f} ms busy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or file; default: the engine's own default")
    parser.add_argument("--executor", default="transformer", choices=["transformer", "checksum"])
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path.cwd())
    parser.add_argument("--flags", default="", help="more flags for the engine")
    arguments = parser.parse_args()
    extra, is_checksum = shlex.split(arguments.flags), arguments.executor == "checksum"
    on_gpu = has_gpu() and not is_checksum and "cpu" not in extra
    model = "checksum" if is_checksum else resolve_model(arguments.model)
    choice = ["--executor", "checksum"] if is_checksum else ["--model", model, "--load-format", arguments.load_format]
    flags = [*choice, *extra]

    requests, ways = decode_requests(arguments.batch, arguments.steps), configurations(on_gpu)
    compared = {f"before: {ways[0].name}": ways[0], f"after: {ways[-1].name}": ways[-1]}
    timelines: dict[str, Timeline] = {}
    for name, way in compared.items():
        (run,) = trace_runs([*flags, "--max-num-seqs", str(arguments.batch), *way.flags], [requests])
        timelines[name] = run.timeline.steady()

    kernels = count_kernels(arguments.batch, flags) if on_gpu else {}
    arguments.out.mkdir(parents=True, exist_ok=True)
    events = [event for pid, (name, timeline) in enumerate(timelines.items()) for event in chrome_events(name, pid, timeline)]
    (arguments.out / "timeline.json").write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))
    about, model_name = facts(), Path(model).name
    title = f"Decode steps of {model_name}, {arguments.batch} requests · {about['device']} · {date.today()}"
    busy_ms = {name: kernels[way.kernels]["busy_ms"] for name, way in compared.items()} if kernels else {}
    draw(arguments.out / "timeline.png", title, timelines, kernels, busy_ms)
    results = {name: summary(timeline) for name, timeline in timelines.items()}
    print_table(results, kernels)
    settings = {"model": model_name, "batch": arguments.batch, "steps": arguments.steps}
    print(json.dumps({"bench": "timeline", **settings, **about, "kernels": kernels, "results": results}))


if __name__ == "__main__":
    main()
