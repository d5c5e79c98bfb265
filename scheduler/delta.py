"""From one plan to the next: the message that tells the workers only what changed."""

import numpy as np

from protocol.messages import BlockGrants, Chunk, RowJoin, StepDelta, Swap


class DeltaBuilder:
    """Remembers which rows the workers believe to decode, and numbers the steps."""

    def __init__(self, num_rows: int):
        self.next_step = 0
        self._decodes_R = np.zeros(num_rows, dtype=bool)

    def build(
        self, decode_rows: np.ndarray, joins: list[RowJoin], grants: BlockGrants | None, chunks: list[Chunk], swaps: list[Swap]
    ) -> StepDelta:
        """The next step's delta; of constant size while the same rows decode on."""
        decodes_R = np.zeros_like(self._decodes_R)
        decodes_R[decode_rows] = True
        on = np.flatnonzero(decodes_R & ~self._decodes_R).tolist()
        off = np.flatnonzero(self._decodes_R & ~decodes_R).tolist()
        self._decodes_R = decodes_R
        delta = StepDelta(self.next_step, joins, grants, on, off, chunks, swaps)
        self.next_step += 1
        return delta
