"""What the worker knows of each row, on the device: a decode step needs nothing else from the host than which rows take part.

R rows and one scratch row behind them, at which padding points; B blocks of the longest context.
"""

import torch

from protocol.messages import BlockGrant, RowJoin, unpack


class RowState:
    """Columns over the rows. The scratch row keeps length 0; its table, like every unused entry, names the scratch block."""

    def __init__(self, num_rows: int, max_blocks: int, scratch_block: int, device: torch.device):
        self.num_rows = num_rows
        self.scratch_block = scratch_block

        def column(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows + 1, dtype=dtype, device=device)

        self.last_token_R = column(torch.int32)
        self.length_R = column(torch.int32)  # tokens whose KV is computed
        self.prompt_len_R = column(torch.int32)
        self.temperature_R = column(torch.float32)
        self.top_k_R = column(torch.int32)
        self.top_p_R = column(torch.float32)
        self.min_p_R = column(torch.float32)
        self.seed_R = column(torch.int64)
        self.block_table_RB = torch.full((num_rows + 1, max_blocks), scratch_block, dtype=torch.int32, device=device)

    @property
    def scratch_row(self) -> int:
        return self.num_rows

    def join(self, message: RowJoin) -> None:
        """Reset a row for its new owner."""
        row, sampling = message.row, message.sampling
        assert 0 <= row < self.num_rows, f"row {row} of {self.num_rows}"
        self.last_token_R[row] = 0
        self.length_R[row] = message.num_computed
        self.prompt_len_R[row] = message.prompt_len
        self.temperature_R[row] = sampling.temperature
        self.top_k_R[row] = sampling.top_k
        self.top_p_R[row] = sampling.top_p
        self.min_p_R[row] = sampling.min_p
        self.seed_R[row] = sampling.seed
        self.block_table_RB[row] = self.scratch_block
        self._append(row, 0, message.blocks)

    def grant(self, message: BlockGrant) -> None:
        """Lengthen a row's block table."""
        self._append(message.row, message.held, message.blocks)

    def _append(self, row: int, held: int, blocks: bytes) -> None:
        ids = torch.from_numpy(unpack(blocks).copy())
        self.block_table_RB[row, held : held + len(ids)] = ids
