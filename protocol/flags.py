"""Every flag of launch.py in one table: its names, the setting behind them and what it means.

The first name is vLLM's where vLLM has the flag; the others are SGLang's, mini-sglang's and llama-server's of the same meaning.
"""

import types
import typing
from difflib import get_close_matches
from typing import Literal

import msgspec

from protocol.config import EngineConfig

# What a flag may set besides the fields of EngineConfig; launch.py makes fields of it.
LAUNCH_TYPES: dict[str, object] = {
    "config": str,
    "zmq_listen": str,
    "http": bool,
    "api_key": list[str],
    "api_key_file": str,
    "kv_cache_dtype": Literal["auto"],
    "always": bool,
}


class Flag(msgspec.Struct, frozen=True):
    """One setting. Its type, its choices and its default are those of the field."""

    field: str  # of EngineConfig, or a key of LAUNCH_TYPES
    spellings: str  # separated by blanks
    help: str  # says the default where the field's is None
    off_spellings: str = ""  # of a switch, those that turn it off
    metavar: str = ""  # "": by the type
    is_hidden: bool = False  # for tests and measurements
    is_always_on: bool = False  # a switch that cannot be turned off

    @property
    def names(self) -> list[str]:
        """The names, those that turn it off last."""
        return f"{self.spellings} {self.off_spellings}".split()

    @property
    def off_names(self) -> list[str]:
        """The names that turn a switch off."""
        return self.off_spellings.split()

    @property
    def type(self) -> object:
        """The field's, without None: bool, int, float, str, list[str] or a Literal."""
        annotation = _FIELD_TYPES[self.field]
        if isinstance(annotation, types.UnionType):
            (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
        return annotation

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it takes, where they can be counted."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def is_repeatable(self) -> bool:
        """Whether several values add up."""
        return typing.get_origin(self.type) is list

    @property
    def value_name(self) -> str:
        """What stands for the value in the help; nothing for a switch."""
        if self.type is bool:
            return ""
        return self.metavar or "|".join(self.choices) or {int: "N", float: "X"}.get(self.type, "TEXT")

    @property
    def full_help(self) -> str:
        """The help with the field's default."""
        default = _FIELD_DEFAULTS.get(self.field)
        if default in (None, []) or self.type is bool or "default" in self.help:
            return self.help
        return f"{self.help}; default: {default:g}" if self.type is float else f"{self.help}; default: {default}"


_FIELD_TYPES = LAUNCH_TYPES | typing.get_type_hints(EngineConfig)
_FIELD_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(EngineConfig) if field.default is not msgspec.NODEFAULT}

GROUPS: dict[str, list[Flag]] = {
    "model": [
        Flag("model", "--model --model-path -m", "a folder, a .gguf file, a Hugging Face id or smollm2-135m, which is the default"),
        Flag("served_model_name", "--served-model-name --alias -a", "the name shown to clients; default: the model as given"),
        Flag("dtype", "--dtype", "of weights and KV cache"),
        Flag("device", "--device", "where the workers run"),
        Flag("load_format", "--load-format", "dummy: random weights, to measure speed"),
        Flag(
            "max_model_len",
            "--max-model-len --context-length --max-seq-len-override",
            "the longest context in tokens; default: the model's",
        ),
        Flag("chat_template", "--chat-template --chat-template-file", "a file, or its text; default: the model's", metavar="FILE|TEXT"),
        Flag("generation_config", "--generation-config", "none: pass over the sampling values that the model suggests"),
        Flag("executor", "--executor", "checksum: no model, a hash of the tokens read back", is_hidden=True),
    ],
    "batching": [
        Flag("max_num_seqs", "--max-num-seqs --max-running-requests", "requests that run at once"),
        Flag(
            "max_num_batched_tokens",
            "--max-num-batched-tokens --chunked-prefill-size --max-prefill-length",
            "tokens of one step, prompts and decoding together",
        ),
        Flag("max_pipeline_depth", "--max-pipeline-depth", "steps sent ahead at most; 1 waits for each"),
        Flag("max_queued_requests", "--max-num-queued-reqs --max-queued-requests", "requests that may wait"),
        Flag("max_num_queued_tokens", "--max-num-queued-tokens", "prompt tokens that may wait"),
        Flag("queue_timeout", "--queue-timeout", "how long a request may wait to start; default: no limit", metavar="SECONDS"),
        Flag("scheduling_policy", "--scheduling-policy --schedule-policy", "priority: requests of a lower number first"),
        Flag("seed", "--seed --random-seed", "of requests without a seed; default: random"),
    ],
    "memory and compute": [
        Flag("block_size", "--block-size --page-size", "tokens per KV block"),
        Flag("num_kv_blocks", "--num-kv-blocks --num-gpu-blocks-override", "KV blocks; default: as many as memory allows"),
        Flag("kv_cache_gib", "--kv-cache-gib", "the KV cache at most; default: 2 on a CPU, what is free on a GPU", metavar="GIB"),
        Flag("kv_cache_dtype", "--kv-cache-dtype", "of the KV cache; it is that of the weights"),
        Flag(
            "gpu_memory_utilization",
            "--gpu-memory-utilization --mem-fraction-static --memory-ratio",
            "share of a GPU's memory for weights, KV cache and all else",
        ),
        Flag(
            "enable_prefix_caching",
            "--enable-prefix-caching",
            "whether prompts that begin alike share their KV; default: on",
            "--no-enable-prefix-caching --disable-radix-cache",
        ),
        Flag("swap_space", "--swap-space", "host memory for the KV of preempted requests", metavar="GIB"),
        Flag("preemption_mode", "--preemption-mode", "how preempted requests come back; auto: what takes less time"),
        Flag("tensor_parallel_size", "--tensor-parallel-size -tp --tp --tp-size", "workers"),
        Flag("enforce_eager", "--enforce-eager --disable-cuda-graph", "launch kernels one by one, without graphs", "--no-enforce-eager"),
        Flag("tune_kernels", "--tune-kernels", "time the kernels at load, where not remembered; default: on", "--no-tune-kernels"),
        Flag("num_threads", "--num-threads", "CPU threads of a worker; default: one per core"),
        Flag("watchdog_timeout", "--watchdog-timeout", "how long a step may take", metavar="SECONDS"),
        Flag("op_by_op", "--op-by-op", "decode without fused kernels and graphs", "--no-op-by-op", is_hidden=True),
        Flag("trace_dir", "--trace", "where the processes record what they did when", metavar="DIR", is_hidden=True),
    ],
    "doors": [
        Flag("host", "--host", "address for HTTP clients"),
        Flag("port", "--port", "port for HTTP clients, 0 for a free one"),
        Flag("uds", "--uds", "a unix socket for HTTP clients, instead of address and port", metavar="PATH"),
        Flag("http", "--http", "whether there is a door for HTTP clients at all", "--no-http"),
        Flag("zmq_listen", "--zmq-listen", "address for ZMQ clients; default: this user's", metavar="ipc://PATH"),
        Flag("frontend_workers", "--frontend-workers --api-server-count", "processes that serve clients"),
        Flag("api_key", "--api-key", "a key that opens the HTTP door; may be given more than once; default: none is needed", metavar="KEY"),
        Flag("api_key_file", "--api-key-file", "a file with such keys, one a line, # begins a comment", metavar="FILE"),
        Flag(
            "ignore_unknown_fields",
            "--ignore-unknown-fields",
            "pass over unknown fields of HTTP bodies; default: refuse them",
            "--no-ignore-unknown-fields",
        ),
        Flag("stream_interval", "--stream-interval", "tokens of a stream's part, at least"),
        Flag(
            "sse_keep_alive_interval",
            "--sse-keep-alive-interval --sse-ping-interval",
            "silence in a stream until it gets a comment",
            metavar="SECONDS",
        ),
        Flag("metrics_prefix", "--metrics-prefix", "before the names of metrics, and a colon"),
        Flag("shutdown_timeout", "--shutdown-timeout", "how long open requests have to end after a signal", metavar="SECONDS"),
    ],
    "settings from elsewhere": [
        Flag("config", "--config", "a YAML or JSON file of flags, without dashes before them, and values", metavar="FILE"),
        Flag(
            "always",
            "--enable-metrics --metrics --enable-chunked-prefill --async-scheduling --jinja",
            "what other servers turn on by these is always on here",
            is_always_on=True,
        ),
    ],
}
FLAGS = [flag for group in GROUPS.values() for flag in group]
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


def name_of(field: str) -> str:
    """The flag that sets a field."""
    return next(flag.names[0] for flag in FLAGS if flag.field == field)


# Flags of vLLM, SGLang, mini-sglang and llama-server that there are not, under the nearest one that there is.
NEAREST: dict[str | None, str] = {
    "--api-key": "--admin-api-key",
    "--device": "-ngl --n-gpu-layers --gpu-layers",
    "--enable-prefix-caching": "--cache-prompt --cache-type",
    "--enforce-eager": "--cuda-graph-max-bs --enable-torch-compile --compilation-config -O",
    "--frontend-workers": "--tokenizer-worker-num",
    "--generation-config": "--override-generation-config",
    "--kv-cache-dtype": "-ctk --cache-type-k -ctv --cache-type-v",
    "--max-model-len": "-c --ctx-size",
    "--max-num-batched-tokens": "-b --batch-size -ub --ubatch-size --max-prefill-tokens --long-prefill-token-threshold",
    "--max-num-seqs": "-np --parallel --schedule-conservativeness",
    "--max-pipeline-depth": "--disable-overlap-schedule --no-async-scheduling --num-scheduler-steps",
    "--model": "-hf --hf-repo --hf-file --revision --tokenizer --tokenizer-path --hf-config-path",
    "--no-enable-prefix-caching": "--no-cache-prompt",
    "--num-kv-blocks": "--max-total-tokens --num-gpu-blocks",
    "--num-threads": "-t --threads --threads-batch",
    "--queue-timeout": "--timeout -to",
    "--scheduling-policy": "--enable-priority-scheduling --scheduler-cls",
    "--seed": "-s",
    "--swap-space": "--cpu-offload-gb --enable-hierarchical-cache --hicache-ratio --hicache-size --kv-offloading-size",
    "--tensor-parallel-size": (
        "--data-parallel-size -dp --dp-size --dp --pipeline-parallel-size -pp --pp-size --ep-size --enable-expert-parallel "
        "--split-mode -sm --tensor-split -ts"
    ),
    None: (
        "--trust-remote-code --quantization -q --download-dir --enable-log-requests --log-requests --tool-call-parser "
        "--enable-auto-tool-choice --reasoning-parser --otlp-traces-endpoint --enable-lora --lora-modules --lora-paths --lora "
        "--speculative-config --speculative-algorithm --attention-backend --sampling-backend --grammar-backend --flash-attn -fa "
        "--ssl-keyfile --ssl-certfile --root-path --allowed-origins --log-level --uvicorn-log-level --disable-log-stats "
        "--skip-server-warmup --nnodes --node-rank --dist-init-addr --distributed-executor-backend --disaggregation-mode "
        "--kv-transfer-config --hf-token --hf-overrides --runner --task --embedding --embeddings --is-embedding --mmproj --mlock "
        "--no-mmap --slots --props --no-webui --max-logprobs --response-role --allow-auto-truncate --enable-sleep-mode"
    ),
}
UNSUPPORTED = {name: nearest for nearest, names in NEAREST.items() for name in names.split()}


def key_of(name: str) -> str:
    """A flag's name in a file; in capitals and behind a prefix, its name in the environment."""
    return name.lstrip("-").replace("-", "_")


BY_KEY = {key_of(name): name for name in BY_NAME if name.startswith("--")}


def why_unknown(name: str) -> tuple[str, str | None]:
    """What is wrong with a name that is no flag's, up to the flag's name that follows, if one does."""
    if name in UNSUPPORTED:
        nearest = UNSUPPORTED[name]
        return f"is not supported; {'nearest is' if nearest else 'there is nothing like it'}", nearest
    known = [other for flag in FLAGS if not flag.is_hidden for other in flag.names]
    return "is unknown; nearest is", get_close_matches(name, known, n=1, cutoff=0.0)[0]
