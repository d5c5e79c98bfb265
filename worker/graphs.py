"""Decode steps as CUDA graphs: one for each bucket and kind of sampling, all in one memory pool.

B = rows of the step
"""

import logging
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from worker.batch import StepBatch
from worker.decode import DecodeChain
from worker.rows import SamplingKind
from worker.runner import StepRunner

log = logging.getLogger(__name__)


class Decode(Protocol):
    """Runs pure decode steps: their tokens, or for FILTERED rows the last layer's output."""

    def run(self, batch: StepBatch) -> Tensor:
        """Run one step."""


class EagerDecode:
    """Launches the chain kernel by kernel: in the graphs' place where they are switched off."""

    def __init__(self, chain: DecodeChain):
        self.chain = chain

    def run(self, batch: StepBatch) -> Tensor:
        """Launch one step."""
        return _launch(self.chain, batch.rows_S, batch.kind)


class DecodeGraphs:
    """Captured from the largest bucket down, so that the smaller ones fit into its memory.

    rows_B is the static buffer that holds the rows of a step, padding included; each bucket reads its leading part.
    """

    def __init__(self, chain: DecodeChain, rows_B: Tensor):
        if chain.model.ops.READS_HOST_VALUES:
            raise ValueError(f"{chain.model.ops.__name__} reads a step's values on the host: no graph can hold it; use --enforce-eager")
        self.chain = chain  # a graph keeps none of the memory alive that it reads and writes
        self.graphs: dict[tuple[int, SamplingKind], torch.cuda.CUDAGraph] = {}
        self.outputs: dict[tuple[int, SamplingKind], Tensor] = {}
        torch.cuda.empty_cache()  # a capture does it too, and what it gives back is no graph's
        before, pool = torch.cuda.memory_reserved(), torch.cuda.graph_pool_handle()
        rows_B.fill_(chain.rows.scratch_row)  # so that warming up touches no row that anybody owns
        for bucket in tqdm(sorted(chain.plans, reverse=True), desc="capturing graphs"):
            for kind in SamplingKind:
                self._capture(chain, rows_B[:bucket], kind, pool)
        mib = (torch.cuda.memory_reserved() - before) / 2**20
        log.info("%d graphs of %d buckets take %.1f MiB", len(self.graphs), len(chain.plans), mib)

    def _capture(self, chain: DecodeChain, rows_B: Tensor, kind: SamplingKind, pool: tuple[int, int]) -> None:
        _launch(chain, rows_B, kind)  # compiles, and lets the library take its workspace
        torch.cuda.synchronize()
        graph, key = torch.cuda.CUDAGraph(), (len(rows_B), kind)
        with torch.cuda.graph(graph, pool=pool):
            self.outputs[key] = _launch(chain, rows_B, kind)
        self.graphs[key] = graph

    def run(self, batch: StepBatch) -> Tensor:
        """Replay one step."""
        key = len(batch.rows_S), batch.kind
        self.graphs[key].replay()
        return self.outputs[key]


def _launch(chain: DecodeChain, rows_B: Tensor, kind: SamplingKind) -> Tensor:
    return chain.hidden(rows_B) if kind is SamplingKind.FILTERED else chain.run(rows_B, kind)


class GraphRunner:
    """Pure decode steps as one replay, everything else op by op."""

    def __init__(self, decode: Decode, others: StepRunner):
        self.decode = decode
        self.others = others

    def run(self, batch: StepBatch) -> Tensor:
        """One step's tokens."""
        if not batch.is_decode:
            return self.others.run(batch)
        output = self.decode.run(batch)
        return self._filtered(batch, output) if batch.kind is SamplingKind.FILTERED else output

    @torch.inference_mode()
    def _filtered(self, batch: StepBatch, x_BD: Tensor) -> Tensor:
        """The graph ended before the head: logits in full, and the sampler that filters."""
        rows = self.others.rows
        self.others.row_ops.gather_contexts(batch.rows_S, batch.counts_S, rows.length_R, batch.context_lens_S)
        return self.others.sample(batch, self.others.model.head(x_BD), batch.context_lens_S)
