"""Projections of up to 32 rows on matrix units without splits: each warp multiplies its own slice of the inputs.

All weights of a program are on their way before it waits for its predecessor; the compiler puts them into shared memory, so they hold
no registers. After the wait there is one load of x, one product per warp and one sum over the warps: no other program is met.

B = rows of the step, K = inputs, O = outputs, W = weight rows; in a program N = outputs, M = rows of the step, S = slices (one a
warp), C = inputs of a slice
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.activation import silu
from kernels.device import Launch, dot, let_dependents_start, wait_for_predecessor
from kernels.projection import KernelConfig, Op, Operands, Projection

SHARED_MEMORY = 220_000  # of the 227 KB that a program may have
MOST_ROWS = 32


@dataclass(frozen=True)
class SlicedConfig(KernelConfig):
    """How a program is cut: outputs, warps, inputs of a warp at a time."""

    outputs: int
    warps: int
    inputs: int

    def fits(self, projection: Projection) -> bool:
        """Whether the inputs are whole slices, all weights have room, and there are not too many rows."""
        p, step = projection, self.warps * self.inputs
        shared = (p.halves * self.outputs * p.inputs + self.batch_rows(p.rows) * step) * p.dtype.itemsize
        return p.inputs % step == 0 and p.rows <= MOST_ROWS and shared <= SHARED_MEMORY

    def batch_rows(self, rows: int) -> int:
        """Rows of a tile: a power of two, and at least the 16 that a matrix instruction is filled with."""
        return max(16, triton.next_power_of_2(rows))

    def launch(self, projection: Projection, operands: Operands, pdl: bool) -> Launch:
        """The kernel's launch; operands may be types."""
        p = projection
        constants = dict(O=p.outputs, K=p.inputs, HALVES=p.halves, NORM=p.has_norm, ADD=p.op is Op.LINEAR_ADD, EPS=p.eps)
        constants |= dict(N=self.outputs, M=self.batch_rows(p.rows), S=self.warps, C=self.inputs)
        grid = (triton.cdiv(p.outputs, self.outputs),)
        return Launch(_sliced_kernel, grid, (*operands, p.rows), constants, pdl, self.warps)


@triton.jit
def _load_slices(weight_WK, first, h, cols_SC, O: tl.constexpr, K: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """The rows of half h that the program owns: a tile [S, N, C] for every STEP inputs."""
    rows_N = tl.arange(0, N)
    if O % N != 0:
        rows_N = tl.minimum(rows_N, O - 1 - first)  # rows that are not there are the last one again
    at_SNC = weight_WK + (h * O + first).to(tl.int64) * K + rows_N[None, :, None] * K + cols_SC[:, None, :]
    tiles = ()
    for i in tl.static_range(K // STEP):
        tiles = tiles + (tl.load(at_SNC + i * STEP),)
    return tiles


@triton.jit
def _output(acc_SNM, squares_SM, bias_W, rows_N, NORM: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr):
    """The sum over the slices, normalised, with the bias of weight rows rows_N."""
    y_NM = tl.sum(acc_SNM, 0)
    if NORM:
        y_NM *= tl.rsqrt(tl.sum(squares_SM, 0) / K + EPS)[None, :]
    if bias_W is not None:
        y_NM += tl.load(bias_W + rows_N, mask=rows_N < LIMIT, other=0.0).to(tl.float32)[:, None]
    return y_NM


@triton.jit(do_not_specialize=["B"])
def _sliced_kernel(x_BK, weight_WK, bias_W, out_BO, B, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr,
                   ADD: tl.constexpr, N: tl.constexpr, M: tl.constexpr, S: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr,
                   PDL: tl.constexpr):
    let_dependents_start(PDL)
    first = tl.program_id(0) * N
    rows_N, rows_M = first + tl.arange(0, N), tl.arange(0, M)
    cols_SC = (tl.arange(0, S) * C)[:, None] + tl.arange(0, C)[None, :]
    weights = _load_slices(weight_WK, first, 0, cols_SC, O, K, N, S * C)
    if HALVES == 2:
        up_weights = _load_slices(weight_WK, first, 1, cols_SC, O, K, N, S * C)
    wait_for_predecessor(PDL)
    acc_SNM, up_SNM, squares_SM = tl.zeros([S, N, M], tl.float32), tl.zeros([S, N, M], tl.float32), tl.zeros([S, M], tl.float32)
    x_at_SMC = x_BK + rows_M[None, :, None] * K + cols_SC[:, None, :]
    for i in tl.static_range(K // (S * C)):
        x_SMC = tl.load(x_at_SMC + i * (S * C), mask=(rows_M < B)[None, :, None], other=0.0)
        if NORM:
            squares_SM += tl.sum(x_SMC.to(tl.float32) * x_SMC.to(tl.float32), 2)
        acc_SNM = dot(weights[i], tl.permute(x_SMC, (0, 2, 1)), acc_SNM)
        if HALVES == 2:
            up_SNM = dot(up_weights[i], tl.permute(x_SMC, (0, 2, 1)), up_SNM)
    y_NM = _output(acc_SNM, squares_SM, bias_W, rows_N, NORM, K, EPS, O)
    if HALVES == 2:
        y_NM = silu(y_NM) * _output(up_SNM, squares_SM, bias_W, O + rows_N, NORM, K, EPS, 2 * O)
    inside_NM = (rows_N < O)[:, None] & (rows_M < B)[None, :]
    at_NM = out_BO + rows_M[None, :] * O + rows_N[:, None]
    if ADD:
        y_NM += tl.load(at_NM, mask=inside_NM, other=0.0).to(tl.float32)
    tl.store(at_NM, y_NM.to(out_BO.dtype.element_ty), mask=inside_NM)
