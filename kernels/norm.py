"""RMS norm, alone and after an addition. https://arxiv.org/abs/1910.07467

T = tokens, H = heads of a token (1 where there are none), D = width of what is normalised
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import Launch, let_dependents_start, wait_for_predecessor


@triton.jit
def _rms_norm_kernel(x_THD, residual_TD, weight_D, out_THD, x_stride_t, x_stride_h, out_stride_t, out_stride_h, residual_stride_t,
                     D: tl.constexpr, BLOCK_D: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr):
    let_dependents_start(PDL)
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns_D = tl.arange(0, BLOCK_D)
    inside_D = columns_D < D
    if weight_D is not None:
        weight = tl.load(weight_D + columns_D, mask=inside_D, other=0.0)
    wait_for_predecessor(PDL)
    x = tl.load(x_THD + t * x_stride_t + h * x_stride_h + columns_D, mask=inside_D, other=0.0)
    if residual_TD is not None:
        at_D = residual_TD + t * residual_stride_t + columns_D
        x = (x.to(tl.float32) + tl.load(at_D, mask=inside_D, other=0.0).to(tl.float32)).to(residual_TD.dtype.element_ty)
        tl.store(at_D, x, mask=inside_D)
    x = x.to(tl.float32)
    # Rounded before the weight is applied, as the reference does.
    out = (x * tl.rsqrt(tl.sum(x * x, 0) / D + EPS)).to(out_THD.dtype.element_ty)
    if weight_D is not None:
        out = (out.to(tl.float32) * weight.to(tl.float32)).to(out_THD.dtype.element_ty)
    tl.store(out_THD + t * out_stride_t + h * out_stride_h + columns_D, out, mask=inside_D)


def rms_norm_launch(T: int, H: int, D: int, tensors: tuple, strides: tuple[int, ...], eps: float, pdl: bool) -> Launch:
    """The launch of either norm; tensors are (x, residual or None, weight or None, out), or their dtypes to compile."""
    block = triton.next_power_of_2(D)
    warps = min(max(block // 512, 1), 16)
    return Launch(_rms_norm_kernel, (T, H), (*tensors, *strides), dict(D=D, BLOCK_D=block, EPS=eps), pdl, warps)


def rms_norm(x_TD: Tensor, weight_D: Tensor | None, out_TD: Tensor, eps: float, pdl: bool = False) -> None:
    """Write the rows of x (last axis, dense; one or two axes before it, of any strides), normalised, into out (may be x)."""
    assert x_TD.shape == out_TD.shape and x_TD.stride(-1) == out_TD.stride(-1) == 1
    assert weight_D is None or weight_D.shape == x_TD.shape[-1:]
    x_THD, out_THD = (t if t.dim() == 3 else t[:, None] for t in (x_TD, out_TD))
    strides = (*x_THD.stride()[:2], *out_THD.stride()[:2], 0)
    rms_norm_launch(*x_THD.shape, (x_THD, None, weight_D, out_THD), strides, eps, pdl).run()


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor | None, out_TD: Tensor, eps: float, pdl: bool = False) -> None:
    """Add x to the residual in place and write the normalised residual into out (may be x)."""
    assert x_TD.shape == residual_TD.shape == out_TD.shape and (weight_D is None or weight_D.shape == x_TD.shape[1:])
    assert x_TD.stride(1) == residual_TD.stride(1) == out_TD.stride(1) == 1
    strides = (x_TD.stride(0), 0, out_TD.stride(0), 0, residual_TD.stride(0))
    rms_norm_launch(len(x_TD), 1, x_TD.shape[1], (x_TD, residual_TD, weight_D, out_TD), strides, eps, pdl).run()
