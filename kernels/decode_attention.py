"""Attention of a decode step in one kernel: query-key norm, rotary embedding, the KV write and split-KV attention over paged KV.

B = rows of the step, R = rows of the row state, H = query heads, K = KV heads, G = H / K, E = (H + 2K) * F, F = head width,
X = H * F, M = heads of a KV head's group, each repeated; N = context tokens of a tile, P = parts that a KV head's context is split into

A KV pool is [blocks + 1, K, block_size, F]. The last row of the row state is scratch: padding points at it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import LOG2_E, kv_offsets, load_kv
from kernels.device import Launch, dot, let_dependents_start, wait_for_predecessor
from kernels.rope_kv import load_rotated

# Elements for each warp of the tile that merges parts: 8 parts of 2 heads of 128. More would decide the registers of the kernel.
_MERGE_TILE = 2048


@dataclass(frozen=True)
class DecodeConfig:
    """How a KV head's context is shared out: share i takes every shares-th tile of `tokens` tokens from tile i on.

    new_token_apart: the new token gets a program of its own instead of going with share 0. prefetch: the first tile is loaded
    before the wait for the predecessor.
    """

    tokens: int
    shares: int
    new_token_apart: bool
    prefetch: bool
    warps: int
    stages: int

    @property
    def parts(self) -> int:
        """Programs of one KV head of one row."""
        return self.shares + self.new_token_apart


def decode_configs(batch: int, num_kv_heads: int, max_context: int) -> list[DecodeConfig]:
    """The configurations worth timing; the first is near the best at any lengths.

    About 1024 programs while that takes shares, and never more shares than tiles. One warp to a program wherever it has few tokens:
    with two, every softmax step has barriers.
    """
    most = max(1, min(32, 1024 // (batch * num_kv_heads), -(-max_context // 32)))
    if batch <= 8:
        found = [(32, most, True, True, 1, 3), (32, most, False, True, 1, 3), (32, most, True, True, 2, 3), (64, most, True, True, 2, 3)]
    elif batch < 64:
        half = max(1, most // 2)
        found = [(32, half, False, True, 1, 3), (32, most, False, True, 1, 3), (64, half, False, False, 2, 3)]
    elif batch < 128:
        found = [(64, 1, False, False, 2, 3), (32, 2, False, True, 1, 3), (32, 1, False, False, 1, 4), (16, 1, False, False, 1, 4)]
    else:
        found = [(16, 1, False, False, 1, 4), (32, 1, False, False, 1, 4), (32, 1, False, True, 1, 3), (64, 1, False, False, 2, 3)]
    return [DecodeConfig(*config) for config in found]


@dataclass(frozen=True)
class DecodeScratch:
    """What programs hand to the one that merges: float32 outputs, log2 of their sums of weights, arrivals (0 between launches)."""

    part: Tensor
    log_sum: Tensor
    arrived: Tensor


def allocate_scratch(
    steps: list[tuple[int, DecodeConfig]], num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch that serves all of these (batch, configuration) pairs."""
    most = num_heads * max(batch * config.parts for batch, config in steps)
    arrivals = num_kv_heads * max(batch for batch, _ in steps)
    return DecodeScratch(
        part=torch.zeros(most * head_dim, dtype=torch.float32, device=device),
        log_sum=torch.zeros(most, dtype=torch.float32, device=device),
        arrived=torch.zeros(arrivals, dtype=torch.int32, device=device),
    )


@triton.jit
def _write_new_token(qkv, table, past, kv_head, k_norm_F, cos_F, sin_F, dims_F, k_pool, v_pool, H: tl.constexpr, K: tl.constexpr,
                     F: tl.constexpr, BLOCK_SIZE: tl.constexpr, EPS: tl.constexpr):
    """Store the new token's key and value; both, [F], as attention sees them."""
    inside_F = dims_F < F
    k_head_X = qkv + (H + kv_head) * F + tl.zeros([1], tl.int32)
    k_F = tl.sum(load_rotated(k_head_X, inside_F[None, :], k_norm_F, cos_F, sin_F, dims_F, F, EPS), 0)
    k_F = k_F.to(k_pool.dtype.element_ty)
    v_F = tl.load(qkv + (H + K + kv_head) * F + dims_F, mask=inside_F, other=0.0).to(v_pool.dtype.element_ty)
    block = tl.load(table + past // BLOCK_SIZE).to(tl.int64)
    at_F = ((block * K + kv_head) * BLOCK_SIZE + past % BLOCK_SIZE) * F + dims_F
    tl.store(k_pool + at_F, k_F, mask=inside_F)
    tl.store(v_pool + at_F, v_F, mask=inside_F)
    return k_F.to(tl.float32), v_F.to(tl.float32)


@triton.jit
def _repeat(x_GF, BLOCK_M: tl.constexpr):
    """Each row several times, so that BLOCK_M rows fill a matrix unit: zeros would cost their norm and rotation too."""
    G: tl.constexpr = x_GF.shape[0]
    F: tl.constexpr = x_GF.shape[1]
    return tl.reshape(tl.broadcast_to(x_GF[:, None, :], [G, BLOCK_M // G, F]), [BLOCK_M, F])


@triton.jit
def _attend(q_MF, k_NF, v_NF, tokens_N, end, highest_M, total_M, acc_FM):
    """Fold the tokens before `end` of a tile into the running softmax.

    Tokens are the wide side of both products and the heads their narrow side of 8: half the instructions and accumulators of the
    usual way round, where a few heads would be padded to 16. https://arxiv.org/abs/2205.14135
    """
    scores_NM = dot(k_NF, tl.trans(q_MF), tl.zeros([k_NF.shape[0], q_MF.shape[0]], tl.float32))
    scores_NM = tl.where((tokens_N < end)[:, None], scores_NM, float("-inf"))
    new_highest_M = tl.maximum(highest_M, tl.max(scores_NM, 0))
    keep_M = tl.exp2(highest_M - new_highest_M)
    weight_NM = tl.exp2(scores_NM - new_highest_M[None, :])
    acc_FM = dot(tl.trans(v_NF), weight_NM.to(v_NF.dtype), acc_FM * keep_M[None, :])
    return new_highest_M, total_M * keep_M + tl.sum(weight_NM, 0), acc_FM


@triton.jit
def _load_tile(k_pool, v_pool, block_N, tokens_N, kv_head, dims_F, K: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr,
               BLOCK_SIZE: tl.constexpr):
    at_NF = kv_offsets(block_N, tokens_N, kv_head, dims_F, K, BLOCK_SIZE, F)
    return load_kv(k_pool, at_NF, dims_F, F, BLOCK_F), load_kv(v_pool, at_NF, dims_F, F, BLOCK_F)


@triton.jit
def _attend_tiles(state, q_MF, table, k_pool, v_pool, kv_head, dims_F, first, end, STEP: tl.constexpr, K: tl.constexpr,
                  F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr):
    """Fold the tiles that begin at first, first + STEP and so on before end into the running softmax."""
    highest_M, total_M, acc_FM = state
    for start in tl.range(first, end, STEP, num_stages=STAGES):
        tokens_N = start + tl.arange(0, TOKENS)
        safe_N = tl.minimum(tokens_N, end - 1)  # beyond lies what earlier owners left: a NaN would poison the sum
        block_N = tl.load(table + safe_N // BLOCK_SIZE)
        k_NF, v_NF = _load_tile(k_pool, v_pool, block_N, safe_N, kv_head, dims_F, K, F, BLOCK_F, BLOCK_SIZE)
        highest_M, total_M, acc_FM = _attend(q_MF, k_NF, v_NF, tokens_N, end, highest_M, total_M, acc_FM)
    return highest_M, total_M, acc_FM


@triton.jit
def _merge(part, log_sum, head_M, in_group_M, dims_F, used, stride, F: tl.constexpr, PARTS: tl.constexpr):
    """The parts of some heads together, [M, F] in float32; part p of a head is `stride` heads behind part p - 1."""
    highest_M = tl.full(head_M.shape, -1e30, tl.float32)
    total_M = tl.zeros(head_M.shape, tl.float32)
    acc_MF = tl.zeros([head_M.shape[0], dims_F.shape[0]], tl.float32)
    for first in tl.range(0, used, PARTS, num_stages=1):
        part_P = first + tl.arange(0, PARTS)
        in_use_PM = (part_P < used)[:, None] & in_group_M[None, :]
        at_PM = part_P[:, None] * stride + head_M[None, :]
        # Other programs wrote these: .cg reads them from L2.
        log_sum_PM = tl.load(log_sum + at_PM, mask=in_use_PM, other=float("-inf"), cache_modifier=".cg")
        in_use_PMF = in_use_PM[:, :, None] & (dims_F < F)[None, None, :]
        part_PMF = tl.load(part + at_PM[:, :, None] * F + dims_F[None, None, :], mask=in_use_PMF, other=0.0, cache_modifier=".cg")
        new_highest_M = tl.maximum(highest_M, tl.max(log_sum_PM, 0))
        keep_M = tl.exp2(highest_M - new_highest_M)
        weight_PM = tl.exp2(log_sum_PM - new_highest_M[None, :])
        acc_MF = acc_MF * keep_M[:, None] + tl.sum(weight_PM[:, :, None] * part_PMF, 0)
        total_M = total_M * keep_M + tl.sum(weight_PM, 0)
        highest_M = new_highest_M
    return acc_MF / total_M[:, None]


@triton.jit
def _hand_in(state, part, log_sum, arrived, out_BX, b, kv_head, p, used, is_padding, dims_F, H: tl.constexpr, K: tl.constexpr,
             F: tl.constexpr, BLOCK_G: tl.constexpr, PARTS: tl.constexpr, MERGE_PARTS: tl.constexpr):
    """Write the output of the only part, or leave this part for the last program to arrive, and be that program."""
    G: tl.constexpr = H // K
    highest_M, total_M, acc_FM = state
    REPEATS: tl.constexpr = acc_FM.shape[1] // BLOCK_G
    group_M = tl.arange(0, acc_FM.shape[1]) // REPEATS
    head_M = (b * K + kv_head) * G + group_M
    in_use_M = (group_M < G) & (tl.arange(0, acc_FM.shape[1]) % REPEATS == 0)
    in_use_FM = (dims_F < F)[:, None] & in_use_M[None, :]
    out_FM = acc_FM / total_M[None, :]
    if PARTS == 1:
        out_FM = tl.where(is_padding, 0.0, out_FM)
        tl.store(out_BX + head_M[None, :] * F + dims_F[:, None], out_FM.to(out_BX.dtype.element_ty), mask=in_use_FM)
    else:
        stride = tl.num_programs(2) * H
        tl.store(part + (p * stride + head_M)[None, :] * F + dims_F[:, None], out_FM, mask=in_use_FM)
        tl.store(log_sum + p * stride + head_M, highest_M + tl.log2(total_M), mask=in_use_M)
        tl.debug_barrier()
        if tl.atomic_add(arrived + b * K + kv_head, 1, sem="acq_rel") == used - 1:
            group_G = tl.arange(0, BLOCK_G)
            head_G = (b * K + kv_head) * G + group_G
            out_GF = _merge(part, log_sum, head_G, group_G < G, dims_F, used, stride, F, MERGE_PARTS)
            out_GF = tl.where(is_padding, 0.0, out_GF)
            in_use_GF = (group_G < G)[:, None] & (dims_F < F)[None, :]
            tl.store(out_BX + head_G[:, None] * F + dims_F[None, :], out_GF.to(out_BX.dtype.element_ty), mask=in_use_GF)
            tl.store(arrived + b * K + kv_head, 0)


@triton.jit
def _cos_sin(cos, sin, index, dims_F, F: tl.constexpr):
    at_F = index.to(tl.int64) * F + dims_F
    return tl.load(cos + at_F, mask=dims_F < F, other=0.0), tl.load(sin + at_F, mask=dims_F < F, other=0.0)


@triton.jit(do_not_specialize=["scratch_row", "table_width"])
def _decode_attention_kernel(qkv_BE, rows_B, length_R, block_table_RB, cos, sin, q_norm_F, k_norm_F, k_pool, v_pool, part, log_sum,
                             arrived, out_BX, scale, scratch_row, table_width, ROPE_BY_POSITION: tl.constexpr, H: tl.constexpr,
                             K: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
                             BLOCK_SIZE: tl.constexpr, EPS: tl.constexpr, TOKENS: tl.constexpr, SHARES: tl.constexpr, APART: tl.constexpr,
                             PREFETCH: tl.constexpr, STAGES: tl.constexpr, MERGE_PARTS: tl.constexpr, PDL: tl.constexpr):
    """One KV head of one row, and one share of its past tokens, the new token, or both."""
    let_dependents_start(PDL)
    kv_head, p, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dims_F, group_G = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_G)
    row = tl.load(rows_B + b)
    past = tl.load(length_R + row)
    table = block_table_RB + row.to(tl.int64) * table_width
    first = tl.maximum(p - APART, 0) * TOKENS
    tokens_N = first + tl.arange(0, TOKENS)
    # Read whether or not the context reaches so far, so that it need not wait for the length.
    block_N = tl.load(table + tl.minimum(tokens_N // BLOCK_SIZE, table_width - 1))
    used = tl.maximum(tl.minimum(tl.cdiv(past, TOKENS), SHARES) + APART, 1)
    if p >= used:
        return  # without a wait: share 0's wait holds back the kernel's end, so transitivity stays, and its place is free
    if PREFETCH:
        k_NF, v_NF = _load_tile(k_pool, v_pool, block_N, tokens_N, kv_head, dims_F, K, F, BLOCK_F, BLOCK_SIZE)
        # What earlier owners left could poison the sum. Not after the wait: so the tile goes into shared memory, not registers.
        v_NF = tl.where((tokens_N < past)[:, None], v_NF, tl.zeros_like(v_NF))
    if ROPE_BY_POSITION:
        cos_F, sin_F = _cos_sin(cos, sin, past, dims_F, F)
    wait_for_predecessor(PDL)
    if not ROPE_BY_POSITION:
        cos_F, sin_F = _cos_sin(cos, sin, b, dims_F, F)
    qkv, in_use_GF = qkv_BE + b * ((H + 2 * K) * F), (group_G < H // K)[:, None] & (dims_F < F)[None, :]
    q_GF = load_rotated(qkv + (kv_head * (H // K) + group_G) * F, in_use_GF, q_norm_F, cos_F, sin_F, dims_F, F, EPS)
    q_GF = (q_GF * scale).to(k_pool.dtype.element_ty)
    q_MF = _repeat(q_GF, BLOCK_M)
    highest_M, total_M = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc_FM = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
    if p == 0:
        k_F, v_F = _write_new_token(qkv, table, past, kv_head, k_norm_F, cos_F, sin_F, dims_F, k_pool, v_pool, H, K, F, BLOCK_SIZE, EPS)
        highest_M = tl.reshape(_repeat(tl.sum(q_GF.to(tl.float32) * k_F[None, :], 1)[:, None], BLOCK_M), [BLOCK_M])
        total_M, acc_FM = total_M + 1.0, acc_FM + v_F[:, None]
    end = tl.where(p < APART, 0, past)
    if PREFETCH:
        if first < end:
            highest_M, total_M, acc_FM = _attend(q_MF, k_NF, v_NF, tokens_N, end, highest_M, total_M, acc_FM)
        first += SHARES * TOKENS
    state = _attend_tiles((highest_M, total_M, acc_FM), q_MF, table, k_pool, v_pool, kv_head, dims_F, first, end, SHARES * TOKENS, K, F,
                          BLOCK_F, BLOCK_SIZE, TOKENS, STAGES)
    _hand_in(state, part, log_sum, arrived, out_BX, b, kv_head, p, used, row == scratch_row, dims_F, H, K, F, BLOCK_G,
             SHARES + APART, MERGE_PARTS)


def decode_attention_launch(
    tensors: tuple, B: int, heads: tuple[int, int, int], block_size: int, scale: float, scratch_row: int, table_width: int,
    rope_by_position: bool, eps: float, config: DecodeConfig, pdl: bool,
) -> Launch:  # fmt: skip
    """The launch for B rows; heads is (H, K, F), and tensors are the kernel's first 14 arguments, or their dtypes to compile."""
    H, K, F = heads
    block_f, block_g = max(16, triton.next_power_of_2(F)), triton.next_power_of_2(H // K)
    constants = dict(
        ROPE_BY_POSITION=rope_by_position, H=H, K=K, F=F, BLOCK_F=block_f, BLOCK_M=max(8, block_g), BLOCK_G=block_g,
        BLOCK_SIZE=block_size, EPS=eps, TOKENS=config.tokens, SHARES=config.shares, APART=int(config.new_token_apart),
        PREFETCH=config.prefetch, STAGES=config.stages, MERGE_PARTS=max(1, min(16, _MERGE_TILE * config.warps // (block_f * block_g))),
    )  # fmt: skip
    arguments = (*tensors, scale * LOG2_E, scratch_row, table_width)
    return Launch(_decode_attention_kernel, (K, config.parts, B), arguments, constants, pdl, config.warps)


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
    scratch: DecodeScratch,
    out_BX: Tensor,
    scale: float,
    config: DecodeConfig,
    pdl: bool = False,
) -> None:
    """Write the new token's key and value into its row's blocks, and the attention of its queries over the whole row into out.

    The new token of row r = rows_B[b] has position length_R[r]. cos and sin, float32, are tables over positions, read before the
    wait, or with rope_by_position=False hold one line per b. Rows may be padding: it writes into its table's block and gets zeros.
    Every entry of a block table names a block of the pool, whatever the length. Split-KV as in
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    B, X = out_BX.shape
    K, block_size, F = k_pool.shape[1:]
    H = X // F
    assert X == H * F and H % K == 0 and qkv_BE.shape == (B, (H + 2 * K) * F) and rows_B.shape == (B,)
    assert v_pool.shape == k_pool.shape
    assert cos.shape == sin.shape and cos.shape[1] == F and cos.dtype == torch.float32 and (rope_by_position or len(cos) == B)
    assert len(block_table_RB) == len(length_R) and scratch.part.numel() >= config.parts * B * X and len(scratch.arrived) >= B * K
    tensors = (
        qkv_BE, rows_B, length_R, block_table_RB, cos, sin, q_norm_F, k_norm_F, k_pool, v_pool,
        scratch.part, scratch.log_sum, scratch.arrived, out_BX,
    )  # fmt: skip
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    scratch_row, table_width = len(length_R) - 1, block_table_RB.shape[1]
    decode_attention_launch(
        tensors, B, (H, K, F), block_size, scale, scratch_row, table_width, rope_by_position, eps, config, pdl
    ).run()  # fmt: skip
