"""The prefix index: which blocks hold the KV of which tokens.

A block is found by a chained hash: of its own tokens and of all before them, from a root that is random per start, so that nobody
outside can aim at another's blocks (CVE-2025-25183). Only full blocks of known tokens are indexed, never a placeholder.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler.blocks import BlockPool

NO_BLOCK = -1  # the parent of a first block


def sha256(data: bytes) -> bytes:
    """0.4 µs for a block; weaker hashes would save a quarter of a microsecond."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """An indexed block. Tokens and parent are compared on a hit, so that no collision of hashes can lend foreign KV."""

    block: int
    parent: int
    tokens: bytes


class PrefixIndex:
    """Blocks by the hash of their prefix.

    Invariant: an entry's block is marked in the pool, and its parent has an entry too: a row that holds a block holds all before it, and
    a prefix is evicted from its end.
    """

    def __init__(self, pool: BlockPool, block_size: int, digest: Callable[[bytes], bytes] = sha256):
        self.pool = pool
        self.block_size = block_size
        self.digest = digest
        self.root = secrets.token_bytes(32)
        self.entries: dict[bytes, Entry] = {}
        self.key_of: dict[int, bytes] = {}

    def find(self, tokens: np.ndarray, salt: bytes) -> tuple[list[int], bytes]:
        """The longest run of blocks that hold these tokens' prefix, and its hash; the last token is always left to compute."""
        blocks: list[int] = []
        key = self.first_key(salt)
        for i in range((len(tokens) - 1) // self.block_size):
            content = self._content(tokens, i)
            next_key = self.digest(key + content)
            entry = self.entries.get(next_key)
            if entry is None or entry.tokens != content or entry.parent != (blocks[-1] if blocks else NO_BLOCK):
                break
            blocks.append(entry.block)
            key = next_key
        return blocks, key

    def first_key(self, salt: bytes) -> bytes:
        """The hash of the empty prefix."""
        return self.digest(self.root + salt)

    def publish(self, tokens: np.ndarray, blocks: np.ndarray, first: int, end: int, key: bytes) -> bytes:
        """Index blocks first to end of a row, whose prefix before them has hash `key`; returns the hash at the end.

        Where the same tokens are indexed already, the row's own block stays unindexed: two copies, and nobody's table changes.
        """
        for i in range(first, end):
            content = self._content(tokens, i)
            key = self.digest(key + content)
            parent = int(blocks[i - 1]) if i else NO_BLOCK
            is_chained = parent == NO_BLOCK or parent in self.key_of
            if key not in self.entries and is_chained:
                block = int(blocks[i])
                self.entries[key] = Entry(block, parent, content)
                self.key_of[block] = key
                self.pool.mark_indexed(block)
        return key

    def forget_evicted(self) -> None:
        """Drop the entries of blocks that the pool has given away."""
        for block in self.pool.evicted:
            del self.entries[self.key_of.pop(block)]
        self.pool.evicted.clear()

    def _content(self, tokens: np.ndarray, i: int) -> bytes:
        return tokens[i * self.block_size : (i + 1) * self.block_size].tobytes()

    def check(self) -> None:
        """Assert the invariant."""
        assert len(self.entries) == len(self.key_of) <= self.pool.num_blocks
        for block, key in self.key_of.items():
            entry = self.entries[key]
            assert entry.block == block
            assert entry.parent == NO_BLOCK or entry.parent in self.key_of


class NoPrefixIndex(PrefixIndex):
    """Finds nothing and keeps nothing: prefix caching switched off."""

    def find(self, tokens: np.ndarray, salt: bytes) -> tuple[list[int], bytes]:
        """No blocks."""
        return [], b""

    def publish(self, tokens: np.ndarray, blocks: np.ndarray, first: int, end: int, key: bytes) -> bytes:
        """Nothing."""
        return key
