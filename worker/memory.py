"""How much memory the KV pool may take: on a GPU what a rehearsal of the largest steps leaves of our share."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from protocol.config import EngineConfig
from worker.runner import Model

log = logging.getLogger(__name__)

GIB = 2**30

# Graphs hold the pool's addresses, so they come after it and cannot be measured before. 105 graphs of a model with 28 layers took
# 46 MiB of torch's memory on an H200, 0.4 MiB each; the rest is for deeper models, and for the driver's part, which torch does not see.
GRAPH_BYTES = 2 << 20

# A CPU's memory is shared with everything else, so the default is modest.
DEFAULT_CPU_GIB = 2.0


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a GPU: all it has, what is free beside the weights, and what we take or will take of it besides the pool."""

    total: int
    free: int  # with the weights loaded, and nothing else of ours
    weights: int
    activations: int  # at the peak; with the row state, the scratch block, the libraries' workspaces and the kernels' binaries
    graphs: int

    @property
    def others(self) -> int:
        """Held by other processes and by our CUDA context (about half a GiB), which nobody inside of it can tell apart."""
        return self.total - self.free - self.weights

    def room(self, utilization: float) -> int:
        """Bytes left for the pool within a share of the GPU. What others hold counts against what is free, not against our share."""
        return min(int(self.total * utilization) - self.weights, self.free) - self.activations - self.graphs

    def explain(self, utilization: float) -> str:
        """The sum behind `room`, in GiB."""
        total, free, weights, activations, graphs, others, share, room = (
            f"{size / GIB:.2f}" for size in (
                self.total, self.free, self.weights, self.activations, self.graphs, self.others, self.total * utilization,
                self.room(utilization),
            )
        )  # fmt: skip
        return (
            f"room {room} GiB = min(share {share} - weights {weights}, free {free}) - activations {activations} - graphs {graphs}; "
            f"share {utilization} of {total} GiB, {others} GiB held by other processes and the CUDA context"
        )


def measure_use(device: torch.device, rehearse: Callable[[], None], num_graphs: int) -> MemoryUse:
    """Measure what `rehearse`, which is to allocate all that steps need and run the largest ones, takes at its peak.

    Counted is what torch has reserved, not what tensors filled of it: it hands nothing back. What torch does not see is the rest of
    what has left the device's free memory since the weights were loaded.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # left over from loading
    torch.cuda.reset_peak_memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_reserved(device)
    rehearse()
    torch.cuda.synchronize(device)
    unseen = free - torch.cuda.mem_get_info(device)[0] - (torch.cuda.memory_reserved(device) - weights)
    activations = torch.cuda.max_memory_reserved(device) - weights + max(unseen, 0)  # negative where another process has ended
    return MemoryUse(total, free, weights, activations, num_graphs * GRAPH_BYTES)


def num_kv_blocks(config: EngineConfig, model: Model, use: MemoryUse | None = None) -> int:
    """Blocks of the KV pool: as many as fit, but no more than full contexts in every row. `use` is a GPU's; None on a CPU.

    Logs the sum. Raises ValueError when not even a request of two tokens fits.
    """
    block_bytes = model.kv_bytes_per_token * config.block_size
    if config.num_kv_blocks is not None:
        check_asked(config, block_bytes, use.total if use else total_memory())
        blocks = config.num_kv_blocks
    else:
        useful = config.max_num_seqs * -(-model.max_model_len // config.block_size)
        blocks = min(fitting_blocks(config, block_bytes, use), useful)
    tokens, gib = blocks * config.block_size, blocks * block_bytes / GIB
    reason = f"; {use.explain(config.gpu_memory_utilization)}" if use else ""
    log.info("KV cache: %.2f GiB in %d blocks of %d tokens, %d tokens%s", gib, blocks, config.block_size, tokens, reason)
    if tokens < model.max_model_len:
        log.warning("the KV cache holds %d tokens, less than max_model_len %d: longer requests are refused", tokens, model.max_model_len)
    return blocks


def fitting_blocks(config: EngineConfig, block_bytes: int, use: MemoryUse | None) -> int:
    """How many blocks there is room for. Raises ValueError when they do not hold the two tokens that a request needs."""
    asked = None if config.kv_cache_gib is None else int(config.kv_cache_gib * GIB)
    if use is None:
        room = int(DEFAULT_CPU_GIB * GIB) if asked is None else asked
    else:
        room = use.room(config.gpu_memory_utilization)
        room = room if asked is None else min(room, asked)
    least = -(-2 // config.block_size)
    if room >= least * block_bytes:
        return room // block_bytes
    needs = f"the KV cache needs at least {least} of its blocks of {block_bytes} bytes, there is room for {max(room, 0)} bytes"
    if use is None:
        raise ValueError(f"{needs}; raise --kv-cache-gib")
    raise ValueError(
        f"{needs}: {use.explain(config.gpu_memory_utilization)}; raise --gpu-memory-utilization{' or --kv-cache-gib' if asked else ''}, "
        "or lower --max-num-batched-tokens or --max-num-seqs"
    )


def check_asked(config: EngineConfig, block_bytes: int, total_bytes: int) -> None:
    """Raise ValueError for a pool that serves no request, or that no memory of this size can hold."""
    asked = config.num_kv_blocks
    if asked * config.block_size < 2:
        raise ValueError("--num-kv-blocks 1 with --block-size 1 holds one token; a request needs two")
    if asked * block_bytes > total_bytes:
        raise ValueError(f"--num-kv-blocks must be at most {total_bytes // block_bytes}, what the memory holds, got {asked}")


def num_host_blocks(config: EngineConfig, model: Model) -> int:
    """Places for blocks in the host memory that --swap-space gives. Raises ValueError for more than the machine has."""
    asked, total = int(config.swap_space * GIB), total_memory()
    if asked > total:
        raise ValueError(f"--swap-space must be at most {total / GIB:.1f} GiB, what the memory holds, got {config.swap_space:g}")
    return asked // (model.kv_bytes_per_token * config.block_size)


def total_memory() -> int:
    """Bytes of the whole machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def explain_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn a GPU's lack of memory for `what` into one line for the user, a ValueError with the driver's numbers.

    torch.OutOfMemoryError is for torch's own allocations alone: a binary that cannot be loaded, or a library without its workspace,
    is a RuntimeError that says so in words.
    """
    try:
        yield
    except RuntimeError as error:
        # A graph's capture that ends early raises an error of its own over the first one.
        reasons = [" ".join(str(raised).split()) for raised in (error, error.__context__) if raised is not None]
        told = [reason for reason in reasons if "out of memory" in reason.lower() or "ALLOC_FAILED" in reason]
        if not told:
            raise
        # The first three sentences say how much was wanted and how much is free; hints for programmers follow.
        numbers = "; ".join(told[0].split(". ")[:3])
        raise ValueError(f"no memory for {what}: {numbers}; {remedy}") from None
