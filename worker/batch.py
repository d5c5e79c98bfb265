"""The persistent input batch: what a delta leaves as it was is not made anew.

T tokens, S sequences, N samples, C samples of rows with controls, X scores (log-probabilities) of W words: L of samples, then P of prompt
tokens. Decode steps are padded to a bucket; padding points at the scratch row.
"""

import msgspec
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
NO_IDS = np.zeros(0, dtype=np.int32)


def bucket_for(num_rows: int, most: int) -> int:
    """The smallest bucket for num_rows: 1, 2, 4, 8, then steps of 8, at most `most` rows."""
    for bucket in SMALL_BUCKETS:
        if num_rows <= bucket:
            return min(bucket, most)
    return min(-(-num_rows // BUCKET_STEP) * BUCKET_STEP, most)


class StepBatch(msgspec.Struct, frozen=True, gc=False):
    """What one step runs on.

    The host makes the first group; `gather_rows` fills the second from the row state. sample_index_N are indexes into T of the
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


class StepBuffers:
    """Where steps of at most max_tokens tokens of max_seqs sequences leave what they make of the host's part."""

    def __init__(self, max_tokens: int, max_seqs: int, block_table_RB: Tensor):
        def buffer(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=block_table_RB.device)

        self.block_table_RB = block_table_RB
        self.by_token = {name: buffer(max_tokens) for name in ("token_ids_T", "positions_T", "slots_T", "prompt_lens_T")}
        self.context_lens_S = buffer(max_seqs)
        self.scores_XW = buffer(max_seqs + max_tokens, NUM_WORDS)

    def step(self, host: dict[str, Tensor], **facts: object) -> StepBatch:
        """The leading parts of the buffers beside the host's tensors, with its own facts of the step."""
        T, S, X = len(host["rows_T"]), len(host["rows_S"]), len(host["scored_L"]) + len(host["prompt_scored_P"])
        return StepBatch(
            **host,
            **{name: tensor[:T] for name, tensor in self.by_token.items()},
            context_lens_S=self.context_lens_S[:S],
            scores_XW=self.scores_XW[:X],
            block_table_RB=self.block_table_RB,
            **facts,
        )


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
        self.decode_rows_B = torch.zeros_like(rows.length_R[: rows.num_rows])  # of a decode step: what the graphs read
        self._mixed_buffers = StepBuffers(max_tokens, rows.num_rows, rows.block_table_RB)
        self._decode_step: StepBatch | None = None

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
        controlled, scored = self._wishes(self._decode_rows)
        values = {
            "controlled_C": controlled, "scored_L": scored, "prompt_scored_P": NO_IDS, "targets_P": NO_IDS,
            "known_tokens_T": np.full(bucket, FROM_ROW, dtype=np.int32), "offsets_T": np.zeros(bucket, dtype=np.int32),
            "counts_S": (np.arange(bucket) < count).astype(np.int32), "sample_index_N": np.arange(bucket, dtype=np.int32),
            "query_start_S1": np.arange(bucket + 1, dtype=np.int32),
        }  # fmt: skip
        rows_B = self.decode_rows_B[:bucket]
        self.staging.write(rows_B, rows)
        host = self._put(values) | {"rows_T": rows_B, "rows_S": rows_B, "sample_rows_N": rows_B}
        return self._decode_buffers.step(host, num_results=count, kind=self._kind(self._decode_rows), is_decode=True)

    def _mixed_step(self, chunks: list[Chunk]) -> StepBatch:
        """The decoding rows with one token each, then the chunks, unpadded."""
        decode_rows = self._decode_rows
        tokens = [unpack(chunk.tokens) for chunk in chunks]
        counts = np.array([1] * len(decode_rows) + [len(ids) for ids in tokens], dtype=np.int32)
        rows = np.concatenate([decode_rows, np.array([chunk.row for chunk in chunks], dtype=np.int32)])
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        samples = np.array([True] * len(decode_rows) + [chunk.samples for chunk in chunks])
        sample_rows, num_tokens = rows[samples], int(starts[-1])
        controlled, scored = self._wishes(sample_rows)
        places, targets = _prompt_targets(chunks, starts[len(decode_rows) :])
        values = {
            "rows_T": np.repeat(rows, counts), "known_tokens_T": np.concatenate([np.full(len(decode_rows), FROM_ROW, np.int32), *tokens]),
            "offsets_T": np.arange(num_tokens, dtype=np.int32) - np.repeat(starts[:-1], counts), "rows_S": rows, "counts_S": counts,
            "query_start_S1": starts, "sample_index_N": starts[1:][samples] - 1, "sample_rows_N": sample_rows, "controlled_C": controlled,
            "scored_L": scored, "prompt_scored_P": places, "targets_P": targets,
        }  # fmt: skip
        return self._mixed_buffers.step(self._put(values), num_results=len(sample_rows), kind=self._kind(sample_rows), is_decode=False)

    def _put(self, values: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """The values on the device."""
        return dict(zip(values, self.staging.put_all(list(values.values())), strict=True))

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
