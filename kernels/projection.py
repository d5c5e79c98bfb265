"""What the projections of a decode step are, and what their kernels are given.

The norms before them have no weight of their own: it is in the projection's weights (worker.parameters.fold_norms).

B = rows of the step, K = inputs, O = outputs, W = weight rows (2 * O where gate and up rows make one output, otherwise O)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.device import Launch
from kernels.norm import rms_norm_launch


class Op(Enum):
    """The three projections; kernels.reference_fused says what each computes."""

    NORM_LINEAR = "norm_linear"
    LINEAR_ADD = "linear_add"
    NORM_GATE_UP = "norm_gate_up"


@dataclass(frozen=True)
class Projection:
    """One projection at one bucket: all that a kernel is compiled for."""

    op: Op
    outputs: int  # O: for NORM_GATE_UP the MLP width
    inputs: int  # K
    rows: int  # B
    dtype: torch.dtype
    has_bias: bool = False
    eps: float = 0.0

    def __post_init__(self):
        assert self.inputs % 16 == 0 and self.outputs > 0 and self.rows > 0

    @property
    def has_norm(self) -> bool:
        return self.op is not Op.LINEAR_ADD

    @property
    def halves(self) -> int:
        """Weight rows to one output."""
        return 2 if self.op is Op.NORM_GATE_UP else 1


class Operands(NamedTuple):
    """A projection's tensors, dense; LINEAR_ADD adds to out. Their dtypes stand for them where kernels are only compiled."""

    x_BK: Tensor
    weight_WK: Tensor
    bias_W: Tensor | None
    out_BO: Tensor

    def check(self, projection: Projection) -> None:
        """Assert that these are the projection's."""
        p, weight_rows = projection, projection.halves * projection.outputs
        assert self.x_BK.shape == (p.rows, p.inputs) and self.out_BO.shape == (p.rows, p.outputs)
        assert self.weight_WK.shape == (weight_rows, p.inputs)
        assert (self.bias_W is not None) == p.has_bias
        assert self.bias_W is None or self.bias_W.shape == (weight_rows,)
        assert all(tensor.dtype == p.dtype and tensor.is_contiguous() for tensor in self if tensor is not None)


def operand_types(projection: Projection) -> Operands:
    """The dtypes in the tensors' places, to compile without tensors."""
    dtype = projection.dtype
    return Operands(dtype, dtype, dtype if projection.has_bias else None, dtype)


def norm_launch(p: Projection, tensors: tuple, pdl: bool) -> Launch:
    """The norm before a projection as a kernel of its own; tensors are (x, normalised x), or their dtypes to compile."""
    x, normed = tensors
    return rms_norm_launch(p.rows, 1, p.inputs, (x, None, None, normed), (p.inputs, p.inputs, p.inputs, p.inputs, 0), p.eps, pdl)


def normalised(p: Projection, operands: Operands, scratch: "Scratch", pdl: bool) -> Operands:
    """The operands with x normalised, in scratch memory."""
    normed_BK = scratch.normed[: p.rows * p.inputs].view(p.rows, p.inputs)
    norm_launch(p, (operands.x_BK, normed_BK), pdl).run()
    return operands._replace(x_BK=normed_BK)


class ScratchSizes(NamedTuple):
    """Elements of each scratch buffer that a kernel needs."""

    partial: int = 0
    arrived: int = 0
    normed: int = 0
    products: int = 0


class Scratch(NamedTuple):
    """Memory that projections of one stream share: each leaves `arrived` at zero and the rest undefined."""

    partial: Tensor  # float32
    arrived: Tensor  # int32
    normed: Tensor  # the model's type, like products
    products: Tensor


def allocate_scratch(sizes: Iterable[ScratchSizes], dtype: torch.dtype, device: torch.device) -> Scratch:
    """Scratch large enough for each of the sizes."""
    partial, arrived, normed, products = (max(column) for column in zip(ScratchSizes(), *sizes))
    return Scratch(
        torch.empty(partial, dtype=torch.float32, device=device),
        torch.zeros(arrived, dtype=torch.int32, device=device),
        torch.empty(normed, dtype=dtype, device=device),
        torch.empty(products, dtype=dtype, device=device),
    )


class KernelConfig:
    """How one kernel that needs no scratch computes projections: a frozen dataclass that says what fits and how it is launched."""

    def fits(self, projection: Projection) -> bool:
        """Whether this configuration can run the projection at all."""
        raise NotImplementedError

    def launch(self, projection: Projection, operands: Operands, pdl: bool) -> Launch:
        """The kernel's launch; operands may be types."""
        raise NotImplementedError

    def scratch_sizes(self, projection: Projection) -> ScratchSizes:
        """The scratch a run needs: none."""
        return ScratchSizes()

    def run(self, projection: Projection, operands: Operands, scratch: Scratch, pdl: bool) -> None:
        """Compute the projection."""
        operands.check(projection)
        assert self.fits(projection)
        self.launch(projection, operands, pdl).run()

    def compile(self, projection: Projection, pdl: bool) -> None:
        """Compile what `run` launches."""
        self.launch(projection, operand_types(projection), pdl).compile()


def scratch_types(dtype: torch.dtype) -> Scratch:
    """The dtypes in the buffers' places, to compile without tensors."""
    return Scratch(torch.float32, torch.int32, dtype, dtype)
