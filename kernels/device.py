"""What every kernel of the decode chain shares: programmatic dependent launch, and matrix products that also run interpreted.

With programmatic dependent launch a kernel starts while its predecessor still runs. Its rules: every kernel of the chain waits; before
the wait it reads only weights, tables and row state that earlier steps wrote; it writes nothing before the wait.
https://docs.nvidia.com/cuda/cuda-programming-guide/ (programmatic dependent launch)
"""

import torch
import triton
import triton.language as tl

# Decided when triton is imported, so before any kernel is defined.
INTERPRETED = bool(triton.knobs.runtime.interpret)
_DOT_IN_FLOAT32 = tl.constexpr(INTERPRETED)


def launch_options(pdl: bool) -> dict[str, bool]:
    """The keyword arguments of a launch that pick dependent launch; the interpreter has none."""
    return dict(PDL=pdl and not INTERPRETED, launch_pdl=pdl) if not INTERPRETED else dict(PDL=False)


@triton.jit
def let_dependents_start(PDL: tl.constexpr):
    """Allow the next kernel to start. First thing in a kernel: measured better than after its own loads."""
    # Triton 3.6's own helper has no memory clobber, so loads could move across it.
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Return once all kernels before this one are complete and their writes visible."""
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def dot(a_MK, b_KN, acc_MN):
    """acc + a @ b in float32; float32 operands are not rounded to tf32."""
    if _DOT_IN_FLOAT32:  # the interpreter multiplies bfloat16 as raw integers
        return tl.dot(a_MK.to(tl.float32), b_KN.to(tl.float32), acc_MN, input_precision="ieee")
    else:
        return tl.dot(a_MK, b_KN, acc_MN, input_precision="ieee")


def dtype_name(dtype: torch.dtype) -> str:
    """Triton's name of a torch type, as in the signature of a kernel that is compiled ahead."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
