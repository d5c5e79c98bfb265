"""The transformer: one step of a batch through a decoder of the Llama family, over a paged KV cache.

T = tokens of a step, N = samples, S = sequences, V = vocabulary, D = model width, I = MLP width, H = query heads, K = KV heads,
F = head width, E = (H + 2K) * F, R = rows, B = blocks of a row
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from worker.model_config import ModelConfig
from worker.parameters import LayerWeights, ModelWeights
from worker.rope import Rope


class Batch(Protocol):
    """One step. Index tensors are int32; what is known of every token, then of every sequence."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # where their KV goes; -1: nowhere
    prompt_lens_T: Tensor  # of the token's request
    rows_S: Tensor
    query_start_S1: Tensor
    context_lens_S: Tensor  # this step's tokens included
    sample_index_N: Tensor  # tokens whose logits are wanted
    block_table_RB: Tensor


@dataclass(frozen=True)
class Buffers:
    """Activations, allocated once for the largest step."""

    x_TD: Tensor
    residual_TD: Tensor
    qkv_TE: Tensor
    q_THF: Tensor
    attended_THF: Tensor
    gate_up_TJ: Tensor
    mlp_TI: Tensor
    cos_TF: Tensor
    sin_TF: Tensor

    def first(self, num_tokens: int) -> "Buffers":
        """The part that a step of so many tokens uses."""
        return Buffers(*(tensor[:num_tokens] for tensor in vars(self).values()))


class TransformerModel:
    """Weights, KV pools and activations of one model on one device, in the precision of its weights."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: ModuleType, max_model_len: int):
        self.config = config
        self.weights = weights
        self.ops = ops
        self.max_model_len = max_model_len
        self.vocab_size = config.vocab_size
        self.dtype = weights.embedding_VD.dtype
        self.device = weights.embedding_VD.device
        self.kv_bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize
        self.rope = Rope(config.rope, config.head_dim, self.device)
        self.scale = config.head_dim**-0.5

    def allocate_pools(self, num_blocks: int, block_size: int) -> None:
        """Allocate KV pools of num_blocks blocks and one scratch block, in the place of earlier ones."""
        config = self.config
        self.kv_pools: list[tuple[Tensor, Tensor]] = []  # the earlier ones go first
        self.kv_CP = self._zeros(0)
        # One allocation: torch rounds each up to 2 MiB, which for every layer's keys and values would be 100 MiB of the room.
        pools = self._zeros(config.num_layers, 2, num_blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        self.kv_pools = [(k_pool, v_pool) for k_pool, v_pool in pools]
        self.kv_CP = pools.flatten(0, 1)

    def allocate_buffers(self, max_tokens: int, max_samples: int) -> None:
        """Allocate the buffers of steps up to these sizes."""
        config = self.config
        T, N, D, I, F = max_tokens, max_samples, config.hidden_size, config.intermediate_size, config.head_dim
        self.buffers = Buffers(
            x_TD=self._zeros(T, D),
            residual_TD=self._zeros(T, D),
            qkv_TE=self._zeros(T, config.qkv_size),
            q_THF=self._zeros(T, config.num_heads, F),
            attended_THF=self._zeros(T, config.num_heads, F),
            gate_up_TJ=self._zeros(T, 2 * I),
            mlp_TI=self._zeros(T, I),
            cos_TF=self._zeros(T, F, dtype=torch.float32),
            sin_TF=self._zeros(T, F, dtype=torch.float32),
        )
        self.sampled_ND, self.sampled_residual_ND = self._zeros(N, D), self._zeros(N, D)
        self.head_NV = self._zeros(N, self.vocab_size)
        self.logits_NV = self.head_NV if self.dtype == torch.float32 else self._zeros(N, self.vocab_size, dtype=torch.float32)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Run a step; the float32 logits of its samples, [N, V], valid until the next step."""
        b = self.buffers.first(len(batch.token_ids_T))
        plan = self.ops.plan_step(
            batch.slots_T,
            batch.block_table_RB,
            batch.rows_S,
            batch.query_start_S1,
            batch.context_lens_S,
            self.kv_pools[0][0],
        )
        self.rope.cos_sin(batch.positions_T, batch.prompt_lens_T, b.cos_TF, b.sin_TF)
        self.ops.embed(batch.token_ids_T, self.weights.embedding_VD, b.x_TD)
        b.residual_TD.zero_()
        for layer, (k_pool, v_pool) in zip(self.weights.layers, self.kv_pools):
            self._attention(layer, b, plan, k_pool, v_pool)
            self._mlp(layer, b)
        return self._head(b, batch.sample_index_N)

    @torch.inference_mode()
    def logits_at(self, batch: Batch, index_P: Tensor) -> Tensor:
        """The float32 logits [P, V] after other tokens of the last step."""
        return self._head(self.buffers, index_P)

    def _attention(self, w: LayerWeights, b: Buffers, plan, k_pool: Tensor, v_pool: Tensor) -> None:
        ops, eps = self.ops, self.config.rms_norm_eps
        ops.add_rms_norm(b.x_TD, b.residual_TD, w.input_norm_D, b.x_TD, eps)
        ops.linear(b.x_TD, w.qkv_ED, w.qkv_bias_E, b.qkv_TE)
        ops.rope_and_write_kv(b.qkv_TE, w.q_norm_F, w.k_norm_F, eps, b.cos_TF, b.sin_TF, plan, k_pool, v_pool, b.q_THF)
        ops.paged_attention(b.q_THF, k_pool, v_pool, plan, b.attended_THF, self.scale)
        ops.linear(b.attended_THF.flatten(1), w.out_DX, w.out_bias_D, b.x_TD)

    def _mlp(self, w: LayerWeights, b: Buffers) -> None:
        ops = self.ops
        ops.add_rms_norm(b.x_TD, b.residual_TD, w.post_norm_D, b.x_TD, self.config.rms_norm_eps)
        if w.experts is not None:
            experts = self.config.experts
            chosen = ops.choose_experts(b.x_TD, w.experts.router_MD, experts.num_chosen, experts.normalises)
            ops.expert_mlps(b.x_TD, *chosen, w.experts.gate_up_MJD, w.experts.down_MDI, b.x_TD)
            return
        ops.linear(b.x_TD, w.gate_up_JD, w.gate_up_bias_J, b.gate_up_TJ)
        ops.silu_mul(b.gate_up_TJ, b.mlp_TI)
        ops.linear(b.mlp_TI, w.down_DI, w.down_bias_D, b.x_TD)

    def _head(self, b: Buffers, sample_index_N: Tensor) -> Tensor:
        """Only samples get this far: a prompt's other tokens have no use for logits."""
        N = len(sample_index_N)
        x_ND, residual_ND = self.sampled_ND[:N], self.sampled_residual_ND[:N]
        torch.index_select(b.x_TD, 0, sample_index_N, out=x_ND)
        torch.index_select(b.residual_TD, 0, sample_index_N, out=residual_ND)
        return self.head(residual_ND.add_(x_ND))

    def head(self, residual_ND: Tensor) -> Tensor:
        """The float32 logits [N, V] that follow the last layer's output, valid until the next step."""
        N = len(residual_ND)
        x_ND, head_NV, logits_NV = self.sampled_ND[:N], self.head_NV[:N], self.logits_NV[:N]
        self.ops.rms_norm(residual_ND, self.weights.final_norm_D, x_ND, self.config.rms_norm_eps)
        self.ops.linear(x_ND, self.weights.head_VD, None, head_NV)
        return logits_NV if self.logits_NV is self.head_NV else logits_NV.copy_(head_NV)
