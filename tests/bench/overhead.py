"""What each way of running a step costs, through the real processes: throughput, host time for each step, the device's idle share.

The same greedy requests of mixed lengths run in every configuration. Figures come from runs with tracing switched on. Idle is the
device's share of time between steps, in the middle of a run. A step that waits for its own launches counts as running there, so on
a GPU a second figure says the share of a median step in which no kernel runs: kernel times are those of a full batch of equal
contexts under a profiler (`kernel_count.py`). Prints a table for people, then one JSON line.

usage: python tests/bench/overhead.py [--model PATH] [--requests 16,64,256] [--new 64] [--only "fused + graphs + async"]
       [--flags "--load-format dummy"]
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from protocol.trace import Span  # noqa: E402
from tests.bench.report import facts, quantiles  # noqa: E402
from tests.bench.traced import Run, has_gpu, mixed_requests, trace_runs  # noqa: E402


@dataclass(frozen=True)
class Configuration:
    """A name, the flags that make it, and the name that `kernel_count.py` has for the way in which it runs steps."""

    name: str
    flags: tuple[str, ...]
    kernels: str = "op by op"


def configurations(on_gpu: bool) -> list[Configuration]:
    """The first is what the others are compared with. A CPU runs steps op by op and has no graphs."""
    eager, op_by_op = ("--enforce-eager",), ("--enforce-eager", "--op-by-op")

    def depth(steps: int) -> tuple[str, str]:
        return "--max-pipeline-depth", str(steps)

    if not on_gpu:
        return [Configuration("sync", depth(1)), *(Configuration(f"async, depth {steps}", depth(steps)) for steps in (2, 4))]
    return [
        Configuration("eager", (*op_by_op, *depth(1))),
        Configuration("fused", (*eager, *depth(1)), "fused"),
        Configuration("fused + graphs", depth(1), "fused + graphs"),
        Configuration("fused + async", (*eager, *depth(4)), "fused"),
        Configuration("fused + graphs + async", depth(4), "fused + graphs"),
    ]


def count_kernels(batch: int, flags: list[str]) -> dict[str, dict[str, float]]:
    """Kernels, launches and busy milliseconds of a decode step, for each way of running it; empty, and said so, if that fails."""
    command = [sys.executable, str(ROOT / "tests" / "bench" / "kernel_count.py"), "--batch", str(batch), *flags]
    counted = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if counted.returncode:
        print(f"no kernel figures: kernel_count.py ended with {counted.returncode}", file=sys.stderr)
        return {}
    return json.loads(counted.stdout.splitlines()[-1])


def first_differences(outputs: list[list[int]], expected: list[list[int]]) -> dict[int, int]:
    """The position of the first other token, for each request that has one."""
    positions = {
        request: next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        for request, (ours, theirs) in enumerate(zip(outputs, expected, strict=True))
    }
    return {request: position for request, position in positions.items() if position is not None}


def summary(run: Run, expected: Run, busy_ms: float | None) -> dict[str, object]:
    """The figures of one run; busy_ms is how long kernels run in a step, where that is known."""
    steady = run.timeline.steady()
    host = steady.host_ms_per_step()
    different, step_ms = first_differences(run.outputs, expected.outputs), quantiles(steady.step_ms().tolist(), 4)
    return {
        "tokens_per_s": round(run.num_tokens / run.seconds, 1),
        "steps": len(run.timeline[Span.DEVICE]),
        "step_ms": step_ms,
        "scheduler_ms": round(host["scheduler"], 4),
        "worker_ms": round(host["worker"], 4),
        "idle_share": round(steady.idle_share(), 4),
        "kernel_idle_share": None if busy_ms is None else round(max(0.0, 1 - busy_ms / step_ms["p50"]), 4),
        "same_tokens": not different,
        "different": different,  # request -> position of its first other token
    }


def print_table(count: int, rows: dict[str, dict]) -> None:
    """One line for each configuration."""
    width = max(map(len, rows)) + 2
    heads = ("tokens/s", "steps", "step ms", "scheduler ms", "worker ms", "idle", "no kernel", "same tokens")
    print(f"{f'{count} requests':<{width}}" + "".join(f"{head:>14}" for head in heads))
    for name, row in rows.items():
        different = row["different"]
        no_kernel = "-" if row["kernel_idle_share"] is None else f"{row['kernel_idle_share']:.1%}"
        same = "yes" if row["same_tokens"] else f"no: {len(different)} from token {min(different.values())} on"
        print(
            f"{name:<{width}}{row['tokens_per_s']:>14.1f}{row['steps']:>14}{row['step_ms']['p50']:>14.3f}"
            f"{row['scheduler_ms']:>14.3f}{row['worker_ms']:>14.3f}{row['idle_share']:>14.1%}{no_kernel:>14}{same:>14}"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or file; default: the engine's own default")
    parser.add_argument("--executor", default="transformer", choices=["transformer", "checksum"])
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--requests", default="16", help="how many at once; several runs separated by commas")
    parser.add_argument("--new", type=int, default=64, help="tokens of the longest request")
    parser.add_argument("--only", default="", help="names of configurations, separated by commas; default: all")
    parser.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True, help="profile kernels too, on a GPU")
    parser.add_argument("--flags", default="", help="more flags for the engine")
    arguments = parser.parse_args()
    counts, extra = [int(count) for count in arguments.requests.split(",")], shlex.split(arguments.flags)
    model = ["--model", arguments.model] if arguments.model else []
    flags = [*model, "--executor", arguments.executor, "--load-format", arguments.load_format, *extra]
    on_gpu = has_gpu() and arguments.executor == "transformer" and "cpu" not in extra

    batches = [mixed_requests(count, arguments.new) for count in counts]
    ways = [way for way in configurations(on_gpu) if not arguments.only or way.name in arguments.only.split(",")]
    if not ways:
        parser.error(f"--only must name some of: {', '.join(way.name for way in configurations(on_gpu))}; got {arguments.only}")
    runs: dict[str, list[Run]] = {}
    for way in ways:
        print(f"{way.name} …", file=sys.stderr, flush=True)
        runs[way.name] = trace_runs([*flags, "--max-num-seqs", str(max(counts)), *way.flags], batches)
    results = {}
    for i, count in enumerate(counts):
        kernels = count_kernels(count, flags) if on_gpu and arguments.kernels else {}
        busy_ms = {way.name: kernels[way.kernels]["busy_ms"] if kernels else None for way in ways}
        results[count] = {way.name: summary(runs[way.name][i], runs[ways[0].name][i], busy_ms[way.name]) for way in ways}
        print_table(count, results[count])
    name = Path(arguments.model).name if arguments.model else "default" if arguments.executor == "transformer" else "checksum"
    settings = {"model": name, "flags": arguments.flags, "new": arguments.new}
    print(json.dumps({"bench": "overhead", **settings, **facts(), "results": results}))


if __name__ == "__main__":
    main()
