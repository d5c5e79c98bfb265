"""Logits and choice of a token in one kernel; the logits are never written.

Every program packs the value and the id of its best token into one integer per row and raises best_B to it, so the outcome does not
depend on the order of the programs. kernels.reference_fused.head_sample describes the packing.

B = rows of the step, D = model width, V = vocabulary, R = rows of the row state; in a tile Y, N = vocabulary, M = rows of the step
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import matvec, skinny
from kernels.device import Launch, let_dependents_start, wait_for_predecessor
from kernels.matvec import MatvecConfig, load_weights, row_products
from kernels.projection import Op, Projection
from kernels.reference_fused import NOTHING as _NOTHING
from kernels.reference_fused import Chance
from kernels.rows import pack_best
from kernels.skinny import SkinnyConfig, tile_product

NOTHING = tl.constexpr(_NOTHING)
HeadConfig = MatvecConfig | SkinnyConfig


@dataclass(frozen=True)
class Head:
    """The head at one bucket: all that its kernel is compiled for. With has_chance, rows with a temperature draw by Gumbel-max."""

    vocab: int
    inputs: int
    rows: int
    dtype: torch.dtype
    sampled_vocab: int
    has_chance: bool

    @property
    def projection(self) -> Projection:
        """The matrix product in it."""
        return Projection(Op.LINEAR_ADD, self.vocab, self.inputs, self.rows, self.dtype)

    def fits(self, config: HeadConfig) -> bool:
        """Whether a configuration can run it: one that sums all inputs in one program."""
        return config.fits(self.projection) and (isinstance(config, MatvecConfig) or config.splits == 1)


def head_sample(
    config: HeadConfig, head: Head, normed_BD: Tensor, head_VD: Tensor, best_B: Tensor, chance: Chance | None, pdl: bool
) -> None:
    """Raise each best_B, int64, to its row's best packed token; it held NOTHING before the first."""
    assert head.fits(config) and normed_BD.shape == (head.rows, head.inputs) and head_VD.shape == (head.vocab, head.inputs)
    assert best_B.shape == (head.rows,) and best_B.dtype == torch.int64
    assert all(t.dtype == head.dtype and t.is_contiguous() for t in (normed_BD, head_VD))
    assert (chance is not None) == head.has_chance and 0 < head.sampled_vocab <= head.vocab
    _launch(config, head, (normed_BD, head_VD, best_B), chance, pdl).run()


def compile_head(config: HeadConfig, head: Head, pdl: bool) -> None:
    """Compile what `head_sample` launches."""
    chance = Chance(torch.int32, torch.float32, torch.int64, torch.int32) if head.has_chance else None
    _launch(config, head, (head.dtype, head.dtype, torch.int64), chance, pdl).compile()


def _launch(config: HeadConfig, head: Head, tensors: tuple, chance: Chance | None, pdl: bool) -> Launch:
    arguments = (*tensors, *(chance or (None,) * len(Chance._fields)))
    constants = dict(V=head.vocab, D=head.inputs, SAMPLED=head.sampled_vocab)
    if isinstance(config, MatvecConfig):
        constants |= dict(B=head.rows) | matvec.tile_options(config, head.inputs, head.dtype.itemsize)
        grid = (triton.cdiv(head.sampled_vocab, config.outputs),)
        return Launch(_row_head_kernel, grid, arguments, constants, pdl, config.warps, config.max_registers)
    constants |= skinny.tile_options(config, head.rows, head.inputs)
    batches = triton.cdiv(head.rows, config.batch_rows(head.rows))
    grid = (triton.cdiv(head.sampled_vocab, config.outputs) * batches,)
    return Launch(_tile_head_kernel, grid, (*arguments, head.rows), constants, pdl, config.warps)


@triton.jit
def gumbel_noise(seed, position, ids):
    """Standard Gumbel noise of token ids at a position of a request.

    The uniforms are those of kernels.reference.gumbel_noise bit for bit, the logarithms float32. seed and position are scalars or
    broadcast to the shape of ids.
    """
    zeros = ids * 0
    word_0, word_1, word_2, word_3 = tl.philox(seed, ids // 4, position + zeros, zeros, zeros)
    word = tl.where(ids % 4 < 2, tl.where(ids % 4 == 0, word_0, word_1), tl.where(ids % 4 == 2, word_2, word_3))
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _add_chance(logits, temperature, seed, position, ids):
    """What is maximised: with temperature 0 the logits themselves."""
    divisor = tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(logits)
    noisy = tl.div_rn(logits, divisor) + gumbel_noise(seed, position, ids)
    return tl.where(temperature > 0, noisy, logits)


@triton.jit
def _pack(values, ids, SAMPLED: tl.constexpr):
    """Values packed with their ids; ids that may not be chosen below all."""
    return tl.where(ids < SAMPLED, pack_best(values, ids), NOTHING)


@triton.jit
def _row_head_kernel(x_BD, head_VD, best_B, rows_B, temperature_R, seed_R, length_R, B: tl.constexpr, V: tl.constexpr,
                     D: tl.constexpr, SAMPLED: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
                     CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Few rows of x: sums of products."""
    let_dependents_start(PDL)
    first = tl.program_id(0) * (GROUPS * WARPS)
    weights = load_weights(head_VD, first, 0, D % (CHUNK * CHUNKS) == 0, V, D, 1, WARPS, GROUPS, CHUNK, CHUNKS)
    temperatures, seeds, positions = (), (), ()
    if rows_B is not None:  # behind the weights, because these loads wait for each other
        for b in tl.static_range(B):
            row = tl.load(rows_B + b)
            temperatures, seeds = temperatures + (tl.load(temperature_R + row),), seeds + (tl.load(seed_R + row),)
            positions = positions + (tl.load(length_R + row) + 1,)
    wait_for_predecessor(PDL)
    logits = row_products(weights, x_BD, head_VD, first, B, V, D, 1, False, WARPS, GROUPS, CHUNK, CHUNKS, 0.0)
    for b in tl.static_range(B):
        best_Y = tl.full([WARPS], NOTHING, tl.int64)
        for g in tl.static_range(GROUPS):
            ids_Y = first + g * WARPS + tl.arange(0, WARPS)
            values_Y = logits[b][g]
            if rows_B is not None:
                values_Y = _add_chance(values_Y, temperatures[b], seeds[b], positions[b], ids_Y)
            best_Y = tl.maximum(best_Y, _pack(values_Y, ids_Y, SAMPLED))
        tl.atomic_max(best_B + b, tl.max(best_Y, 0), sem="relaxed")


@triton.jit(do_not_specialize=["B"])
def _tile_head_kernel(x_BD, head_VD, best_B, rows_B, temperature_R, seed_R, length_R, B, V: tl.constexpr, D: tl.constexpr,
                      SAMPLED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SHARE: tl.constexpr,
                      EARLY: tl.constexpr, STAGES: tl.constexpr, BATCHES: tl.constexpr, IS_FULL: tl.constexpr, PDL: tl.constexpr):
    """Many rows of x: matrix units."""
    let_dependents_start(PDL)
    first, first_row = tl.program_id(0) // BATCHES * N, tl.program_id(0) % BATCHES * M
    values_NM, _, _ = tile_product(
        x_BD, head_VD, first, first_row, 0, B, V, D, 1, False, M, N, S, SHARE, EARLY, STAGES, IS_FULL, PDL)
    ids_NM = (first + tl.arange(0, N))[:, None] + tl.zeros([1, M], tl.int32)
    rows_M = first_row + tl.arange(0, M)
    if rows_B is not None:
        row_M = tl.load(rows_B + rows_M, mask=rows_M < B, other=0)
        temperature_1M = tl.load(temperature_R + row_M)[None, :]
        seed_1M, position_1M = tl.load(seed_R + row_M)[None, :], tl.load(length_R + row_M)[None, :] + 1
        values_NM = _add_chance(values_NM, temperature_1M, seed_1M, position_1M, ids_NM)
    tl.atomic_max(best_B + rows_M, tl.max(_pack(values_NM, ids_NM, SAMPLED), 0), mask=rows_M < B, sem="relaxed")
