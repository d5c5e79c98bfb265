"""The configurations worth timing for a projection, and for the head. What won on an H200 comes first."""

import torch

from kernels.head import Head, HeadConfig
from kernels.library import LibraryConfig
from kernels.matvec import MatvecConfig
from kernels.projection import Op, Projection
from kernels.skinny import SkinnyConfig
from kernels.sliced import SlicedConfig

Config = MatvecConfig | SlicedConfig | SkinnyConfig | LibraryConfig

# Beyond this many rows sums of products lose to matrix units.
MOST_MATVEC_ROWS = 8
# Up to here they always win (0.6B shape, H200).
FEW_ROWS = 2
# With fewer rows every program squares them all itself.
FEWEST_APART_ROWS = 32
# Fewer rows than this never pay for a norm and an activation of their own; from MANY_ROWS on they always do.
FEWEST_LIBRARY_ROWS = 16
MANY_ROWS = 128

# outputs, inputs, splits, early, warps, stages
_SKINNY = [SkinnyConfig(*c) for c in (
    (64, 128, 4, 4, 4, 4), (64, 128, 2, 4, 4, 4), (64, 128, 4, 2, 4, 4), (64, 128, 4, 0, 4, 4), (64, 128, 1, 0, 4, 4),
    (64, 128, 2, 0, 4, 4), (64, 128, 2, 2, 4, 3), (64, 128, 1, 2, 4, 3), (32, 128, 2, 4, 4, 4), (32, 128, 4, 2, 4, 4),
    (128, 64, 1, 0, 8, 4), (128, 64, 2, 0, 8, 4), (128, 128, 1, 0, 8, 3),
)]  # fmt: skip
# The same, for a norm apart: with many rows.
_SKINNY_APART = [SkinnyConfig(*c, norm_apart=True) for c in (
    (64, 128, 1, 0, 4, 4), (64, 128, 2, 0, 4, 4), (64, 128, 2, 2, 4, 3), (64, 128, 4, 0, 4, 3), (128, 64, 1, 0, 8, 4),
    (64, 64, 1, 0, 8, 4), (128, 128, 1, 0, 8, 3),
)]  # fmt: skip
# outputs, warps, inputs
_SLICED = [SlicedConfig(*c) for c in ((16, 4, 256), (16, 8, 128), (32, 8, 128), (16, 8, 256), (8, 8, 256), (16, 16, 64))]
_SKINNY_HEAD = [SkinnyConfig(*c) for c in (
    (64, 128, 1, 0, 4, 4), (64, 128, 1, 4, 4, 4), (128, 128, 1, 0, 8, 3), (128, 64, 1, 0, 8, 4), (128, 64, 1, 0, 4, 4),
)]  # fmt: skip
# For inputs that the above do not divide: one of them fits whatever the shape.
_SKINNY_ODD = [SkinnyConfig(64, 64, 3), SkinnyConfig(64, 64), SkinnyConfig(64, 32), SkinnyConfig(64, 16)]


def candidates(projection: Projection) -> list[Config]:
    """Configurations that fit, at least one. The first is a fair choice where nothing is timed."""
    p = projection
    sums = _matvec(p) if p.rows <= MOST_MATVEC_ROWS else []
    slices = [config for config in _SLICED if config.fits(p)] if p.dtype != torch.float32 else []
    if sums and p.rows <= FEW_ROWS:
        return sums + slices
    apart = _SKINNY_APART if p.has_norm and p.rows >= FEWEST_APART_ROWS else []
    tiles = [config for config in [*_SKINNY, *apart] if config.fits(p)] or [config for config in _SKINNY_ODD if config.fits(p)]
    library = [LibraryConfig()] if p.rows >= FEWEST_LIBRARY_ROWS else []
    if library and (p.rows >= MANY_ROWS or p.op is Op.NORM_GATE_UP):
        return library + slices + tiles
    return slices + tiles + sums + library


def head_candidates(head: Head) -> list[HeadConfig]:
    """Configurations that fit the head, at least one. The first is a fair choice where nothing is timed."""
    found: list[HeadConfig] = []
    if head.rows <= MOST_MATVEC_ROWS:
        outputs = 32 if head.rows <= 2 else 16
        found += [MatvecConfig(outputs, 4, 1024), MatvecConfig(outputs // 2, 4, 1024), MatvecConfig(outputs, 8, 1024)]
        found += [MatvecConfig(16, 8, 512)]
    tiles = [config for config in _SKINNY_HEAD if head.fits(config)] or [config for config in _SKINNY_ODD if head.fits(config)]
    return found + tiles


def _matvec(p: Projection) -> list[MatvecConfig]:
    """Outputs, warps, inputs at a time, cap on registers. With several rows weights are kept as float32: twice the registers."""
    if p.rows > 2:
        # Of more inputs at a time, and a loop over them, Triton 3.6's LLVM makes an assertion of its own where there is a norm.
        return [MatvecConfig(8, 8, 1024 if p.inputs <= 1024 else 512), MatvecConfig(16, 8, 512)]
    whole = min(p.inputs, 3072)
    match p.op:
        case Op.NORM_LINEAR:
            return [MatvecConfig(*c) for c in ((16, 8, 1024), (8, 8, 1024), (8, 4, 1024), (32, 8, 1024), (16, 4, 1024))]
        case Op.LINEAR_ADD:
            cap = 96 if whole == 3072 and p.rows == 1 else None
            return [MatvecConfig(*c) for c in ((8, 8, whole, cap), (8, 8, whole), (4, 4, whole), (8, 4, 1024), (16, 8, 1024))]
        case Op.NORM_GATE_UP:
            cap = 128 if p.rows == 1 else None
            return [MatvecConfig(*c) for c in ((16, 8, 1024, cap), (8, 8, 1024), (24, 8, 1024), (8, 4, 1024), (16, 8, 512))]
