"""The checksum model: a test's stand-in for a language model that makes every fault of paging and routing visible.

It stores token ids in its KV pages, and its next token is a hash of all the request's tokens as read back through the block table.
A client that knows the hash can tell a wrong page, a stale or foreign token, a lost or a doubled one, at no matrix cost.
"""

import numpy as np
import torch
from torch import Tensor

from worker.batch import StepBatch

VOCAB_SIZE = 1000
DEFAULT_MODEL_LEN = 4096


def position_weights(count: int) -> np.ndarray:
    """An odd 64-bit weight for each position, as int64: splitmix64 of the position."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)


class ChecksumModel:
    """next token = bits 32..62 of sum((token_i + 1) * weight_i) mod 2**64, mod the vocabulary."""

    vocab_size = VOCAB_SIZE
    kv_bytes_per_token = 4
    device = torch.device("cpu")

    def __init__(self, max_model_len: int | None):
        self.max_model_len = max_model_len or DEFAULT_MODEL_LEN
        self.weights_L = torch.from_numpy(position_weights(self.max_model_len))

    def allocate_pools(self, num_blocks: int, block_size: int) -> None:
        """Pages for the blocks and one scratch block."""
        self.block_size = block_size
        self.pages = torch.zeros(num_blocks + 1, block_size, dtype=torch.int32)
        self.kv_CP = self.pages[None]

    def allocate_buffers(self, max_tokens: int, max_samples: int) -> None:
        """Logits."""
        self.logits_NV = torch.zeros(max_samples, self.vocab_size)

    def logits(self, batch: StepBatch) -> Tensor:
        """One-hot logits of the next token."""
        scratch_slot = self.pages.numel() - 1
        slots_T = torch.where(batch.slots_T < 0, scratch_slot, batch.slots_T)
        self.pages.view(-1)[slots_T] = batch.token_ids_T
        return self.logits_at(batch, batch.sample_index_N)

    def logits_at(self, batch: StepBatch, index_N: Tensor) -> Tensor:
        """One-hot logits of the token after any of the step's."""
        length_N = batch.positions_T[index_N] + 1
        logits_NV = self.logits_NV[: len(length_N)]
        logits_NV.zero_()
        if len(length_N):
            logits_NV.scatter_(1, self._hash(batch, batch.rows_T[index_N], length_N)[:, None], 1.0)
        return logits_NV

    def _hash(self, batch: StepBatch, rows_N: Tensor, length_N: Tensor) -> Tensor:
        most = int(length_N.max())
        num_blocks = -(-most // self.block_size)
        blocks_NB = batch.block_table_RB[rows_N, :num_blocks]
        tokens_NL = self.pages[blocks_NB].flatten(1)[:, :most].long()
        is_inside_NL = torch.arange(most) < length_N[:, None]
        sum_N = ((tokens_NL + 1) * self.weights_L[:most] * is_inside_NL).sum(dim=1)  # wraps mod 2**64, as intended
        return ((sum_N >> 32) & 0x7FFFFFFF) % self.vocab_size
