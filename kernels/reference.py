"""The plain torch version of every op: what the CPU runs and what the Triton kernels are tested against.

An op checks its shapes and writes into the outputs it is given. Index tensors are int32, seeds int64.

T = tokens of a step, S = sequences, V = vocabulary, D = model width, I, O = inputs and outputs of a linear layer,
H = query heads, K = KV heads, G = H / K, F = head width, E = (H + 2K) * F, R = rows, B = blocks of a row, L = tokens attended

A KV pool is [blocks + 1, K, block_size, F]. Its last block is scratch: written by padding, never read, never handed out.
A slot is block * block_size + offset; slot -1 is in the scratch block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from kernels.reference_experts import choose_experts, expert_mlps
from kernels.reference_sampling import NO_TOKEN, gumbel_noise, philox, sample

__all__ = [
    "NO_TOKEN",
    "add_rms_norm",
    "choose_experts",
    "embed",
    "expert_mlps",
    "gumbel_noise",
    "linear",
    "paged_attention",
    "philox",
    "plan_step",
    "rms_norm",
    "rope_and_write_kv",
    "sample",
    "silu_mul",
]

# The step's lengths decide what is computed, so no graph can hold it.
READS_HOST_VALUES = True


def embed(token_ids_T: Tensor, table_VD: Tensor, out_TD: Tensor) -> None:
    """Write the embeddings of the tokens."""
    assert out_TD.shape == (len(token_ids_T), table_VD.shape[1])
    torch.index_select(table_VD, 0, token_ids_T, out=out_TD)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor) -> None:
    """out = x @ weight.T + bias."""
    assert x_TI.shape[1] == weight_OI.shape[1] and out_TO.shape == (x_TI.shape[0], weight_OI.shape[0])
    if bias_O is None:
        torch.mm(x_TI, weight_OI.t(), out=out_TO)
    else:
        torch.addmm(bias_O, x_TI, weight_OI.t(), out=out_TO)


def rms_norm(x_TD: Tensor, weight_D: Tensor | None, out_TD: Tensor, eps: float) -> None:
    """Write the rows of x (last axis; any number of axes before it), normalised, into out (may be x).

    https://arxiv.org/abs/1910.07467. The arithmetic is float32; the quotient is rounded to the model's type before the weight is
    applied, as Llama does.
    """
    assert x_TD.shape == out_TD.shape and (weight_D is None or weight_D.shape == x_TD.shape[-1:])
    x32_TD = x_TD.float()
    # The root mean square by way of the norm: one pass over the row, where squares and their mean take two and a temporary.
    scale_T1 = torch.linalg.vector_norm(x32_TD, dim=-1, keepdim=True).square_().div_(x_TD.shape[-1]).add_(eps).rsqrt_()
    if weight_D is None:
        out_TD.copy_(x32_TD * scale_T1)
    else:
        torch.mul((x32_TD * scale_T1).to(out_TD.dtype), weight_D, out=out_TD)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, out_TD: Tensor, eps: float) -> None:
    """Add x to the residual in place and write the normalised residual into out (may be x)."""
    assert x_TD.shape == residual_TD.shape
    residual_TD.add_(x_TD)
    rms_norm(residual_TD, weight_D, out_TD, eps)


def silu_mul(gate_up_T2I: Tensor, out_TI: Tensor) -> None:
    """out = silu(gate) * up in float32, where gate is the first half of the input's columns. https://arxiv.org/abs/2002.05202"""
    assert gate_up_T2I.shape == (out_TI.shape[0], 2 * out_TI.shape[1])
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    if out_TI.dtype == torch.float32:
        torch.ops.aten.silu.out(gate_TI, out=out_TI).mul_(up_TI)
    else:
        out_TI.copy_(functional.silu(gate_TI.float()).mul_(up_TI.float()))


# ---- paged attention ----------------------------------------------------------------------------------------------


class DecodeGroup(NamedTuple):
    """Sequences with one query each and contexts of similar length, padded to the longest of them."""

    tokens_S: Tensor | slice  # where their queries are
    kv_index_X: Tensor  # int64, rows of the pool, X = S * K * L
    mask_S11L: Tensor  # added to the scores: 0 or -inf


class Chunk(NamedTuple):
    """Several queries of one sequence."""

    tokens: slice
    kv_index_X: Tensor  # X = K * L
    mask_TL: Tensor | None  # as above; None: causal from the first token on


class StepPlan(NamedTuple):
    """What the attention of every layer of a step has in common; made once by `plan_step`."""

    slot_block_T: Tensor
    slot_offset_T: Tensor
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    padding: list[slice]  # tokens that attend to nothing
    gathered_2XF: Tensor  # keys and values of one group or chunk at a time, in a memory that stays in the processor's cache


def plan_step(
    slots_T: Tensor,
    block_table_RB: Tensor,
    rows_S: Tensor,
    query_start_S1: Tensor,
    context_lens_S: Tensor,
    k_pool: Tensor,
) -> StepPlan:
    """Work out indexes and masks for a step over pools like k_pool.

    Sequence s is row rows_S[s]; its queries are tokens query_start[s] up to query_start[s + 1], the last of the context_lens[s]
    tokens that its row's blocks hold with this step's. A context length of 0 is padding.
    """
    starts, context_lens = query_start_S1.tolist(), context_lens_S.tolist()
    assert starts[-1] == len(slots_T) and len(rows_S) == len(context_lens) == len(starts) - 1
    block_size = k_pool.shape[2]
    decoding: dict[int, list[int]] = {}
    chunks, padding = [], []
    for s, context_len in enumerate(context_lens):
        tokens = slice(starts[s], starts[s + 1])
        if context_len == 0:
            padding.append(tokens)
        elif tokens.stop - tokens.start == 1:
            # Blocks to the next power of two share a group, so that no sequence is padded to more than twice its length.
            num_blocks = -(-context_len // block_size)
            decoding.setdefault((num_blocks - 1).bit_length(), []).append(s)
        else:
            index_X = _kv_index(block_table_RB[rows_S[s]][None], context_lens_S[s : s + 1], context_len, k_pool)
            chunks.append(Chunk(tokens, index_X, _causal_mask(tokens.stop - tokens.start, context_len, k_pool)))
    groups = [_decode_group(members, block_table_RB, rows_S, starts, context_lens_S, k_pool) for members in decoding.values()]
    blocks_T = torch.div(slots_T, block_size, rounding_mode="floor").long()  # -1 stays -1, the scratch block
    most = max((len(part.kv_index_X) for part in (*groups, *chunks)), default=0)
    gathered_2XF = k_pool.new_empty(2, most, k_pool.shape[3])
    return StepPlan(blocks_T, slots_T.long() % block_size, groups, chunks, padding, gathered_2XF)


def _decode_group(members: list[int], block_table_RB, rows_S, starts: list[int], context_lens_S, k_pool: Tensor) -> DecodeGroup:
    sequences_S = torch.tensor(members, device=rows_S.device)
    lens_S = context_lens_S[sequences_S]
    longest = int(lens_S.max())
    index_X = _kv_index(block_table_RB[rows_S[sequences_S]], lens_S, longest, k_pool)
    mask_SL = _additive(torch.arange(longest, device=rows_S.device) < lens_S[:, None], k_pool)
    tokens = [starts[s] for s in members]
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return DecodeGroup(slice(tokens[0], tokens[0] + len(tokens)), index_X, mask_SL[:, None, None])
    return DecodeGroup(torch.tensor(tokens, device=rows_S.device), index_X, mask_SL[:, None, None])


def _kv_index(table_SB: Tensor, lens_S: Tensor, longest: int, k_pool: Tensor) -> Tensor:
    """Rows of a pool seen as [(blocks + 1) * K * block_size, F] that hold each sequence's heads and tokens in order.

    What pads a sequence points at its own first token, not at foreign memory: a masked NaN would still poison the result.
    """
    _, num_kv_heads, block_size, _ = k_pool.shape
    position_L = torch.arange(longest, device=table_SB.device)
    position_SL = torch.where(position_L < lens_S[:, None], position_L, 0)
    block_SL = table_SB.long().gather(1, position_SL // block_size)
    head_K1 = torch.arange(num_kv_heads, device=table_SB.device)[:, None]
    return ((block_SL[:, None] * num_kv_heads + head_K1) * block_size + (position_SL % block_size)[:, None]).flatten()


def _causal_mask(num_queries: int, context_len: int, k_pool: Tensor) -> Tensor | None:
    if num_queries == context_len:
        return None
    query_T1 = torch.arange(context_len - num_queries, context_len, device=k_pool.device)[:, None]
    return _additive(torch.arange(context_len, device=k_pool.device) <= query_T1, k_pool)


def _additive(attend: Tensor, k_pool: Tensor) -> Tensor:
    """A mask to add, in the pool's type: made once a step, where torch would turn a boolean one into it in every layer."""
    return k_pool.new_zeros(attend.shape).masked_fill_(~attend, -torch.inf)


def rope_and_write_kv(
    qkv_TE: Tensor,
    q_norm_F: Tensor | None,
    k_norm_F: Tensor | None,
    eps: float,
    cos_TF: Tensor,
    sin_TF: Tensor,
    plan: StepPlan,
    k_pool: Tensor,
    v_pool: Tensor,
    q_out_THF: Tensor,
) -> None:
    """Normalise q and k per head where the model does, rotate them, write k and v into their slots and q into q_out.

    The rotation pairs element i with i + F / 2 and is float32, as are cos and sin. https://arxiv.org/abs/2104.09864
    """
    T, H, F = q_out_THF.shape
    K = k_pool.shape[1]
    assert qkv_TE.shape == (T, (H + 2 * K) * F) and cos_TF.shape == sin_TF.shape == (T, F) and len(plan.slot_block_T) == T
    heads_TXF = qkv_TE.view(T, H + 2 * K, F)
    if q_norm_F is not None:
        rms_norm(heads_TXF[:, :H], q_norm_F, heads_TXF[:, :H], eps)
        rms_norm(heads_TXF[:, H : H + K], k_norm_F, heads_TXF[:, H : H + K], eps)
    x_TXF, half = heads_TXF[:, : H + K].float(), F // 2
    rotated_TXF = x_TXF * cos_TF[:, None]
    rotated_TXF[..., :half].addcmul_(x_TXF[..., half:], sin_TF[:, None, :half], value=-1)
    rotated_TXF[..., half:].addcmul_(x_TXF[..., :half], sin_TF[:, None, half:])
    q_out_THF.copy_(rotated_TXF[:, :H])
    slots = (plan.slot_block_T, plan.slot_offset_T)
    k_pool.transpose(1, 2)[slots] = rotated_TXF[:, H:].to(k_pool.dtype)
    v_pool.transpose(1, 2)[slots] = heads_TXF[:, H + K :]


def paged_attention(q_THF: Tensor, k_pool: Tensor, v_pool: Tensor, plan: StepPlan, out_THF: Tensor, scale: float) -> None:
    """Causal attention of every query to its own sequence's tokens, its own included; padding gets zeros.

    Paged as in https://arxiv.org/abs/2309.06180, with several query heads to a KV head as in https://arxiv.org/abs/2305.13245.
    """
    assert q_THF.shape == out_THF.shape and q_THF.shape[1] % k_pool.shape[1] == 0 and k_pool.shape == v_pool.shape
    for group in plan.groups:
        k_XF, v_XF = _gather_kv(k_pool, v_pool, group.kv_index_X, plan)
        out_THF[group.tokens_S] = _attend_group(q_THF[group.tokens_S], k_XF, v_XF, group.mask_S11L, scale)
    for chunk in plan.chunks:
        k_XF, v_XF = _gather_kv(k_pool, v_pool, chunk.kv_index_X, plan)
        out_THF[chunk.tokens] = _attend_chunk(q_THF[chunk.tokens], k_XF, v_XF, chunk.mask_TL, k_pool.shape[1], scale)
    for tokens in plan.padding:
        out_THF[tokens] = 0


def _gather_kv(k_pool: Tensor, v_pool: Tensor, kv_index_X: Tensor, plan: StepPlan) -> Tensor:
    F = k_pool.shape[3]
    gathered_2XF = plan.gathered_2XF[:, : len(kv_index_X)]
    torch.index_select(k_pool.view(-1, F), 0, kv_index_X, out=gathered_2XF[0])
    torch.index_select(v_pool.view(-1, F), 0, kv_index_X, out=gathered_2XF[1])
    return gathered_2XF


def _attend_group(q_SHF: Tensor, k_XF: Tensor, v_XF: Tensor, mask_S11L: Tensor, scale: float) -> Tensor:
    S, H, F = q_SHF.shape
    k_SKLF, v_SKLF = (x_XF.view(S, -1, mask_S11L.shape[-1], F) for x_XF in (k_XF, v_XF))
    # The heads that share a KV head are rows of one small matrix: 2 to 3 times faster than enable_gqa.
    q_SKGF = q_SHF.view(S, k_SKLF.shape[1], -1, F)
    return functional.scaled_dot_product_attention(q_SKGF, k_SKLF, v_SKLF, mask_S11L, scale=scale).reshape(S, H, F)


def _attend_chunk(q_THF: Tensor, k_XF: Tensor, v_XF: Tensor, mask_TL: Tensor | None, num_kv_heads: int, scale: float) -> Tensor:
    T, H, F = q_THF.shape
    G = H // num_kv_heads
    # A KV head is repeated for its query heads by a stride of 0, not by a copy.
    k_KGLF, v_KGLF = (x_XF.view(num_kv_heads, 1, -1, F).expand(-1, G, -1, -1) for x_XF in (k_XF, v_XF))
    q_KGTF = q_THF.view(T, num_kv_heads, G, F).permute(1, 2, 0, 3)
    causal = mask_TL is None
    out_KGTF = functional.scaled_dot_product_attention(q_KGTF, k_KGLF, v_KGLF, mask_TL, is_causal=causal, scale=scale)
    return out_KGTF.permute(2, 0, 1, 3).reshape(T, H, F)
