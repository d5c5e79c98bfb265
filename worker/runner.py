"""One step on the device: rows in, rows and sampled tokens out."""

from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from worker.batch import StepBatch
from worker.logprobs import AT_ONCE, write_scores
from worker.rows import RowState


class Model(Protocol):
    """What a step needs of a model. Before the first one, both `allocate` methods are called, in any order."""

    vocab_size: int
    max_model_len: int
    kv_bytes_per_token: int
    kv_CP: Tensor  # all pools as one: their parts, then blocks, then what a block holds
    device: torch.device

    def allocate_pools(self, num_blocks: int, block_size: int) -> None:
        """KV pool of one scratch block more than num_blocks, in the place of an earlier one."""

    def allocate_buffers(self, max_tokens: int, max_samples: int) -> None:
        """Activation buffers for steps up to these sizes."""

    def logits(self, batch: StepBatch) -> Tensor:
        """float32 [N, vocabulary] after the tokens of batch.sample_index_N; KV of all tokens is written."""

    def logits_at(self, batch: StepBatch, index_P: Tensor) -> Tensor:
        """The same after other tokens of the step that `logits` has just run, in the place of what that gave. At most N of them."""


class Runner(Protocol):
    """What the worker's loop needs: the step's sampled tokens, int32, whose first batch.num_results are real; valid until the next step."""

    def run(self, batch: StepBatch) -> Tensor:
        """Run one step."""


class StepRunner:
    """Runs any step, op by op. The sampled tokens stay on the device and are the next step's input there.

    ops samples; row_ops are gather_rows, gather_contexts and advance_rows.
    """

    def __init__(self, model: Model, ops: ModuleType, row_ops: ModuleType, rows: RowState, block_size: int, sampled_vocab: int):
        self.model = model
        self.ops = ops
        self.row_ops = row_ops
        self.rows = rows
        self.block_size = block_size
        self.sampled_vocab = sampled_vocab
        self.sampled_N = torch.zeros(rows.num_rows, dtype=torch.int32, device=rows.length_R.device)

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        """One step of prompt chunks and decoding rows."""
        self._gather(batch)
        logits_NV = self.model.logits(batch)
        sampled_N = self.sample(batch, logits_NV, batch.positions_T[batch.sample_index_N] + 1)
        if len(batch.prompt_scored_P):
            self._score_prompts(batch)
        return sampled_N

    def _score_prompts(self, batch: StepBatch) -> None:
        """Score prompt tokens, as many at once as the model has logits for."""
        scores_PW = batch.scores_XW[len(batch.scored_L) :]
        at_once = min(AT_ONCE, self.rows.num_rows)
        parts = (tensor.split(at_once) for tensor in (batch.prompt_scored_P, batch.targets_P, scores_PW))
        for index_C, targets_C, scores_CW in zip(*parts, strict=True):
            write_scores(self.model.logits_at(batch, index_C), targets_C, scores_CW)

    def _gather(self, batch: StepBatch) -> None:
        rows = self.rows
        self.row_ops.gather_rows(
            batch.rows_T, batch.known_tokens_T, batch.offsets_T,
            rows.last_token_R, rows.length_R, rows.prompt_len_R, rows.block_table_RB, self.block_size,
            batch.token_ids_T, batch.positions_T, batch.slots_T, batch.prompt_lens_T,
        )  # fmt: skip
        self.row_ops.gather_contexts(batch.rows_S, batch.counts_S, rows.length_R, batch.context_lens_S)

    @torch.inference_mode()
    def sample(self, batch: StepBatch, logits_NV: Tensor, position_N: Tensor) -> Tensor:
        """Choose the tokens at these positions and write them into the rows; batch.context_lens_S are the rows' new lengths.

        Noise is keyed by the position, so a step's neighbours and a row's place in the batch change nothing.
        """
        rows, sample_rows_N = self.rows, batch.sample_rows_N
        sampled_N = self.sampled_N[: len(sample_rows_N)]
        is_controlled, is_scored = len(batch.controlled_C) > 0, len(batch.scored_L) > 0
        raw_LV = logits_NV[batch.scored_L] if is_scored else logits_NV  # a copy, since the rest changes them
        if is_controlled:
            rows.controls.apply(logits_NV, batch.controlled_C, sample_rows_N, position_N)
        self.ops.sample(
            logits_NV, rows.temperature_R[sample_rows_N], rows.top_k_R[sample_rows_N], rows.top_p_R[sample_rows_N],
            rows.min_p_R[sample_rows_N], rows.seed_R[sample_rows_N], position_N, self.sampled_vocab, sampled_N,
        )  # fmt: skip
        if is_controlled:
            rows.controls.count(batch.controlled_C, sample_rows_N, sampled_N)
        if is_scored:
            write_scores(raw_LV, sampled_N[batch.scored_L], batch.scores_XW[: len(batch.scored_L)])
        self.row_ops.advance_rows(
            batch.rows_S, batch.context_lens_S, sample_rows_N, sampled_N, rows.length_R, rows.last_token_R
        )  # fmt: skip
        return sampled_N
