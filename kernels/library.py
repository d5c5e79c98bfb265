"""Projections by the vendor's matrix library, with the norm and the activation as kernels of their own: for many rows.

The library's own kernels are launched in full order, so a chain may mix them with dependent launches.

B = rows of the step, K = inputs, O = outputs, W = weight rows
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.activation import silu_mul, silu_mul_launch
from kernels.projection import Op, Operands, Projection, Scratch, ScratchSizes, norm_launch, normalised


@dataclass(frozen=True)
class LibraryConfig:
    """The library has nothing to choose."""

    def fits(self, projection: Projection) -> bool:
        """Whether this configuration can run the projection: always."""
        return True

    def scratch_sizes(self, projection: Projection) -> ScratchSizes:
        """The scratch a run needs: normalised inputs, and gate and up products before the activation."""
        p = projection
        products = p.rows * 2 * p.outputs if p.op is Op.NORM_GATE_UP else 0
        return ScratchSizes(normed=p.rows * p.inputs if p.has_norm else 0, products=products)

    def run(self, projection: Projection, operands: Operands, scratch: Scratch, pdl: bool) -> None:
        """Compute the projection."""
        p = projection
        operands.check(p)
        if p.has_norm:
            operands = normalised(p, operands, scratch, pdl)
        x_BK, weight_WK, bias_W, out_BO = operands
        match p.op:
            case Op.LINEAR_ADD:
                _add_product(x_BK, weight_WK, bias_W, out_BO)
            case Op.NORM_LINEAR:
                _product(x_BK, weight_WK, bias_W, out_BO)
            case Op.NORM_GATE_UP:
                products_BW = scratch.products[: p.rows * 2 * p.outputs].view(p.rows, 2 * p.outputs)
                _product(x_BK, weight_WK, bias_W, products_BW)
                silu_mul(products_BW, out_BO, pdl)

    def compile(self, projection: Projection, pdl: bool) -> None:
        """Compile what `run` launches beside the library's kernels."""
        p, dtype = projection, projection.dtype
        if p.has_norm:
            norm_launch(p, (dtype, dtype), pdl).compile()
        if p.op is Op.NORM_GATE_UP:
            silu_mul_launch(p.rows, p.outputs, (dtype, dtype), pdl).compile()


def _product(x_BK: Tensor, weight_WK: Tensor, bias_W: Tensor | None, out_BW: Tensor) -> None:
    if bias_W is None:
        torch.mm(x_BK, weight_WK.t(), out=out_BW)
    else:
        torch.addmm(bias_W, x_BK, weight_WK.t(), out=out_BW)


def _add_product(x_BK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, out_BO: Tensor) -> None:
    if bias_O is not None:
        out_BO.add_(bias_O)
    out_BO.addmm_(x_BK, weight_OK.t())
