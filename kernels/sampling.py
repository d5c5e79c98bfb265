"""Sampling with temperature, top-k, top-p and min-p. Nothing is sorted, and no value of a tensor is needed on the host.

N = samples, V = vocabulary, L = logits of a tile

A logit's key is an int32 that orders as the logits do. What top-k and top-p keep of a row is everything from some lowest key on,
and among the logits of exactly that key the lowest ids. A program per row finds that key: it narrows a range of keys by counting
what is above three keys inside it, with top-p by summing weights instead. Which tokens then remain is seen by each token alone, so
the choice among them uses as many programs as there are tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.head import gumbel_noise
from kernels.reference_fused import NOTHING
from kernels.rows import pack_best, unpack_best

_NOTHING = tl.constexpr(NOTHING)
_BIT_31 = tl.constexpr(0x7FFFFFFF)
_LIMIT_TILE, _LIMIT_WARPS = 4096, 16
_CHOICE_TILE = 2048


@triton.jit
def _is_random(temperature, top_k, top_p):
    return (temperature > 0) & (top_k != 1) & (top_p > 0)


@triton.jit
def _load_scaled(logits, start, temperature, V, BLOCK_L: tl.constexpr):
    """Ids of a tile, their logits over the temperature (-inf from V on), and the keys of those."""
    id_L = start + tl.arange(0, BLOCK_L)
    scaled_L = tl.load(logits + id_L, mask=id_L < V, other=float("-inf"))
    scaled_L = tl.div_rn(scaled_L, temperature + tl.zeros([BLOCK_L], tl.float32))
    scaled_L = tl.where(scaled_L == 0, 0.0, scaled_L)  # -0 equals 0
    bits_L = scaled_L.to(tl.int32, bitcast=True)
    return id_L, scaled_L, tl.where(bits_L < 0, bits_L ^ _BIT_31, bits_L)


@triton.jit
def _extremes(logits, temperature, V, BLOCK_L: tl.constexpr):
    """The highest scaled logit, the lowest and the highest key."""
    highest_L = tl.full([BLOCK_L], float("-inf"), tl.float32)
    low_L, high_L = tl.full([BLOCK_L], _BIT_31, tl.int32), tl.full([BLOCK_L], -_BIT_31, tl.int32)
    for start in tl.range(0, V, BLOCK_L):
        id_L, scaled_L, key_L = _load_scaled(logits, start, temperature, V, BLOCK_L)
        highest_L = tl.maximum(highest_L, scaled_L)
        low_L = tl.where(id_L < V, tl.minimum(low_L, key_L), low_L)
        high_L = tl.maximum(high_L, key_L)
    return tl.max(highest_L, 0), tl.min(low_L, 0).to(tl.int64), tl.max(high_L, 0).to(tl.int64)


@triton.jit
def _count_from(logits, temperature, highest, key_1, key_2, key_3, V, BY_WEIGHT: tl.constexpr, BLOCK_L: tl.constexpr):
    """How many logits have at least each of three keys, and what their softmax weights (the highest has weight 1) sum to."""
    count_1, count_2, count_3 = tl.zeros([BLOCK_L], tl.int32), tl.zeros([BLOCK_L], tl.int32), tl.zeros([BLOCK_L], tl.int32)
    sum_1, sum_2, sum_3 = tl.zeros([BLOCK_L], tl.float64), tl.zeros([BLOCK_L], tl.float64), tl.zeros([BLOCK_L], tl.float64)
    for start in tl.range(0, V, BLOCK_L):
        id_L, scaled_L, key_L = _load_scaled(logits, start, temperature, V, BLOCK_L)
        in_1, in_2, in_3 = (id_L < V) & (key_L >= key_1), (id_L < V) & (key_L >= key_2), (id_L < V) & (key_L >= key_3)
        count_1 += in_1.to(tl.int32)
        count_2 += in_2.to(tl.int32)
        count_3 += in_3.to(tl.int32)
        if BY_WEIGHT:
            weight_L = tl.exp(scaled_L - highest).to(tl.float64)
            sum_1 += tl.where(in_1, weight_L, 0.0)
            sum_2 += tl.where(in_2, weight_L, 0.0)
            sum_3 += tl.where(in_3, weight_L, 0.0)
    counts = (tl.sum(count_1, 0), tl.sum(count_2, 0), tl.sum(count_3, 0))
    return counts, (tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0))


@triton.jit
def _narrow(logits, temperature, highest, low, high, num_low, num_high, target, V, BY_WEIGHT: tl.constexpr, BLOCK_L: tl.constexpr):
    """The range of keys [low, high) that holds the lowest key kept, so that its logits are one, or equal.

    Kept are the highest logits until their number, or the sum of their weights, reaches the target: true from low on, false from
    high on. num_low and num_high logits are from low and high on.
    """
    while (high - low > 1) & (num_low - num_high > 1):
        span = high - low
        key_1, key_2, key_3 = low + (span + 3) // 4, low + (span + 1) // 2, low + (span * 3 + 3) // 4
        counts, sums = _count_from(logits, temperature, highest, key_1, key_2, key_3, V, BY_WEIGHT, BLOCK_L)
        if BY_WEIGHT:
            reached_1, reached_2, reached_3 = sums[0] >= target, sums[1] >= target, sums[2] >= target
        else:
            reached_1, reached_2, reached_3 = counts[0] >= target, counts[1] >= target, counts[2] >= target
        if reached_3:
            low, num_low = key_3, counts[2]
        elif reached_2:
            low, num_low, high, num_high = key_2, counts[1], key_3, counts[2]
        elif reached_1:
            low, num_low, high, num_high = key_1, counts[0], key_2, counts[1]
        else:
            high, num_high = key_1, counts[0]
    return low, high, num_low, num_high


@triton.jit
def _keep(logits, temperature, highest, low, high, top_k, top_p, V, BLOCK_L: tl.constexpr):
    """What top-k and top-p keep: the lowest key kept, how many logits are equal there, and how many of those stay."""
    num_low, num_high = V + tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    end = high
    low, high, num_low, num_high = _narrow(logits, temperature, highest, low, high, num_low, num_high, top_k, V, False, BLOCK_L)
    room = top_k - num_high
    if top_p < 1:
        # The weights of what top-k keeps; those of the lowest key are equal.
        counts, sums = _count_from(logits, temperature, highest, low, high, high, V, True, BLOCK_L)
        whole = sums[1] + (sums[0] - sums[1]) / (num_low - num_high) * room
        needed = top_p.to(tl.float64) * whole
        num_high *= 0
        low, high, num_low, num_high = _narrow(logits, temperature, highest, low, end, num_low, num_high, needed, V, True, BLOCK_L)
        counts, sums = _count_from(logits, temperature, highest, low, high, high, V, True, BLOCK_L)
        each = (sums[0] - sums[1]) / (num_low - num_high)
        by_p = tl.ceil((needed - sums[1]) / each).to(tl.int32)
        room = tl.minimum(tl.maximum(by_p, 1), tl.minimum(top_k - num_high, num_low - num_high))
    return low, num_low - num_high, room


@triton.jit
def _nth_equal(logits, temperature, key, n, V, BLOCK_L: tl.constexpr):
    """The id of the n-th logit, from 1, that has this key."""
    seen, last_id = n * 0, n * 0
    for start in tl.range(0, V, BLOCK_L):
        id_L, scaled_L, key_L = _load_scaled(logits, start, temperature, V, BLOCK_L)
        is_equal_L = (key_L == key) & (id_L < V)
        rank_L = seen + tl.cumsum(is_equal_L.to(tl.int32), 0)
        last_id = tl.maximum(last_id, tl.max(tl.where(is_equal_L & (rank_L == n), id_L, 0), 0))
        seen += tl.sum(is_equal_L.to(tl.int32), 0)
    return last_id


@triton.jit
def _limits_kernel(logits_NV, temperature_N, top_k_N, top_p_N, highest_N, lowest_key_N, last_id_N, best_N, stride, V,
                   BLOCK_L: tl.constexpr):
    """For each row that samples at random: its highest scaled logit, the lowest key kept, and the last id kept of that key."""
    n = tl.program_id(0).to(tl.int64)
    tl.store(best_N + n, _NOTHING)
    temperature, top_k, top_p = tl.load(temperature_N + n), tl.load(top_k_N + n), tl.load(top_p_N + n)
    if _is_random(temperature, top_k, top_p):
        logits = logits_NV + n * stride
        highest, low, high = _extremes(logits, temperature, V, BLOCK_L)
        tl.store(highest_N + n, highest)
        top_k = tl.where((top_k <= 0) | (top_k > V), V, top_k)
        last_id = V + tl.zeros([], tl.int32)
        if (top_k < V) | (top_p < 1):
            low, num_equal, room = _keep(logits, temperature, highest, low, high + 1, top_k, top_p, V, BLOCK_L)
            if room < num_equal:
                last_id = _nth_equal(logits, temperature, low, room, V, BLOCK_L)
        tl.store(lowest_key_N + n, low.to(tl.int32))
        tl.store(last_id_N + n, last_id)


@triton.jit
def _choose_kernel(logits_NV, temperature_N, top_k_N, top_p_N, log_min_p_N, seed_N, position_N, highest_N, lowest_key_N, last_id_N,
                   best_N, stride, V, BLOCK_L: tl.constexpr):
    """Raise best_N to the best packed token of one tile of one row."""
    n = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_L
    logits = logits_NV + n * stride
    temperature = tl.load(temperature_N + n)
    is_random = _is_random(temperature, tl.load(top_k_N + n), tl.load(top_p_N + n))
    divisor = tl.where(is_random, temperature, 1.0)
    id_L, value_L, key_L = _load_scaled(logits, start, divisor, V, BLOCK_L)
    is_kept_L = id_L < V
    if is_random:
        lowest_key, last_id = tl.load(lowest_key_N + n), tl.load(last_id_N + n)
        is_kept_L &= (key_L > lowest_key) | ((key_L == lowest_key) & (id_L <= last_id))
        is_kept_L &= value_L - tl.load(highest_N + n) >= tl.load(log_min_p_N + n)
        if tl.max(is_kept_L.to(tl.int32), 0) > 0:
            value_L += gumbel_noise(tl.load(seed_N + n), tl.load(position_N + n), id_L)
        is_kept_L |= ~(value_L < float("inf")) & (id_L < V)  # infinity or a NaN anywhere breaks the row
    packed_L = tl.where(is_kept_L, pack_best(value_L, id_L), _NOTHING)
    tl.atomic_max(best_N + n, tl.max(packed_L, 0), sem="relaxed")


@triton.jit
def _unpack_kernel(best_N, out_N, N, BLOCK_N: tl.constexpr):
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out_N + n_N, unpack_best(tl.load(best_N + n_N, mask=n_N < N, other=_NOTHING)), mask=n_N < N)


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
    N, V = len(logits_NV), sampled_vocab
    assert logits_NV.dtype == torch.float32 and logits_NV.stride(1) == 1 and out_N.shape == (N,) and 0 < V <= logits_NV.shape[1]
    assert all(len(x) == N for x in (temperature_N, top_k_N, top_p_N, min_p_N, seed_N, position_N))
    if N == 0:
        return
    highest_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    lowest_key_N, last_id_N = torch.empty(2, N, dtype=torch.int32, device=logits_NV.device)
    best_N = torch.empty(N, dtype=torch.int64, device=logits_NV.device)
    limits, filters, stride = (highest_N, lowest_key_N, last_id_N, best_N), (temperature_N, top_k_N, top_p_N), logits_NV.stride(0)
    block = min(_LIMIT_TILE, triton.next_power_of_2(V))
    _limits_kernel[(N,)](logits_NV, *filters, *limits, stride, V, BLOCK_L=block, num_warps=_LIMIT_WARPS)
    block = min(_CHOICE_TILE, triton.next_power_of_2(V))
    grid = (N, triton.cdiv(V, block))
    _choose_kernel[grid](logits_NV, *filters, min_p_N.log(), seed_N, position_N, *limits, stride, V, BLOCK_L=block, num_warps=8)
    _unpack_kernel[(triton.cdiv(N, 256),)](best_N, out_N, N, BLOCK_N=256)
