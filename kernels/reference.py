"""The plain torch version of every op: what the CPU runs and what the Triton kernels are tested against.

An op checks its shapes and writes into the outputs it is given. Index tensors are int32, seeds int64.

T = tokens of a step, S = sequences, N = samples, V = vocabulary, D = model width, I, O = inputs and outputs of a linear layer,
H = query heads, K = KV heads, G = H / K, F = head width, E = (H + 2K) * F, R = rows, B = blocks of a row, L = tokens attended,
C = candidates for a sample

A KV pool is [blocks + 1, K, block_size, F]. Its last block is scratch: written by padding, never read, never handed out.
A slot is block * block_size + offset; slot -1 is in the scratch block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

# The token of a row whose logits have no finite maximum; protocol.messages has the same number.
NO_TOKEN = -1

# The uniforms of `gumbel_noise` go up to 1 - 2**-24, so no noise is higher than this (16.636, and room for rounding).
HIGHEST_NOISE = 16.7

# Ids this far below the highest get their noise first; what they reach tells which others could still win. At temperature 1 some
# 1,500 of SmolLM2's 12,288 quads are left.
LIKELY_SPAN = 4.0

# Highest logits looked at before a row is sorted whole. 16 rows of 49,152: 0.9 and 3.8 ms, sorting 60 ms.
SHORT_LISTS = (64, 1024)


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


def rms_norm(x_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float) -> None:
    """Write the rows of x (last axis; any number of axes before it), normalised, into out (may be x).

    https://arxiv.org/abs/1910.07467. The arithmetic is float32; the quotient is rounded to the model's type before the weight is
    applied, as Llama does.
    """
    assert x_TD.shape == out_TD.shape and weight_D.shape == x_TD.shape[-1:]
    x32_TD = x_TD.float()
    scale_T1 = x32_TD.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    torch.mul((x32_TD * scale_T1).to(out_TD.dtype), weight_D, out=out_TD)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, out_TD: Tensor, eps: float) -> None:
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


# ---- sampling -----------------------------------------------------------------------------------------------------


def sample(
    logits_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    sampled_vocab: int,
    out_N: Tensor,
) -> None:
    """Write one token id per row: temperature, then top-k, then top-p among those, then min-p; then Gumbel-max.

    Temperature 0, top_k 1 and top_p 0 give the highest logit, the lowest id on ties. top_k 0 is no limit; a limit of k tokens keeps
    exactly k, the lowest ids on ties. Ids from sampled_vocab up are never chosen. A row's choice depends on that row alone, with
    noise from its seed and position. A row whose maximum is not finite (NaN, or nothing but -inf) gets NO_TOKEN.
    """
    N = len(logits_NV)
    assert logits_NV.dtype == torch.float32 and out_N.shape == (N,) and 0 < sampled_vocab <= logits_NV.shape[1]
    logits_NV = logits_NV[:, :sampled_vocab]
    best_N = logits_NV.argmax(-1)  # the place of a NaN, where there is one
    valid_N = logits_NV.gather(1, best_N[:, None])[:, 0].isfinite()
    random_M = (valid_N & (temperature_N > 0) & (top_k_N != 1) & (top_p_N > 0)).nonzero()[:, 0]
    if len(random_M):
        scaled_MV = logits_NV[random_M] / temperature_N[random_M, None]
        kept_MV = _apply_filters(scaled_MV, top_k_N[random_M], top_p_N[random_M], min_p_N[random_M])
        best_N[random_M] = _gumbel_max(kept_MV, seed_N[random_M], position_N[random_M])
    out_N.copy_(torch.where(valid_N, best_N, NO_TOKEN))


def _apply_filters(scaled_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor, min_p_M: Tensor) -> Tensor:
    """The logits with what top-k, top-p and min-p remove at -inf."""
    V = scaled_MV.shape[1]
    kept_MV = scaled_MV.clone()
    top_k_M = torch.where((top_k_M <= 0) | (top_k_M > V), V, top_k_M.long())
    limited_M = ((top_k_M < V) | (top_p_M < 1)).nonzero()[:, 0]
    if len(limited_M):
        count_M, lowest_M = _count_kept(scaled_MV[limited_M], top_k_M[limited_M], top_p_M[limited_M])
        kept_MV[limited_M] = _keep_highest(scaled_MV[limited_M], count_M, lowest_M)
    floored_M = (min_p_M > 0).nonzero()[:, 0]
    if len(floored_M):
        # p >= min_p * max(p) needs no normaliser, so it does not matter what the other filters removed.
        floor_M1 = scaled_MV[floored_M].amax(-1, keepdim=True) + min_p_M[floored_M, None].log()
        kept_MV[floored_M] = kept_MV[floored_M].masked_fill_(scaled_MV[floored_M] < floor_M1, -torch.inf)
    return kept_MV


def _count_kept(scaled_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the highest logits top-k and top-p keep, at least 1, and the lowest of them.

    A row that its few highest logits cannot decide gets a longer list; which rows those are depends on each row alone.
    """
    M, V = scaled_MV.shape
    total_M1 = (scaled_MV - scaled_MV.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    count_M, lowest_M = torch.empty_like(top_k_M), scaled_MV.new_empty(M)
    open_M = torch.arange(M, device=scaled_MV.device)
    for width in (*(width for width in SHORT_LISTS if width < V), V):
        highest_MW = scaled_MV[open_M].topk(width).values if width < V else scaled_MV[open_M].sort(descending=True).values
        k_M1, p_M1 = top_k_M[open_M, None], top_p_M[open_M, None].double()
        weight_MW = (highest_MW - highest_MW[:, :1]).double().exp_()
        weight_MW.masked_fill_(torch.arange(width, device=scaled_MV.device) >= k_M1, 0)
        up_to_MW = weight_MW.cumsum(-1)
        needed_M1 = p_M1 * torch.where(k_M1 <= width, up_to_MW[:, -1:], total_M1[open_M])
        by_p_M1 = (up_to_MW - weight_MW < needed_M1).sum(-1, keepdim=True).clamp_(min=1)
        count_M1 = torch.where(p_M1 < 1, torch.minimum(by_p_M1, k_M1), k_M1)
        decided_M = ((k_M1 <= width) | ((k_M1 == V) & (up_to_MW[:, -1:] >= needed_M1)))[:, 0]
        count_M[open_M] = count_M1[:, 0]
        lowest_M[open_M] = highest_MW.gather(1, count_M1.clamp(max=width) - 1)[:, 0]
        open_M = open_M[~decided_M]
        if not len(open_M):
            break
    return count_M, lowest_M


def _keep_highest(scaled_MV: Tensor, count_M: Tensor, lowest_M: Tensor) -> Tensor:
    """The count highest, -inf elsewhere; among equals of the lowest kept, the lowest ids stay."""
    stays_MV = scaled_MV >= lowest_M[:, None]
    for m in (stays_MV.sum(-1) > count_M).nonzero()[:, 0].tolist():
        equal_ids = (scaled_MV[m] == lowest_M[m]).nonzero()[:, 0]
        surplus = int(stays_MV[m].sum() - count_M[m])
        stays_MV[m, equal_ids[len(equal_ids) - surplus :]] = False
    return scaled_MV.masked_fill(~stays_MV, -torch.inf)


def _gumbel_max(kept_MV: Tensor, seed_M: Tensor, position_M: Tensor) -> Tensor:
    """Draw from softmax(kept) as argmax(kept + Gumbel noise), https://arxiv.org/abs/1611.01144.

    Noise is computed for quads of ids, and only where it can matter; the result is that of noise for every id.
    """
    M, V = kept_MV.shape
    kept_MQ4 = functional.pad(kept_MV, (0, -V % 4), value=-torch.inf).view(M, -1, 4)
    highest_MQ = kept_MQ4.amax(-1)
    scores_MQ4 = torch.full_like(kept_MQ4, -torch.inf)
    floor_M1 = highest_MQ.amax(-1, keepdim=True) - LIKELY_SPAN
    for _ in range(2):
        rows_C, quads_C = (highest_MQ > floor_M1).nonzero(as_tuple=True)
        scores_MQ4[rows_C, quads_C] = kept_MQ4[rows_C, quads_C] + gumbel_noise(seed_M[rows_C], position_M[rows_C], quads_C)
        floor_M1 = scores_MQ4.amax((1, 2))[:, None] - HIGHEST_NOISE
    return scores_MQ4.flatten(1).argmax(-1)


def gumbel_noise(seed_C: Tensor, position_C: Tensor, quad_C: Tensor) -> Tensor:
    """Standard Gumbel noise of the ids 4 * quad up to 4 * quad + 3, at a position of a request: [C, 4].

    The uniforms have 23 bits and lie in the middle of their cells: exact in float32, never 0 or 1 (with 24 bits the highest rounds
    to 1, whose noise is infinite, once in 340 tokens of a vocabulary of 49,152). The logarithms are float64, so that a vector unit
    and its scalar remainder agree.
    """
    zeros_C = torch.zeros_like(quad_C)
    words_C4 = philox((quad_C, position_C.long(), zeros_C, zeros_C), (seed_C & 0xFFFFFFFF, (seed_C >> 32) & 0xFFFFFFFF))
    uniform_C4 = ((words_C4 >> 9).double() + 0.5) * 2**-23
    return uniform_C4.log_().neg_().log_().neg_().float()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> Tensor:
    """Philox-4x32-10 of four counter words and two key words, each int64 [C] holding 32 bits: four words, [C, 4].

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps, which keeps the 64 bits right; the shift then drags the sign along, which the mask removes.
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product_1 >> 32) & 0xFFFFFFFF) ^ c1 ^ k0, product_1 & 0xFFFFFFFF
        c2, c3 = ((product_0 >> 32) & 0xFFFFFFFF) ^ c3 ^ k1, product_0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return torch.stack((c0, c1, c2, c3), -1)
