"""What the worker knows of each row, on the device: a decode step needs nothing else from the host than which rows take part.

R rows and one scratch row behind them, at which padding points; B blocks of the longest context; J rows that change; K columns.
"""

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from protocol.messages import BlockGrants, RowJoin, unpack
from protocol.sampling import RowSampling
from worker.controls import Controls
from worker.staging import ALIGNED, Staging


NUM_INTEGERS, NUM_COLUMNS = 4, 7


class SamplingKind(IntEnum):
    """How much a row's sampling needs; a step needs the most that one of its rows does."""

    GREEDY = 0
    RANDOM = 1  # temperature alone
    FILTERED = 2  # top-k, top-p or min-p, any of the controls, or log-probabilities, whatever the temperature


def sampling_kind(sampling: RowSampling) -> SamplingKind:
    """The kind of a row with these parameters and no controls."""
    if sampling.temperature == 0:
        return SamplingKind.GREEDY
    is_filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return SamplingKind.FILTERED if is_filtered else SamplingKind.RANDOM


class RowState:
    """Columns over the rows. The scratch row keeps length 0; its table, like every unused entry, names the scratch block."""

    def __init__(self, num_rows: int, max_blocks: int, scratch_block: int, device: torch.device, controls: Controls | None = None):
        self.num_rows = num_rows
        self.controls = controls  # None: no row may have any
        self.scratch_block = scratch_block

        # The columns that a join writes lie side by side, so that one copy does it; each begins where new memory would, at 16 bytes.
        R = num_rows + 1
        self._columns_KR = torch.zeros(NUM_COLUMNS, -(-R // ALIGNED) * ALIGNED, dtype=torch.int32, device=device)
        floats_KR = self._columns_KR.view(torch.float32)
        self.last_token_R, self.length_R, self.prompt_len_R, self.top_k_R = (self._columns_KR[k, :R] for k in range(NUM_INTEGERS))
        self.temperature_R, self.top_p_R, self.min_p_R = (floats_KR[k, :R] for k in range(NUM_INTEGERS, NUM_COLUMNS))
        self.seed_R = torch.zeros(R, dtype=torch.int64, device=device)
        self.block_table_RB = torch.full((num_rows + 1, max_blocks), scratch_block, dtype=torch.int32, device=device)
        self.kind_R = np.zeros(num_rows + 1, dtype=np.int8)  # SamplingKind, on the host
        self.is_controlled_R = np.zeros(num_rows + 1, dtype=bool)  # on the host
        self.is_scored_R = np.zeros(num_rows + 1, dtype=bool)  # on the host
        # So that a rehearsal has the dearest steps.
        self.is_controlled_R[num_rows] = controls is not None
        self.is_scored_R[num_rows] = True

    @property
    def scratch_row(self) -> int:
        return self.num_rows

    def join(self, joins: list[RowJoin], staging: Staging) -> None:
        """Reset rows for their new owners: every column is written, so that nothing of the last owner stays."""
        assert all(0 <= join.row < self.num_rows for join in joins)
        rows_J = np.array([join.row for join in joins], dtype=np.int64)
        staging.scatter(self._columns_KR, (slice(None), rows_J), _columns(joins))
        staging.scatter(self.seed_R, (rows_J,), np.array([join.sampling.seed for join in joins], dtype=np.int64))
        self._join_controls(joins, staging)
        staging.scatter(self.block_table_RB, (rows_J,), np.full((len(joins), 1), self.scratch_block, dtype=np.int32))
        blocks = [unpack(join.blocks) for join in joins]
        rows = np.repeat(np.array([join.row for join in joins], dtype=np.int32), [len(ids) for ids in blocks])
        places = np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in blocks])
        self._write_blocks(rows, places, np.concatenate(blocks), staging)

    def _join_controls(self, joins: list[RowJoin], staging: Staging) -> None:
        rows = [join.row for join in joins]
        self.kind_R[rows] = [
            SamplingKind.FILTERED if join.controls or join.is_scored else sampling_kind(join.sampling) for join in joins
        ]
        self.is_scored_R[rows] = [join.is_scored for join in joins]
        self.is_controlled_R[rows] = [join.controls is not None for join in joins]
        if controlled := [join for join in joins if join.controls is not None]:
            assert self.controls is not None
            self.controls.join(controlled, staging)

    def grant(self, grants: BlockGrants, staging: Staging) -> None:
        """Lengthen block tables."""
        self._write_blocks(*map(unpack, (grants.rows, grants.places, grants.blocks)), staging)

    def _write_blocks(self, rows: np.ndarray, places: np.ndarray, blocks: np.ndarray, staging: Staging) -> None:
        staging.scatter(self.block_table_RB, (rows, places), blocks)


def _columns(joins: list[RowJoin]) -> np.ndarray:
    """int32 [K, J]: what RowState holds of new rows, the last ones floats by their bits."""
    values_KJ = np.zeros((NUM_COLUMNS, len(joins)), dtype=np.int32)
    samplings = [join.sampling for join in joins]
    values_KJ[1] = [join.num_computed for join in joins]
    values_KJ[2] = [join.prompt_len for join in joins]
    values_KJ[3] = [sampling.top_k for sampling in samplings]
    floats = [[sampling.temperature, sampling.top_p, sampling.min_p] for sampling in samplings]
    values_KJ[NUM_INTEGERS:] = np.array(floats, dtype=np.float32).view(np.int32).T
    return values_KJ
