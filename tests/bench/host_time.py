"""Host time of a steady decode step, by batch size: the scheduler's planning and confirming, and the worker's own bookkeeping.

Both run in this process, without a model and without sockets; messages are encoded and decoded. "Rebuilt" is the worker as it would be
without a persistent batch: every row of the step is written anew. Prints a table for people, then one JSON line.

usage: python tests/bench/host_time.py [--rows 16,64,256,1024] [--steps 300]
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from protocol.messages import AddRequest, RowJoin, StepDelta, StepResult, decode_result, decode_to_worker, encode, pack  # noqa: E402
from protocol.sampling import RowSampling  # noqa: E402
from scheduler.core import Limits, Scheduler  # noqa: E402
from tests.bench.report import facts, quantiles  # noqa: E402
from tests.simulation import make_executor  # noqa: E402
from worker.batch import PersistentBatch  # noqa: E402
from worker.checksum import ChecksumModel  # noqa: E402

PROMPT_TOKENS, WARM_UP = 16, 30


def limits_for(rows: int, steps: int) -> Limits:
    """Room for every row to decode all the steps."""
    length = PROMPT_TOKENS + steps + 2 * WARM_UP
    return Limits(
        num_rows=rows, num_blocks=rows * (length // 16 + 2), block_size=16, max_model_len=length, vocab_size=1000,
        max_step_tokens=rows * PROMPT_TOKENS, max_pipeline_depth=2, max_queued_requests=rows,
    )  # fmt: skip


class Stopwatch:
    """Sums the milliseconds between `start` and `stop`, one sum for each step."""

    def __init__(self) -> None:
        self.sums_ms = [0.0]

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.sums_ms[-1] += (time.perf_counter() - self.began) * 1e3

    def next_step(self) -> None:
        """Begin a new sum."""
        self.sums_ms.append(0.0)


def measure(rows: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each steady step, by who spends them."""
    limits = limits_for(rows, steps)
    scheduler = Scheduler(limits)
    batch = make_executor(ChecksumModel(limits.max_model_len), limits).batch
    spare = make_executor(ChecksumModel(limits.max_model_len), limits).batch
    for handle in range(rows):
        tokens = np.full(PROMPT_TOKENS - handle % 16, handle % 1000)  # so that not all rows need a block in the same step
        scheduler.add(0, AddRequest(handle, pack(tokens), b"", limits.max_model_len, [0, 1], RowSampling()))
    rng, sent = np.random.default_rng(0), []
    planning, applying, rebuilding = watches = (Stopwatch(), Stopwatch(), Stopwatch())
    for step in range(steps + WARM_UP):
        with planning:
            sent += plan_all(scheduler)
        payload, num_samples = sent.pop(0)
        with applying:
            batch.apply(decode_to_worker(payload))
        with rebuilding:
            rebuild(spare, limits)
        result = encode(StepResult(step, pack(rng.integers(2, 1000, num_samples))))
        with planning:
            confirm(scheduler, result)
        for watch in watches:
            watch.next_step()
    names = ("scheduler", "worker", "worker, rebuilt")
    return {name: watch.sums_ms[WARM_UP:-1] for name, watch in zip(names, watches, strict=True)}


def plan_all(scheduler: Scheduler) -> list[tuple[bytes, int]]:
    """Plan until the pipeline is full: messages, and how many rows each samples for."""
    sent = []
    while scheduler.has_room and (plan := scheduler.plan()):
        sent.append((encode(plan.delta), len(plan.rows)))
    return sent


def confirm(scheduler: Scheduler, result: bytes) -> None:
    """Confirm a step and encode what the frontends hear."""
    for _, message in scheduler.confirm(decode_result(result)).batches():
        encode(message)


def rebuild(batch: PersistentBatch, limits: Limits) -> None:
    """Write every row of the step anew, as a worker without a persistent batch must."""
    blocks = pack(np.arange(limits.max_model_len // limits.block_size))
    rows = range(limits.num_rows)
    joins = [RowJoin(row, 1, PROMPT_TOKENS, 0, blocks, RowSampling()) for row in rows]
    batch.apply(StepDelta(batch.next_step, joins=joins, decode_on=list(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="16,64,256,1024")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    results = {}
    for rows in map(int, arguments.rows.split(",")):
        results[rows] = {name: quantiles(values, 4) for name, values in measure(rows, arguments.steps).items()}
    names = list(next(iter(results.values())))
    print(f"{'ms a step, median':<20}" + "".join(f"{rows:>10}" for rows in results))
    for name in names:
        print(f"{name:<20}" + "".join(f"{results[rows][name]['p50']:>10.3f}" for rows in results))
    print(json.dumps({"bench": "host_time", **facts(), "steps": arguments.steps, "results": results}))


if __name__ == "__main__":
    main()
