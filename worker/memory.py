"""How much memory the KV pool may take."""

import logging
import os

import torch

from protocol.config import EngineConfig
from worker.runner import Model

log = logging.getLogger(__name__)

# What comes after the weights and beside the pool: activations, graphs, the allocator's rest. 105 graphs of a 0.6B model take 46 MiB.
GPU_RESERVE_BYTES = 1 << 30

# A CPU's memory is shared with everything else, so the default is modest.
DEFAULT_CPU_GIB = 2.0


def num_kv_blocks(config: EngineConfig, model: Model) -> int:
    """Blocks of the KV pool: as many as fit, but no more than full contexts in every row. Raises ValueError when none fits."""
    block_bytes = model.kv_bytes_per_token * config.block_size
    useful = config.max_num_seqs * -(-model.max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        check_asked(config, block_bytes, total_memory(model.device))
        return config.num_kv_blocks
    room = int(config.kv_cache_gib * 2**30) if config.kv_cache_gib is not None else None
    if room is None:
        room = gpu_room(config, model) if model.device.type == "cuda" else int(DEFAULT_CPU_GIB * 2**30)
    if room < block_bytes:
        raise ValueError(f"the KV cache needs at least one block of {block_bytes} bytes, there is room for {max(room, 0)}")
    return min(room // block_bytes, useful)


def check_asked(config: EngineConfig, block_bytes: int, total_bytes: int) -> None:
    """Raise ValueError for a pool that serves no request, or that no memory of this size can hold."""
    asked = config.num_kv_blocks
    if asked * config.block_size < 2:
        raise ValueError("--num-kv-blocks 1 with --block-size 1 holds one token; a request needs two")
    if asked * block_bytes > total_bytes:
        raise ValueError(f"--num-kv-blocks must be at most {total_bytes // block_bytes}, what the memory holds, got {asked}")


def total_memory(device: torch.device) -> int:
    """Bytes of the GPU, or of the whole machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_room(config: EngineConfig, model: Model) -> int:
    """Bytes left for the pool within gpu_memory_utilization, after weights and a reserve; explained in one log line.

    Other processes' memory counts against what is free, not against our share.
    """
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(model.device)
    ours = torch.cuda.memory_reserved(model.device)
    share = int(total * config.gpu_memory_utilization)
    room = min(share - ours, free) - GPU_RESERVE_BYTES
    gib = 2**30
    log.info(
        "KV cache: %.2f GiB = min(%.2f of %.2f GiB - %.2f ours, %.2f free) - %.2f reserve",
        room / gib, config.gpu_memory_utilization, total / gib, ours / gib, free / gib, GPU_RESERVE_BYTES / gib,
    )  # fmt: skip
    if room <= 0:
        raise ValueError(
            f"no memory for a KV cache: {config.gpu_memory_utilization} of {total / gib:.2f} GiB less {ours / gib:.2f} GiB of weights and "
            f"{GPU_RESERVE_BYTES / gib:.2f} GiB reserve, with {free / gib:.2f} GiB free, leaves {room / gib:.2f} GiB"
        )
    return room
