"""The paged KV pool, as numbers: which blocks are free, which are shared, and which keep a prefix that may come again."""

from collections import OrderedDict

import numpy as np


class BlockPool:
    """Blocks with reference counts.

    A block is held (by one or more rows), idle (held by none, but its content is indexed and may be held again), or free.
    Invariant: exactly one of the three; `_stack` below `_num_unused` holds each free block once; `_idle` holds the idle ones, least
    recently used first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._num_unused = num_blocks
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # block 0 on top
        self.num_holders = np.zeros(num_blocks, dtype=np.int32)
        self._is_indexed = np.zeros(num_blocks, dtype=bool)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evicted: list[int] = []  # idle blocks that `take` has used up; the index must forget them

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: free ones and idle ones."""
        return self._num_unused + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self, count: int) -> np.ndarray:
        """`count` blocks with one holder each: free ones first, then the idle ones that were used longest ago."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        from_stack = min(count, self._num_unused)
        self._num_unused -= from_stack
        blocks = self._stack[self._num_unused : self._num_unused + from_stack]
        if from_stack < count:
            evicted = [self._idle.popitem(last=False)[0] for _ in range(count - from_stack)]
            self._is_indexed[evicted] = False
            self.evicted += evicted
            blocks = np.concatenate([blocks, np.array(evicted, dtype=np.int32)])
        else:
            blocks = blocks.copy()
        self.num_holders[blocks] = 1
        return blocks

    def count_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody holds: sharing them leaves that many fewer to take."""
        return sum(block in self._idle for block in blocks)

    def count_freed(self, blocks: np.ndarray) -> int:
        """How many blocks nobody would hold after `give`; a block may occur several times."""
        counts = np.bincount(blocks, minlength=self.num_blocks)
        return int(((counts > 0) & (counts == self.num_holders)).sum())

    def share(self, blocks: list[int]) -> None:
        """One more holder for indexed blocks, whether idle or held."""
        for block in blocks:
            assert self._is_indexed[block]
            self._idle.pop(block, None)
            self.num_holders[block] += 1

    def mark_indexed(self, blocks: list[int]) -> None:
        """The content of held blocks can be found from now on: they stay when nobody holds them."""
        assert (self.num_holders[blocks] > 0).all()
        self._is_indexed[blocks] = True

    def give(self, blocks: np.ndarray) -> None:
        """One holder less. Work launched later may use a freed block at once: a worker's steps run in launch order.

        Of a row's blocks the last become idle first, so that a prefix is evicted from its end.
        """
        assert (self.num_holders[blocks] > 0).all(), "a block was freed twice"
        self.num_holders[blocks] -= 1
        unheld = blocks[self.num_holders[blocks] == 0]
        kept = self._is_indexed[unheld]
        self._idle.update(dict.fromkeys(unheld[kept][::-1].tolist()))
        freed = unheld[~kept]
        self._stack[self._num_unused : self._num_unused + len(freed)] = freed
        self._num_unused += len(freed)

    def check(self) -> None:
        """Assert the invariant."""
        free, idle = self._stack[: self._num_unused], np.fromiter(self._idle, dtype=np.int32)
        assert len(np.unique(np.concatenate([free, idle]))) == self.num_free
        assert not self.num_holders[free].any() and not self.num_holders[idle].any()
        assert self._is_indexed[idle].all() and not self._is_indexed[free].any()
        assert (self.num_holders > 0).sum() + self.num_free == self.num_blocks
