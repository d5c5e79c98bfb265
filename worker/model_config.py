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
    "Qwen3MoeForCausalLM": _COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "MixtralForCausalLM": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "use_sliding_window": True,
        "num_experts_per_tok": 2,
    },
}
# Both spell the number of experts in two ways.
DEFAULT_EXPERTS = {"Qwen3MoeForCausalLM": 128, "MixtralForCausalLM": 8}


# key -> (lowest, highest), both allowed: beyond these no model lies, only a damaged or hostile file. Weights are allocated from sizes,
# block tables from lengths.
MAX_MODEL_LEN = 2**24
BOUNDS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 2**11),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (4, 2**12),
    "max_position_embeddings": (1, MAX_MODEL_LEN),
    "original_max_position_embeddings": (1, MAX_MODEL_LEN),
    "rms_norm_eps": (0, 1),
    "rope_theta": (2, 1e15),
    "num_experts": (0, 2**12),
    "num_local_experts": (0, 2**12),
    "num_experts_per_tok": (1, 2**12),
    "moe_intermediate_size": (1, 2**20),
    "decoder_sparse_step": (1, 2**11),
}
ROPE_BOUNDS: dict[str, tuple[float, float]] = {
    "rope_theta": BOUNDS["rope_theta"],
    "factor": (1, 2**16),
    "original_max_position_embeddings": (1, MAX_MODEL_LEN),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0, 1e6),
    "mscale_all_dim": (0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
}


class RawRope(msgspec.Struct, frozen=True):
    """rope_parameters, or rope_scaling. None: not given."""

    rope_type: str | None = None
    type: str | None = None  # its name before transformers 4.43
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None


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
    rope_scaling: RawRope | None = None
    rope_parameters: RawRope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    quantization_config: dict | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class ExpertsConfig(msgspec.Struct, frozen=True):
    """What the sparse layers of a mixture of experts have in common."""

    num_experts: int
    num_chosen: int  # experts of a token
    width: int  # of each one's MLP
    normalises: bool  # whether a token's router weights are divided by their sum
    sparse_layers: frozenset[int]  # the others have one MLP


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
    experts: ExpertsConfig | None = None

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
    except (ValueError, RecursionError) as error:
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
    _check_rope_keys(raw)
    try:
        config = msgspec.convert(DEFAULTS[architecture] | raw, HfConfig)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    _check_supported(config)
    rope = parse_rope(config)
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    flagged_bias = config.attention_bias and (qwen3 or architecture == "LlamaForCausalLM")
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
        max_model_len=_checked_len(max_model_len(config, rope)),
        rope=rope,
        dtype=config.dtype or config.torch_dtype,
        experts=parse_experts(config, architecture),
    )


def parse_experts(config: HfConfig, architecture: str) -> ExpertsConfig | None:
    """None where no layer is sparse. Mixtral's experts are as wide as its intermediate_size, and its weights always normalised."""
    given = [config.num_experts, config.num_local_experts, DEFAULT_EXPERTS.get(architecture, 0)]
    num_experts = next(number for number in given if number is not None)
    dense = set(config.mlp_only_layers or ())
    sparse = {i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % config.decoder_sparse_step == 0}
    if architecture not in DEFAULT_EXPERTS or num_experts == 0 or not sparse:
        return None
    if config.num_experts_per_tok > num_experts:
        raise ValueError(f"num_experts_per_tok must be at most num_experts ({num_experts}), got {config.num_experts_per_tok}")
    is_mixtral = architecture == "MixtralForCausalLM"
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=config.num_experts_per_tok,
        width=config.intermediate_size if is_mixtral else config.moe_intermediate_size,
        normalises=is_mixtral or config.norm_topk_prob,
        sparse_layers=frozenset(sparse),
    )


def _architecture(raw: dict) -> str:
    supported = ", ".join(DEFAULTS)
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ValueError(f"architectures is missing; supported are {supported}")
    if not isinstance(names[0], str) or names[0] not in DEFAULTS:
        raise ValueError(f"the architecture {names[0]} is not supported; supported are {supported}")
    return names[0]


def _check_supported(config: HfConfig) -> None:
    _check_bounds(config, BOUNDS)
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act must be silu, got {config.hidden_act}")
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise ValueError(f"quantization_config ({method}) is not supported in safetensors folders; GGUF files are")


def _check_bounds(values: msgspec.Struct, bounds: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in bounds.items():
        value = getattr(values, name)
        if value is not None and not low <= value <= high:  # so that NaN fails too
            raise ValueError(f"{name} must be between {low} and {high}, got {value}")


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


def _check_rope_keys(raw: dict) -> None:
    """Refuse parameters per layer type; warn of those we know nothing about."""
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name)
        for key in given.keys() - set(RawRope.__struct_fields__) if isinstance(given, dict) else ():
            if isinstance(given[key], dict):
                raise ValueError(f"{name} differs between layers ({key}), which is not supported")
            log.warning("%s of %s is not known, and ignored", key, name)


def parse_rope(config: HfConfig) -> RopeConfig:
    """The rotary parameters from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    raw = config.rope_scaling or config.rope_parameters or RawRope()
    rope_type = raw.rope_type or raw.type or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"the rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    _check_bounds(raw, ROPE_BOUNDS)
    for partial in (raw.partial_rotary_factor, config.partial_rotary_factor):
        if partial not in (None, 1):
            raise ValueError(f"partial_rotary_factor must be 1, got {partial}")
    if rope_type != "default" and raw.factor is None:
        raise ValueError(f"the rope type {rope_type} needs a factor")
    original = config.original_max_position_embeddings or raw.original_max_position_embeddings
    if rope_type == "dynamic":  # transformers measures its stretch against this, whatever else is given
        original = config.max_position_embeddings
    given = {name: getattr(raw, name, None) for name in RopeConfig.__struct_fields__}
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {"rope_type": rope_type, "original_max_position": original or config.max_position_embeddings}
    fields["theta"] = raw.rope_theta or config.rope_theta or 10000.0
    rope = RopeConfig(**fields)
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(f"low_freq_factor ({rope.low_freq_factor}) must be below high_freq_factor ({rope.high_freq_factor})")
    return rope


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


def _checked_len(longest: int) -> int:
    if not 2 <= longest <= MAX_MODEL_LEN:
        raise ValueError(f"the context length that it asks for must be between 2 and {MAX_MODEL_LEN} tokens, got {longest}")
    return longest


def _has_sliding_layer(config: HfConfig) -> bool:
    if config.layer_types is not None:
        return "sliding_attention" in config.layer_types
    return config.max_window_layers < config.num_hidden_layers
