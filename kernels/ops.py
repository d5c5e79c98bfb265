"""The ops of a step on a GPU: the names of kernels.reference, bound to Triton kernels and the vendor's matrix products.

Nothing here reads a tensor's value on the host.
"""

from kernels.activation import silu_mul
from kernels.attention import paged_attention, plan_step
from kernels.norm import add_rms_norm, rms_norm
from kernels.reference import embed, linear
from kernels.rope_kv import rope_and_write_kv
from kernels.sampling import sample

# So a step can be captured: launch grids follow from shapes alone.
READS_HOST_VALUES = False

__all__ = ["add_rms_norm", "embed", "linear", "paged_attention", "plan_step", "rms_norm", "rope_and_write_kv", "sample", "silu_mul"]
