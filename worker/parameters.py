"""The weights of a decoder as the kernels want them: q, k, v fused into one matrix, gate and up into another.

Every tensor is allocated once; a checkpoint's tensors are copied into their slices, which `by_name` lists.

On a CPU a matrix [O, I] lies in memory as [I, O]. Two cores, float32, SmolLM2's shapes: from 4 to 48 tokens MKL multiplies that way
1.3 to 2.5 times faster, with 1 token and with hundreds as fast, with 2 and 3 a quarter slower.

V = vocabulary, D = model width, I = MLP width, H = query heads, K = KV heads, F = head width, E = (H + 2K) * F, M = experts
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertWeights:
    """The MLPs of a sparse layer, and what chooses among them."""

    router_MD: Tensor
    gate_up_MJD: Tensor  # J = 2 * I, I the width of an expert
    down_MDI: Tensor


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
    gate_up_JD: Tensor | None  # J = 2 * I
    gate_up_bias_J: Tensor | None
    down_DI: Tensor | None
    down_bias_D: Tensor | None
    experts: ExpertWeights | None = None  # of a sparse layer, in the place of gate_up and down


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
        if device == "cpu" and len(shape) >= 2:
            return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).mT
        return torch.empty(shape, dtype=dtype, device=device)

    embedding_VD = new(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding_VD=embedding_VD,
        layers=[_allocate_layer(config, index, new) for index in range(config.num_layers)],
        final_norm_D=new(config.hidden_size),
        head_VD=embedding_VD if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, index: int, new) -> LayerWeights:
    D, I, E, F = config.hidden_size, config.intermediate_size, config.qkv_size, config.head_dim
    is_sparse = config.experts is not None and index in config.experts.sparse_layers
    return LayerWeights(
        input_norm_D=new(D),
        qkv_ED=new(E, D),
        qkv_bias_E=new(E) if config.qkv_bias else None,
        q_norm_F=new(F) if config.qk_norm else None,
        k_norm_F=new(F) if config.qk_norm else None,
        out_DX=new(D, config.num_heads * F),
        out_bias_D=new(D) if config.out_bias else None,
        post_norm_D=new(D),
        gate_up_JD=None if is_sparse else new(2 * I, D),
        gate_up_bias_J=new(2 * I) if config.mlp_bias else None,
        down_DI=None if is_sparse else new(D, I),
        down_bias_D=new(D) if config.mlp_bias else None,
        experts=_allocate_experts(config, new) if is_sparse else None,
    )


def _allocate_experts(config: ModelConfig, new) -> ExpertWeights:
    M, D, I = config.experts.num_experts, config.hidden_size, config.experts.width
    return ExpertWeights(router_MD=new(M, D), gate_up_MJD=new(M, 2 * I, D), down_MDI=new(M, D, I))


# The sparse block, and an expert's projections.
EXPERT_NAMES = {
    "Qwen3MoeForCausalLM": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "MixtralForCausalLM": ("block_sparse_moe", "w1", "w3", "w2"),
}


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
    if layer.experts is not None:
        yield from _expert_slices(layer.experts, config)


def _expert_slices(experts: ExpertWeights, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    block, gate, up, down = EXPERT_NAMES[config.architecture]
    yield f"{block}.gate.weight", experts.router_MD
    for index, (gate_up_JD, down_DI) in enumerate(zip(experts.gate_up_MJD, experts.down_MDI, strict=True)):
        parts = zip((gate, up, down), (*gate_up_JD.chunk(2), down_DI), strict=True)
        yield from ((f"{block}.experts.{index}.{name}.weight", part) for name, part in parts)


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
