"""The sum of the squares of all dot products of two sets of vectors, from their Gram matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesian_attention.divergences.fork import PORT_RANK, Port
from bayesian_attention.divergences.wide_algebra import double, gram, plain_product

#: Numbers in a block of centred keys.
_BLOCK = 2**20


class Vectors(NamedTuple):
    """Vectors a_i = (factor q_i, y_i + scale q_i·c, x_i, …) of rows and b_j = (k_j − c, e_j, …) of keys.

    Attributes:
        query: q, (…, N, D), float32 or float64.
        key: k, (…, M, D), of that dtype.
        centre: c, (…, 1, D), of that dtype; a constant.
        row_extra: y, x, …, (…, E, N), float64.
        key_extra: e, …, (…, E, M), float64.
        factor: of the queries.
        scale: the factor as the dtype of the queries rounds it: (), float64.
    """

    query: Tensor
    key: Tensor
    centre: Tensor
    row_extra: Tensor
    key_extra: Tensor
    factor: float
    scale: Tensor

    def first_keys(self, number: int) -> Vectors:
        """All rows, and the first so many keys."""
        return self._replace(key=self.key[..., :number, :], key_extra=self.key_extra[..., :number])

    def rows(self) -> Tensor:
        """Vectors a, (…, N, D + E), the dtype of the queries."""
        extra = _full_extra(self).to(self.query.dtype).transpose(-1, -2)
        return torch.cat([self.query * self.factor, extra], dim=-1)

    def keys(self, first: int = 0) -> Tensor:
        """Vectors b from number ``first`` on, (…, M, D + E), the dtype of the keys."""
        extra = self.key_extra[..., first:].to(self.key.dtype).transpose(-1, -2)
        return torch.cat([self.key[..., first:, :] - self.centre, extra], dim=-1)


def squared_products(vectors: Vectors, ports: tuple[Port, Port] | None = None) -> Tensor:
    """Σ_i Σ_j (a_i·b_j)², the inner product of the Gram matrices Σ_i a_i a_iᵀ and Σ_j b_j b_jᵀ.

    Sums over many rows are in blocks, which are added up in float64; where all weights are alike what matters
    are the extra features, few, and in float64 throughout.

    Args:
        vectors: the two sets.
        ports: of the queries and the keys: there the gradients go that would be as large as these.

    Returns:
        (…), float64.
    """
    if torch.compiler.is_compiling():
        # A compiler differentiates plain operations, and fuses them.
        return _squares(vectors, _sums(vectors))
    flat = () if ports is None else (*ports[0], *ports[1])
    squares: Tensor = _SquaredProducts.apply(*vectors, *flat)[0]
    return squares


class _Sums(NamedTuple):
    """Blocks of the Gram matrices, in float64: features with features, and extra features with features."""

    rows: Tensor
    keys: Tensor
    rows_mixed: Tensor
    keys_mixed: Tensor


def _full_extra(vectors: Vectors) -> Tensor:
    """The extra features of the rows, with q_i·c in the first."""
    first = double((vectors.query @ vectors.centre.transpose(-1, -2)).transpose(-1, -2)) * vectors.scale
    if vectors.row_extra.shape[-2] == 1:
        return vectors.row_extra + first
    return torch.cat([vectors.row_extra[..., :1, :] + first, vectors.row_extra[..., 1:, :]], dim=-2)


def _sums(vectors: Vectors) -> _Sums:
    query, key, centre = vectors.query, vectors.key, vectors.centre
    dtype = query.dtype
    # Blocks of keys, so that there is no second set of them.
    step = max(256, _BLOCK // max(key[..., 0, :].numel(), 1) // 256 * 256)
    grams, mixed = [], []
    for first in range(0, key.shape[-2], step):
        centred = key[..., first : first + step, :] - centre
        grams.append(gram(centred))
        mixed.append(plain_product(vectors.key_extra[..., first : first + step].to(dtype), centred))
    rows_mixed = plain_product(_full_extra(vectors).to(dtype), query)
    return _Sums(gram(query), _added(grams), rows_mixed, _added(mixed))


def _added(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _squares(vectors: Vectors, sums: _Sums) -> Tensor:
    row_extra = _full_extra(vectors)
    extra = _self_product(row_extra) * _self_product(vectors.key_extra)
    mixed = (sums.rows_mixed * sums.keys_mixed).sum((-2, -1)) * (2.0 * vectors.factor)
    return (sums.rows * sums.keys).sum((-2, -1)) * vectors.factor**2 + mixed + extra.sum((-2, -1))


def _self_product(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2)


class _SquaredProducts(torch.autograd.Function):
    # Autograd would keep copies as large as the queries and the keys, and add up several gradients of that size.
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        vectors = Vectors(*inputs[:7])
        sums = _sums(vectors)
        return _squares(vectors, sums), *sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        query, key, centre, row_extra, key_extra, ctx.factor, scale = inputs[:7]
        ctx.ports = len(inputs) > 7
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(query, key, centre, row_extra, key_extra, scale, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, centre, row_extra, key_extra, scale, *kept = ctx.saved_tensors
        vectors = Vectors(query, key, centre, row_extra, key_extra, ctx.factor, scale)
        # Sums that were kept have no history, which a second derivative needs.
        sums = _sums(vectors) if torch.is_grad_enabled() else _Sums(*kept)
        dtype, factor = query.dtype, ctx.factor
        twice = 2.0 * grad[..., None, None]
        full_extra = _full_extra(vectors)
        of_rows = _Parts((sums.keys * (twice * factor**2)).to(dtype), full_extra, sums.keys_mixed * (twice * factor))
        of_keys = _Parts((sums.rows * (twice * factor**2)).to(dtype), key_extra, sums.rows_mixed * (twice * factor))
        grad_row_extra = double(of_rows.features.to(dtype) @ query.transpose(-1, -2)) + (
            twice * _self_product(key_extra) @ full_extra
        )
        # The first extra feature of a row depends on its query.
        of_rows = of_rows.with_product(grad_row_extra[..., :1, :] * scale, centre)
        wanted: list[Tensor | None] = [None] * 7
        wanted[3] = grad_row_extra
        if ctx.needs_input_grad[4]:
            wanted[4] = double(of_keys.features.to(dtype) @ (key - centre).transpose(-1, -2)) + (
                twice * _self_product(full_extra) @ key_extra
            )
        if ctx.ports:
            return *wanted, *of_rows.message(torch.zeros_like(centre)), *of_keys.message(centre)
        if ctx.needs_input_grad[0]:
            wanted[0] = of_rows.product(query)
        if ctx.needs_input_grad[1]:
            wanted[1] = of_keys.product(key - centre)
        return tuple(wanted)


class _Parts(NamedTuple):
    """A gradient x square + weightsᵀ features by x, (…, N, D)."""

    square: Tensor
    weights: Tensor
    features: Tensor

    def with_product(self, weights: Tensor, features: Tensor) -> _Parts:
        """And one more outer product."""
        both = torch.cat([self.weights, weights], dim=-2), torch.cat([self.features, double(features)], dim=-2)
        return _Parts(self.square, *both)

    def product(self, x: Tensor) -> Tensor:
        """The gradient itself."""
        outer = self.weights.transpose(-1, -2).to(x.dtype) @ self.features.to(x.dtype)
        return outer + x @ self.square

    def message(self, centre: Tensor) -> Port:
        """The gradient in parts."""
        room = (0, 0, 0, PORT_RANK - self.weights.shape[-2])
        dtype = self.square.dtype
        weights, features = (torch.nn.functional.pad(x.to(dtype), room) for x in (self.weights, self.features))
        return Port(self.square, centre, weights, features)
