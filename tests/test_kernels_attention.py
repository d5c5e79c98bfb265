"""Rotary embedding, KV writes and both attention kernels against the plain torch version.

T = tokens, S = sequences, B = rows of a decode step, R = rows, H, K, F = query heads, KV heads, head width, X = H * F
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import reference, reference_decode
from kernels.attention import AttentionConfig, paged_attention, plan_step
from kernels.decode_attention import DecodeConfig, allocate_scratch, decode_attention, decode_configs
from kernels.rope_kv import rope_and_write_kv

EPS = 1e-6
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
QWEN3 = (16, 8, 128)
REAL_HEADS = [QWEN3, (32, 8, 64), (32, 8, 128)]


@dataclass
class Case:
    """Rows of given lengths over pools in which everything else is NaN or, as the scratch block, zero."""

    heads: tuple[int, int, int]
    length_R: Tensor
    block_table_RB: Tensor
    k_pool: Tensor
    v_pool: Tensor

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.k_pool.dtype, device=self.k_pool.device)

    def copied_pools(self) -> tuple[Tensor, Tensor]:
        return self.k_pool.clone(), self.v_pool.clone()


def make_case(lengths: list[int], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, spare: int = 2) -> Case:
    """Rows that hold so many tokens, with room for more, blocks in random order, and the scratch row behind them."""
    torch.manual_seed(0)
    _, K, F = heads
    per_row = [length // BLOCK_SIZE + spare for length in lengths]
    num_blocks = sum(per_row) + 1
    block_table_RB = torch.full((len(lengths) + 1, max(per_row)), num_blocks, dtype=torch.int32, device=device)
    blocks = torch.randperm(num_blocks, dtype=torch.int32, device=device)[:-1].split(per_row)
    for r, blocks_of_row in enumerate(blocks):
        block_table_RB[r, : per_row[r]] = blocks_of_row
    length_R = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
    row_T = torch.arange(len(length_R), device=device).repeat_interleave(length_R)
    position_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    at = (block_table_RB[row_T, position_T // BLOCK_SIZE].long(), slice(None), position_T % BLOCK_SIZE)
    pools = [torch.full((num_blocks + 1, K, BLOCK_SIZE, F), torch.nan, dtype=dtype, device=device) for _ in range(2)]
    for pool in pools:
        pool[-1] = 0
        pool[at] = torch.randn(len(row_T), K, F, dtype=dtype, device=device)
    return Case(heads, length_R, block_table_RB, *pools)


def rotary_table(num_positions: int, F: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angle = torch.arange(num_positions)[:, None] * 10000.0 ** (-torch.arange(0, F, 2) / F)
    return angle.cos().repeat(1, 2).to(device), angle.sin().repeat(1, 2).to(device)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    error = ((got.float() - want.float()).norm() / want.float().norm()).item()
    assert error < TOLERANCE[dtype], f"relative error {error}"  # also fails on NaN


def assert_same_pools(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], case: Case) -> None:
    """Equal but for rounding where the step wrote, byte for byte as before elsewhere; the scratch block is nobody's."""
    for got_pool, want_pool, before in zip(got, want, (case.k_pool, case.v_pool)):
        got_pool, want_pool, before = (pool[:-1].nan_to_num(nan=99.0) for pool in (got_pool, want_pool, before))
        is_written = want_pool != before
        assert torch.equal(got_pool[~is_written], before[~is_written])
        assert_close(got_pool[is_written], want_pool[is_written], before.dtype)


# ---- mixed steps --------------------------------------------------------------------------------------------------


def check_mixed(contexts, queries, heads, dtype, device, has_norm=True, config: AttentionConfig | None = None):
    """A step in which sequence s has the last queries[s] of its contexts[s] tokens, then one token of padding."""
    H, K, F = heads
    case = make_case([c - q for c, q in zip(contexts, queries)], heads, dtype, device, spare=2 + max(queries) // BLOCK_SIZE)
    index = dict(dtype=torch.int32, device=device)
    position_T = torch.cat([torch.arange(c - q, c) for c, q in zip(contexts, queries)] + [torch.tensor([0])]).to(device)
    rows_S = torch.arange(len(contexts) + 1, **index)
    counts_S = torch.tensor([*queries, 1], **index)
    query_start_S1 = torch.cat([torch.zeros(1, **index), counts_S.cumsum(0).int()])
    row_T = rows_S.repeat_interleave(counts_S)
    slots_T = case.block_table_RB[row_T, position_T // BLOCK_SIZE] * BLOCK_SIZE + position_T.int() % BLOCK_SIZE
    slots_T[-1] = -1
    context_lens_S = torch.tensor([*contexts, 0], **index)
    cos_TF, sin_TF = (table[position_T] for table in rotary_table(max(contexts), F, device))
    qkv_TE = case.randn(len(position_T), (H + 2 * K) * F)
    norms = (1 + 0.1 * case.randn(F), 1 + 0.1 * case.randn(F)) if has_norm else (None, None)

    def run(plan_step, rope_and_write_kv, paged_attention, **options):
        pools = case.copied_pools()
        plan = plan_step(slots_T, case.block_table_RB, rows_S, query_start_S1, context_lens_S, pools[0])
        q_THF, out_THF = (torch.full((len(position_T), H, F), torch.nan, dtype=dtype, device=device) for _ in range(2))
        rope_and_write_kv(qkv_TE.clone(), *norms, EPS, cos_TF, sin_TF, plan, *pools, q_THF)
        paged_attention(q_THF, *pools, plan, out_THF, F**-0.5, **options)
        return q_THF, out_THF, pools

    want_q, want_out, want_pools = run(reference.plan_step, reference.rope_and_write_kv, reference.paged_attention)
    got_q, got_out, got_pools = run(plan_step, rope_and_write_kv, paged_attention, config=config)
    assert_close(got_q, want_q, dtype)
    assert_same_pools(got_pools, want_pools, case)
    assert_close(got_out, want_out, dtype)
    assert (got_out[-1] == 0).all()


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 16), (2, 2, 80)], ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
def test_mixed_step_matches_the_reference(heads, has_norm, device):
    check_mixed([1, 40, 17, 70, 33], [1, 23, 17, 1, 2], heads, torch.float32, device, has_norm)


def test_mixed_step_with_several_tiles_of_queries(device):
    config = AttentionConfig(rows=16, tokens=16, warps=4, stages=2)
    check_mixed([5, 90, 41], [1, 50, 41], (6, 2, 32), torch.float32, device, config=config)


def test_mixed_step_in_half_precision(device):
    for dtype in (torch.bfloat16, torch.float16):
        check_mixed([9, 45], [1, 30], (4, 2, 32), dtype, device)


def test_step_of_decoding_rows_only(device):
    check_mixed([1, 40, 100], [1, 1, 1], (4, 2, 64), torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", REAL_HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mixed_step_of_real_shapes(heads, dtype, device):
    check_mixed([1, 1500, 2048, 700, 33, 8], [1, 1, 2048, 250, 33, 5], heads, dtype, device)


# ---- decode steps -------------------------------------------------------------------------------------------------


def check_decode(lengths, heads, dtype, device, config: DecodeConfig, by_position=True, has_norm=True, launches=2):
    """Rows in random order between two of padding, more than once over the same scratch."""
    H, K, F = heads
    case = make_case(lengths, heads, dtype, device)
    rows = torch.cat([torch.tensor([len(lengths)]), torch.randperm(len(lengths)), torch.tensor([len(lengths)])])
    rows_B = rows.to(device, torch.int32)
    B = len(rows_B)
    cos, sin = rotary_table(max(lengths) + 1, F, device)
    if not by_position:
        cos, sin = cos[case.length_R[rows_B]], sin[case.length_R[rows_B]]
    norms = (1 + 0.1 * case.randn(F), 1 + 0.1 * case.randn(F)) if has_norm else (None, None)
    scratch = allocate_scratch([(1, config), (B, config)], H, K, F, device)
    scratch.part.fill_(torch.nan)
    scratch.log_sum.fill_(torch.nan)
    for _ in range(launches):
        qkv_BE = case.randn(B, (H + 2 * K) * F)
        want_BX, got_BX = (torch.full((B, H * F), torch.nan, dtype=dtype, device=device) for _ in range(2))
        want_pools, got_pools = case.copied_pools(), case.copied_pools()
        shared = (rows_B, case.length_R, case.block_table_RB, cos, sin, by_position, *norms, EPS)
        reference_decode.decode_attention(qkv_BE.clone(), *shared, *want_pools, None, want_BX, F**-0.5, None)
        decode_attention(qkv_BE, *shared, *got_pools, scratch, got_BX, F**-0.5, config)
        assert_same_pools(got_pools, want_pools, case)
        assert_close(got_BX, want_BX, dtype)
        assert (got_BX[0] == 0).all() and (got_BX[-1] == 0).all()
        assert (scratch.arrived == 0).all()


CONFIGS = [
    DecodeConfig(tokens=16, shares=1, new_token_apart=False, prefetch=False, warps=4, stages=2),
    DecodeConfig(tokens=16, shares=3, new_token_apart=False, prefetch=True, warps=4, stages=2),
    DecodeConfig(tokens=16, shares=2, new_token_apart=True, prefetch=True, warps=4, stages=2),
    DecodeConfig(tokens=32, shares=20, new_token_apart=True, prefetch=False, warps=4, stages=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_decode_step_matches_the_reference(config, device):
    check_decode([0, 1, 47, 16, 100], (4, 2, 64), torch.float32, device, config)


@pytest.mark.parametrize("heads", [(3, 1, 16), (2, 2, 80), (32, 2, 32)], ids=str)
def test_decode_step_of_other_heads(heads, device):
    check_decode([5, 33], heads, torch.float32, device, CONFIGS[2], has_norm=False, launches=1)


def test_decode_step_with_rotary_factors_per_row(device):
    check_decode([5, 33, 0], (4, 2, 32), torch.float32, device, CONFIGS[1], by_position=False)


def test_decode_step_in_half_precision(device):
    for dtype in (torch.bfloat16, torch.float16):
        check_decode([5, 33, 70], (4, 2, 64), dtype, device, CONFIGS[1], launches=1)


def test_decode_step_merges_more_parts_than_one_tile(device):
    config = DecodeConfig(tokens=16, shares=32, new_token_apart=True, prefetch=True, warps=4, stages=2)
    check_decode([300], (2, 1, 64), torch.float32, device, config)


def real_steps():
    """The first configuration of every size of batch for all heads and the types of each; for one of them all configurations."""
    for heads in REAL_HEADS:
        for batch in (1, 16, 64, 254):
            found = decode_configs(batch + 2, heads[1], 4096)
            for dtype in (torch.bfloat16, torch.float32) if heads == QWEN3 else (torch.bfloat16,):
                configs = found if (heads, dtype) == (QWEN3, torch.bfloat16) else found[:1]
                yield pytest.param(heads, batch, dtype, configs, id=f"{heads}-{batch}-{dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "batch", "dtype", "configs"), real_steps())
def test_decode_step_of_real_shapes(heads, batch, dtype, configs, device):
    torch.manual_seed(batch)
    lengths = [2999, *torch.randint(0, 30_000 // batch, (batch,)).clamp(max=3000).tolist()][:batch]
    for config in configs:
        check_decode(lengths, heads, dtype, device, config)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", REAL_HEADS, ids=str)
def test_decode_step_of_real_shapes_with_rotary_factors_per_row(heads, device):
    check_decode([0, 3000, 700, 33], heads, torch.bfloat16, device, CONFIGS[2], by_position=False)
