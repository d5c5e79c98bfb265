"""Where a decode step's time goes on the device: the whole chain as a graph, and how much faster it is with one phase left out.

Phases overlap, so what leaving them out saves need not add up to the step. Random weights, one process, no host work. Prints a table
for people, then one JSON line. Needs a GPU.

usage: python tests/bench/phases.py MODEL_FOLDER [--batches 1,16,64,256] [--context 257] [--no-tune-kernels]
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from launch import cache_folder  # noqa: E402
from tests.bench.floors import floor_ms  # noqa: E402
from tests.bench.report import facts  # noqa: E402
from worker.decode import BucketPlan, DecodeChain  # noqa: E402
from worker.loading import load_model  # noqa: E402
from worker.model import TransformerModel  # noqa: E402
from worker.rows import RowState, SamplingKind  # noqa: E402
from worker.tuning import PRODUCTS, filled_rows, plan_buckets  # noqa: E402

BLOCK_SIZE, MAX_MODEL_LEN = 16, 8192
PHASES = ("qkv", "attention", "out", "gate_up", "down", "head")
REPLAYS, GROUPS = 5, 9


class PartialChain(DecodeChain):
    """A decode chain without one of its phases."""

    def __init__(self, *arguments: object, without: str | None):
        super().__init__(*arguments)
        self.without = without

    def run(self, rows_B: Tensor, kind: SamplingKind) -> Tensor:
        """One step."""
        return self.hidden(rows_B) if self.without == "head" else super().run(rows_B, kind)

    def _project(self, name: str, *arguments: object) -> None:
        if name != self.without:
            super()._project(name, *arguments)

    def _attention(self, *arguments: object) -> Callable[..., None]:
        attend = super()._attention(*arguments)
        return attend if self.without != "attention" else lambda *_: None


def replay_ms(chain: DecodeChain, batch: int, context: int) -> float:
    """Median milliseconds of a graph's replay."""
    rows_B = torch.arange(batch, dtype=torch.int32, device=chain.x_BD.device)
    graph = torch.cuda.CUDAGraph()
    chain.run(rows_B, SamplingKind.GREEDY)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        chain.run(rows_B, SamplingKind.GREEDY)
    chain.rows.length_R[:batch] = context
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(GROUPS + 1)]
    for _ in range(REPLAYS):
        graph.replay()
    for mark in marks:
        mark.record()
        for _ in range(REPLAYS):
            graph.replay()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])) / REPLAYS


def measure(model: TransformerModel, rows: RowState, plan: BucketPlan, batch: int, context: int) -> dict[str, float]:
    """The step, the step without early launch, and what is saved without each phase: milliseconds."""

    def timed(pdl: bool, without: str | None) -> float:
        chain = PartialChain(model, rows, model.vocab_size, {batch: plan}, pdl, without=without)
        return replay_ms(chain, batch, context)

    step = timed(True, None)
    saved = {phase: round(step - timed(True, phase), 4) for phase in PHASES}
    return {"step": round(step, 4), "serial": round(timed(False, None), 4), **saved, "again": round(timed(True, None), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=257)
    parser.add_argument("--tune-kernels", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    model = load_model(str(arguments.model), "bfloat16", "cuda", MAX_MODEL_LEN, "dummy")
    blocks_of_row = (arguments.context + 256) // BLOCK_SIZE + 2
    model.allocate_pools(max(batches) * blocks_of_row, BLOCK_SIZE)
    model.allocate_buffers(2 * max(batches), max(batches))
    for pool in (pool for pools in model.kv_pools for pool in pools):
        pool.normal_()
    rows = filled_rows(model, max(batches), arguments.context + 256)
    plans = plan_buckets(model, batches, model.vocab_size, Path(cache_folder(dict(os.environ))), arguments.tune_kernels)
    print(f"{'batch':>6}{'floor':>9}" + "".join(f"{name:>11}" for name in ("step", "serial", *PHASES, "again")))
    results = {}
    for batch in batches:
        results[batch] = measure(model, rows, plans[batch], batch, arguments.context)
        print(f"{batch:>6}{floor_ms(arguments.model, batch, arguments.context):>9.3f}", end="")
        print("".join(f"{ms:>11.3f}" for ms in results[batch].values()), flush=True)
        chosen = {name: str(plans[batch].configs[name]) for name in PRODUCTS}
        print(f"       {chosen} {plans[batch].attention} head {plans[batch].head}")
    print(json.dumps({"bench": "phases", "model": arguments.model.name, "context": arguments.context, **facts(), "ms": results}))


if __name__ == "__main__":
    main()
