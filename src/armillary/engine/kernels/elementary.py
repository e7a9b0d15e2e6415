"""exp and what follows from it, in operations that LLVM turns into vectors (libm's are calls)."""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from armillary.engine.kernels.common import as_float

Float = Any
"""A float32 to Numba, and so is what is made of it; NumPy's types would have it a float64."""

_LOG2E = np.float32(1 / math.log(2))
# ln 2 in two parts, the first of few enough bits that n times it is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
# The series of e^r: what follows r^7 / 7! is below 6e-9 of it where |r| ≤ ln 2 / 2.
_P7, _P6, _P5, _P4, _P3, _P2 = (np.float32(1 / math.factorial(n)) for n in range(7, 1, -1))
_ONE, _HALF, _TWO = np.float32(1), np.float32(0.5), np.float32(2)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)


# All that makes sums fast but their order, on which the remainder depends.
@register_jitable(fastmath={"nnan", "ninf", "nsz", "arcp", "contract"})
def exp(x: Float) -> Float:
    """e^x to 2e-7 relative, between 1e-38 and 2e38."""
    x = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(x * _LOG2E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_P7 * r + _P6) * r + _P5) * r + _P4) * r + _P3) * r + _P2
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + _ONE) * as_float(power)


@register_jitable
def sigmoid(x: Float) -> Float:
    """1 / (1 + e^−x)."""
    return _ONE / (_ONE + exp(-x))


@register_jitable
def tanh(x: Float) -> Float:
    """Hyperbolic tangent, to 2e-7 absolute."""
    return _ONE - _TWO / (exp(_TWO * x) + _ONE)


_SQRT_HALF, _SQRT_2_OVER_PI, _CUBIC, _QUICK = (
    np.float32(x) for x in (math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715, 1.702)
)


@register_jitable
def silu(x: Float) -> Float:
    """x·σ(x)."""
    return x * sigmoid(x)


@register_jitable
def gelu(x: Float) -> Float:
    """x·Φ(x)."""
    return _HALF * x * (_ONE + np.float32(math.erf(x * _SQRT_HALF)))


@register_jitable
def gelu_tanh(x: Float) -> Float:
    """GELU by its approximation."""
    return _HALF * x * (_ONE + tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)))


@register_jitable
def quick_gelu(x: Float) -> Float:
    """x·σ(1.702·x)."""
    return x * sigmoid(_QUICK * x)


@register_jitable
def relu(x: Float) -> Float:
    """max(x, 0)."""
    return max(x, np.float32(0))


@register_jitable
def identity(x: Float) -> Float:
    """x."""
    return x


ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "sigmoid": sigmoid,
    "identity": identity,
}
"""By the names of `FeedForwardConfig.activation`."""
