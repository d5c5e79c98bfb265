"""What a step reads from the row state before the model runs, and writes back after it.

B = rows of a decode step, T = tokens, S = sequences, N = samples, R = rows (the last one is scratch: padding points at it),
V = vocabulary, D = model width; a block table is [R, blocks of a row]. Index tensors are int32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.device import Launch, let_dependents_start, wait_for_predecessor
from kernels.reference import NO_TOKEN
from kernels.reference_fused import NOTHING

_NO_TOKEN, _NOTHING = tl.constexpr(NO_TOKEN), tl.constexpr(NOTHING)
_BLOCK = 256


@triton.jit
def _embed_rows_kernel(rows_B, last_token_R, table_VD, x_BD, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    let_dependents_start(PDL)
    b, column_D = tl.program_id(0), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(last_token_R + tl.load(rows_B + b)).to(tl.int64)
    x_D = tl.load(table_VD + token * D + column_D, mask=column_D < D)
    wait_for_predecessor(PDL)
    tl.store(x_BD + b * D + column_D, x_D, mask=column_D < D)


def embed_rows(rows_B: Tensor, last_token_R: Tensor, table_VD: Tensor, x_BD: Tensor, pdl: bool = False) -> None:
    """Write the embeddings of the rows' last tokens."""
    B, D = x_BD.shape
    assert rows_B.shape == (B,) and table_VD.shape[1] == D and x_BD.is_contiguous() and table_VD.is_contiguous()
    block = min(1024, triton.next_power_of_2(D))
    grid, arguments = (B, triton.cdiv(D, block)), (rows_B, last_token_R, table_VD, x_BD)
    Launch(_embed_rows_kernel, grid, arguments, dict(D=D, BLOCK_D=block), pdl, warps=4).run()


@triton.jit
def pack_best(value, token):
    """A float32 value and a token as one int64 that orders by value (-0 as 0, any NaN above infinity), then by lower token."""
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(value != value, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def unpack_best(packed):
    """The token of packed values, NO_TOKEN where the value is not finite; see kernels.reference_fused.head_sample."""
    ordered = (packed >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    token = (0x7FFFFFFF - (packed & 0x7FFFFFFF)).to(tl.int32)
    return tl.where((bits & 0x7F800000) == 0x7F800000, _NO_TOKEN, token)


@triton.jit(do_not_specialize=["B"])
def _finish_rows_kernel(best_B, rows_B, last_token_R, length_R, sampled_B, scratch_row, B, BLOCK_B: tl.constexpr, PDL: tl.constexpr):
    let_dependents_start(PDL)
    b_B = tl.arange(0, BLOCK_B)
    in_use_B = b_B < B
    row_B = tl.load(rows_B + b_B, mask=in_use_B, other=0)
    length_B = tl.load(length_R + row_B)
    wait_for_predecessor(PDL)
    token_B = unpack_best(tl.load(best_B + b_B, mask=in_use_B, other=_NOTHING))
    tl.store(sampled_B + b_B, token_B, mask=in_use_B)
    tl.store(last_token_R + row_B, tl.maximum(token_B, 0), mask=in_use_B)
    tl.store(length_R + row_B, tl.where(row_B == scratch_row, 0, length_B + 1), mask=in_use_B)
    tl.store(best_B + b_B, tl.full([BLOCK_B], _NOTHING, tl.int64), mask=in_use_B)


def finish_rows(
    best_B: Tensor, rows_B: Tensor, last_token_R: Tensor, length_R: Tensor, sampled_B: Tensor, pdl: bool = False
) -> None:
    """Unpack the sampled tokens, write them into their rows, and lengthen the rows by the token that the step has computed.

    A row whose best value is not finite gets NO_TOKEN, and 0 as its last token, which has an embedding. The scratch row keeps
    length 0. best_B is left at NOTHING for the next step.
    """
    B = len(best_B)
    assert best_B.dtype == torch.int64 and rows_B.shape == sampled_B.shape == (B,) and last_token_R.shape == length_R.shape
    arguments = (best_B, rows_B, last_token_R, length_R, sampled_B, len(length_R) - 1, B)
    Launch(_finish_rows_kernel, (1,), arguments, dict(BLOCK_B=triton.next_power_of_2(B)), pdl, warps=4).run()


# ---- mixed steps --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["T"])
def _gather_rows_kernel(rows_T, known_tokens_T, offsets_T, last_token_R, length_R, prompt_len_R, block_table_RB, token_ids_T,
                        positions_T, slots_T, prompt_lens_T, T, scratch_row, table_width, BLOCK_SIZE: tl.constexpr,
                        BLOCK_T: tl.constexpr):
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_use_T = t_T < T
    row_T = tl.load(rows_T + t_T, mask=in_use_T, other=0)
    known_T = tl.load(known_tokens_T + t_T, mask=in_use_T, other=0)
    is_padding_T = row_T == scratch_row
    position_T = tl.load(length_R + row_T) + tl.load(offsets_T + t_T, mask=in_use_T, other=0)
    position_T = tl.where(is_padding_T, 0, position_T)
    block_T = tl.load(block_table_RB + row_T.to(tl.int64) * table_width + position_T // BLOCK_SIZE, mask=in_use_T, other=0)
    slot_T = tl.where(is_padding_T, -1, block_T * BLOCK_SIZE + position_T % BLOCK_SIZE)
    tl.store(token_ids_T + t_T, tl.where(known_T < 0, tl.load(last_token_R + row_T), known_T), mask=in_use_T)
    tl.store(positions_T + t_T, position_T, mask=in_use_T)
    tl.store(slots_T + t_T, slot_T, mask=in_use_T)
    tl.store(prompt_lens_T + t_T, tl.load(prompt_len_R + row_T), mask=in_use_T)


def gather_rows(
    rows_T: Tensor,
    known_tokens_T: Tensor,
    offsets_T: Tensor,
    last_token_R: Tensor,
    length_R: Tensor,
    prompt_len_R: Tensor,
    block_table_RB: Tensor,
    block_size: int,
    token_ids_T: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    prompt_lens_T: Tensor,
) -> None:
    """Write each token's id, position, KV slot and its request's prompt length (the last four arguments).

    Token t is the offsets_T[t]-th new one of row rows_T[t]. Its id is known_tokens_T[t], or where that is negative the row's last
    sampled token, which the host may not know yet. Tokens of the scratch row get position 0 and slot -1.
    """
    T = len(rows_T)
    assert all(len(x) == T for x in (known_tokens_T, offsets_T, token_ids_T, positions_T, slots_T, prompt_lens_T))
    assert block_table_RB.is_contiguous() and len(block_table_RB) == len(length_R)
    if T == 0:
        return
    _gather_rows_kernel[(triton.cdiv(T, _BLOCK),)](
        rows_T, known_tokens_T, offsets_T, last_token_R, length_R, prompt_len_R, block_table_RB, token_ids_T, positions_T,
        slots_T, prompt_lens_T, T, len(length_R) - 1, block_table_RB.shape[1], BLOCK_SIZE=block_size, BLOCK_T=_BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S"])
def _gather_contexts_kernel(rows_S, counts_S, length_R, context_lens_S, S, BLOCK_S: tl.constexpr):
    s_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_use_S = s_S < S
    length_S = tl.load(length_R + tl.load(rows_S + s_S, mask=in_use_S, other=0))
    tl.store(context_lens_S + s_S, length_S + tl.load(counts_S + s_S, mask=in_use_S, other=0), mask=in_use_S)


def gather_contexts(rows_S: Tensor, counts_S: Tensor, length_R: Tensor, context_lens_S: Tensor) -> None:
    """Write each sequence's length once its counts_S new tokens are in: 0 for padding, which has no new token."""
    S = len(rows_S)
    assert len(counts_S) == len(context_lens_S) == S
    _gather_contexts_kernel[(triton.cdiv(S, _BLOCK),)](rows_S, counts_S, length_R, context_lens_S, S, BLOCK_S=_BLOCK)


@triton.jit(do_not_specialize=["S", "N"])
def _advance_rows_kernel(rows_S, context_lens_S, sample_rows_N, sampled_N, length_R, last_token_R, S, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_S = tl.load(rows_S + i, mask=i < S, other=0)
    tl.store(length_R + row_S, tl.load(context_lens_S + i, mask=i < S, other=0), mask=i < S)
    row_N = tl.load(sample_rows_N + i, mask=i < N, other=0)
    # A broken row samples NO_TOKEN, which has no embedding.
    tl.store(last_token_R + row_N, tl.maximum(tl.load(sampled_N + i, mask=i < N, other=0), 0), mask=i < N)


def advance_rows(
    rows_S: Tensor, context_lens_S: Tensor, sample_rows_N: Tensor, sampled_N: Tensor, length_R: Tensor, last_token_R: Tensor
) -> None:
    """Write lengths and sampled tokens back into the rows. The scratch row keeps length 0 and some valid id."""
    S, N = len(rows_S), len(sample_rows_N)
    assert len(context_lens_S) == S and len(sampled_N) == N
    grid = (triton.cdiv(max(S, N), _BLOCK),)
    _advance_rows_kernel[grid](rows_S, context_lens_S, sample_rows_N, sampled_N, length_R, last_token_R, S, N, BLOCK=_BLOCK)
