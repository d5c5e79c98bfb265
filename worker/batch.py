"""The persistent input batch: static buffers that a delta changes only where something changed.

T tokens, S sequences, N samples, C samples of rows with controls, X scores (log-probabilities) of W words: L of samples, then P of prompt
tokens. Decode steps are padded to a bucket; padding points at the scratch row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from protocol.logprobs import NUM_WORDS
from protocol.messages import Chunk, StepDelta, pack, unpack
from worker.logprobs import AT_ONCE
from worker.rows import RowState, SamplingKind
from worker.staging import Staging
from worker.swap import BlockSwapper

SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8
FROM_ROW = -1  # in known_tokens_T: the row's last sampled token


def bucket_for(num_rows: int, most: int) -> int:
    """The smallest bucket for num_rows: 1, 2, 4, 8, then steps of 8, at most `most` rows."""
    for bucket in SMALL_BUCKETS:
        if num_rows <= bucket:
            return min(bucket, most)
    return min(-(-num_rows // BUCKET_STEP) * BUCKET_STEP, most)


@dataclass(frozen=True)
class StepBatch:
    """What one step runs on: views of static buffers.

    The host writes the first group; `gather_rows` fills the second from the row state. sample_index_N are indexes into T of the
    tokens after which one is sampled; the first num_results samples are real. controlled_C and scored_L are indexes into N,
    prompt_scored_P into T, with the tokens to be scored after them in targets_P. The step leaves its scores in scores_XW.
    """

    rows_T: Tensor
    known_tokens_T: Tensor
    offsets_T: Tensor
    rows_S: Tensor
    counts_S: Tensor
    query_start_S1: Tensor
    sample_index_N: Tensor
    sample_rows_N: Tensor
    controlled_C: Tensor
    scored_L: Tensor
    prompt_scored_P: Tensor
    targets_P: Tensor

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    prompt_lens_T: Tensor
    context_lens_S: Tensor

    scores_XW: Tensor
    block_table_RB: Tensor
    num_results: int
    kind: SamplingKind
    is_decode: bool  # one token per row and padded to a bucket


class StepSizes(NamedTuple):
    """How many there are of each in a step."""

    tokens: int
    seqs: int
    samples: int
    controlled: int
    scored: int
    prompt_scored: int = 0


class StepBuffers:
    """Storage of one StepBatch of at most max_tokens tokens of max_seqs sequences."""

    def __init__(self, max_tokens: int, max_seqs: int, block_table_RB: Tensor):
        device = block_table_RB.device

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.block_table_RB = block_table_RB
        self.by_token = {name: buffer(max_tokens) for name in _TOKEN_FIELDS}
        self.by_seq = {name: buffer(max_seqs) for name in _SEQ_FIELDS}
        self.by_sample = {name: buffer(max_seqs) for name in _SAMPLE_FIELDS}
        self.query_start_S1 = buffer(max_seqs + 1)
        self.controlled_C, self.scored_L = buffer(max_seqs), buffer(max_seqs)
        self.prompt_scored_P, self.targets_P = buffer(max_tokens), buffer(max_tokens)
        self.scores_XW = torch.zeros(max_seqs + max_tokens, NUM_WORDS, dtype=torch.int32, device=device)

    def view(self, sizes: StepSizes, **facts: object) -> StepBatch:
        """The leading part of every buffer, with the host's own facts of the step."""
        T, S, N, C, L, P = sizes
        return StepBatch(
            **{name: tensor[:T] for name, tensor in self.by_token.items()},
            **{name: tensor[:S] for name, tensor in self.by_seq.items()},
            **{name: tensor[:N] for name, tensor in self.by_sample.items()},
            query_start_S1=self.query_start_S1[: S + 1],
            controlled_C=self.controlled_C[:C],
            scored_L=self.scored_L[:L],
            prompt_scored_P=self.prompt_scored_P[:P],
            targets_P=self.targets_P[:P],
            scores_XW=self.scores_XW[: L + P],
            block_table_RB=self.block_table_RB,
            **facts,
        )


_TOKEN_FIELDS = ("rows_T", "known_tokens_T", "offsets_T", "token_ids_T", "positions_T", "slots_T", "prompt_lens_T")
_SEQ_FIELDS = ("rows_S", "counts_S", "context_lens_S")
_SAMPLE_FIELDS = ("sample_index_N", "sample_rows_N")


class PersistentBatch:
    """Turns deltas into steps. While the same rows decode on, `apply` returns the same StepBatch without touching it."""

    def __init__(self, rows: RowState, max_tokens: int, staging: Staging, swapper: BlockSwapper | None = None):
        self.rows = rows
        self.staging = staging
        self.swapper = swapper  # None: there is no host memory for blocks
        self.next_step = 0
        self._is_decoding_R = np.zeros(rows.num_rows, dtype=bool)
        self._decode_rows = np.zeros(0, dtype=np.int32)
        self._decode_buffers = StepBuffers(rows.num_rows, rows.num_rows, rows.block_table_RB)
        self._mixed_buffers = StepBuffers(max_tokens, rows.num_rows, rows.block_table_RB)
        self._decode_step: StepBatch | None = None

    @property
    def decode_rows_B(self) -> Tensor:
        """The static buffer of a decode step's rows: what the graphs read."""
        return self._decode_buffers.by_seq["rows_S"]

    def apply(self, delta: StepDelta) -> StepBatch:
        """Bring the rows up to date and return the step to run."""
        if delta.step != self.next_step:
            raise RuntimeError(f"step {delta.step} arrived, expected step {self.next_step}: a delta was lost")
        self.next_step += 1
        self.staging.begin(delta.step)
        if delta.swaps:
            assert self.swapper is not None
            self.swapper.run(delta.swaps)
        if delta.joins:
            self.rows.join(delta.joins, self.staging)
        if delta.grants:
            self.rows.grant(delta.grants, self.staging)
        if delta.decode_on or delta.decode_off:
            self._change_decoding(delta.decode_on, delta.decode_off)
        if delta.chunks:
            return self._mixed_step(delta.chunks)
        if self._decode_step is None:
            self._decode_step = self._pure_decode_step()
        return self._decode_step

    def padding_step(self, num_tokens: int, num_seqs: int) -> StepBatch:
        """Prompt chunks of nobody's, to warm up with. They lengthen the scratch row, which must be reset after them."""
        sizes = [len(part) for part in np.array_split(np.zeros(num_tokens), num_seqs)]
        scratch, most = self.rows.scratch_row, AT_ONCE
        return self._mixed_step([Chunk(scratch, pack(np.zeros(n)), True, pack(np.zeros(min(n, most)))) for n in sizes])

    def _change_decoding(self, on: list[int], off: list[int]) -> None:
        self._is_decoding_R[on] = True
        self._is_decoding_R[off] = False
        self._decode_rows = np.flatnonzero(self._is_decoding_R).astype(np.int32)
        self._decode_step = None

    def _pure_decode_step(self) -> StepBatch:
        count = len(self._decode_rows)
        bucket = bucket_for(count, self.rows.num_rows)
        rows = np.full(bucket, self.rows.scratch_row, dtype=np.int32)
        rows[:count] = self._decode_rows
        is_real = (np.arange(bucket) < count).astype(np.int32)
        index = np.arange(bucket, dtype=np.int32)
        kind, (controlled, scored) = self._kind(self._decode_rows), self._wishes(self._decode_rows)
        sizes = StepSizes(bucket, bucket, bucket, len(controlled), len(scored))
        batch = self._decode_buffers.view(sizes, num_results=count, kind=kind, is_decode=True)
        write = self.staging.write
        write(batch.rows_T, rows)
        write(batch.rows_S, rows)
        write(batch.sample_rows_N, rows)
        write(batch.counts_S, is_real)
        write(batch.sample_index_N, index)
        write(batch.controlled_C, controlled)
        write(batch.scored_L, scored)
        write(batch.query_start_S1, np.arange(bucket + 1, dtype=np.int32))
        batch.known_tokens_T.fill_(FROM_ROW)
        batch.offsets_T.zero_()
        return batch

    def _mixed_step(self, chunks: list[Chunk]) -> StepBatch:
        """The decoding rows with one token each, then the chunks, unpadded."""
        decode_rows = self._decode_rows
        tokens = [unpack(chunk.tokens) for chunk in chunks]
        counts = np.array([1] * len(decode_rows) + [len(ids) for ids in tokens], dtype=np.int32)
        rows = np.concatenate([decode_rows, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        samples = np.array([True] * len(decode_rows) + [chunk.samples for chunk in chunks])
        num_tokens, num_samples, (controlled, scored) = int(starts[-1]), int(samples.sum()), self._wishes(rows[samples])
        places, targets = _prompt_targets(chunks, starts[len(decode_rows) :])
        sizes = StepSizes(num_tokens, len(rows), num_samples, len(controlled), len(scored), len(targets))
        batch = self._mixed_buffers.view(sizes, num_results=num_samples, kind=self._kind(rows[samples]), is_decode=False)
        write = self.staging.write
        write(batch.rows_T, np.repeat(rows, counts))
        write(batch.known_tokens_T, np.concatenate([np.full(len(decode_rows), FROM_ROW, dtype=np.int32), *tokens]))
        write(batch.offsets_T, np.arange(num_tokens, dtype=np.int32) - np.repeat(starts[:-1], counts))
        write(batch.rows_S, rows)
        write(batch.counts_S, counts)
        write(batch.query_start_S1, starts)
        write(batch.sample_index_N, starts[1:][samples] - 1)
        write(batch.sample_rows_N, rows[samples])
        write(batch.controlled_C, controlled)
        write(batch.scored_L, scored)
        write(batch.prompt_scored_P, places)
        write(batch.targets_P, targets)
        return batch

    def _wishes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of rows with controls, and of those whose samples are scored."""
        wishes = (self.rows.is_controlled_R, self.rows.is_scored_R)
        return tuple(np.flatnonzero(wish_R[rows]).astype(np.int32) for wish_R in wishes)

    def _kind(self, rows: np.ndarray) -> SamplingKind:
        return SamplingKind(int(self.rows.kind_R[rows].max(initial=SamplingKind.GREEDY)))


def _prompt_targets(chunks: list[Chunk], starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in the step a prompt token is to be scored, chunks beginning at starts, and which one."""
    targets = [unpack(chunk.targets) for chunk in chunks]
    places = [start + np.arange(len(ids), dtype=np.int32) for start, ids in zip(starts, targets)]
    return np.concatenate(places, dtype=np.int32), np.concatenate(targets)
