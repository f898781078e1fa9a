# mypy: disable-error-code="no-untyped-def"
"""Device side of the Triton backend: the noise of :mod:`bayesian_attention.engine.noise`, made in registers.

Bits and uniform numbers are the same as there; what follows from them is so within rounding. Noise comes in units of
log 2, as the logits of the kernels do.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The constants of engine/noise.py, unsigned.
_M1 = tl.constexpr(0x7FEB352D)
_M2 = tl.constexpr(0x846CA68B)
_LANE1 = tl.constexpr(0xA54FF53A)
_STEP0 = tl.constexpr(0x9E3779B1)


@triton.jit
def key_words(position):
    """One uint32 word a key position: ``noise.key_words``."""
    x = position.to(tl.uint32) * _STEP0 + _LANE1
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 15)) * _M2
    return x ^ (x >> 16)


@triton.jit
def random_bits(first, second, keys):
    """The bits of every entry, uint32: ``noise.bits``."""
    x = keys ^ first
    x = (x ^ (x >> 16)) * _M1
    x = (x ^ (x >> 15) ^ second) * _M2
    return x ^ (x >> 16)


@triton.jit
def uniform(bits):
    """(n + ½)·2⁻²³ with n the upper 23 bits: ``noise.uniform``, exact.

    With n as the mantissa of a number in [1, 2), one subtraction is left; a conversion from integers runs at an
    eighth of its speed.
    """
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375


@triton.jit
def log2(x):
    """The hardware's binary logarithm, one instruction; off by up to 2⁻²² in absolute terms for x in (½, 2).

    The library's takes some twenty, mostly for arguments that do not occur here.
    """
    return libdevice.fast_log2f(x)


@triton.jit
def exponential_near_zero(t):
    """−log(1 − t) by three terms of its series, to 1e-6 of its value for t up to 1/64."""
    return ((t * (1 / 3) + 0.5) * t + 1.0) * t


@triton.jit
def half_normal_quantile(x, log):
    """√2 erfinv(x) in units of log 2, to 2e-5 of its value, from ``log`` = log₂(1 − x²).

    A least-maximum fit of the ratio to x on the range of our uniforms; one polynomial without branches costs half of
    what the two in :func:`normal_quantile` do.
    """
    t = -log - 11.0
    ratio = 2.3797009e-11 * t - 1.1863581e-10
    ratio = ratio * t - 8.17726864e-09
    ratio = ratio * t + 9.23702217e-08
    ratio = ratio * t - 7.17090956e-08
    ratio = ratio * t - 5.32401964e-06
    ratio = ratio * t + 0.000169328297
    ratio = ratio * t - 0.00520898402
    ratio = ratio * t + 0.254971087
    ratio = ratio * t + 5.29347324
    return ratio * x


@triton.jit
def normal_quantile(u):
    """√2 erfinv(2u − 1), to 1e-6 of its value.

    Source: Giles, "Approximating the erfinv function", GPU Computing Gems Jade, 2010: the single-precision
    polynomials. 1 − u is exact here, so w = −log(1 − x²) keeps its digits at both ends.
    """
    w = tl.log2(4.0 * u * (1.0 - u)) * -LN2
    t = w - 2.5
    centre = 2.81022636e-08 * t + 3.43273939e-07
    centre = centre * t - 3.5233877e-06
    centre = centre * t - 4.39150654e-06
    centre = centre * t + 0.00021858087
    centre = centre * t - 0.00125372503
    centre = centre * t - 0.00417768164
    centre = centre * t + 0.246640727
    centre = centre * t + 1.50140941
    # Next to u = ½, a rounded w may be below 0: the root is NaN there, and not selected.
    t = tl.sqrt(w) - 3.0
    tail = -0.000200214257 * t + 0.000100950558
    tail = tail * t + 0.00134934322
    tail = tail * t - 0.00367342844
    tail = tail * t + 0.00573950773
    tail = tail * t - 0.0076224613
    tail = tail * t + 0.00943887047
    tail = tail * t + 1.00167406
    tail = tail * t + 2.83297682
    return tl.where(w < 5.0, centre, tail) * ((2.0 * u - 1.0) * 1.4142135623730951)


@triton.jit
def unit_noise(first, second, keys, family: tl.constexpr, fast: tl.constexpr):
    """The noise of spread 1 in units of log 2: log₂ of a standard exponential draw, or a normal draw.

    Args:
        first: first noise words of the rows.
        second: second noise words.
        keys: words of the keys.
        family: "weibull" or "lognormal".
        fast: by the hardware's logarithm, to about 2e-5; for products in half precision, whose error is larger.
    """
    u = uniform(random_bits(first, second, keys))
    if family == "weibull":
        if fast:
            # Near u = 1 the logarithm has lost the digits of −log u, whose logarithm is taken next.
            draw = tl.where(u > 1 - 1 / 64, exponential_near_zero(1.0 - u), log2(u) * -LN2)
            noise = log2(draw)
        else:
            noise = tl.log2(-tl.log(u))
    else:
        if fast:
            x = 2.0 * u - 1.0
            # One rounding: 1 − x² keeps its digits next to 0.
            noise = half_normal_quantile(x, log2(tl.fma(-x, x, 1.0)))
        else:
            noise = normal_quantile(u) * LOG2E
    return noise


@triton.jit
def noise_factor(spread, head, family: tl.constexpr):
    """What multiplies :func:`unit_noise` for this head."""
    factor = 1.0
    if family == "weibull":
        factor = 1.0 / tl.load(spread + head)
    elif family == "lognormal":
        factor = tl.load(spread + head)
    return factor


@triton.jit
def load_words(words, rows, queries, family: tl.constexpr):
    """Noise words of rows as uint32; zeros for the softmax, which has none."""
    if family == "softmax":
        loaded = tl.zeros_like(rows).to(tl.uint32)
    else:
        loaded = tl.load(words + rows, mask=rows < queries, other=0).to(tl.uint32, bitcast=True)
    return loaded
