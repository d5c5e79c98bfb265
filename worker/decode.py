"""A decode step as a chain of fused kernels: five a layer, each launched while its predecessor still runs.

Everything that a step needs lies in the row state, so the chain depends on its bucket alone and a graph can hold it.

B = rows of the step (a bucket), R = rows, V = vocabulary, D = model width, I = MLP width, E = (H + 2K) * F, X = H * F, L = longest context
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.candidates import Config
from kernels.decode_attention import DecodeConfig, DecodeScratch, decode_attention
from kernels.decode_attention import allocate_scratch as allocate_attention_scratch
from kernels.head import Head, HeadConfig, head_sample
from kernels.norm import rms_norm
from kernels.projection import Op, Operands, Projection, Scratch, allocate_scratch
from kernels.reference_fused import NOTHING, Chance
from kernels.rows import embed_rows, finish_rows
from worker.model import TransformerModel
from worker.model_config import ModelConfig
from worker.parameters import LayerWeights
from worker.rows import RowState, SamplingKind


@dataclass(frozen=True)
class LayerProjections:
    """The four products of a layer, at one bucket."""

    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection


def layer_projections(c: ModelConfig, dtype: torch.dtype, rows: int) -> LayerProjections:
    """What is to be computed, whatever computes it."""
    X, eps = c.num_heads * c.head_dim, c.rms_norm_eps
    return LayerProjections(
        qkv=Projection(Op.NORM_LINEAR, c.qkv_size, c.hidden_size, rows, dtype, c.qkv_bias, eps),
        out=Projection(Op.LINEAR_ADD, c.hidden_size, X, rows, dtype, c.out_bias),
        gate_up=Projection(Op.NORM_GATE_UP, c.intermediate_size, c.hidden_size, rows, dtype, c.mlp_bias, eps),
        down=Projection(Op.LINEAR_ADD, c.hidden_size, c.intermediate_size, rows, dtype, c.mlp_bias),
    )


def head_of(c: ModelConfig, dtype: torch.dtype, rows: int, sampled_vocab: int, has_chance: bool) -> Head:
    """The head and its sampling at one bucket."""
    return Head(c.vocab_size, c.hidden_size, rows, dtype, sampled_vocab, has_chance)


def operands_of(layer: LayerWeights, x: Tensor, qkv: Tensor, attended: Tensor, mlp: Tensor) -> dict[str, Operands]:
    """The tensors of a layer's four products."""
    return {
        "qkv": Operands(x, layer.qkv_ED, layer.qkv_bias_E, qkv),
        "out": Operands(attended, layer.out_DX, layer.out_bias_D, x),
        "gate_up": Operands(x, layer.gate_up_JD, layer.gate_up_bias_J, mlp),
        "down": Operands(mlp, layer.down_DI, layer.down_bias_D, x),
    }


@dataclass(frozen=True)
class BucketPlan:
    """Which kernel computes what at one bucket."""

    projections: LayerProjections
    configs: dict[str, Config]  # by the field names of LayerProjections
    attention: DecodeConfig
    head: HeadConfig


class DecodeChain:
    """Runs decode steps of a transformer over one row state. Allocates once, for the largest bucket."""

    def __init__(self, model: TransformerModel, rows: RowState, sampled_vocab: int, plans: dict[int, BucketPlan], pdl: bool):
        c, most = model.config, max(plans)
        assert all(layer.input_norm_D is None and layer.post_norm_D is None for layer in model.weights.layers), "norms are not folded"
        self.model, self.rows, self.plans, self.pdl = model, rows, plans, pdl
        self.sampled_vocab = sampled_vocab

        def empty(width: int) -> Tensor:
            return torch.zeros(most, width, dtype=model.dtype, device=model.device)

        self.x_BD, self.normed_BD, self.qkv_BE = empty(c.hidden_size), empty(c.hidden_size), empty(c.qkv_size)
        self.attended_BX, self.mlp_BI = empty(c.num_heads * c.head_dim), empty(c.intermediate_size)
        self.best_B = torch.full((most,), NOTHING, dtype=torch.int64, device=model.device)
        self.sampled_B = torch.zeros(most, dtype=torch.int32, device=model.device)
        self.scratch = self._projection_scratch()
        steps = [(bucket, plan.attention) for bucket, plan in plans.items()]
        self.attention_scratch: DecodeScratch = allocate_attention_scratch(
            steps, c.num_heads, c.num_kv_heads, c.head_dim, torch.device(model.device)
        )
        self.cos, self.sin = self._rope_tables(most)

    def _projection_scratch(self) -> Scratch:
        sizes = [
            config.scratch_sizes(getattr(plan.projections, name))
            for plan in self.plans.values()
            for name, config in plan.configs.items()
        ]
        return allocate_scratch(sizes, self.model.dtype, torch.device(self.model.device))

    def _rope_tables(self, most: int) -> tuple[Tensor, Tensor]:
        """Tables over positions; one line per row of the step where a position alone does not say the angle."""
        lines = self.model.max_model_len if self.is_rope_by_position else most
        shape = (lines, self.model.config.head_dim)
        cos, sin = (torch.zeros(shape, dtype=torch.float32, device=self.model.device) for _ in range(2))
        if self.is_rope_by_position:
            positions = torch.arange(lines, dtype=torch.int32, device=self.model.device)
            self.model.rope.cos_sin(positions, torch.zeros_like(positions), cos, sin)
        return cos, sin

    @property
    def is_rope_by_position(self) -> bool:
        return self.model.config.rope.rope_type != "dynamic"

    @torch.inference_mode()
    def run(self, rows_B: Tensor, kind: SamplingKind) -> Tensor:
        """Launch one step; the tokens that it samples, int32 [B], in a buffer of its own. Not for FILTERED rows: see `hidden`."""
        B, model, rows = len(rows_B), self.model, self.rows
        x_BD = self.hidden(rows_B)
        chance = None
        if kind is SamplingKind.RANDOM:
            chance = Chance(rows_B, rows.temperature_R, rows.seed_R, rows.length_R)
        head = head_of(model.config, model.dtype, B, self.sampled_vocab, has_chance=chance is not None)
        normed_BD, best_B, sampled_B = self.normed_BD[:B], self.best_B[:B], self.sampled_B[:B]
        rms_norm(x_BD, model.weights.final_norm_D, normed_BD, model.config.rms_norm_eps, self.pdl)
        head_sample(self.plans[B].head, head, normed_BD, model.weights.head_VD, best_B, chance, self.pdl)
        finish_rows(best_B, rows_B, rows.last_token_R, rows.length_R, sampled_B, self.pdl)
        return sampled_B

    @torch.inference_mode()
    def hidden(self, rows_B: Tensor) -> Tensor:
        """Launch the layers; the last one's output [B, D]. The rows' lengths stay as they are."""
        B = len(rows_B)
        x_BD, qkv_BE, attended_BX, mlp_BI = (t[:B] for t in (self.x_BD, self.qkv_BE, self.attended_BX, self.mlp_BI))
        embed_rows(rows_B, self.rows.last_token_R, self.model.weights.embedding_VD, x_BD)
        attend = self._attention(rows_B, qkv_BE, attended_BX)
        for layer, (k_pool, v_pool) in zip(self.model.weights.layers, self.model.kv_pools, strict=True):
            operands = operands_of(layer, x_BD, qkv_BE, attended_BX, mlp_BI)
            self._project("qkv", B, operands)
            attend(layer, k_pool, v_pool)
            self._project("out", B, operands)
            self._project("gate_up", B, operands)
            self._project("down", B, operands)
        return x_BD

    def _project(self, name: str, bucket: int, operands: dict[str, Operands]) -> None:
        plan = self.plans[bucket]
        plan.configs[name].run(getattr(plan.projections, name), operands[name], self.scratch, self.pdl)

    def _attention(self, rows_B: Tensor, qkv_BE: Tensor, attended_BX: Tensor) -> Callable[[LayerWeights, Tensor, Tensor], None]:
        rows, model, B = self.rows, self.model, len(rows_B)
        cos, sin = self.cos, self.sin
        if not self.is_rope_by_position:
            cos, sin = cos[:B], sin[:B]
            model.rope.cos_sin(rows.length_R[rows_B], rows.prompt_len_R[rows_B], cos, sin)

        def attend(layer: LayerWeights, k_pool: Tensor, v_pool: Tensor) -> None:
            decode_attention(
                qkv_BE, rows_B, rows.length_R, rows.block_table_RB, cos, sin, self.is_rope_by_position, layer.q_norm_F, layer.k_norm_F,
                model.config.rms_norm_eps, k_pool, v_pool, self.attention_scratch, attended_BX, model.scale, self.plans[B].attention,
                self.pdl,
            )  # fmt: skip

        return attend
