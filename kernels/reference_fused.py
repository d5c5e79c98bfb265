"""The projections and the head of a decode step in plain torch, composed of kernels.reference, to test their kernels against.

The norms have no weight of their own: it is in the projection's weights.

B = rows of the step, D, K = width of a projection's input, O = its outputs, I = MLP width, J = 2I (gate rows, then up rows),
V = vocabulary, R = rows of the row state
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference

# What best_B holds while no logit has been seen: below every packed one.
NOTHING = -(1 << 63)
_ID_BITS = 0x7FFFFFFF


class Chance(NamedTuple):
    """What the noise of a step's rows follows from: row b of the step is row rows_B[b] of the row state."""

    rows_B: Tensor
    temperature_R: Tensor
    seed_R: Tensor
    length_R: Tensor


def norm_linear(x_BD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, out_BO: Tensor, eps: float) -> None:
    """out = rms_norm(x) @ weight.T + bias."""
    normed_BD = torch.empty_like(x_BD)
    reference.rms_norm(x_BD, None, normed_BD, eps)
    reference.linear(normed_BD, weight_OD, bias_O, out_BO)


def linear_add(a_BK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, x_BO: Tensor) -> None:
    """x += a @ weight.T + bias."""
    product_BO = torch.empty_like(x_BO)
    reference.linear(a_BK, weight_OK, bias_O, product_BO)
    x_BO.add_(product_BO)


def norm_gate_up(x_BD: Tensor, weight_JD: Tensor, bias_J: Tensor | None, out_BI: Tensor, eps: float) -> None:
    """out = silu(gate) * up of gate, up = rms_norm(x) @ weight.T + bias."""
    gate_up_BJ = x_BD.new_empty(len(x_BD), len(weight_JD))
    norm_linear(x_BD, weight_JD, bias_J, gate_up_BJ, eps)
    reference.silu_mul(gate_up_BJ, out_BI)


def head_sample(
    normed_BD: Tensor, head_VD: Tensor, sampled_vocab: int, best_B: Tensor, chance: Chance | None = None
) -> None:
    """Raise each best_B, int64, to its row's best packed token; NOTHING before the first.

    A token's value is its logit or, with chance and a temperature above 0, logit / temperature + Gumbel noise of its row's seed and
    next position. Ids from sampled_vocab up do not count. The higher half of a packed token orders like its value, NaN above
    everything; the lower half is 0x7FFFFFFF - id, so the lowest id wins among equals.
    """
    assert 0 < sampled_vocab <= len(head_VD) and best_B.shape == (len(normed_BD),) and best_B.dtype == torch.int64
    logits_BV = normed_BD.new_empty(len(normed_BD), len(head_VD))
    reference.linear(normed_BD, head_VD, None, logits_BV)
    values_BV = logits_BV[:, :sampled_vocab].float()
    if chance is not None:
        values_BV = _add_noise(values_BV, chance)
    ids_V = torch.arange(sampled_vocab, device=normed_BD.device)
    packed_BV = (_ordered(values_BV).long() << 32) | (_ID_BITS - ids_V)
    torch.maximum(best_B, packed_BV.amax(1), out=best_B)


def _add_noise(values_BV: Tensor, chance: Chance) -> Tensor:
    B, V = values_BV.shape
    rows_B = chance.rows_B.long()
    temperature_B1 = chance.temperature_R[rows_B, None]
    quads = torch.arange(-(-V // 4), device=values_BV.device)
    seed_C = chance.seed_R[rows_B].repeat_interleave(len(quads))
    position_C = (chance.length_R[rows_B] + 1).repeat_interleave(len(quads))
    noise_BV = reference.gumbel_noise(seed_C, position_C, quads.repeat(B)).view(B, -1)[:, :V]
    return torch.where(temperature_B1 > 0, values_BV / temperature_B1 + noise_BV, values_BV)


def _ordered(values: Tensor) -> Tensor:
    """int32 that order as the float32 values do; every NaN, of either sign, above infinity, and -0 equal to 0."""
    bits = torch.where(values == 0, 0.0, values).view(torch.int32)
    return torch.where(values.isnan(), _ID_BITS, torch.where(bits < 0, bits ^ _ID_BITS, bits))
