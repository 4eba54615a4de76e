"""SplitMix64, a generator of 64-bit numbers, in PyTorch's signed integers.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), with Stafford's variant 13 of
the finalizer.
"""

from torch import Tensor

STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SIGNED_STEP = STEP - 2**64


def finalized(state: Tensor) -> Tensor:
    """The finalizer. It maps different numbers to different ones, and each bit of the result depends on all bits.

    Args:
        state: int64 of any shape; read it as unsigned.

    Returns:
        int64 of the same shape; read it as unsigned.
    """
    for shift, factor in ((30, FIRST), (27, SECOND)):
        # PyTorch shifts the sign in, so it is masked out.
        state = ((state >> shift) & (1 << 64 - shift) - 1).bitwise_xor_(state).mul_(factor - 2**64)
    return ((state >> 31) & (1 << 33) - 1).bitwise_xor_(state)
