"""The gated activation of the MLP. https://arxiv.org/abs/2002.05202

T = tokens, I = MLP width
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.device import Launch, let_dependents_start, wait_for_predecessor

BLOCK_I = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul_kernel(gate_up_T2I, out_TI, I: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    let_dependents_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    columns_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside_I = columns_I < I
    wait_for_predecessor(PDL)
    gate = tl.load(gate_up_T2I + t * (2 * I) + columns_I, mask=inside_I, other=0.0).to(tl.float32)
    up = tl.load(gate_up_T2I + t * (2 * I) + I + columns_I, mask=inside_I, other=0.0).to(tl.float32)
    tl.store(out_TI + t * I + columns_I, (silu(gate) * up).to(out_TI.dtype.element_ty), mask=inside_I)


def silu_mul_launch(T: int, I: int, tensors: tuple, pdl: bool) -> Launch:
    """The launch of silu_mul; tensors are (gate_up, out), or their dtypes to compile."""
    return Launch(_silu_mul_kernel, (T, triton.cdiv(I, BLOCK_I)), tensors, dict(I=I, BLOCK_I=BLOCK_I), pdl, warps=4)


def silu_mul(gate_up_T2I: Tensor, out_TI: Tensor, pdl: bool = False) -> None:
    """out = silu(gate) * up in float32, where gate is the first half of the input's columns."""
    T, I = out_TI.shape
    assert gate_up_T2I.shape == (T, 2 * I) and gate_up_T2I.is_contiguous() and out_TI.is_contiguous()
    silu_mul_launch(T, I, (gate_up_T2I, out_TI), pdl).run()
