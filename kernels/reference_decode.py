"""The row ops and the attention of a decode step in plain torch: what their kernels are tested against.

B = rows of the step, R = rows of the row state (the last one is scratch: padding points at it), H = query heads, K = KV heads,
F = head width, E = (H + 2K) * F, X = H * F, V = vocabulary, D = model width; a block table is [R, blocks of a row]
"""

import torch
from torch import Tensor

from kernels import reference
from kernels.reference_fused import NOTHING

_ID_BITS = 0x7FFFFFFF
_EXPONENT_BITS = 0x7F800000


def embed_rows(rows_B: Tensor, last_token_R: Tensor, table_VD: Tensor, x_BD: Tensor, pdl: bool = False) -> None:
    """Write the embeddings of the rows' last tokens."""
    reference.embed(last_token_R[rows_B], table_VD, x_BD)


def decode_attention(
    qkv_BE: Tensor,
    rows_B: Tensor,
    length_R: Tensor,
    block_table_RB: Tensor,
    cos: Tensor,
    sin: Tensor,
    rope_by_position: bool,
    q_norm_F: Tensor | None,
    k_norm_F: Tensor | None,
    eps: float,
    k_pool: Tensor,
    v_pool: Tensor,
    scratch: object,
    out_BX: Tensor,
    scale: float,
    config: object,
    pdl: bool = False,
) -> None:
    """Write the new token's key and value into its row's blocks, and the attention of its queries over the whole row into out.

    The new token of row r = rows_B[b] has position length_R[r]. cos and sin are tables over positions, or with
    rope_by_position=False hold one line per b. Padding writes into the scratch block and gets zeros. scratch, config and pdl are
    the kernel's affair.
    """
    B, F, block_size = len(rows_B), k_pool.shape[3], k_pool.shape[2]
    position_B = length_R[rows_B]
    is_padding_B = rows_B == len(length_R) - 1
    block_B = block_table_RB[rows_B, position_B // block_size]
    slots_B = torch.where(is_padding_B, -1, block_B * block_size + position_B % block_size)
    context_B = torch.where(is_padding_B, 0, position_B + 1)
    starts_B1 = torch.arange(B + 1, dtype=torch.int32, device=rows_B.device)
    plan = reference.plan_step(slots_B, block_table_RB, rows_B, starts_B1, context_B, k_pool)
    cos_BF, sin_BF = (table[position_B] if rope_by_position else table for table in (cos, sin))
    q_BHF = torch.empty_like(out_BX).view(B, -1, F)
    reference.rope_and_write_kv(qkv_BE, q_norm_F, k_norm_F, eps, cos_BF, sin_BF, plan, k_pool, v_pool, q_BHF)
    reference.paged_attention(q_BHF, k_pool, v_pool, plan, out_BX.view(B, -1, F), scale)


def finish_rows(
    best_B: Tensor, rows_B: Tensor, last_token_R: Tensor, length_R: Tensor, sampled_B: Tensor, pdl: bool = False
) -> None:
    """Unpack the sampled tokens, write them into their rows, and lengthen the rows by the token that the step has computed.

    A row whose best value is not finite gets NO_TOKEN, and 0 as its last token, which has an embedding. The scratch row keeps
    length 0. best_B is left at NOTHING for the next step.
    """
    ordered_B = best_B >> 32
    bits_B = torch.where(ordered_B < 0, ordered_B ^ _ID_BITS, ordered_B)
    is_finite_B = (bits_B & _EXPONENT_BITS) != _EXPONENT_BITS
    token_B = torch.where(is_finite_B, _ID_BITS - (best_B & _ID_BITS), reference.NO_TOKEN)
    sampled_B.copy_(token_B)
    last_token_R[rows_B] = token_B.clamp(min=0).to(last_token_R.dtype)
    length_R[rows_B] += 1
    length_R[-1] = 0
    best_B.fill_(NOTHING)
