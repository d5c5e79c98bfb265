"""GGUF files: configuration from the metadata, tensors dequantised under their Hugging Face names.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import re
from collections.abc import Iterator
from copy import copy
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from torch import Tensor

from protocol.gguf_header import TensorPlace, read_header
from worker.model_config import BOUNDS, ModelConfig, parse_model_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
ROPE_DIVISORS = "rope_freqs.weight"
MAX_LAYERS = int(BOUNDS["num_hidden_layers"][1])

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
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
}
KEY_TYPES = {"rms_norm_eps": float, "rope_type": str, "original_max_position_embeddings": int}
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
    "ffn_gate_inp": "mlp.gate",
}
STACKED_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}  # of all experts of a layer
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
        header = read_header(path)
        self.metadata = header.metadata
        self.tensors = dict(part for name, place in header.tensors.items() for part in _named_parts(QuantizedTensor(path, name, place)))
        self.divisors = self.tensors.pop(ROPE_DIVISORS, None)
        self.data = np.memmap(path, np.uint8, "r")
        for tensor in [*self.tensors.values(), *([self.divisors] if self.divisors else [])]:
            tensor.check_inside(len(self.data))
        try:
            self.architecture = self._architecture()
            self.config = self._config()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def names(self):
        """See TensorSource."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        return self.tensors[name].shape

    def read(self, name: str) -> Tensor:
        """See TensorSource: float32, dequantised. Raises ValueError for a quantisation that the gguf package does not know."""
        values = self.tensors[name].read(self.data)
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            num_heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
            return halves_from_pairs(values, num_heads)
        return values

    def _architecture(self) -> str:
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ValueError(f"the architecture {architecture} is not supported; supported are {', '.join(ARCHITECTURES)}")
        return architecture

    def _value(self, key: str, kind: type = int) -> object:
        """A number or text of the architecture's own metadata, None where it is absent. Raises ValueError on another type."""
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key)
        if value is not None and type(value) is not kind:
            raise ValueError(f"{key} must be of type {kind.__name__}, got {str(value)[:40]}")
        return value

    def _config(self) -> ModelConfig:
        keys = KEYS | EXPERT_KEYS if self.architecture == "qwen3moe" else KEYS
        values = {name: self._value(key, KEY_TYPES.get(name, int)) for name, key in keys.items()}
        for name, value in values.items():
            if value is None and name not in OPTIONAL:
                raise ValueError(f"the metadata lacks {self.architecture}.{keys[name]}")
            if value == 0 and name not in OPTIONAL:
                raise ValueError(f"{self.architecture}.{keys[name]} must not be 0")
        config = parse_model_config(self._as_config_json(values))
        return config if self.divisors is None else self._with_divisors(config)

    def _with_divisors(self, config: ModelConfig) -> ModelConfig:
        divisors = self.divisors.read(self.data)
        num_pairs = config.head_dim // 2
        if divisors.shape != (num_pairs,):
            raise ValueError(f"{ROPE_DIVISORS} has shape {list(divisors.shape)} where head_dim asks for [{num_pairs}]")
        if not (divisors.isfinite() & (divisors > 0)).all():
            raise ValueError(f"{ROPE_DIVISORS} must hold positive numbers")
        return msgspec.structs.replace(config, rope=msgspec.structs.replace(config.rope, divisors=tuple(divisors.tolist())))

    def _as_config_json(self, values: dict) -> dict:
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        rotated = self._value("rope.dimension_count") or values["head_dim"]
        if rotated != values["head_dim"]:
            raise ValueError(f"{self.architecture}.rope.dimension_count must be the head width {values['head_dim']}, got {rotated}")
        rope = {name: self._value(key, KEY_TYPES.get(name, float)) for name, key in ROPE_KEYS.items()}
        rope["rope_type"] = "default" if rope["rope_type"] in (None, "none") else rope["rope_type"]
        embedding = self.tensors.get("model.embed_tokens.weight")
        return values | {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": 0 if embedding is None else embedding.shape[0],
            "use_sliding_window": bool(values["sliding_window"]),  # 0 stands for none
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self.tensors,
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "norm_topk_prob": True,  # of Qwen3's mixtures; the format has no key for it
            "mlp_only_layers": [i for i in range(min(values["num_hidden_layers"], MAX_LAYERS)) if self._is_dense(i)],
            "rope_parameters": {name: value for name, value in rope.items() if value is not None},
        }


    def _is_dense(self, layer: int) -> bool:
        return f"model.layers.{layer}.mlp.down_proj.weight" in self.tensors


class QuantizedTensor:
    """A tensor in the file, under the name that the file gives it."""

    def __init__(self, path: Path, name: str, place: TensorPlace):
        """Raises ValueError naming file and tensor for a quantisation or a shape that cannot be."""
        self.name, self.label = name, f"{path}: {name}"
        self.shape, self.start = place.shape, place.start
        try:
            self.kind = gguf.GGMLQuantizationType(place.kind)
            self.byte_shape = gguf.quants.quant_shape_to_byte_shape(place.shape, self.kind)
        except ValueError as error:
            raise ValueError(f"{self.label}: {error}") from None
        self.end = self.start + math.prod(self.byte_shape)

    def parts(self) -> list["QuantizedTensor"]:
        """The matrices that this one stacks."""
        size, found = math.prod(self.byte_shape[1:]), []
        for index in range(self.shape[0]):
            part = copy(self)
            part.shape, part.byte_shape = self.shape[1:], self.byte_shape[1:]
            part.start, part.end = self.start + index * size, self.start + (index + 1) * size
            found.append(part)
        return found

    def check_inside(self, file_size: int) -> None:
        """Raise ValueError when the file ends before the tensor does."""
        if self.end > file_size:
            raise ValueError(f"{self.label} ends at byte {self.end} of {file_size}: the file is cut short or damaged")

    def read(self, data: np.ndarray) -> Tensor:
        """The values as float32, from the file's bytes. Raises ValueError for a quantisation that the gguf package does not know."""
        try:
            values = gguf.dequantize(data[self.start : self.end].reshape(self.byte_shape), self.kind)
        except NotImplementedError:
            raise ValueError(f"{self.label} is quantised as {self.kind.name}, which is not supported") from None
        return torch.from_numpy(np.require(values, requirements="AW"))  # float32 tensors come as the read-only file itself


def _named_parts(tensor: QuantizedTensor) -> Iterator[tuple[str, QuantizedTensor]]:
    """Under Hugging Face names, where every expert has tensors of its own."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
    if not match or match[2] not in STACKED_NAMES or len(tensor.shape) != 3:
        yield _hf_name(tensor.name), tensor
        return
    for index, part in enumerate(tensor.parts()):
        yield f"model.layers.{match[1]}.mlp.experts.{index}.{STACKED_NAMES[match[2]]}.weight", part


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
