"""The reference ops against formulas written out token by token."""

import math

import pytest
import torch

from kernels import reference as ops

BLOCK, K, H, F = 4, 2, 6, 8


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def plan_for(pool, block_table_RB, work, slots=None):
    """A plan for (row, queries, context length) triples."""
    starts = [0]
    for _, count, _ in work:
        starts.append(starts[-1] + count)
    rows, lens = int32([row for row, _, _ in work]), int32([context for _, _, context in work])
    slots_T = int32([-1] * starts[-1]) if slots is None else slots
    return ops.plan_step(slots_T, block_table_RB, rows, int32(starts), lens, pool)


def slow_attention(q_THF, k_pool, v_pool, block_table_RB, work, scale):
    """One query, one head, one key at a time."""
    out_THF, t = torch.zeros_like(q_THF), 0
    for row, count, context in work:
        for i in range(count):
            visible = max(0, context - count + i + 1) if context else 0
            for h in range(H):
                places = [(int(block_table_RB[row, p // BLOCK]), h // (H // K), p % BLOCK) for p in range(visible)]
                if places:
                    scores = torch.stack([scale * (q_THF[t, h] @ k_pool[place]) for place in places])
                    weights = torch.exp(scores - scores.max())
                    weights /= weights.sum()
                    out_THF[t, h] = sum(w * v_pool[place] for w, place in zip(weights, places))
            t += 1
    return out_THF


MIXTURES = {
    "decode": [(0, 1, 9), (1, 1, 1), (2, 1, 4)],
    "decode_scattered_lengths": [(2, 1, 23), (0, 1, 2), (1, 1, 21), (3, 1, 3)],
    "whole_prompt": [(1, 7, 7)],
    "continued_chunk": [(1, 5, 12)],
    "mixed": [(3, 1, 17), (0, 6, 6), (2, 1, 5), (1, 3, 20)],
    "padding": [(0, 1, 5), (3, 1, 0), (3, 1, 0)],
    "only_padding": [(3, 1, 0)],
}


@pytest.mark.parametrize("name", MIXTURES)
def test_paged_attention_equals_a_loop_over_keys(name):
    work = MIXTURES[name]
    num_blocks = 24
    k_pool, v_pool = random(num_blocks + 1, K, BLOCK, F), random(num_blocks + 1, K, BLOCK, F) * 2
    block_table_RB = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).view(4, 6).int()
    q_THF = random(sum(count for _, count, _ in work), H, F)
    expected = slow_attention(q_THF, k_pool, v_pool, block_table_RB, work, 0.3)
    out_THF = torch.full_like(q_THF, torch.nan)
    ops.paged_attention(q_THF, k_pool, v_pool, plan_for(k_pool, block_table_RB, work), out_THF, 0.3)
    torch.testing.assert_close(out_THF, expected, rtol=1e-4, atol=1e-5)


def test_foreign_memory_never_reaches_the_result():
    """What a sequence does not own is NaN: unused slots of its last block, other blocks, scratch, stale table entries."""
    k_pool, v_pool = torch.full((9, K, BLOCK, F), torch.nan), torch.full((9, K, BLOCK, F), torch.nan)
    block_table_RB = int32([[0, 1, 8, 8], [2, 3, 4, 5], [6, 7, 7, 7]])
    for row, context in ((0, 5), (1, 15), (2, 7)):
        for p in range(context):
            place = (int(block_table_RB[row, p // BLOCK]), slice(None), p % BLOCK)
            k_pool[place], v_pool[place] = random(K, F), random(K, F) + p
    q_THF = random(5, H, F)
    out_THF = torch.empty_like(q_THF)
    plan = plan_for(k_pool, block_table_RB, [(0, 1, 5), (1, 3, 15), (2, 1, 7)])
    assert len(plan.groups) == 1, "rows 0 and 2 are padded to a common length"
    ops.paged_attention(q_THF, k_pool, v_pool, plan, out_THF, 1.0)
    assert out_THF.isfinite().all()


@pytest.mark.parametrize("with_norms", [False, True])
def test_rope_and_write_kv_equals_a_loop_over_tokens(with_norms):
    T = 5
    qkv_TE = random(T, (H + 2 * K) * F)
    original = qkv_TE.clone().view(T, H + 2 * K, F)
    q_norm_F, k_norm_F = (random(F), random(F) + 1) if with_norms else (None, None)
    angle_TP = random(T, F // 2) * 3
    cos_TF, sin_TF = angle_TP.cos().repeat(1, 2), angle_TP.sin().repeat(1, 2)
    k_pool, v_pool = torch.zeros(7, K, BLOCK, F), torch.zeros(7, K, BLOCK, F)
    slots = [9, 0, -1, 23, 14]
    plan = plan_for(k_pool, int32([[0]]), [(0, T, 0)], int32(slots))
    q_THF = torch.empty(T, H, F)
    ops.rope_and_write_kv(qkv_TE, q_norm_F, k_norm_F, 1e-6, cos_TF, sin_TF, plan, k_pool, v_pool, q_THF)

    def expected(x_F, norm_F, t):
        if norm_F is not None:
            x_F = x_F / math.sqrt(float(x_F.square().mean()) + 1e-6) * norm_F
        x, angle = x_F.tolist(), angle_TP[t].tolist()
        pairs = [(x[i], x[i + F // 2], angle[i]) for i in range(F // 2)]
        first = [a * math.cos(r) - b * math.sin(r) for a, b, r in pairs]
        return torch.tensor(first + [b * math.cos(r) + a * math.sin(r) for a, b, r in pairs])

    for t, slot in enumerate(slots):
        for h in range(H):
            torch.testing.assert_close(q_THF[t, h], expected(original[t, h], q_norm_F, t))
        block, offset = (slot // BLOCK, slot % BLOCK) if slot >= 0 else (6, BLOCK - 1)
        for k in range(K):
            torch.testing.assert_close(k_pool[block, k, offset], expected(original[t, H + k], k_norm_F, t))
            torch.testing.assert_close(v_pool[block, k, offset], original[t, H + K + k])
    assert (k_pool[:6].abs().sum((1, 3)) > 0).sum() == 4, "a slot that was not named was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_in_place(dtype):
    x_TD, residual_TD, weight_D = random(3, 10).to(dtype), random(3, 10).to(dtype) * 5, random(10).to(dtype)
    total = (x_TD + residual_TD).float()
    rounded = (total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(dtype)
    ops.add_rms_norm(x_TD, residual_TD, weight_D, x_TD, 1e-5)
    torch.testing.assert_close(residual_TD, total.to(dtype))
    torch.testing.assert_close(x_TD, weight_D * rounded, rtol=2e-6 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul_computes_in_float32(dtype):
    gate_up = random(3, 12).to(dtype)
    out = torch.empty(3, 6, dtype=dtype)
    ops.silu_mul(gate_up, out)
    gate, up = gate_up[:, :6].float(), gate_up[:, 6:].float()
    torch.testing.assert_close(out, (gate / (1 + torch.exp(-gate)) * up).to(dtype))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("input_major", [False, True])
def test_linear_in_both_memory_layouts(bias, input_major):
    x_TI, weight_OI, bias_O = random(3, 5), random(4, 5), random(4) if bias else None
    stored = weight_OI.t().contiguous().t() if input_major else weight_OI
    out_TO = torch.empty(3, 4)
    ops.linear(x_TI, stored, bias_O, out_TO)
    expected = [[float(x @ w) + (float(bias_O[o]) if bias else 0) for o, w in enumerate(weight_OI)] for x in x_TI]
    torch.testing.assert_close(out_TO, torch.tensor(expected))


def test_embed_picks_rows():
    table_VD, out_TD = random(7, 3), torch.empty(4, 3)
    ops.embed(int32([6, 0, 6, 2]), table_VD, out_TD)
    assert torch.equal(out_TD, torch.stack([table_VD[6], table_VD[0], table_VD[6], table_VD[2]]))
