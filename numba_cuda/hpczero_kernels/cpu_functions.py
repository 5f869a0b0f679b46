"""exp, tanh, sigmoid and erf of fp32 in arithmetic that the compiler vectorises on CPUs.

A loop that calls a library's function goes element by element. Constants are those of Cephes
(S. Moshier, single precision), for erf from 1 on of Abramowitz and Stegun 7.1.26; errors are two
or three roundings of fp32. Infinities and NaN go where the true functions take them.
"""

from numba import float32, uint32

from hpczero_kernels.cpu import bits_as, inner

_LEAST = float32(-87.0)  # below it exp is 0
_LOG2_E = float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = float32(0.693359375), float32(-2.12194440e-4)
_SHIFT = float32(12582912.0)  # 1.5 * 2^23: a number added to it is rounded to an integer
_SHIFT_BITS = uint32(0x4B400000)
_ZERO, _HALF, _ONE, _TWO = float32(0.0), float32(0.5), float32(1.0), float32(2.0)


@inner
def exp_of_negative(x):
    """Return exp(x) for x <= 0."""
    bounded = x if x > _LEAST else _LEAST
    shifted = bounded * _LOG2_E + _SHIFT
    whole = shifted - _SHIFT
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = float32(1.9875691500e-4)
    p = p * r + float32(1.3981999507e-3)
    p = p * r + float32(8.3334519073e-3)
    p = p * r + float32(4.1665795894e-2)
    p = p * r + float32(1.6666665459e-1)
    p = p * r + float32(5.0000001201e-1)
    exponent = uint32(uint32(bits_as(shifted, uint32) - _SHIFT_BITS + uint32(127)) << uint32(23))
    value = (p * r * r + r + _ONE) * bits_as(exponent, float32)
    return _ZERO if x < _LEAST else value


@inner
def sigmoid(x):
    power = exp_of_negative(-abs(x))
    size = _ONE / (_ONE + power)
    return size if x >= _ZERO else power * size


@inner
def tanh(x):
    """Return tanh(x), for small x by a polynomial: the quotient would cancel."""
    power = exp_of_negative(-_TWO * abs(x))
    size = (_ONE - power) / (_ONE + power)
    z = x * x
    p = float32(-5.70498872745e-3)
    p = p * z + float32(2.06390887954e-2)
    p = p * z + float32(-5.37397155531e-2)
    p = p * z + float32(1.33314422036e-1)
    p = p * z + float32(-3.33332819422e-1)
    near = p * z * x + x
    far = size if x >= _ZERO else -size
    return near if abs(x) < float32(0.625) else far


@inner
def erf(x, power):
    """Return erf(x), near 0 by a polynomial; `power` is exp(-x^2), which its derivative has too."""
    t = _ONE / (_ONE + float32(0.3275911) * abs(x))
    p = float32(1.061405429)
    p = p * t + float32(-1.453152027)
    p = p * t + float32(1.421413741)
    p = p * t + float32(-0.284496736)
    p = p * t + float32(0.254829592)
    size = _ONE - p * t * power
    far = size if x >= _ZERO else -size
    z = x * x
    q = float32(7.853861353153693e-5)
    q = q * z + float32(-8.010193625184903e-4)
    q = q * z + float32(5.188327685732524e-3)
    q = q * z + float32(-2.685381193529856e-2)
    q = q * z + float32(1.128358514861418e-1)
    q = q * z + float32(-3.761262582423300e-1)
    q = q * z + float32(1.128379165726710)
    return x * q if abs(x) < _ONE else far


_ROOT = float32(0.7978845608028654)  # sqrt(2 / pi)
_CUBE, _THREE = float32(0.044715), float32(3.0)
_HALF_ROOT = float32(0.7071067811865476)  # sqrt(1 / 2)
_DENSITY = float32(0.3989422804014327)  # 1 / sqrt(2 pi)


@inner
def silu(x):
    """Return silu and its derivative."""
    s = sigmoid(x)
    return x * s, s + x * s * (_ONE - s)


@inner
def gelu_by_tanh(x):
    """Return GELU by tanh and its derivative."""
    t = tanh(_ROOT * x * (_ONE + _CUBE * x * x))
    inside = _ROOT * (_ONE + _THREE * _CUBE * x * x)
    half = _HALF * x
    return half + half * t, _HALF * (_ONE + t) + half * (_ONE - t * t) * inside


@inner
def gelu_by_erf(x):
    """Return exact GELU and its derivative."""
    power = exp_of_negative(-_HALF * x * x)
    share = _HALF + _HALF * erf(x * _HALF_ROOT, power)
    return x * share, share + x * _DENSITY * power
