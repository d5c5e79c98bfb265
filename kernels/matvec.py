"""Projections of a few rows, as sums of products. Faster than matrix units while there are at most about 8 rows.

Each program owns some weight rows and loads all or much of them into registers before it waits for its predecessor. A tile is one
chunk of one row for each warp, 16 bytes for each lane, so sums need no shared memory and no barrier. Tiles have two axes because
with a third, Triton 3.6 and 3.7 disagree on which one the warps divide. Every warp loads the inputs for itself.

B = rows of the step, K = inputs, O = outputs, W = weight rows; in a tile Y = weight rows, one a warp, C = inputs of a chunk
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.activation import silu
from kernels.device import Launch, let_dependents_start, wait_for_predecessor
from kernels.projection import KernelConfig, Op, Operands, Projection

LANES = tl.constexpr(32)


@dataclass(frozen=True)
class MatvecConfig(KernelConfig):
    """How a program is cut: outputs per program, warps, inputs at a time, cap on registers per thread.

    The first inputs' weights are loaded before the wait, the next ones' always during the sums before theirs.
    """

    outputs: int
    warps: int
    inputs: int
    max_registers: int | None = None

    def fits(self, projection: Projection) -> bool:
        """Whether this configuration can run the projection at all."""
        return self.outputs % self.warps == 0

    def launch(self, projection: Projection, operands: Operands, pdl: bool) -> Launch:
        """The kernel's launch; operands may be types."""
        p = projection
        constants = dict(B=p.rows, O=p.outputs, K=p.inputs, HALVES=p.halves, NORM=p.has_norm, ADD=p.op is Op.LINEAR_ADD, EPS=p.eps)
        constants |= tile_options(self, p.inputs, p.dtype.itemsize)
        grid = (triton.cdiv(p.outputs, self.outputs),)
        return Launch(_matvec_kernel, grid, tuple(operands), constants, pdl, self.warps, self.max_registers)


def tile_options(config: MatvecConfig, inputs: int, itemsize: int) -> dict[str, int]:
    """The compile-time constants of `row_products` that follow from a configuration."""
    chunk = 512 // itemsize  # 16 bytes for each lane of a warp
    chunks = triton.cdiv(min(config.inputs, inputs), chunk)
    return dict(WARPS=config.warps, GROUPS=config.outputs // config.warps, CHUNK=chunk, CHUNKS=chunks)


@triton.jit
def _load_chunk(row_Y1, start, IS_WHOLE: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of each row, from input `start` on; zeros beyond the last input."""
    cols_YC = tl.broadcast_to((start + tl.arange(0, CHUNK))[None, :], [WARPS, CHUNK])
    if IS_WHOLE:
        tile_YC = tl.load(row_Y1 + cols_YC)
    else:
        tile_YC = tl.load(row_Y1 + cols_YC, mask=cols_YC < K, other=0.0)
    return tile_YC


@triton.jit
def load_weights(weight_WK, first, start, IS_WHOLE: tl.constexpr, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
                 WARPS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The program's weight rows from input `start` on: CHUNKS tiles for each group of each half."""
    tiles = ()
    for h in tl.static_range(HALVES):
        for g in tl.static_range(GROUPS):
            rows_Y = g * WARPS + tl.arange(0, WARPS)
            if O % (WARPS * GROUPS) != 0:
                rows_Y = tl.minimum(rows_Y, O - 1 - first)  # rows that are not there are the last one again
            row_Y1 = weight_WK + (h * O + first).to(tl.int64) * K + (rows_Y * K)[:, None]
            for c in tl.static_range(CHUNKS):
                tiles = tiles + (_load_chunk(row_Y1, start + c * CHUNK, IS_WHOLE, K, WARPS, CHUNK),)
    return tiles


@triton.jit
def _load_row(row_K, start, IS_WHOLE: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr,
              CHUNKS: tl.constexpr):
    """CHUNKS tiles of one vector, the same in every row of a tile: each warp gets all of it."""
    tiles = ()
    for c in tl.static_range(CHUNKS):
        tiles = tiles + (_load_chunk(row_K, start + c * CHUNK, IS_WHOLE, K, WARPS, CHUNK),)
    return tiles


@triton.jit
def _lane_sums(products_YC, WARPS: tl.constexpr, CHUNK: tl.constexpr):
    """Each lane's own sum [row, lane]; lanes are added only once, at the end."""
    return tl.sum(tl.reshape(products_YC, [WARPS, LANES, CHUNK // LANES]), 2)


@triton.jit
def _add_products(sums, squares, weights, xs, NORM: tl.constexpr, WARPS: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr):
    """One row of x against all tiles: the row's TILES sums and its sum of squares, each with CHUNKS more chunks."""
    wide = ()
    for c in tl.static_range(len(xs)):
        x_YC = xs[c].to(tl.float32)
        if NORM:
            squares += _lane_sums(x_YC * x_YC, WARPS, CHUNK)
        wide = wide + (x_YC,)
    more = ()
    for i in tl.static_range(TILES):
        products_YC = weights[i * len(xs)].to(tl.float32) * wide[0]
        for c in tl.static_range(1, len(xs)):
            products_YC += weights[i * len(xs) + c].to(tl.float32) * wide[c]
        more = more + (sums[i] + _lane_sums(products_YC, WARPS, CHUNK),)
    return more, squares


@triton.jit
def row_products(weights, x_BK, weight_WK, first, B: tl.constexpr, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
                 NORM: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
                 EPS: tl.constexpr):
    """The float32 products of the program's weight rows: for each row of x a tuple of HALVES * GROUPS [Y].

    weights are the first tiles, loaded before the wait. With NORM the rows of x are normalised: their inverse root mean square is
    applied to the sums.
    """
    STEP: tl.constexpr = CHUNK * CHUNKS
    TILES: tl.constexpr = HALVES * GROUPS
    no_sums, sums, squares = (), (), ()
    for _ in tl.static_range(TILES):
        no_sums = no_sums + (tl.zeros([WARPS, LANES], tl.float32),)
    for _ in tl.static_range(B):
        sums, squares = sums + (no_sums,), squares + (tl.zeros([WARPS, LANES], tl.float32),)
    for start in tl.range(0, K, STEP, num_stages=1):
        now = weights
        if STEP < K:  # the next tiles, so that they are on their way during the sums; past the last input nothing is loaded
            weights = load_weights(weight_WK, first, start + STEP, False, O, K, HALVES, WARPS, GROUPS, CHUNK, CHUNKS)
        more_sums, more_squares = (), ()
        for b in tl.static_range(B):
            xs = _load_row(x_BK + b * K, start, K % STEP == 0, K, WARPS, CHUNK, CHUNKS)
            row_sums, row_squares = _add_products(sums[b], squares[b], now, xs, NORM, WARPS, CHUNK, TILES)
            more_sums, more_squares = more_sums + (row_sums,), more_squares + (row_squares,)
        sums, squares = more_sums, more_squares
    return _finish_sums(sums, squares, NORM, B, TILES, K, EPS)


@triton.jit
def _finish_sums(sums, squares, NORM: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr):
    results = ()
    for b in tl.static_range(B):
        of_row = ()
        for i in tl.static_range(TILES):
            sum_Y = tl.sum(sums[b][i], 1)
            if NORM:
                sum_Y *= tl.rsqrt(tl.sum(squares[b], 1) / K + EPS)
            of_row = of_row + (sum_Y,)
        results = results + (of_row,)
    return results


@triton.jit
def _matvec_kernel(x_BK, weight_WK, bias_W, out_BO, B: tl.constexpr, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
                   NORM: tl.constexpr, ADD: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
                   CHUNKS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr):
    let_dependents_start(PDL)
    first = tl.program_id(0) * (GROUPS * WARPS)
    weights = load_weights(weight_WK, first, 0, K % (CHUNK * CHUNKS) == 0, O, K, HALVES, WARPS, GROUPS, CHUNK, CHUNKS)
    wait_for_predecessor(PDL)
    sums = row_products(weights, x_BK, weight_WK, first, B, O, K, HALVES, NORM, WARPS, GROUPS, CHUNK, CHUNKS, EPS)
    for b in tl.static_range(B):
        for g in tl.static_range(GROUPS):
            rows_Y = first + g * WARPS + tl.arange(0, WARPS)
            inside_Y = rows_Y < O
            y_Y = sums[b][g]
            if bias_W is not None:
                y_Y += tl.load(bias_W + rows_Y, mask=inside_Y, other=0.0).to(tl.float32)
            if HALVES == 2:
                up_Y = sums[b][GROUPS + g]
                if bias_W is not None:
                    up_Y += tl.load(bias_W + O + rows_Y, mask=inside_Y, other=0.0).to(tl.float32)
                y_Y = silu(y_Y) * up_Y
            at_Y = out_BO + b * O + rows_Y
            if ADD:
                y_Y += tl.load(at_Y, mask=inside_Y, other=0.0).to(tl.float32)
            tl.store(at_Y, y_Y.to(out_BO.dtype.element_ty), mask=inside_Y)
