"""Sampling in plain torch: temperature, top-k, top-p and min-p, then Gumbel-max with counter-based noise.

N = samples, M = those drawn at random (or some of them), V = vocabulary, padded to lanes inside, Q = V / 4 quads of ids,
W = highest logits looked at, C = candidate quads
"""

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

LANE = 64  # rows are padded to a multiple of this


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
    valid_N = logits_NV.amax(-1).isfinite()
    is_random_N = valid_N & (temperature_N > 0) & (top_k_N != 1) & (top_p_N > 0)
    random_M, greedy_M = is_random_N.nonzero()[:, 0], (~is_random_N).nonzero()[:, 0]
    if len(greedy_M):
        out_N[greedy_M] = logits_NV[greedy_M].argmax(-1).int()
    if len(random_M):
        scaled_MV = _scale(logits_NV[random_M], temperature_N[random_M])
        kept_MV = _apply_filters(scaled_MV, sampled_vocab, top_k_N[random_M], top_p_N[random_M], min_p_N[random_M])
        out_N[random_M] = _gumbel_max(kept_MV, seed_N[random_M], position_N[random_M]).int()
    out_N.masked_fill_(~valid_N, NO_TOKEN)


def _scale(logits_MV: Tensor, temperature_M: Tensor) -> Tensor:
    """logits / temperature, with columns of -inf up to a multiple of LANE."""
    scaled_MV = functional.pad(logits_MV, (0, -logits_MV.shape[1] % LANE), value=-torch.inf)
    return scaled_MV.div_(temperature_M[:, None])


def _apply_filters(scaled_MV: Tensor, vocab: int, top_k_M: Tensor, top_p_M: Tensor, min_p_M: Tensor) -> Tensor:
    """The logits with what top-k, top-p and min-p remove at -inf."""
    kept_MV = scaled_MV.clone()
    top_k_M = torch.where((top_k_M <= 0) | (top_k_M > vocab), vocab, top_k_M.long())
    limited_M = ((top_k_M < vocab) | (top_p_M < 1)).nonzero()[:, 0]
    if len(limited_M):
        limited_MV = scaled_MV[limited_M]
        kept_MV[limited_M] = _keep_highest(limited_MV, *_count_kept(limited_MV, vocab, top_k_M[limited_M], top_p_M[limited_M]))
    floored_M = (min_p_M > 0).nonzero()[:, 0]
    if len(floored_M):
        # p >= min_p * max(p) needs no normaliser, so it does not matter what the other filters removed.
        floor_M1 = scaled_MV[floored_M].amax(-1, keepdim=True) + min_p_M[floored_M, None].log()
        kept_MV[floored_M] = kept_MV[floored_M].masked_fill_(scaled_MV[floored_M] < floor_M1, -torch.inf)
    return kept_MV


def _count_kept(scaled_MV: Tensor, vocab: int, top_k_M: Tensor, top_p_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many of the highest logits top-k and top-p keep, at least 1; the lowest of them; whether more may equal it.

    A row that its few highest logits cannot decide gets a longer list; which rows those are depends on each row alone.
    """
    M, V = scaled_MV.shape
    total_M1 = _total_weight(scaled_MV, top_k_M == vocab)
    count_M1, lowest_M1, tied_M1 = top_k_M.new_empty(M, 1), scaled_MV.new_empty(M, 1), top_k_M.new_empty(M, 1, dtype=torch.bool)
    open_M, open_MV = torch.arange(M, device=scaled_MV.device), scaled_MV
    for width in (*(width for width in SHORT_LISTS if width < V), V):
        highest_MW = open_MV.topk(width).values if width < V else open_MV.sort(descending=True).values
        k_M1, p_M1 = top_k_M[open_M, None], top_p_M[open_M, None].double()
        weight_MW = (highest_MW - highest_MW[:, :1]).double().exp_()
        weight_MW.masked_fill_(torch.arange(width, device=scaled_MV.device) >= k_M1, 0)
        up_to_MW = weight_MW.cumsum(-1)
        needed_M1 = p_M1 * torch.where(k_M1 <= width, up_to_MW[:, -1:], total_M1[open_M])
        by_p_M1 = (up_to_MW - weight_MW < needed_M1).sum(-1, keepdim=True).clamp_(min=1)
        kept_M1 = torch.where(p_M1 < 1, torch.minimum(by_p_M1, k_M1), k_M1)
        count_M1[open_M] = kept_M1
        lowest_M1[open_M] = highest_MW.gather(1, kept_M1.clamp(max=width) - 1)
        tied_M1[open_M] = (kept_M1 >= width) | (highest_MW.gather(1, kept_M1.clamp(max=width - 1)) == lowest_M1[open_M])
        is_open_M = ~((k_M1 <= width) | ((k_M1 == vocab) & (up_to_MW[:, -1:] >= needed_M1)))[:, 0]
        open_M, open_MV = open_M[is_open_M], open_MV[is_open_M]
        if not len(open_M):
            break
    return count_M1, lowest_M1, tied_M1


def _total_weight(scaled_MV: Tensor, wanted_M: Tensor) -> Tensor:
    """The sum of exp(logit - highest) of the wanted rows, float64 [M, 1].

    Summed by lanes first: torch splits one long sum between threads, so that a row alone would be rounded differently.
    """
    total_M1 = scaled_MV.new_zeros(len(scaled_MV), 1, dtype=torch.float64)
    rows_MV = scaled_MV[wanted_M]
    weight_MV = (rows_MV - rows_MV.amax(-1, keepdim=True)).exp_()
    total_M1[wanted_M] = weight_MV.unflatten(-1, (-1, LANE)).sum(-1).double().sum(-1, keepdim=True)
    return total_M1


def _keep_highest(scaled_MV: Tensor, count_M1: Tensor, lowest_M1: Tensor, tied_M1: Tensor) -> Tensor:
    """The count highest, -inf elsewhere; among equals of the lowest kept, the lowest ids stay."""
    kept_MV = scaled_MV.masked_fill(scaled_MV < lowest_M1, -torch.inf)
    for m in tied_M1.nonzero()[:, 0].tolist():
        num_above = int((scaled_MV[m] > lowest_M1[m]).sum())
        equal_ids = (scaled_MV[m] == lowest_M1[m]).nonzero()[:, 0]
        kept_MV[m, equal_ids[int(count_M1[m]) - num_above :]] = -torch.inf
    return kept_MV


def _gumbel_max(kept_MV: Tensor, seed_M: Tensor, position_M: Tensor) -> Tensor:
    """Draw from softmax(kept) as argmax(kept + Gumbel noise), https://arxiv.org/abs/1611.01144.

    Noise is computed for quads of ids, and only where it can matter; the result is that of noise for every id.
    """
    M, V = kept_MV.shape
    kept_MQ4 = kept_MV.view(M, -1, 4)
    highest_MQ = kept_MQ4.amax(-1)
    floor_M1 = highest_MQ.amax(-1, keepdim=True) - LIKELY_SPAN
    for _ in range(2):
        rows_C, quads_C = (highest_MQ > floor_M1).nonzero(as_tuple=True)
        scores_C4 = kept_MQ4[rows_C, quads_C] + gumbel_noise(seed_M[rows_C], position_M[rows_C], quads_C)
        best_M = floor_M1.new_full((M,), -torch.inf).scatter_reduce_(0, rows_C, scores_C4.amax(-1), "amax")
        floor_M1 = best_M[:, None] - HIGHEST_NOISE
    winners = (scores_C4.amax(-1) == best_M[rows_C]).nonzero()[:, 0]  # one a row; more where scores are equal
    ids = 4 * quads_C[winners] + scores_C4[winners].argmax(-1)
    return rows_C.new_full((M,), V).scatter_reduce_(0, rows_C[winners], ids, "amin")


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
