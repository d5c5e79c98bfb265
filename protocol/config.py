"""The frozen configuration that launch.py hands to every process."""

import re
from pathlib import Path
from typing import Literal

import msgspec

PROMETHEUS_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

Executor = Literal["transformer", "checksum"]
PreemptionMode = Literal["auto", "recompute", "swap"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. Checked once, in `launch.py`; a child only reads it."""

    model: str  # a folder or a .gguf file; "checksum" with that executor
    served_model_name: str
    run_dir: str  # private 0700 directory of the internal sockets
    client_address: str  # ipc:// address of the ZMQ door
    epoch: int  # random per start; keeps messages of another start out
    host: str = "127.0.0.1"
    port: int | None = 8000  # of the HTTP door; 0: a free one, None: there is no HTTP door
    uds: str | None = None  # path of a unix socket for HTTP, instead of host and port
    http_fd: int | None = None  # the listening socket of either, which the frontends inherit
    frontend_workers: int = 1  # processes that serve clients
    api_key_hashes: list[str] = []  # SHA-256, in hex, of the keys that HTTP clients must have one of; none: no key is needed
    ignore_unknown_fields: bool = False  # of HTTP bodies, instead of refusing them by name
    generation_config: Literal["auto", "none"] = "auto"  # whether the model's file of that name gives sampling defaults
    chat_template: str | None = None  # the text of one, instead of the model's own
    stream_interval: int = 1  # tokens of a stream's part, at least; the first and the last come at once
    sse_keep_alive_interval: float = 15.0  # seconds without anything until a stream gets a comment
    metrics_prefix: str = "stepahead"  # before the names of /metrics and a colon
    shutdown_timeout: float = 30.0  # seconds that open requests have to end after a signal
    watchdog_timeout: float = 60.0  # seconds that a step may take; after the kernels' first use

    executor: Executor = "transformer"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, for measuring speed
    max_model_len: int | None = None  # None: the model's own limit
    max_num_seqs: int = 64  # rows
    max_num_batched_tokens: int = 512  # tokens of a step, prompts and decoding rows together
    block_size: int = 16  # tokens per KV block
    num_kv_blocks: int | None = None  # None: from kv_cache_gib
    kv_cache_gib: float | None = None  # at most; None: 2 on a CPU, from gpu_memory_utilization on a GPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and KV cache
    swap_space: float = 0.0  # GiB of host memory for the KV of preempted requests
    preemption_mode: PreemptionMode = "auto"  # auto: what is estimated to take less time
    enforce_eager: bool = False  # launch kernels one by one instead of replaying graphs
    tune_kernels: bool = True  # time the kernels of each shape at load, where the cache does not know them
    cache_dir: str | None = None  # where tuning results last; None: nowhere
    enable_prefix_caching: bool = True
    max_pipeline_depth: int = 4  # steps sent and not yet confirmed, at most; 1 is the synchronous mode
    max_queued_requests: int = 1024
    max_num_queued_tokens: int = 2**22  # prompt tokens that may wait
    queue_timeout: float | None = None  # seconds that a request may wait for its first row; None: as long as it takes
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    tensor_parallel_size: int = 1
    seed: int | None = None  # of the seeds given to requests that name none; None: random
    num_threads: int | None = None  # CPU threads of a worker; None: one per core
    op_by_op: bool = False  # decode without fused kernels and graphs: what the benches compare with
    trace_dir: str | None = None  # where the processes record what they did when; None: nowhere
    failpoint: str | None = None  # "PLACE:STEP:ACTION", with the checksum executor only

    def address(self, channel: str) -> str:
        """The ipc address of an internal channel: workers, results or frontends."""
        return f"ipc://{Path(self.run_dir) / channel}"


# field -> (lowest, highest), both allowed
BOUNDS: dict[str, tuple[float, float]] = {
    "max_model_len": (2, 2**24),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "num_kv_blocks": (1, 2**31 - 2),
    "kv_cache_gib": (2**-20, 2**20),
    "gpu_memory_utilization": (0.01, 1.0),
    "swap_space": (0, 2**20),
    "port": (0, 65535),
    "frontend_workers": (1, 64),
    "stream_interval": (1, 1024),
    "sse_keep_alive_interval": (0.1, 3600),
    "shutdown_timeout": (0, 3600),
    "watchdog_timeout": (1, 3600),
    "max_pipeline_depth": (1, 8),
    "max_queued_requests": (1, 2**20),
    "max_num_queued_tokens": (1, 2**40),
    "queue_timeout": (0.001, 2**20),
    "tensor_parallel_size": (1, 1),
    "num_threads": (1, 1024),
    "seed": (-(2**63), 2**63 - 1),
}


def check_config(config: EngineConfig) -> None:
    """Raise ValueError naming the flag, its value and its limit for the first field out of bounds."""
    for field, (low, high) in BOUNDS.items():
        value = getattr(config, field)
        if value is not None and not low <= value <= high:
            raise ValueError(f"--{field.replace('_', '-')} must be between {low} and {high}, got {value}")
    if config.block_size not in BLOCK_SIZES:
        raise ValueError(f"--block-size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {config.block_size}")
    if not PROMETHEUS_NAME.fullmatch(config.metrics_prefix):
        raise ValueError(f"--metrics-prefix must be letters, digits and _, no digit first, got {config.metrics_prefix!r}")
    if config.preemption_mode == "swap" and not config.swap_space:
        raise ValueError("--preemption-mode swap needs --swap-space")
    if config.preemption_mode == "recompute" and config.swap_space:
        raise ValueError("--swap-space has no effect with --preemption-mode recompute")
    if config.failpoint is not None and config.executor != "checksum":
        raise ValueError("a failpoint works with --executor checksum only")


def save_config(config: EngineConfig) -> Path:
    """Write the configuration into its run directory; returns the file, which a child reads with `load_config`."""
    path = Path(config.run_dir) / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def load_config(path: str | Path) -> EngineConfig:
    """The configuration that `save_config` wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=EngineConfig)
