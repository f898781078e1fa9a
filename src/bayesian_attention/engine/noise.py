"""Counter-based noise: the only source of randomness of the library.

Every attention weight has an address, (seed, sample, batch row, head, query position, key position).
Its 32 random bits are a pure function of that address, so the same weight gets the same noise from
every backend, in any block size, on any number of threads, whatever else is in the batch, and again
in a backward pass that recomputes it. A stateful generator can promise none of this.

The function has two stages.

1. *Row words.* ``(seed, sample, batch, inner, head, query)`` is hashed into two 32-bit words. Each word
   is a chain: starting from a constant, every coordinate is added (times an odd constant) and the state
   goes through :func:`mix`, a bijection of 32 bits. Seed, sample and batch row are 64-bit numbers, which
   enter by their low and their high word; the others are 32-bit. ``inner`` numbers the attention rows of
   one example where a model folds windows or time steps into the batch; elsewhere, and on graphs, it is 0.
   The two chains use different constants, so two rows share their noise only if both words collide,
   with probability 2⁻⁶⁴ a pair.
2. *Bits.* The key position is mixed once a column into a word ``c``. The bits of an entry are
   ``mix(c ^ r0)`` with ``r1`` joined by exclusive or between the two multiplications: ten 32-bit integer
   operations an element (on unsigned words), which CPUs and GPUs vectorise. Within a row the map from
   ``c`` to the bits is a bijection. Joined by addition instead, ``r1`` would make two rows that share
   ``r0`` alone (2⁻³² a pair, so some of a large batch) the same numbers up to a shift.

``mix`` is the finaliser "lowbias32" (C. Wellons, hash-prospector, public domain), the best known
two-multiplication mixer of 32 bits by avalanche bias. Signed ``int32`` stands in for ``uint32``, which
PyTorch supports only in part: multiplication wraps to the same bits, and a right shift is masked.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, distributed

_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # as a signed 32-bit integer
_LANE0 = 0x3C6EF372
_LANE1 = 0xA54FF53A - (1 << 32)
_STEP0 = 0x9E3779B1 - (1 << 32)
_STEP1 = 0x85EBCA77 - (1 << 32)

#: Uniforms are odd multiples of 2⁻²⁴: exact in float32, never 0 or 1, symmetric about ½.
UNIFORM_BITS = 23


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int32 (``>>`` alone copies the sign)."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def mix(x: Tensor) -> Tensor:
    """Mix 32 bits (lowbias32): a bijection in which every input bit moves about half the output bits.

    Args:
        x: int32 tensor of any shape.

    Returns:
        int32 tensor of the same shape.
    """
    x = (x ^ _shift_right(x, 16)) * _M1
    x = (x ^ _shift_right(x, 15)) * _M2
    return x ^ _shift_right(x, 16)


def _words(value: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The low and the high 32 bits of an integer (or of each integer of a tensor), as int32."""
    if not isinstance(value, Tensor):
        # A seed may be written as an unsigned number, as torch.manual_seed takes it: the same 64 bits.
        value = torch.tensor((value + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=device)
    if value.dtype == torch.int32:
        value = value.to(device)
        return value, value >> 31  # the high word repeats the sign, as in int64
    value = value.to(device=device, dtype=torch.int64)
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return _signed(low), _signed(high)


def _signed(x: Tensor) -> Tensor:
    """Unsigned 32-bit values held in int64, as the int32 of the same bits."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


class RowWords:
    """Two int32 words a row, from which :func:`bits` makes the noise of the row's entries."""

    __slots__ = ("first", "second")

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first = first
        self.second = second

    def absorb(self, value: int | Tensor) -> RowWords:
        """The words after one more coordinate, broadcast against ``value`` (int32 or int64)."""
        first, second = self.first, self.second
        for word in _words(value, first.device):
            first = mix(first + word * _STEP0)
            second = mix(second + word * _STEP1)
        return RowWords(first, second)

    def absorb_position(self, value: Tensor) -> RowWords:
        """Like :meth:`absorb` for a coordinate below 2³¹, such as a head or a position: one word."""
        word = value.to(torch.int32)
        return RowWords(mix(self.first + word * _STEP0), mix(self.second + word * _STEP1))

    def index_select(self, index: Tensor) -> RowWords:
        """The words of the rows that ``index`` (int64, one-dimensional) names along dimension 0."""
        return RowWords(self.first.index_select(0, index), self.second.index_select(0, index))

    def view(self, *shape: int) -> RowWords:
        """Both words reshaped."""
        return RowWords(self.first.view(*shape), self.second.view(*shape))


def integer(name: str, value: object) -> int | Tensor:
    """``value``, if it is an integer of 64 bits, signed or not, or a tensor of integers.

    Raises:
        ValueError: it is not; a float that were rounded would make two seeds one.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name}: must hold integers; got {value.dtype}")
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**64:
        return int(value)
    raise ValueError(f"{name}: must be an integer of at most 64 bits; got {value!r}")


def start(seed: int | Tensor, sample: int | Tensor = 0, *, device: torch.device | None = None) -> RowWords:
    """Begin an address with the seed and the number of the posterior draw.

    Args:
        seed: any 64-bit integer, signed or not, or an integer tensor that broadcasts.
        sample: number of the draw; a tensor gives each row of the batch its own.
        device: where the words live; by default that of ``seed``, or the CPU.
    """
    seed, sample = integer("seed", seed), integer("sample_index", sample)
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else torch.device("cpu")
    lanes = torch.tensor([_LANE0, _LANE1], dtype=torch.int32, device=device)
    return RowWords(lanes[0], lanes[1]).absorb(seed).absorb(sample)


def key_words(position: Tensor) -> Tensor:
    """One int32 word a key position (int32 or int64, below 2³¹), same shape."""
    return mix(position.to(torch.int32) * _STEP0 + _LANE1)


def bits(rows: RowWords, keys: Tensor) -> Tensor:
    """The 32 random bits of every entry: ``rows`` broadcast against ``keys`` (:func:`key_words`).

    Returns:
        int32 tensor of the broadcast shape, uniform over all 2³² values.
    """
    x = keys ^ rows.first
    x = (x ^ _shift_right(x, 16)) * _M1
    x = (x ^ _shift_right(x, 15) ^ rows.second) * _M2
    return x ^ _shift_right(x, 16)


def uniform(random_bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in (0, 1) from the upper 23 of 32 bits: (n + ½)·2⁻²³.

    The values are exact in float32, so that every dtype and every backend sees the same number; the
    smallest is 6e-8 and the largest 1 − 6e-8. No logarithm downstream needs a clamp.

    Args:
        random_bits: int32 tensor, from :func:`bits`.
        dtype: float32 or float64.
    """
    return (_shift_right(random_bits, 32 - UNIFORM_BITS).to(dtype) + 0.5) * 2.0**-UNIFORM_BITS


def new_seed() -> Tensor:
    """A fresh seed, int64 of shape (), drawn from PyTorch's global CPU generator.

    ``torch.manual_seed`` therefore rules, and activation checkpointing, which restores that generator,
    replays the same noise. Training scripts give all ranks of a process group the same seed; the rank enters
    here, so that examples at the same place in the batches of two ranks do not share their noise.
    """
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return derive_seed(seed, rank) if rank else seed


def derive_seed(seed: int | Tensor, *coordinates: int) -> Tensor:
    """An int64 seed (shape ()) that is a function of ``seed`` and further integers, such as a layer's number."""
    words = start(seed)
    for coordinate in coordinates:
        words = words.absorb(coordinate)
    return (words.first.to(torch.int64) << 32) | (words.second.to(torch.int64) & 0xFFFFFFFF)
