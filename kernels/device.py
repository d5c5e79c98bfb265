"""What the kernels share: dependent launch, launches that can also be compiled ahead, products that run interpreted too.

With programmatic dependent launch a kernel starts while its predecessor still runs. The rules: every kernel of the chain waits;
before the wait it reads only weights, tables and row state that earlier steps wrote; it writes nothing before the wait; the first
kernel of a step is launched without it.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import triton
import triton.language as tl

# Decided when triton is imported, so before any kernel is defined.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_DOT_IN_FLOAT32 = tl.constexpr(INTERPRETED)


@dataclass(frozen=True)
class Launch:
    """One kernel launch. Its arguments are tensors to run it, torch dtypes to compile it without any; None stays None in both."""

    kernel: Callable
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict
    pdl: bool
    warps: int
    max_registers: int | None = None  # per thread

    def run(self) -> None:
        """Launch on the current stream."""
        self.kernel[self.grid](*self.arguments, **self.constants, **self._options())

    def compile(self) -> None:
        """Put the binary into Triton's cache. Needs no tensors, so processes of their own can do it."""
        self.kernel.warmup(*self.arguments, grid=self.grid, **self.constants, **self._options())

    def _options(self) -> dict:
        if INTERPRETED:
            return dict(PDL=False)
        cap = {} if self.max_registers is None else dict(maxnreg=self.max_registers)
        return dict(PDL=self.pdl, launch_pdl=self.pdl, num_warps=self.warps, **cap)


def fix_cache_keys() -> None:
    """Hash all kernels in one order, whatever will be launched first, so that every process finds the others' binaries.

    Triton 3.6 and 3.7 give a kernel another key after hashing one that shares a function with it: most binaries compiled ahead were
    compiled again.
    """
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        for value in vars(importlib.import_module(f"kernels.{module}")).values():
            if isinstance(value, triton.JITFunction):
                value.cache_key  # noqa: B018 (computed and kept at the first look)


@triton.jit
def let_dependents_start(PDL: tl.constexpr):
    """Allow the next kernel to start. First thing in a kernel: after the kernel's own loads a step took 38 to 54 µs longer."""
    # Inline assembly, because Triton 3.6's own helper has no memory clobber and loads may move across it.
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Return once all kernels before this one are complete and their writes visible."""
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def dot(a_MK, b_KN, acc_MN):
    """acc + a @ b in float32. Operands in float32 are not rounded to tf32."""
    if _DOT_IN_FLOAT32:  # the interpreter multiplies bfloat16 as raw integers
        acc_MN = tl.dot(a_MK.to(tl.float32), b_KN.to(tl.float32), acc_MN, input_precision="ieee")
    else:
        acc_MN = tl.dot(a_MK, b_KN, acc_MN, input_precision="ieee")
    return acc_MN
