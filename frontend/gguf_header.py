"""The metadata of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), without its tensors.

Read here rather than with the gguf package's reader, which takes 2.3 s for a vocabulary of 49,152 where this takes 0.1 s, and which
trusts lengths: every length below is checked against the file's size before anything is allocated.
"""

import mmap
import struct
from pathlib import Path

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_NESTING = 4

STRING, ARRAY = 8, 9
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


def read_metadata(path: str | Path) -> dict[str, object]:
    """All key-value pairs. Raises ValueError naming the file when it is not a whole GGUF header."""
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).metadata()
            except (struct.error, _Damaged, UnicodeDecodeError) as error:
                raise ValueError(f"{path} has a damaged GGUF header: {error}") from None


class _Damaged(Exception):
    """A length or type that cannot be."""


class _Reader:
    """A position in the header."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = len(MAGIC)

    def metadata(self) -> dict[str, object]:
        version, _num_tensors, num_pairs = self.unpack("<IQQ")
        if version not in VERSIONS:
            raise _Damaged(f"version {version} is not one of {VERSIONS}")
        pairs = {}
        for _ in range(num_pairs):  # ends at the file's end at the latest: each pair takes bytes
            key = self.string()
            (kind,) = self.unpack("<I")
            pairs[key] = self.value(kind)
        return pairs

    def unpack(self, layout: str) -> tuple:
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return values

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self.data) - self.at:
            raise _Damaged(f"{num_bytes} bytes announced, {len(self.data) - self.at} left")
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        return self.take(size).decode()

    def value(self, kind: int, nesting: int = 0) -> object:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(nesting + 1)
        return self.scalars(kind, 1)[0]

    def array(self, nesting: int) -> list:
        if nesting > MAX_NESTING:
            raise _Damaged(f"arrays nested deeper than {MAX_NESTING}")
        kind, size = self.unpack("<IQ")
        if kind not in (STRING, ARRAY):
            return self.scalars(kind, size)
        return [self.value(kind, nesting) for _ in range(size)]

    def scalars(self, kind: int, count: int) -> list:
        if kind not in SCALARS:
            raise _Damaged(f"unknown value type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
