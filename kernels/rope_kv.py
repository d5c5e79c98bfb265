"""Query-key norm, rotary embedding and the write into the paged KV pools, for the tokens of a step.

T = tokens, H = query heads, K = KV heads, X = heads of one kind, F = head width, E = (H + 2K) * F

Columns beyond F, where F is no power of two, are masked off.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import StepPlan


@triton.jit
def load_rotated(heads_X, in_use_XF, gain_F, cos_F, sin_F, dims_F, F: tl.constexpr, EPS: tl.constexpr):
    """The heads that begin at the pointers heads_X, [X, F] in float32: normalised if there is a gain, and rotated.

    cos_F and sin_F belong to elements dims_F. The two halves of a head are real and imaginary parts:
    out[f] = x[f] * cos[f] - x[f + F / 2] * sin[f] in the lower half and x[f] * cos[f] + x[f - F / 2] * sin[f] in the upper one.
    """
    partner_F = (dims_F + F // 2) % F
    x_XF = tl.load(heads_X[:, None] + dims_F[None, :], mask=in_use_XF, other=0.0).to(tl.float32)
    partner_XF = tl.load(heads_X[:, None] + partner_F[None, :], mask=in_use_XF, other=0.0).to(tl.float32)
    signed_sin_F = tl.where(dims_F < F // 2, -sin_F, sin_F)
    if gain_F is not None:
        inverse_rms_X = tl.rsqrt(tl.sum(x_XF * x_XF, 1) / F + EPS)
        inside_F = dims_F < F
        x_XF *= tl.load(gain_F + dims_F, mask=inside_F, other=0.0).to(tl.float32)[None, :]
        partner_XF *= tl.load(gain_F + partner_F, mask=inside_F, other=0.0).to(tl.float32)[None, :]
        rotated_XF = (x_XF * cos_F[None, :] + partner_XF * signed_sin_F[None, :]) * inverse_rms_X[:, None]
    else:
        rotated_XF = x_XF * cos_F[None, :] + partner_XF * signed_sin_F[None, :]
    return rotated_XF


@triton.jit
def _rope_and_write_kv_kernel(qkv_TE, q_norm_F, k_norm_F, cos_TF, sin_TF, slots_T, k_pool, v_pool, q_out_THF,
                              SCRATCH_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
                              F: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr,
                              EPS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    dims_F, q_head_X, kv_head_X = tl.arange(0, BLOCK_F), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    inside_F = dims_F < F
    cos_F = tl.load(cos_TF + t * F + dims_F, mask=inside_F, other=0.0)
    sin_F = tl.load(sin_TF + t * F + dims_F, mask=inside_F, other=0.0)
    token = qkv_TE + t * (H + 2 * K) * F

    q_in_use_XF = (q_head_X < H)[:, None] & inside_F[None, :]
    q_XF = load_rotated(token + q_head_X * F, q_in_use_XF, q_norm_F, cos_F, sin_F, dims_F, F, EPS)
    q_at_XF = q_out_THF + (t * H + q_head_X[:, None]) * F + dims_F[None, :]
    tl.store(q_at_XF, q_XF.to(q_out_THF.dtype.element_ty), mask=q_in_use_XF)

    kv_in_use_XF = (kv_head_X < K)[:, None] & inside_F[None, :]
    k_XF = load_rotated(token + (H + kv_head_X) * F, kv_in_use_XF, k_norm_F, cos_F, sin_F, dims_F, F, EPS)
    v_XF = tl.load(token + (H + K + kv_head_X)[:, None] * F + dims_F[None, :], mask=kv_in_use_XF, other=0.0)
    slot = tl.load(slots_T + t)
    block = tl.where(slot < 0, SCRATCH_BLOCK, slot // BLOCK_SIZE).to(tl.int64)
    offset = tl.where(slot < 0, 0, slot % BLOCK_SIZE)
    at_XF = ((block * K + kv_head_X) * BLOCK_SIZE + offset)[:, None] * F + dims_F[None, :]
    tl.store(k_pool + at_XF, k_XF.to(k_pool.dtype.element_ty), mask=kv_in_use_XF)
    tl.store(v_pool + at_XF, v_XF.to(v_pool.dtype.element_ty), mask=kv_in_use_XF)


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

    The pools are [blocks + 1, K, block_size, F]; slot -1 is in the last block, the scratch block. Unlike the reference this leaves
    qkv as it is. The rotation is https://arxiv.org/abs/2104.09864, with cos and sin in float32.
    """
    T, H, F = q_out_THF.shape
    num_blocks, K, block_size, _ = k_pool.shape
    assert qkv_TE.shape == (T, (H + 2 * K) * F) and cos_TF.shape == sin_TF.shape == (T, F) and plan.slots_T.shape == (T,)
    assert v_pool.shape == k_pool.shape and all(x.is_contiguous() for x in (qkv_TE, cos_TF, sin_TF, k_pool, v_pool, q_out_THF))
    if T == 0:
        return
    block_h, block_k, block_f = (triton.next_power_of_2(size) for size in (H, K, F))
    num_warps = 8 if block_h * block_f > 2048 else 4
    _rope_and_write_kv_kernel[(T,)](
        qkv_TE, q_norm_F, k_norm_F, cos_TF, sin_TF, plan.slots_T, k_pool, v_pool, q_out_THF,
        SCRATCH_BLOCK=num_blocks - 1, BLOCK_SIZE=block_size, H=H, K=K, F=F,
        BLOCK_H=block_h, BLOCK_K=block_k, BLOCK_F=block_f, EPS=eps, num_warps=num_warps,
    )  # fmt: skip
