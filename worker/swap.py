"""KV blocks of preempted requests, copied to host memory and back.

C = keys and values of every layer, P = blocks of the pool, H = places in host memory, N = blocks copied at a time
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protocol.messages import Swap, pack, unpack
from worker.staging import Staging

# Copies of more blocks at once would be no faster (a block of the 0.6B shape has 1.8 MB), and take more of the device's memory.
AT_ONCE = 16


class Lane(Protocol):
    """Where copies run, beside the steps."""

    def fenced(self) -> AbstractContextManager[None]:
        """What is launched inside starts after all steps launched before, and steps launched later start after it."""


class HostLane:
    """On a CPU everything runs in launch order already."""

    def fenced(self) -> AbstractContextManager[None]:
        """Nothing to wait for."""
        return nullcontext()


class DeviceLane:
    """A stream of its own, so that copies overlap with steps that are already launched. No host waits: events are the fences."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """Launch on the copy stream."""
        steps = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(steps)
        with torch.cuda.stream(self.stream):
            yield
        steps.wait_stream(self.stream)  # blocks that were copied out are written at once by their next owner


class BlockSwapper:
    """Copies blocks of kv_CP… (anything after the two leading dimensions) to places in host memory and back.

    A block's parts lie all over the pool, so they are gathered on the device first: one copy of 1.8 MB for the 0.6B shape instead of 56.
    """

    def __init__(self, kv_CP: Tensor, num_places: int, lane: Lane, staging: Staging):
        shape = (kv_CP.shape[0], *kv_CP.shape[2:])
        self.kv_CP, self.lane, self.staging = kv_CP, lane, staging
        self.num_places = num_places
        # A CPU's empty memory costs nothing until it is written.
        self.host_HC = torch.empty(num_places, *shape, dtype=kv_CP.dtype, pin_memory=kv_CP.is_cuda)
        self.gathered_NC = torch.empty(AT_ONCE, *shape, dtype=kv_CP.dtype, device=kv_CP.device)

    @torch.inference_mode()
    def run(self, swaps: list[Swap]) -> None:
        """Copy, in the order given: a place or block that one gives free may be the next one's target."""
        with self.lane.fenced():
            for swap in swaps:
                blocks, places = unpack(swap.blocks), unpack(swap.places)
                assert len(blocks) == len(places)
                for first in range(0, len(blocks), AT_ONCE):
                    self._copy(swap.is_out, blocks[first : first + AT_ONCE], places[first : first + AT_ONCE].tolist())

    def _copy(self, is_out: bool, blocks: np.ndarray, places: list[int]) -> None:
        blocks_N = self.staging.put_long(blocks)
        gathered_NC = self.gathered_NC[: len(places)]
        if is_out:
            gathered_NC.copy_(self.kv_CP.index_select(1, blocks_N).transpose(0, 1))
            for block_C, place in zip(gathered_NC, places):
                self.host_HC[place].copy_(block_C, non_blocking=True)
        else:
            for block_C, place in zip(gathered_NC, places):
                block_C.copy_(self.host_HC[place], non_blocking=True)
            self.kv_CP.index_copy_(1, blocks_N.long(), gathered_NC.transpose(0, 1))

    def seconds_per_block(self) -> float:
        """Measure a copy in one direction, at a start, while nobody owns a block."""
        count = min(AT_ONCE, self.num_places, self.kv_CP.shape[1])
        ids = pack(np.arange(count))
        there_and_back = [Swap(True, ids, ids), Swap(False, ids, ids)]
        self.run(there_and_back)  # what is slow only once: pages are mapped, kernels are loaded
        self._wait()
        begin = time.perf_counter()
        self.run(there_and_back)
        self._wait()
        return (time.perf_counter() - begin) / (2 * count)

    def _wait(self) -> None:
        if self.kv_CP.is_cuda:
            torch.cuda.synchronize(self.kv_CP.device)
