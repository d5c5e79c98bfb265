"""The plain torch version of a mixture of experts: https://arxiv.org/abs/1701.06538, as Mixtral and Qwen3 do it.

T = tokens of a step, D = model width, M = experts, N = experts of a token, I = width of an expert, J = 2 * I, X = a token's places with
one expert
"""

import torch
import torch.nn.functional as functional
from torch import Tensor


def choose_experts(x_TD: Tensor, router_MD: Tensor, num_chosen: int, normalises: bool) -> tuple[Tensor, Tensor]:
    """Each token's N likeliest experts and their weights: float32 [T, N] and int64 [T, N]."""
    chances_TM = torch.softmax(torch.mm(x_TD, router_MD.t()), dim=-1, dtype=torch.float32)
    weights_TN, experts_TN = torch.topk(chances_TM, num_chosen, dim=-1)
    if normalises:
        weights_TN /= weights_TN.sum(dim=-1, keepdim=True)
    return weights_TN, experts_TN


def expert_mlps(
    x_TD: Tensor, weights_TN: Tensor, experts_TN: Tensor, gate_up_MJD: Tensor, down_MDI: Tensor, out_TD: Tensor
) -> None:
    """The weighted sum of what a token's experts make of it, into out (may be x): one expert after the other, its tokens together."""
    sum_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in torch.unique(experts_TN).tolist():
        tokens_X, places_X = torch.where(experts_TN == expert)
        gate_XI, up_XI = torch.mm(x_TD[tokens_X], gate_up_MJD[expert].t()).chunk(2, dim=-1)
        hidden_XI = functional.silu(gate_XI.float()).mul_(up_XI.float()).to(x_TD.dtype)
        made_XD = torch.mm(hidden_XI, down_MDI[expert].t())
        sum_TD.index_add_(0, tokens_X, made_XD.float() * weights_TN[tokens_X, places_X, None])
    out_TD.copy_(sum_TD)
