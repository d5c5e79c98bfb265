"""A model's configuration: from a Hugging Face config.json to one frozen struct, every supported spelling resolved."""

import json
import logging
from pathlib import Path

import msgspec

from worker.rope import ROPE_TYPES, RopeConfig

log = logging.getLogger(__name__)

# What transformers assumes for keys that a config.json leaves out.
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "tie_word_embeddings": False,
}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict] = {
    "LlamaForCausalLM": _COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "MistralForCausalLM": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "use_sliding_window": True,
        "max_window_layers": 0,
    },
    "Qwen2ForCausalLM": _COMMON | _QWEN,
    "Qwen3ForCausalLM": _COMMON | _QWEN | {"head_dim": 128},
}


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


class HfConfig(msgspec.Struct, frozen=True):
    """The keys of config.json that matter here, after the architecture's defaults."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_scaling: dict | None = None
    rope_parameters: dict | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    quantization_config: dict | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    out_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_model_len: int  # tokens, with the rope scaling counted in
    rope: RopeConfig
    dtype: str | None  # of the checkpoint, where it says so

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused q, k and v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def load_model_config(folder: Path) -> ModelConfig:
    """Read folder/config.json. Raises ValueError naming the file and the key for what is missing, malformed or not supported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a model folder: it holds no config.json") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object")
    try:
        return parse_model_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_model_config(raw: dict) -> ModelConfig:
    """Resolve the content of a config.json. Raises ValueError; code that the file names (auto_map) is never run."""
    architecture = _architecture(raw)
    try:
        config = msgspec.convert(DEFAULTS[architecture] | raw, HfConfig)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    _check_supported(config)
    rope = parse_rope(config)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    flagged_bias = config.attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        rms_norm_eps=config.rms_norm_eps,
        qkv_bias=qwen2 or flagged_bias,
        out_bias=flagged_bias,
        mlp_bias=config.mlp_bias and architecture == "LlamaForCausalLM",
        qk_norm=qwen3,
        tie_word_embeddings=config.tie_word_embeddings,
        max_model_len=max_model_len(config, rope),
        rope=rope,
        dtype=config.dtype or config.torch_dtype,
    )


def _architecture(raw: dict) -> str:
    supported = ", ".join(DEFAULTS)
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures is missing; supported are {supported}")
    if names[0] not in DEFAULTS:
        raise ValueError(f"the architecture {names[0]} is not supported; supported are {supported}")
    return names[0]


def _check_supported(config: HfConfig) -> None:
    for name in SIZES:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act must be silu, got {config.hidden_act}")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise ValueError(f"quantization_config ({method}) is not supported in safetensors folders; GGUF files are")


def _num_kv_heads(config: HfConfig) -> int:
    num_heads = config.num_attention_heads
    num_kv_heads = num_heads if config.num_key_value_heads is None else config.num_key_value_heads
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    return num_kv_heads


def _head_dim(config: HfConfig) -> int:
    head_dim = config.head_dim
    if head_dim is None:
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size ({config.hidden_size}) must be a multiple of num_attention_heads ({config.num_attention_heads}) "
                "where head_dim is not given"
            )
        head_dim = config.hidden_size // config.num_attention_heads
    if head_dim < 4 or head_dim % 2:
        raise ValueError(f"head_dim must be even and at least 4, got {head_dim}")
    return head_dim


def parse_rope(config: HfConfig) -> RopeConfig:
    """The rotary parameters from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    raw = config.rope_scaling or config.rope_parameters or {}
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"the rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    partial = raw.get("partial_rotary_factor", config.partial_rotary_factor)
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor must be 1, got {partial}")
    if rope_type != "default" and raw.get("factor") is None:
        raise ValueError(f"the rope type {rope_type} needs a factor")
    original = config.original_max_position_embeddings or raw.get("original_max_position_embeddings")
    if rope_type == "dynamic":  # transformers measures its stretch against this, whatever else is given
        original = config.max_position_embeddings
    fields = {name: raw[name] for name in RopeConfig.__struct_fields__ if name != "divisors" and raw.get(name) is not None}
    fields |= {"rope_type": rope_type, "original_max_position": original or config.max_position_embeddings}
    fields["theta"] = raw.get("rope_theta") or config.rope_theta or 10000.0
    try:
        return msgspec.convert(fields, RopeConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"rope_parameters: {error}") from None


def max_model_len(config: HfConfig, rope: RopeConfig) -> int:
    """The longest sequence in tokens.

    linear, dynamic and yarn stretch the original context (where it is not given, max_position_embeddings) by their factor; for the
    others max_position_embeddings already counts everything in. A sliding window in any layer caps it: within the window,
    windowed and full attention are the same.
    """
    longest = config.max_position_embeddings
    if rope.rope_type in ("linear", "dynamic", "yarn"):
        longest = int(rope.original_max_position * rope.factor)
    if config.use_sliding_window and config.sliding_window and _has_sliding_layer(config) and config.sliding_window < longest:
        log.warning("sliding-window attention is not supported: max_model_len is capped at the window of %d", config.sliding_window)
        return config.sliding_window
    return longest


def _has_sliding_layer(config: HfConfig) -> bool:
    if config.layer_types is not None:
        return "sliding_attention" in config.layer_types
    return config.max_window_layers < config.num_hidden_layers
