"""Attention of a step that mixes prompt chunks and decoding rows, over paged KV.

T = tokens of the step, S = sequences, H = query heads, K = KV heads, G = H / K, F = head width, R = rows, B = blocks of a row,
M = queries times heads of a tile, N = context tokens of a tile

A KV pool is [blocks + 1, K, block_size, F].
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import dot

LOG2_E = 1.4426950408889634  # the kernels' exponentials have base 2


@dataclass(frozen=True)
class StepPlan:
    """What the attention of every layer of a step has in common; made once by `plan_step`."""

    slots_T: Tensor
    block_table_RB: Tensor
    rows_S: Tensor
    query_start_S1: Tensor
    context_lens_S: Tensor


@dataclass(frozen=True)
class AttentionConfig:
    """Tile of a program: rows (a power of two of at least 16 and G: queries times heads) by context tokens."""

    rows: int
    tokens: int
    warps: int
    stages: int


def attention_config(num_tokens: int, num_seqs: int, group: int, dtype: torch.dtype) -> AttentionConfig:
    """The configuration for a step of so many tokens and sequences."""
    if num_tokens == num_seqs:  # every sequence decodes, or is padding
        return AttentionConfig(max(16, triton.next_power_of_2(group)), 64, warps=4, stages=3)
    if dtype == torch.float32:  # no tensor core multiplies in full precision; larger tiles would spill
        return AttentionConfig(32, 32, warps=4, stages=2)
    return AttentionConfig(128, 64, warps=8, stages=3)


def plan_step(
    slots_T: Tensor, block_table_RB: Tensor, rows_S: Tensor, query_start_S1: Tensor, context_lens_S: Tensor, k_pool: Tensor
) -> StepPlan:
    """Keep what the kernels read. No value of a tensor is needed on the host.

    Sequence s is row rows_S[s]; its queries are tokens query_start[s] up to query_start[s + 1], the last of the context_lens[s]
    tokens that its row's blocks hold with this step's. A context length of 0 is padding.
    """
    S = len(rows_S)
    assert len(query_start_S1) == S + 1 and len(context_lens_S) == S and block_table_RB.is_contiguous() and k_pool.is_contiguous()
    return StepPlan(slots_T, block_table_RB, rows_S, query_start_S1, context_lens_S)


@triton.jit
def kv_offsets(blocks_N, tokens_N, kv_head, dims_F, K: tl.constexpr, BLOCK_SIZE: tl.constexpr, F: tl.constexpr):
    """Where in a pool the tokens of a row are, [N, F], given the blocks that hold them."""
    return ((blocks_N.to(tl.int64) * K + kv_head) * BLOCK_SIZE + tokens_N % BLOCK_SIZE)[:, None] * F + dims_F[None, :]


@triton.jit
def load_kv(pool, offsets_NF, dims_F, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """Keys or values at the offsets; zeros in columns that a head does not have."""
    if F == BLOCK_F:
        x_NF = tl.load(pool + offsets_NF)
    else:
        x_NF = tl.load(pool + offsets_NF, mask=(dims_F < F)[None, :], other=0.0)
    return x_NF


@triton.jit
def scores(q_MF, k_NF):
    """q @ k.T in float32."""
    return dot(q_MF, tl.trans(k_NF), tl.zeros([q_MF.shape[0], k_NF.shape[0]], tl.float32))


@triton.jit
def softmax_step(scores_MN, v_NF, highest_M, total_M, acc_MF):
    """Fold a tile into a running softmax: the highest score so far, the sums of weights and of weighted values.

    Scores are base-2 logarithms; the highest one begins finite, so that rows that see nothing stay finite.
    https://arxiv.org/abs/1805.02867, as in https://arxiv.org/abs/2205.14135
    """
    new_highest_M = tl.maximum(highest_M, tl.max(scores_MN, 1))
    keep_M = tl.exp2(highest_M - new_highest_M)
    weight_MN = tl.exp2(scores_MN - new_highest_M[:, None])
    acc_MF = dot(weight_MN.to(v_NF.dtype), v_NF, acc_MF * keep_M[:, None])
    return new_highest_M, total_M * keep_M + tl.sum(weight_MN, 1), acc_MF


@triton.jit
def _find_sequence(query_start_S1, tile, S, BLOCK_S: tl.constexpr, QUERIES: tl.constexpr):
    """The sequence that a tile belongs to, and its first tile.

    Sequence s is given tiles from query_start[s] // QUERIES + s on: at least as many as it needs, at most one more, and their
    number follows from T and S alone. So the host sizes the grid without knowing the chunks, and no program walks a list.
    """
    seq_S = tl.arange(0, BLOCK_S)
    first_tile_S = tl.load(query_start_S1 + seq_S, mask=seq_S < S, other=0) // QUERIES + seq_S
    s = tl.sum(((first_tile_S <= tile) & (seq_S < S)).to(tl.int32), 0) - 1
    return s, tl.load(query_start_S1 + s) // QUERIES + s


@triton.jit
def attend_range(state, q_MF, limit_M, scale, table, k_pool, v_pool, kv_head, dims_F, first, end, STEP: tl.constexpr,
                 MASKED: tl.constexpr, K: tl.constexpr, F: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr,
                 STAGES: tl.constexpr):
    """Fold the tiles of context tokens that begin at first, first + STEP and so on before end into the softmax state.

    Masked: row m sees no token beyond limit_M[m], and end is the end of what may be read.
    """
    highest_M, total_M, acc_MF = state
    for start in tl.range(first, end, STEP, num_stages=STAGES):
        tokens_N = start + tl.arange(0, TOKENS)
        # Beyond the end lies what earlier owners left: a masked NaN would still poison the sum.
        safe_N = tl.minimum(tokens_N, end - 1) if MASKED else tokens_N
        offsets_NF = kv_offsets(tl.load(table + safe_N // BLOCK_SIZE), safe_N, kv_head, dims_F, K, BLOCK_SIZE, F)
        k_NF = load_kv(k_pool, offsets_NF, dims_F, F, q_MF.shape[1])
        v_NF = load_kv(v_pool, offsets_NF, dims_F, F, q_MF.shape[1])
        scores_MN = scores(q_MF, k_NF) * scale
        if MASKED:
            scores_MN = tl.where(tokens_N[None, :] <= limit_M[:, None], scores_MN, float("-inf"))
        highest_M, total_M, acc_MF = softmax_step(scores_MN, v_NF, highest_M, total_M, acc_MF)
    return highest_M, total_M, acc_MF


@triton.jit(do_not_specialize=["S"])
def _paged_attention_kernel(q_THF, k_pool, v_pool, block_table_RB, rows_S, query_start_S1, context_lens_S, out_THF, scale,
                            table_width, S, BLOCK_S: tl.constexpr, H: tl.constexpr, K: tl.constexpr, F: tl.constexpr,
                            BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
                            STAGES: tl.constexpr):
    """One tile of one sequence's queries, with the G query heads that share a KV head side by side."""
    G: tl.constexpr = H // K
    QUERIES: tl.constexpr = ROWS // G
    kv_head = tl.program_id(1)
    # Later tiles have longer contexts, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    s, first_tile = _find_sequence(query_start_S1, tile, S, BLOCK_S, QUERIES)
    query_start = tl.load(query_start_S1 + s)
    num_queries = tl.load(query_start_S1 + s + 1) - query_start
    first_query = (tile - first_tile) * QUERIES
    if first_query >= num_queries:
        return
    context_len = tl.load(context_lens_S + s)
    row_M, dims_F = tl.arange(0, ROWS), tl.arange(0, BLOCK_F)
    query_M = first_query + row_M // G
    in_use_MF = ((row_M < QUERIES * G) & (query_M < num_queries))[:, None] & (dims_F < F)[None, :]
    token_head_M = (query_start + query_M).to(tl.int64) * H + kv_head * G + row_M % G
    q_MF = tl.load(q_THF + token_head_M[:, None] * F + dims_F[None, :], mask=in_use_MF, other=0.0)

    limit_M = context_len - num_queries + query_M  # the query's own position
    table = block_table_RB + tl.load(rows_S + s).to(tl.int64) * table_width
    first_limit = context_len - num_queries + first_query
    end = tl.minimum(first_limit + QUERIES, context_len)
    all_see = tl.maximum(first_limit + 1, 0) // TOKENS * TOKENS
    state = (tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, BLOCK_F], tl.float32))
    state = attend_range(state, q_MF, limit_M, scale, table, k_pool, v_pool, kv_head, dims_F, 0, all_see, TOKENS, False,
                         K, F, BLOCK_SIZE, TOKENS, STAGES)
    state = attend_range(state, q_MF, limit_M, scale, table, k_pool, v_pool, kv_head, dims_F, all_see, end, TOKENS, True,
                         K, F, BLOCK_SIZE, TOKENS, STAGES)
    total_M = tl.where(context_len > 0, state[1], 1.0)  # padding: 0 / 1
    out_MF = (state[2] / total_M[:, None]).to(out_THF.dtype.element_ty)
    tl.store(out_THF + token_head_M[:, None] * F + dims_F[None, :], out_MF, mask=in_use_MF)


def paged_attention(
    q_THF: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    plan: StepPlan,
    out_THF: Tensor,
    scale: float,
    config: AttentionConfig | None = None,
) -> None:
    """Causal attention of every query to its own sequence's tokens, its own included; padding gets zeros.

    Paged as in https://arxiv.org/abs/2309.06180, with several query heads to a KV head as in https://arxiv.org/abs/2305.13245.
    """
    T, H, F = q_THF.shape
    S, K, block_size = len(plan.rows_S), k_pool.shape[1], k_pool.shape[2]
    assert out_THF.shape == q_THF.shape and H % K == 0 and k_pool.shape == v_pool.shape and k_pool.shape[3] == F
    assert all(x.is_contiguous() for x in (q_THF, out_THF, k_pool, v_pool))
    if T == 0:
        return
    config = config or attention_config(T, S, H // K, q_THF.dtype)
    num_tiles = T // (config.rows // (H // K)) + S
    _paged_attention_kernel[(num_tiles, K)](
        q_THF, k_pool, v_pool, plan.block_table_RB, plan.rows_S, plan.query_start_S1, plan.context_lens_S, out_THF,
        scale * LOG2_E, plan.block_table_RB.shape[1], S,
        BLOCK_S=triton.next_power_of_2(S), H=H, K=K, F=F, BLOCK_F=max(16, triton.next_power_of_2(F)), BLOCK_SIZE=block_size,
        ROWS=config.rows, TOKENS=config.tokens, STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
