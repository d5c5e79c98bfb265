"""GGUF files: configuration from the metadata, tensors dequantised under their Hugging Face names.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from torch import Tensor

from worker.model_config import ModelConfig, parse_model_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"

# our config.json key -> the metadata key after "ARCHITECTURE."
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
}
OPTIONAL = {"num_key_value_heads", "head_dim", "sliding_window"}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufFile:
    """A TensorSource over one GGUF file."""

    def __init__(self, path: Path):
        """Read the header. Raises ValueError naming the file when it is damaged or of an unsupported architecture."""
        self.path = path
        self.reader = open_gguf(path)
        self.architecture = self._value("general.architecture")
        if self.architecture not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ValueError(f"{path}: the architecture {self.architecture} is not supported; supported are {supported}")
        self.tensors = {_hf_name(tensor.name): tensor for tensor in self.reader.tensors}
        self.divisors = self.tensors.pop(ROPE_DIVISORS, None)
        self.config = self._config()

    def names(self):
        """See TensorSource."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource. The file lists dimensions from the innermost out."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str) -> Tensor:
        """See TensorSource: float32, dequantised. Raises ValueError for a quantisation that the gguf package does not know."""
        values = self._dequantised(self.tensors[name])
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            num_heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            return halves_from_pairs(values, num_heads)
        return values

    def _dequantised(self, tensor: gguf.ReaderTensor) -> Tensor:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{self.path}: {tensor.name} is quantised as {kind}, which is not supported") from None
        return torch.from_numpy(np.require(values, requirements="W"))  # float32 tensors come as the read-only file itself

    def _value(self, key: str):
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def _config(self) -> ModelConfig:
        values = {name: self._value(f"{self.architecture}.{key}") for name, key in KEYS.items()}
        for name, value in values.items():
            if value is None and name not in OPTIONAL:
                raise ValueError(f"{self.path}: the metadata lacks {self.architecture}.{KEYS[name]}")
        try:
            config = parse_model_config(self._as_config_json(values))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        return config if self.divisors is None else self._with_divisors(config)

    def _with_divisors(self, config: ModelConfig) -> ModelConfig:
        divisors = self._dequantised(self.divisors).tolist()
        num_pairs = config.head_dim // 2
        if len(divisors) != num_pairs:
            raise ValueError(f"{self.path}: {ROPE_DIVISORS} holds {len(divisors)} numbers where head_dim asks for {num_pairs}")
        return msgspec.structs.replace(config, rope=msgspec.structs.replace(config.rope, divisors=tuple(divisors)))

    def _as_config_json(self, values: dict) -> dict:
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        rotated = self._value(f"{self.architecture}.rope.dimension_count") or values["head_dim"]
        rope = {name: self._value(f"{self.architecture}.{key}") for name, key in ROPE_KEYS.items()}
        rope["rope_type"] = "default" if rope["rope_type"] in (None, "none") else rope["rope_type"]
        return values | {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": self.shape("model.embed_tokens.weight")[0] if "model.embed_tokens.weight" in self.tensors else 0,
            "use_sliding_window": values["sliding_window"] is not None,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "partial_rotary_factor": rotated / values["head_dim"],
            "rope_parameters": {name: value for name, value in rope.items() if value is not None},
        }


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open a file. Raises ValueError with the file's name when it is cut short or no GGUF file."""
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a whole GGUF file ({error}): cut short, damaged, or a git-lfs pointer") from None


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; a name we do not know stays, and is refused with its own name."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    return OTHER_NAMES.get(name, name)


def halves_from_pairs(values: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of llama.cpp's q and k, whose rotation pairs neighbours where ours pairs the halves of a head."""
    pairs = values.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)
