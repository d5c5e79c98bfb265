"""Drives a model over its paged cache without an engine: requests in scrambled blocks, any mixture of chunks and decoding."""

from types import SimpleNamespace

import torch
from torch import Tensor

from worker.model import TransformerModel


def int32(values) -> Tensor:
    """Values as the index tensors of a batch."""
    return torch.tensor(values, dtype=torch.int32)


class PagedDriver:
    """One row per request; `run` computes the next tokens of some of them in one step."""

    def __init__(self, model: TransformerModel, num_rows: int = 4, block_size: int = 4, max_tokens: int = 512):
        self.model = model
        self.block_size = block_size
        blocks_per_row = -(-model.max_model_len // block_size)
        num_blocks = num_rows * blocks_per_row
        generator = torch.Generator().manual_seed(0)
        self.block_table_RB = torch.randperm(num_blocks, generator=generator).view(num_rows, blocks_per_row).int()
        self.num_computed = [0] * num_rows
        self.prompt_lens = [0] * num_rows
        model.allocate_pools(num_blocks, block_size)
        model.allocate_buffers(max_tokens, num_rows)
        for k_pool, v_pool in model.kv_pools:  # whatever former owners left in a block must not show
            k_pool.fill_(torch.nan)
            v_pool.fill_(torch.nan)

    def start(self, row: int, prompt_len: int) -> None:
        """Give a row to a new request."""
        self.num_computed[row], self.prompt_lens[row] = 0, prompt_len

    def run(self, work: dict[int, list[int]]) -> Tensor:
        """One step: row -> its next tokens. The logits after each row's last token, [rows, vocabulary]."""
        token_ids, positions, slots, prompt_lens, query_start, context_lens = [], [], [], [], [0], []
        for row, tokens in work.items():
            start = self.num_computed[row]
            self.num_computed[row] = end = start + len(tokens)
            token_ids += tokens
            positions += range(start, end)
            slots += [self._slot(row, position) for position in range(start, end)]
            prompt_lens += [self.prompt_lens[row]] * len(tokens)
            query_start.append(len(token_ids))
            context_lens.append(end)
        batch = SimpleNamespace(
            token_ids_T=int32(token_ids),
            positions_T=int32(positions),
            slots_T=int32(slots),
            prompt_lens_T=int32(prompt_lens),
            rows_S=int32(list(work)),
            query_start_S1=int32(query_start),
            context_lens_S=int32(context_lens),
            sample_index_N=int32(query_start[1:]) - 1,
            block_table_RB=self.block_table_RB,
        )
        return self.model.logits(batch).clone()

    def _slot(self, row: int, position: int) -> int:
        return int(self.block_table_RB[row, position // self.block_size]) * self.block_size + position % self.block_size

    def greedy(self, row: int, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
        """Run a prompt at once, then decode: the tokens and the logits they came from, [num_tokens, vocabulary]."""
        self.start(row, len(prompt))
        tokens, logits = prompt, []
        for _ in range(num_tokens):
            logits.append(self.run({row: tokens})[0])
            tokens = [int(logits[-1].argmax())]
        return [int(step.argmax()) for step in logits], torch.stack(logits)
