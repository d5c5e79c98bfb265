"""The row ops against the plain torch version.

B = rows of a decode step, T = tokens, S = sequences, N = samples, R = rows, V = vocabulary, D = model width
"""

import pytest
import torch
from torch import Tensor

from kernels import reference_decode, reference_rows, rows
from kernels.reference import NO_TOKEN
from kernels.reference_fused import NOTHING

BLOCK_SIZE = 16


def packed(value: float, token: int) -> int:
    """The packing as reference_fused.head_sample describes it."""
    bits = torch.tensor(value).view(torch.int32).item()
    return ((bits if bits >= 0 else bits ^ 0x7FFFFFFF) << 32) | (0x7FFFFFFF - token)


def int32(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_same_effect(op: str, reference, arguments: tuple, outputs: tuple[int, ...]) -> list[Tensor]:
    """Run both versions on copies and compare every argument afterwards; outputs (their places) begin as rubbish."""
    results = []
    for module in (reference, rows):
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        for place in outputs:
            copies[place].fill_(-77)
        getattr(module, op)(*copies)
        results.append(copies)
    for want, got in zip(*results):
        assert torch.equal(got, want) if isinstance(got, Tensor) else got == want
    return [x for x in results[1] if isinstance(x, Tensor)]


@pytest.mark.parametrize("D", [48, 1024, 1600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embed_rows(D, dtype, device):
    table_VD, x_BD = torch.randn(50, D).to(device, dtype), torch.empty(4, D, dtype=dtype, device=device)
    last_token_R = int32([3, 49, 0, 7, 20, 5], device)
    assert_same_effect("embed_rows", reference_decode, (int32([4, 0, 5, 5], device), last_token_R, table_VD, x_BD), (3,))


def test_finish_rows(device):
    """Values of both signs, zero, and rows that are broken in each way; two of padding."""
    values = [(1.5, 4), (-2.5, 151_935), (0.0, 0), (float("nan"), 8), (float("inf"), 9), (float("-inf"), 3), (7.0, 1), (3.0, 2)]
    best_B = torch.tensor([packed(*value) for value in values] + [NOTHING], device=device)
    rows_B = int32([6, 2, 0, 1, 3, 4, 8, 8, 5], device)
    last_token_R, length_R = int32([11, 12, 13, 14, 15, 16, 17, 18, 0], device), int32([5, 0, 9, 1, 2, 3, 100, 8, 0], device)
    arguments = (best_B, rows_B, last_token_R, length_R, torch.zeros_like(rows_B))
    if device.type == "cuda":  # which of the padding rows wins is not defined
        last_token_R[8] = 0
        best_B[6:8] = packed(1.0, 2)
    best_B, _, last_token_R, length_R, sampled_B = assert_same_effect("finish_rows", reference_decode, arguments, (4,))
    assert sampled_B.tolist()[:6] == [4, 151_935, 0, NO_TOKEN, NO_TOKEN, NO_TOKEN] and sampled_B[8] == NO_TOKEN
    assert length_R.tolist() == [6, 1, 10, 2, 3, 4, 101, 8, 0] and (best_B == NOTHING).all() and (last_token_R >= 0).all()


def make_rows(num_rows: int, num_blocks: int, device: torch.device) -> tuple[Tensor, ...]:
    """last_token, length, prompt_len and block table, the scratch row last."""
    torch.manual_seed(0)
    columns = [torch.randint(0, high, (num_rows + 1,), dtype=torch.int32) for high in (1000, num_blocks * BLOCK_SIZE - 40, 300)]
    columns[1][-1] = 0
    table_RB = torch.randint(0, 5000, (num_rows + 1, num_blocks), dtype=torch.int32)
    return tuple(x.to(device) for x in (*columns, table_RB))


@pytest.mark.parametrize("T", [1, 700])
def test_gather_rows(T, device):
    last_token_R, length_R, prompt_len_R, table_RB = make_rows(20, 8, device)
    row_T = torch.randint(0, 21, (T,), dtype=torch.int32, device=device)
    known_T = torch.randint(-1, 5, (T,), dtype=torch.int32, device=device)
    offset_T = torch.randint(0, 40, (T,), dtype=torch.int32, device=device)
    outputs = tuple(torch.empty_like(row_T) for _ in range(4))
    arguments = (row_T, known_T, offset_T, last_token_R, length_R, prompt_len_R, table_RB, BLOCK_SIZE, *outputs)
    assert_same_effect("gather_rows", reference_rows, arguments, (8, 9, 10, 11))


@pytest.mark.parametrize("S", [1, 300])
def test_gather_contexts_and_advance_rows(S, device):
    last_token_R, length_R, _, _ = make_rows(S, 8, device)
    rows_S = torch.randperm(S + 1, dtype=torch.int32).to(device)
    counts_S = torch.randint(1, 9, (S + 1,), dtype=torch.int32, device=device)
    counts_S[rows_S == S] = 0
    arguments = (rows_S, counts_S, length_R, torch.empty_like(rows_S))
    context_lens_S = assert_same_effect("gather_contexts", reference_rows, arguments, (3,))[3]
    sample_rows_N = rows_S[: S // 2]
    sampled_N = torch.randint(-1, 50, (S // 2,), dtype=torch.int32, device=device)
    arguments = (rows_S, context_lens_S, sample_rows_N, sampled_N, length_R, last_token_R)
    length_R = assert_same_effect("advance_rows", reference_rows, arguments, ())[4]
    assert length_R[-1] == 0
