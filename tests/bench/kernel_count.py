"""Kernels of one decode step, counted by torch.profiler: op by op, as the fused chain, and as a graph. Needs a GPU.

The worker's own runners, in one process without sockets; a process of its own, so that its memory is free again for the engine.
Prints one JSON line.

usage: python tests/bench/kernel_count.py [--batch 16] --model PATH [more flags of the engine]
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from launch import make_config, parse_arguments  # noqa: E402
from tests.simulation import Simulation  # noqa: E402
from worker.batch import StepBatch  # noqa: E402
from worker.loading import load_model  # noqa: E402
from worker.runner import Model, Runner  # noqa: E402

PROMPT_TOKENS = 129  # nine blocks of 16: room for the steps below without a grant
WARM_UP_STEPS, STEPS = 4, 5


def decoding(model: Model, batch: int, **overrides: object) -> tuple[Runner, StepBatch]:
    """A runner and a decode step of so many rows."""
    limits = dict(num_rows=batch, block_size=16, num_blocks=batch * 16, max_step_tokens=2048, max_pipeline_depth=1)
    sim = Simulation(model, overrides, **limits)
    for handle in range(batch):
        assert sim.add(handle, [handle + 3] * PROMPT_TOKENS, 100) is None
    sim.step()
    while len(sim.scheduler.table.prefilling_rows()):
        sim.step()
    executor = sim.worker.executor
    return executor.runner, executor.batch.apply(sim.scheduler.plan().delta)


def count(run: Callable[[], object]) -> dict[str, float]:
    """What a step launches and runs, and how long at least one kernel of it is running."""
    for _ in range(WARM_UP_STEPS):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
    events = profiler.events()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))]
    launches = [e for e in events if e.device_type == DeviceType.CPU and ("LaunchKernel" in e.name or e.name == "cudaGraphLaunch")]
    busy_us = covered([(e.time_range.start, e.time_range.end) for e in kernels])
    return {"kernels": len(kernels) / STEPS, "launches": len(launches) / STEPS, "busy_ms": round(busy_us / STEPS / 1e3, 4)}


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union: a kernel may start while its predecessor still runs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--batch", type=int, default=16)
    arguments, flags = parser.parse_known_args()
    config = make_config(parse_arguments(flags), dict(os.environ))
    tuned = dict(tune_kernels=config.tune_kernels, cache_dir=config.cache_dir)  # the kernels that the engine has chosen
    model = load_model(config.model, config.dtype, config.device, config.max_model_len, config.load_format)
    counts = {}
    runner, step = decoding(model, arguments.batch, enforce_eager=True, **tuned)
    counts["op by op"] = count(lambda: runner.others.run(step))
    counts["fused"] = count(lambda: runner.run(step))
    runner, step = decoding(model, arguments.batch, **tuned)
    counts["fused + graphs"] = count(lambda: runner.run(step))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
