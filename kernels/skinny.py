"""Projections of a batch of rows on matrix units, as tiles of weights @ x.T: the batch is the narrow side of a tile.

Each program loads its first weight tiles into registers before it waits for its predecessor. With several splits of the inputs the
last program of a tile to arrive sums all partial results in a fixed order, so equal inputs give equal bits.

B = rows of the step, K = inputs, O = outputs, W = weight rows; in a program N = weight rows, M = rows of the step,
S = inputs at a time
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.activation import silu
from kernels.device import Launch, dot, let_dependents_start, wait_for_predecessor
from kernels.projection import (
    Op,
    Operands,
    Projection,
    Scratch,
    ScratchSizes,
    norm_launch,
    normalised,
    operand_types,
    scratch_types,
)

# Of the 227 KB that a program may have, less what layout conversions take.
SHARED_MEMORY = 200_000
REGISTERS = 255  # the most a thread can have


@dataclass(frozen=True)
class SkinnyConfig:
    """How a program is cut: outputs, inputs at a time, splits of the inputs, weight tiles before the wait, warps, stages, rows.

    A step of more rows than `rows` has programs of its own for them, which find the weights in the cache. norm_apart: a norm is a
    kernel of its own before this one, where otherwise every program would square all rows again.
    """

    outputs: int
    inputs: int
    splits: int = 1
    early: int = 0
    warps: int = 4
    stages: int = 4
    rows: int = 128
    norm_apart: bool = False

    def fits(self, projection: Projection) -> bool:
        """Whether the inputs divide into splits of whole tiles, and tiles and sums have room."""
        p, batch = projection, self.batch_rows(projection.rows) * (2 if self._squares(projection) else 1)  # x is loaded twice
        tiles = self.stages + (self.early > 0)  # those loaded early pass through shared memory too
        pipelined = (self.outputs * p.halves + batch) * self.inputs * p.dtype.itemsize * tiles
        sums = p.halves * self.outputs * self.batch_rows(p.rows)
        weights = p.halves * self.outputs * self.inputs * self.early * p.dtype.itemsize // 4
        has_room = pipelined <= SHARED_MEMORY and (sums + weights) // (32 * self.warps) <= REGISTERS - 64
        return p.inputs % (self.inputs * self.splits) == 0 and has_room

    def batch_rows(self, rows: int) -> int:
        """Rows of the step in one program: a power of two, and at least the 16 of a matrix instruction's side."""
        return min(max(triton.next_power_of_2(rows), 16), self.rows)

    def scratch_sizes(self, projection: Projection) -> ScratchSizes:
        """The scratch a run needs: partial results of every program, a counter for every tile."""
        p = projection
        normed = p.rows * p.inputs if p.has_norm and self.norm_apart else 0
        if self.splits == 1:
            return ScratchSizes(normed=normed)
        tiles = self.grid(p)[0]
        per_program = (p.halves * self.outputs + 1) * self.batch_rows(p.rows)
        return ScratchSizes(partial=tiles * self.splits * per_program, arrived=tiles, normed=normed)

    def _squares(self, projection: Projection) -> bool:
        """Whether the kernel itself normalises."""
        return projection.has_norm and not self.norm_apart

    def grid(self, projection: Projection) -> tuple[int, int]:
        """Programs: tiles (batches of the same weights side by side), splits."""
        batches = triton.cdiv(projection.rows, self.batch_rows(projection.rows))
        return triton.cdiv(projection.outputs, self.outputs) * batches, self.splits

    def run(self, projection: Projection, operands: Operands, scratch: Scratch, pdl: bool) -> None:
        """Compute the projection."""
        operands.check(projection)
        sizes = self.scratch_sizes(projection)
        assert self.fits(projection) and len(scratch.partial) >= sizes.partial and len(scratch.arrived) >= sizes.arrived
        if sizes.normed:
            operands = normalised(projection, operands, scratch, pdl)
        _launch(self, projection, operands, scratch, pdl).run()

    def compile(self, projection: Projection, pdl: bool) -> None:
        """Compile what `run` launches."""
        if self.norm_apart and projection.has_norm:
            norm_launch(projection, (projection.dtype, projection.dtype), pdl).compile()
        _launch(self, projection, operand_types(projection), scratch_types(projection.dtype), pdl).compile()


def tile_options(config: SkinnyConfig, rows: int, inputs: int) -> dict[str, int]:
    """The compile-time constants of `tile_product` that follow from a configuration: the same for many numbers of rows."""
    share = inputs // config.splits
    early = min(config.early, share // config.inputs)
    batch = config.batch_rows(rows)
    tile = dict(M=batch, N=config.outputs, S=config.inputs, SHARE=share, EARLY=early, STAGES=config.stages)
    return dict(tile, BATCHES=triton.cdiv(rows, batch), IS_FULL=rows % batch == 0)


def _launch(config: SkinnyConfig, p: Projection, operands: Operands, scratch: Scratch, pdl: bool) -> Launch:
    constants = dict(O=p.outputs, K=p.inputs, HALVES=p.halves, NORM=config._squares(p), ADD=p.op is Op.LINEAR_ADD, EPS=p.eps)
    constants |= tile_options(config, p.rows, p.inputs)
    arguments = (*operands, scratch.partial, scratch.arrived, p.rows)
    return Launch(_skinny_kernel, config.grid(p), arguments, constants, pdl, config.warps)


@triton.jit
def _activations(x_at_MS, k, squares_M, rows_M, B, IS_FULL: tl.constexpr, NORM: tl.constexpr):
    """The tile of x at input k, and the sums of squares with this tile's."""
    if IS_FULL:
        x_MS = tl.load(x_at_MS + k)
    else:
        x_MS = tl.load(x_at_MS + k, mask=(rows_M < B)[:, None], other=0.0)
    if NORM:
        # Loaded again, in other words so that the compiler keeps both: Triton 3.6 and 3.7 give a tile that is both summed and
        # multiplied one buffer too few, and overwrite it while the matrix units still read it.
        if IS_FULL:
            again_MS = tl.load(x_at_MS + k, eviction_policy="evict_last")
        else:
            again_MS = tl.load(x_at_MS + k, mask=(rows_M < B)[:, None], other=0.0, eviction_policy="evict_last")
        x32_MS = again_MS.to(tl.float32)
        squares_M += tl.sum(x32_MS * x32_MS, 1)
    return x_MS, squares_M


@triton.jit
def tile_product(x_BK, weight_WK, first, first_row, first_input, B, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
                 NORM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHARE: tl.constexpr, EARLY: tl.constexpr,
                 STAGES: tl.constexpr, IS_FULL: tl.constexpr, PDL: tl.constexpr):
    """Wait, then the products of N weight rows and M rows of x over SHARE inputs [N, M], those of the up rows, and squares [M].

    With NORM they are still to be multiplied by the inverse root mean square over all inputs.
    """
    rows_N, rows_M, inputs_S = tl.arange(0, N), first_row + tl.arange(0, M), first_input + tl.arange(0, S)
    if O % N != 0:
        rows_N = tl.minimum(rows_N, O - 1 - first)  # rows that are not there are the last one again
    weight_at = weight_WK + first.to(tl.int64) * K + rows_N[:, None] * K + inputs_S[None, :]
    up_at = weight_at + O * K if HALVES == 2 else weight_at
    x_at = x_BK + rows_M[:, None] * K + inputs_S[None, :]
    early, early_up = (), ()
    for i in tl.static_range(EARLY):
        early = early + (tl.load(weight_at + i * S),)
        if HALVES == 2:
            early_up = early_up + (tl.load(up_at + i * S),)
    wait_for_predecessor(PDL)
    acc_NM, up_NM, squares_M = tl.zeros([N, M], tl.float32), tl.zeros([N, M], tl.float32), tl.zeros([M], tl.float32)
    for i in tl.static_range(EARLY):
        x_MS, squares_M = _activations(x_at, i * S, squares_M, rows_M, B, IS_FULL, NORM)
        acc_NM = dot(early[i], tl.trans(x_MS), acc_NM)
        if HALVES == 2:
            up_NM = dot(early_up[i], tl.trans(x_MS), up_NM)
    if EARLY * S < SHARE:
        for k in tl.range(EARLY * S, SHARE, S, num_stages=STAGES):
            x_MS, squares_M = _activations(x_at, k, squares_M, rows_M, B, IS_FULL, NORM)
            acc_NM = dot(tl.load(weight_at + k), tl.trans(x_MS), acc_NM)
            if HALVES == 2:
                up_NM = dot(tl.load(up_at + k), tl.trans(x_MS), up_NM)
    return acc_NM, up_NM, squares_M


@triton.jit
def _leave_partial(partial, acc_NM, up_NM, squares_M, HALVES: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Write one program's results, all of them side by side."""
    at_NM = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(partial + at_NM, acc_NM)
    if HALVES == 2:
        tl.store(partial + N * M + at_NM, up_NM)
    tl.store(partial + HALVES * N * M + tl.arange(0, M), squares_M)


@triton.jit
def _merge_partials(partial, SPLITS: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    at_NM = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    acc_NM, up_NM, squares_M = tl.zeros([N, M], tl.float32), tl.zeros([N, M], tl.float32), tl.zeros([M], tl.float32)
    for s in tl.static_range(SPLITS):
        # .cg: what other programs wrote is in the L2 cache; this processor's own L1 may not know.
        acc_NM += tl.load(partial + at_NM, cache_modifier=".cg")
        if HALVES == 2:
            up_NM += tl.load(partial + N * M + at_NM, cache_modifier=".cg")
        squares_M += tl.load(partial + HALVES * N * M + tl.arange(0, M), cache_modifier=".cg")
        partial += (HALVES * N + 1) * M
    return acc_NM, up_NM, squares_M


@triton.jit
def _finish(acc_NM, up_NM, squares_M, bias_W, out_BO, rows_N, rows_M, B, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
            NORM: tl.constexpr, ADD: tl.constexpr, EPS: tl.constexpr):
    """From sums over all inputs to the stored outputs."""
    inside_N = rows_N < O
    inside_NM = inside_N[:, None] & (rows_M < B)[None, :]
    at_NM = out_BO + rows_M[None, :] * O + rows_N[:, None]
    if NORM:
        scale_M = tl.rsqrt(squares_M / K + EPS)
        acc_NM, up_NM = acc_NM * scale_M[None, :], up_NM * scale_M[None, :]
    if bias_W is not None:
        acc_NM += tl.load(bias_W + rows_N, mask=inside_N, other=0.0).to(tl.float32)[:, None]
    if HALVES == 2:
        if bias_W is not None:
            up_NM += tl.load(bias_W + O + rows_N, mask=inside_N, other=0.0).to(tl.float32)[:, None]
        acc_NM = silu(acc_NM) * up_NM
    if ADD:
        acc_NM += tl.load(at_NM, mask=inside_NM, other=0.0).to(tl.float32)
    tl.store(at_NM, acc_NM.to(out_BO.dtype.element_ty), mask=inside_NM)


@triton.jit(do_not_specialize=["B"])
def _skinny_kernel(x_BK, weight_WK, bias_W, out_BO, partial, arrived, B, O: tl.constexpr, K: tl.constexpr, HALVES: tl.constexpr,
                   NORM: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHARE: tl.constexpr,
                   EARLY: tl.constexpr, STAGES: tl.constexpr, BATCHES: tl.constexpr, IS_FULL: tl.constexpr, EPS: tl.constexpr,
                   PDL: tl.constexpr):
    let_dependents_start(PDL)
    SPLITS: tl.constexpr = K // SHARE
    tile, split = tl.program_id(0), tl.program_id(1)
    first, first_row = tile // BATCHES * N, tile % BATCHES * M
    acc_NM, up_NM, squares_M = tile_product(
        x_BK, weight_WK, first, first_row, split * SHARE, B, O, K, HALVES, NORM, M, N, S, SHARE, EARLY, STAGES, IS_FULL, PDL)
    rows_N, rows_M = first + tl.arange(0, N), first_row + tl.arange(0, M)
    if SPLITS == 1:
        _finish(acc_NM, up_NM, squares_M, bias_W, out_BO, rows_N, rows_M, B, O, K, HALVES, NORM, ADD, EPS)
    else:
        partial += tile.to(tl.int64) * (SPLITS * (HALVES * N + 1) * M)
        _leave_partial(partial + split * ((HALVES * N + 1) * M), acc_NM, up_NM, squares_M, HALVES, N, M)
        tl.debug_barrier()  # all threads' partial results are written before one of them counts the program in
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            acc_NM, up_NM, squares_M = _merge_partials(partial, SPLITS, HALVES, N, M)
            _finish(acc_NM, up_NM, squares_M, bias_W, out_BO, rows_N, rows_M, B, O, K, HALVES, NORM, ADD, EPS)
            tl.store(arrived + tile, 0)
