"""Penalties, biases and bans: what changes a row's logits before it samples, all from state on the device.

R = rows and one scratch row behind them, V = vocabulary, E = end ids, W = bad words, P = tokens before a bad word's last one;
C = controlled samples of a step, J = rows that change, X = flat lists over them
"""

import numpy as np
import torch
from torch import Tensor

from protocol.controls import MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS, RowControls
from protocol.messages import RowJoin, unpack
from protocol.sampling import MAX_END_IDS
from worker.staging import Staging

# In place of ids: an output that is not there yet, a place that any token fits, and one that none does.
NO_OUTPUT, ANY, NEVER = -1, -2, -3

# Samples worked on at once: their copies of logits (39 MB for 64 rows of 152k ids) are among the activations that are measured.
AT_ONCE = 64


class Controls:
    """The controls of every row. Only rows that were joined with some are ever read, so other joins leave theirs as it is.

    The two tensors over the vocabulary take 8 bytes for each of its ids and row: 24 MiB for 64 rows of 49k ids, 298 MiB for 256 rows
    of 152k. Any row may have controls at any time, so a GPU reserves them at the start. They are written when a row is given to a
    request with controls and not before: a CPU's memory holds them only for rows that had one.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        R, V, W, P = num_rows + 1, vocab_size, MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS - 1

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((R, *shape), value, dtype=dtype, device=device)

        # Twice the number of times that an id was output, and one more where it is in the prompt.
        self.tally_RV = torch.empty(R, V, dtype=torch.int32, device=device)
        self.bias_RV = torch.empty(R, V, dtype=torch.float32, device=device)  # -inf for what is not allowed
        self.repetition_R = full(1, torch.float32)
        self.presence_R = full(0, torch.float32)
        self.frequency_R = full(0, torch.float32)
        self.free_end_R = full(0, torch.int32)  # the first position at which the row may end
        self.end_ids_RE = full(0, torch.int32, MAX_END_IDS)
        self.bad_start_RWP = full(NEVER, torch.int32, W, P)
        self.bad_last_RW = full(0, torch.int32, W)
        self.recent_RP = full(NO_OUTPUT, torch.int32, P)  # the row's last output tokens
        self.tally_RV[num_rows] = self.bias_RV[num_rows] = 0  # a rehearsal's

    # ---- applied to logits ----------------------------------------------------------------------------------------

    def apply(self, logits_NV: Tensor, samples_C: Tensor, rows_N: Tensor, position_N: Tensor) -> None:
        """Change the logits of those of the samples that are in samples_C: penalties, then biases, then bans.

        Every operation is exact for what a row does not ask for, and a row's result depends on that row alone.
        """
        for some_C in samples_C.split(AT_ONCE):
            rows_C = rows_N[some_C]
            logits_CV = self._penalise(logits_NV[some_C], rows_C)
            logits_CV += self.bias_RV[rows_C]
            self._ban_ends(logits_CV, rows_C, position_N[some_C])
            self._ban_words(logits_CV, rows_C)
            logits_NV[some_C] = logits_CV

    def count(self, samples_C: Tensor, rows_N: Tensor, tokens_N: Tensor) -> None:
        """Remember what the rows of samples_C have sampled. A broken row's token is none, and counts for nothing."""
        rows_C, tokens_C = rows_N[samples_C], tokens_N[samples_C]
        ids_C = tokens_C.clamp(min=0)
        self.tally_RV[rows_C, ids_C] = self.tally_RV[rows_C, ids_C] + 2 * (tokens_C >= 0).int()
        self.recent_RP[rows_C] = torch.cat((self.recent_RP[rows_C][:, 1:], tokens_C[:, None]), dim=1)

    def _penalise(self, logits_CV: Tensor, rows_C: Tensor) -> Tensor:
        """Repetition (https://arxiv.org/abs/1909.05858) of prompt and output; frequency and presence, as OpenAI defines them, of output."""
        tally_CV = self.tally_RV[rows_C]
        repetition_C1 = self.repetition_R[rows_C, None]
        repeated_CV = torch.where(logits_CV > 0, logits_CV / repetition_C1, logits_CV * repetition_C1)
        logits_CV = torch.where(tally_CV > 0, repeated_CV, logits_CV)
        logits_CV -= self.frequency_R[rows_C, None] * (tally_CV >> 1)
        logits_CV -= self.presence_R[rows_C, None] * (tally_CV > 1)
        return logits_CV

    def _ban_ends(self, logits_CV: Tensor, rows_C: Tensor, position_C: Tensor) -> None:
        ban_C1 = _ban_where(position_C < self.free_end_R[rows_C])[:, None]
        logits_CV.scatter_add_(1, self.end_ids_RE[rows_C].long(), ban_C1.expand(-1, MAX_END_IDS))

    def _ban_words(self, logits_CV: Tensor, rows_C: Tensor) -> None:
        """Ban the last token of each bad word whose other tokens are the row's last ones."""
        start_CWP = self.bad_start_RWP[rows_C]
        fits_CW = ((start_CWP == self.recent_RP[rows_C, None]) | (start_CWP == ANY)).all(dim=-1)
        logits_CV.scatter_add_(1, self.bad_last_RW[rows_C].long(), _ban_where(fits_CW))

    # ---- given to a request ---------------------------------------------------------------------------------------

    def join(self, joins: list[RowJoin], staging: Staging) -> None:
        """Reset rows for their new owners, all of which have controls: everything that is read is written."""
        put, rows = staging.put_long, [join.row for join in joins]
        controls, samplings = [join.controls for join in joins], [join.sampling for join in joins]
        rows_J = put(np.array(rows, dtype=np.int64))

        def reset(column: Tensor, values: list, dtype: type) -> None:
            column[rows_J] = put(np.array(values, dtype=dtype))

        reset(self.repetition_R, [sampling.repetition_penalty for sampling in samplings], np.float32)
        reset(self.presence_R, [sampling.presence_penalty for sampling in samplings], np.float32)
        reset(self.frequency_R, [sampling.frequency_penalty for sampling in samplings], np.float32)
        reset(self.free_end_R, [join.prompt_len + join.sampling.min_tokens if join.controls.end_ids else 0 for join in joins], np.int32)
        reset(self.end_ids_RE, [_padded_ends(each) for each in controls], np.int32)
        starts, lasts = zip(*map(_padded_words, controls), strict=True)
        reset(self.bad_start_RWP, starts, np.int32)
        reset(self.bad_last_RW, lasts, np.int32)
        reset(self.recent_RP, [_padded_output(join) for join in joins], np.int32)
        self._join_tally(joins, rows_J, staging)
        self._join_bias(joins, rows_J, staging)

    def _join_tally(self, joins: list[RowJoin], rows_J: Tensor, staging: Staging) -> None:
        tokens = [unpack(join.controls.tokens) for join in joins]
        rows_X, prompt_X = _flat(joins, [ids[: join.prompt_len] for ids, join in zip(tokens, joins)], staging)
        self.tally_RV.index_fill_(0, rows_J, 0)
        one = torch.ones((), dtype=torch.int32, device=prompt_X.device)  # a Python number would be copied there, and waited for
        self.tally_RV[rows_X, prompt_X] = one
        rows_X, output_X = _flat(joins, [ids[join.prompt_len :] for ids, join in zip(tokens, joins)], staging)
        self.tally_RV.index_put_((rows_X, output_X), one + one, accumulate=True)

    def _join_bias(self, joins: list[RowJoin], rows_J: Tensor, staging: Staging) -> None:
        others = [-np.inf if join.controls.allowed_ids else 0.0 for join in joins]
        self.bias_RV[rows_J] = staging.put_long(np.array(others, dtype=np.float32))[:, None]
        rows_X, allowed_X = _flat(joins, [unpack(join.controls.allowed_ids) for join in joins], staging)
        self.bias_RV[rows_X, allowed_X] = torch.zeros((), device=allowed_X.device)
        rows_X, biased_X = _flat(joins, [unpack(join.controls.bias_ids) for join in joins], staging)
        values_X = np.concatenate([np.frombuffer(join.controls.bias_values, dtype="<f4") for join in joins])
        self.bias_RV[rows_X, biased_X] = self.bias_RV[rows_X, biased_X] + staging.put_long(values_X)  # what is not allowed stays so


def _ban_where(condition: Tensor) -> Tensor:
    """What is to be added to a logit: -inf where the condition is true, else 0."""
    return torch.zeros_like(condition, dtype=torch.float32).masked_fill_(condition, -torch.inf)


def _flat(joins: list[RowJoin], ids: list[np.ndarray], staging: Staging) -> tuple[Tensor, Tensor]:
    """The rows and ids of lists of ids, one a join."""
    rows = np.repeat(np.array([join.row for join in joins], dtype=np.int32), [len(some) for some in ids])
    return staging.put_long(rows), staging.put_long(np.concatenate(ids))


def _padded_ends(controls: RowControls) -> np.ndarray:
    """The end ids, one of them repeated: adding -inf again changes nothing. Without any none is ever banned."""
    ids = unpack(controls.end_ids)
    return np.concatenate((ids, np.full(MAX_END_IDS - len(ids), ids[0] if len(ids) else 0, dtype=np.int32)))


def _padded_words(controls: RowControls) -> tuple[np.ndarray, np.ndarray]:
    """The tokens before the last one of each bad word, right-aligned [W, P], and the last ones [W]."""
    start_WP = np.full((MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS - 1), NEVER, dtype=np.int32)
    last_W = np.zeros(MAX_BAD_SEQUENCES, dtype=np.int32)
    for w, ids in enumerate(map(unpack, controls.bad_words)):
        start_WP[w] = ANY
        start_WP[w, start_WP.shape[1] - len(ids) + 1 :] = ids[:-1]
        last_W[w] = ids[-1]
    return start_WP, last_W


def _padded_output(join: RowJoin) -> np.ndarray:
    """The last output tokens that are known, right-aligned [P]."""
    most = MAX_BAD_WORD_TOKENS - 1
    recent_P = np.full(most, NO_OUTPUT, dtype=np.int32)
    output = unpack(join.controls.tokens)[join.prompt_len :][-most:]
    recent_P[most - len(output) :] = output
    return recent_P
