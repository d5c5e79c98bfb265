"""Host values on their way to the device, without ever waiting for it."""

import itertools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


ALIGNED = 4  # int32 values: 16 bytes
DTYPES = {np.dtype(kind): getattr(torch, kind) for kind in ("int32", "int64", "float32")}


class Staging(Protocol):
    """Where a step's host values pass through. `begin` is called once per step, before the others."""

    def begin(self, step: int) -> None:
        """Make room for the values of a step; those of `depth` steps ago have long been copied."""

    def put(self, values: np.ndarray) -> Tensor:
        """The values (4 or 8 bytes each) as a new tensor on the device."""

    def put_long(self, values: np.ndarray) -> Tensor:
        """The same for values that are rare, and too many to have room reserved for them in every step."""

    def put_all(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Flat int32 arrays as new tensors, in one copy."""

    def scatter(self, target: Tensor, index: tuple[np.ndarray | slice, ...], values: np.ndarray) -> None:
        """target[index] = values"""

    def write(self, target: Tensor, values: np.ndarray) -> None:
        """Copy the values into a static tensor of their shape."""


class HostStaging:
    """For a worker whose device is the CPU: plain copies."""

    def begin(self, step: int) -> None:
        """Nothing to make room for."""

    def put(self, values: np.ndarray) -> Tensor:
        """A tensor over the same memory."""
        return torch.from_numpy(values)

    def put_long(self, values: np.ndarray) -> Tensor:
        """A tensor over the same memory, or a copy of what is read-only."""
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def put_all(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Tensors over the same memory."""
        return [torch.from_numpy(values) for values in arrays]

    def scatter(self, target: Tensor, index: tuple[np.ndarray | slice, ...], values: np.ndarray) -> None:
        """numpy's, which takes less code than torch's: a step of its own finds neither in the caches."""
        target.numpy()[index] = values

    def write(self, target: Tensor, values: np.ndarray) -> None:
        """A plain copy."""
        assert target.shape == values.shape
        target.copy_(torch.from_numpy(values))


class PinnedStaging:
    """A ring of pinned buffers. The scheduler has at most `depth` steps unconfirmed, so the copies out of a buffer are done when its
    turn comes again: asserted by an event, not waited for."""

    def __init__(self, device: torch.device, depth: int, step_bytes: int):
        self.device = device
        self.ring = [torch.zeros(step_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(depth + 1)]
        self.views = [buffer.numpy() for buffer in self.ring]
        self.copied = [torch.cuda.Event() for _ in self.ring]
        self.slot = depth  # as if a step had just used it, so that the first step's own event is a fresh one
        self.used = 0

    def begin(self, step: int) -> None:
        """Take the next buffer of the ring."""
        self.copied[self.slot].record()
        self.slot = step % len(self.ring)
        assert self.copied[self.slot].query(), "a staging buffer is still being copied from"
        self.used = 0

    def put(self, values: np.ndarray) -> Tensor:
        """An asynchronous copy into new device memory."""
        return self._pinned(values).to(self.device, non_blocking=True)

    def put_long(self, values: np.ndarray) -> Tensor:
        """An asynchronous copy through pinned memory that torch lends, and lends again only once the copy is done."""
        pinned = torch.empty(values.shape, dtype=DTYPES[values.dtype], pin_memory=True)
        pinned.numpy()[...] = values
        return pinned.to(self.device, non_blocking=True)

    def put_all(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Parts of one asynchronous copy, each aligned as new memory is: kernels are compiled for that."""
        ends = list(itertools.accumulate(-(-len(values) // ALIGNED) * ALIGNED for values in arrays))
        flat = np.zeros(ends[-1], dtype=np.int32)
        places = [(begin, begin + len(values)) for begin, values in zip([0, *ends], arrays)]
        for (begin, end), values in zip(places, arrays):
            flat[begin:end] = values
        on_device = self.put(flat)
        return [on_device[begin:end] for begin, end in places]

    def scatter(self, target: Tensor, index: tuple[np.ndarray | slice, ...], values: np.ndarray) -> None:
        """Index and values are copied asynchronously first."""
        on_device = tuple(part if isinstance(part, slice) else self.put(part) for part in index)
        target[on_device] = self.put(values)

    def write(self, target: Tensor, values: np.ndarray) -> None:
        """An asynchronous copy into a static tensor."""
        assert target.shape == values.shape
        target.copy_(self._pinned(values), non_blocking=True)

    def _pinned(self, values: np.ndarray) -> Tensor:
        begin = -(-self.used // 8) * 8  # aligned for any type
        self.used = begin + values.nbytes
        assert self.used <= len(self.ring[0]), f"a step stages more than {len(self.ring[0])} bytes"
        self.views[self.slot][begin : self.used] = values.reshape(-1).view(np.uint8)
        return self.ring[self.slot][begin : self.used].view(DTYPES[values.dtype]).view(values.shape)
