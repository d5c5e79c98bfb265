"""The weights of a decoder as the kernels want them: q, k, v fused into one matrix, gate and up into another.

Every tensor is allocated once; a checkpoint's tensors are copied into their slices, which `by_name` lists.

On a CPU a matrix [O, I] lies in memory as [I, O]. Two cores, float32, SmolLM2's shapes: from 4 to 48 tokens MKL multiplies that way
1.3 to 2.5 times faster, with 1 token and with hundreds as fast, with 2 and 3 a quarter slower.

V = vocabulary, D = model width, I = MLP width, H = query heads, K = KV heads, F = head width, E = (H + 2K) * F
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.model_config import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; None where the model has no such weight, or `fold_norms` has put it into the matrix behind it."""

    input_norm_D: Tensor | None
    qkv_ED: Tensor
    qkv_bias_E: Tensor | None
    q_norm_F: Tensor | None
    k_norm_F: Tensor | None
    out_DX: Tensor  # X = H * F
    out_bias_D: Tensor | None
    post_norm_D: Tensor | None
    gate_up_JD: Tensor  # J = 2 * I
    gate_up_bias_J: Tensor | None
    down_DI: Tensor
    down_bias_D: Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """All weights. Of a tied model, `head_VD` is `embedding_VD`."""

    embedding_VD: Tensor
    layers: list[LayerWeights]
    final_norm_D: Tensor
    head_VD: Tensor


def allocate_weights(config: ModelConfig, dtype: torch.dtype, device: str) -> ModelWeights:
    """Uninitialised weights of the model's shapes."""

    def new(*shape: int) -> Tensor:
        if device == "cpu" and len(shape) == 2:
            return torch.empty(shape[::-1], dtype=dtype, device=device).t()
        return torch.empty(shape, dtype=dtype, device=device)

    embedding_VD = new(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding_VD=embedding_VD,
        layers=[_allocate_layer(config, new) for _ in range(config.num_layers)],
        final_norm_D=new(config.hidden_size),
        head_VD=embedding_VD if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, new) -> LayerWeights:
    D, I, E, F = config.hidden_size, config.intermediate_size, config.qkv_size, config.head_dim
    return LayerWeights(
        input_norm_D=new(D),
        qkv_ED=new(E, D),
        qkv_bias_E=new(E) if config.qkv_bias else None,
        q_norm_F=new(F) if config.qk_norm else None,
        k_norm_F=new(F) if config.qk_norm else None,
        out_DX=new(D, config.num_heads * F),
        out_bias_D=new(D) if config.out_bias else None,
        post_norm_D=new(D),
        gate_up_JD=new(2 * I, D),
        gate_up_bias_J=new(2 * I) if config.mlp_bias else None,
        down_DI=new(D, I),
        down_bias_D=new(D) if config.mlp_bias else None,
    )


def by_name(weights: ModelWeights, config: ModelConfig) -> dict[str, Tensor]:
    """Where each tensor of a checkpoint belongs: its Hugging Face name and the slice that it fills."""
    slices = {"model.embed_tokens.weight": weights.embedding_VD, "model.norm.weight": weights.final_norm_D}
    if not config.tie_word_embeddings:
        slices["lm_head.weight"] = weights.head_VD
    for i, layer in enumerate(weights.layers):
        slices |= {f"model.layers.{i}.{name}": tensor for name, tensor in _layer_slices(layer, config) if tensor is not None}
    return slices


def _layer_slices(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor | None]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer.input_norm_D
    for kind, fused in (("weight", layer.qkv_ED), ("bias", layer.qkv_bias_E)):
        if fused is not None:
            parts = fused.split([q_size, kv_size, kv_size])
            yield from ((f"self_attn.{name}_proj.{kind}", part) for name, part in zip("qkv", parts))
    yield "self_attn.q_norm.weight", layer.q_norm_F
    yield "self_attn.k_norm.weight", layer.k_norm_F
    yield "self_attn.o_proj.weight", layer.out_DX
    yield "self_attn.o_proj.bias", layer.out_bias_D
    yield "post_attention_layernorm.weight", layer.post_norm_D
    for kind, fused in (("weight", layer.gate_up_JD), ("bias", layer.gate_up_bias_J)):
        if fused is not None:
            yield from ((f"mlp.{name}_proj.{kind}", part) for name, part in zip(("gate", "up"), fused.chunk(2)))
    yield "mlp.down_proj.weight", layer.down_DI
    yield "mlp.down_proj.bias", layer.down_bias_D


def fold_norms(weights: ModelWeights) -> ModelWeights:
    """The layers' norms without weights of their own: column d of the matrix behind a norm is multiplied by weight d, in place.

    Kernels then need no weight before their products, and x meets the matrix unrounded. The final norm stays: a tied head is the
    embedding too.
    """
    for layer in weights.layers:
        for norm_D, matrix in ((layer.input_norm_D, layer.qkv_ED), (layer.post_norm_D, layer.gate_up_JD)):
            matrix.copy_(matrix.float() * norm_D.float())
    return replace(weights, layers=[replace(layer, input_norm_D=None, post_norm_D=None) for layer in weights.layers])


def weight_bytes(weights: ModelWeights, config: ModelConfig) -> int:
    """Memory of the weights; a tied head counts once."""
    return sum(tensor.nbytes for tensor in by_name(weights, config).values())
