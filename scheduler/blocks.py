"""The paged KV pool, as numbers: which blocks are free."""

import numpy as np


class BlockPool:
    """A stack of free block ids.

    Invariant: every block is free or held, never both; the stack below `num_free` holds each free block once.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # block 0 on top
        self._is_held = np.zeros(num_blocks, dtype=bool)

    def take(self, count: int) -> np.ndarray:
        """`count` free blocks, now held."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count].copy()
        self._is_held[blocks] = True
        return blocks

    def give(self, blocks: np.ndarray) -> None:
        """Free held blocks. Work launched later may use them at once: a worker's steps run in launch order."""
        assert self._is_held[blocks].all(), "a block was freed twice"
        self._is_held[blocks] = False
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def check(self) -> None:
        """Assert the invariant."""
        free = self._stack[: self.num_free]
        assert len(np.unique(free)) == self.num_free
        assert not self._is_held[free].any()
        assert self._is_held.sum() + self.num_free == self.num_blocks
