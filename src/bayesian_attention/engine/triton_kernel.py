"""The Triton backend: attention on a GPU in one pass over the keys, with nothing of size Lq × Lk in memory.

The scheme is FlashAttention's (Dao, "FlashAttention-2", 2023), with the noise made in registers where it is
needed, forward and again backward, from the words of the row and the position of the key. The kernels are in
triton_forward.py, triton_backward.py and triton_query.py, the noise in triton_noise.py; this is the host side.

Products run on tensor cores for float16 and bfloat16 and in full float32 otherwise, with sums in float32. All
results are deterministic.

Triton is imported with this module, which nothing imports until the backend is used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from bayesian_attention.engine import triton_backward, triton_forward, triton_query

#: Whether the kernels run in Triton's interpreter, on any device: TRITON_INTERPRET=1 stood in the environment when
#: Triton was imported.
INTERPRETED = not isinstance(triton_forward.forward_kernel, triton.JITFunction)

#: Widest head that fits: a tile of 16 rows of it, twice buffered, and its gradients.
MAX_FEATURES = 256


class Launch(NamedTuple):
    """How a kernel is launched.

    Attributes:
        rows: query rows of a tile, a power of two of at least 16.
        keys: keys of a tile, likewise.
        warps: warps of a program.
        stages: depth of the pipeline that loads tiles ahead.
    """

    rows: int
    keys: int
    warps: int
    stages: int


# By the widest head that an entry serves. Noise takes registers: smaller tiles keep more warps in flight.
_MEAN = {64: Launch(128, 64, 4, 3), 128: Launch(128, 64, 8, 2), 256: Launch(64, 32, 8, 2)}
_FORWARD = {64: Launch(64, 64, 4, 3), 128: Launch(64, 32, 4, 2), 256: Launch(64, 32, 8, 2)}
_KEY_VALUE = {64: Launch(64, 64, 4, 2), 128: Launch(32, 64, 4, 2), 256: Launch(32, 32, 4, 1)}
_QUERY = {64: Launch(64, 64, 4, 2), 128: Launch(64, 32, 4, 2), 256: Launch(32, 32, 4, 1)}
# Products in full float32 run outside of the tensor cores, on operands that lie in registers whole.
_FULL = {64: Launch(32, 32, 4, 1), 128: Launch(32, 32, 8, 1), 256: Launch(16, 16, 4, 1)}


def _launch(table: dict[int, Launch], dtype: torch.dtype, widest: int, blocks: tuple[int, int] | None) -> Launch:
    """The entry for a head size and dtype, with the tile of ``blocks`` if that is given."""
    if dtype == torch.float32:
        table = _FULL
    launch = next(launch for limit, launch in table.items() if widest <= limit)
    return launch._replace(rows=blocks[0], keys=blocks[1]) if blocks else launch


def _power_of_two(size: int) -> int:
    """The next power of two, at least 16: what a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


class _Problem:
    """What all kernels of a call share: tensors of one dtype, sizes, strides and compile-time settings."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first: Tensor | None,
        second: Tensor | None,
        spread: Tensor,
        mask: Tensor | None,
        *,
        family: str,
        scale: float,
        is_causal: bool,
        query_offset: int,
    ) -> None:
        if torch.float64 in (query.dtype, key.dtype, value.dtype):
            raise NotImplementedError(
                "query, key, value: the Triton backend computes in float32 and takes no float64; "
                "backend='blockwise' does"
            )
        self.dtype = query.dtype if query.dtype == key.dtype == value.dtype else torch.float32
        if self.dtype == torch.bfloat16 and INTERPRETED:
            self.dtype = torch.float32  # the interpreter has no products of bfloat16
        # Mixed dtypes are rare, and a copy of them is of the size of the input.
        self.query, self.key, self.value = (x.to(self.dtype) for x in (query, key, value))
        self.batch, self.heads, self.rows, self.features = query.shape
        self.keys, self.value_features = value.shape[-2:]
        self.key_heads = key.shape[1]
        widest = max(self.features, self.value_features)
        if widest > MAX_FEATURES:
            raise NotImplementedError(
                f"query, value: the Triton backend takes up to {MAX_FEATURES} features a head; got {widest}; "
                "backend='blockwise' has no limit"
            )
        # The hardware's logarithm moves the noise by 2e-5, below what half precision sees. AMD's has another name.
        self.fast_noise = self.dtype != torch.float32 and not INTERPRETED and torch.version.hip is None
        self.widest = _power_of_two(widest)
        self.samples = 1 if first is None else first.shape[0]
        self.family = family
        # Kernels take an address for each argument; what a family does not need is never read.
        self.first = query if first is None else first.contiguous()
        self.second = query if second is None else second.contiguous()
        self.spread = spread.to(torch.float32).contiguous()
        self.mask_kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
        self.mask = query
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            # A size of 1 broadcasts, whatever its stride.
            strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
            self.mask, self.mask_strides = mask, tuple(strides)
            if mask.dtype == torch.bool:
                self.mask = mask.view(torch.uint8)
        self.is_causal = is_causal
        # Positions beyond the keys on either side mean all or none; clamped, they fit 32 bits.
        self.query_offset = max(-self.rows, min(query_offset, self.keys))
        self.scale = scale

    def device(self) -> AbstractContextManager[object]:
        """A context in which the tensors' GPU is the current one, which is where Triton launches."""
        if self.query.device.type != "cuda":
            return nullcontext()
        return torch.cuda.device(self.query.device)

    @property
    def words_and_mask(self) -> tuple[Tensor, ...]:
        """Arguments that follow query, key and value."""
        return self.first, self.second, self.spread, self.mask

    @property
    def strides(self) -> tuple[int, ...]:
        """Of query, key, value and mask."""
        return (*self.query.stride(), *self.key.stride(), *self.value.stride(), *self.mask_strides)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch rows, heads, query heads a key head, query rows, keys."""
        return self.batch, self.heads, self.heads // max(self.key_heads, 1), self.rows, self.keys

    def settings(self, launch: Launch) -> dict[str, Any]:
        """Compile-time arguments of every kernel."""
        return {
            "family": self.family,
            "fast_noise": self.fast_noise,
            "is_causal": self.is_causal,
            "features": self.features,
            "value_features": self.value_features,
            "block_features": _power_of_two(self.features),
            "block_value_features": _power_of_two(self.value_features),
            "block_rows": launch.rows,
            "block_keys": launch.keys,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            # Said outright: Triton is changing the default.
            "enable_fp_fusion": True,
        }


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    *,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    blocks: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention with sampled weights.

    Args:
        query: (B, H, Lq, D), float32, float16 or bfloat16, any strides.
        key: (B, Hkv, Lk, D), H a multiple of Hkv.
        value: (B, Hkv, Lk, Dv).
        first: int32 (S, B, H, Lq), the first noise word of each row and draw; None for "softmax".
        second: the second, likewise.
        spread: (H,): the shape of "weibull", the scale of "lognormal".
        mask: None, boolean (True: attend) or additive, four-dimensional, each size full or 1.
        family: "softmax", "weibull" or "lognormal".
        scale: factor of the dot products.
        is_causal: row i sees keys up to i + ``query_offset``.
        query_offset: absolute position of the first query.
        blocks: rows and keys of a tile, powers of two of at least 16, in place of the tuned ones; for tests.

    Returns:
        Output (S, B, H, Lq, Dv) in the dtype of ``value`` (S = 1 for "softmax"), log-sum-exp of the clean logits
        (B, H, Lq), −∞ where a row sees no key, and what :func:`backward` needs of each row (2 + S, B, H, Lq); the
        last two are float32.

    Raises:
        NotImplementedError: heads of more than :data:`MAX_FEATURES` features, or float64.
    """
    problem = _Problem(
        query, key, value, first, second, spread, mask,
        family=family, scale=scale, is_causal=is_causal, query_offset=query_offset,
    )  # fmt: skip
    shape = (problem.samples, problem.batch, problem.heads, problem.rows)
    output = value.new_empty((*shape, problem.value_features))
    lse = query.new_empty(shape[1:], dtype=torch.float32)
    state = query.new_empty((2 + problem.samples, *shape[1:]), dtype=torch.float32)
    if lse.numel() == 0:
        return output, lse, state
    launch = _launch(_MEAN if family == "softmax" else _FORWARD, problem.dtype, problem.widest, blocks)
    if blocks is None:
        # A decoding step has few rows, and tiles of more would compute on nothing.
        launch = launch._replace(rows=min(launch.rows, _power_of_two(problem.rows)))
    programs = triton.cdiv(problem.rows, launch.rows) * problem.batch * problem.heads
    with problem.device():
        # The clean log-sum-exp is the same for all draws: the first computes it.
        for start, count in ((0, 1), (1, problem.samples - 1)):
            if count == 0:
                continue
            triton_forward.forward_kernel[(programs * count,)](
                problem.query, problem.key, problem.value, *problem.words_and_mask, output, lse, state,
                *problem.strides, *problem.sizes, problem.scale, problem.query_offset, start,
                mask_kind=problem.mask_kind, with_lse=start == 0, even_keys=problem.keys % launch.keys == 0,
                **problem.settings(launch),
            )  # fmt: skip
    return output, lse, state


def backward(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    spread: Tensor,
    mask: Tensor | None,
    output: Tensor,
    state: Tensor,
    *,
    family: str,
    scale: float,
    is_causal: bool,
    query_offset: int,
    mask_grad: bool,
    spread_grad: bool,
    blocks: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of :func:`forward`.

    Args:
        grad_output: (S, B, H, Lq, Dv).
        grad_lse: float32 (B, H, Lq); None where the log-sum-exp was not used, which saves an exponential an entry.
        query: as in :func:`forward`, like all that is not named here.
        key: likewise.
        value: likewise.
        first: likewise.
        second: likewise.
        spread: likewise.
        mask: likewise.
        output: what ``forward`` returned.
        state: likewise.
        family: likewise.
        scale: likewise.
        is_causal: likewise.
        query_offset: likewise.
        mask_grad: whether the gradient of an additive mask is wanted; it takes a pass of its own.
        spread_grad: whether the gradient of the spread is wanted.
        blocks: likewise.

    Returns:
        Gradients of query, key, value, spread and mask, of their shapes and dtypes; the last two are None where
        not asked for.
    """
    problem = _Problem(
        query, key, value, first, second, spread, mask,
        family=family, scale=scale, is_causal=is_causal, query_offset=query_offset,
    )  # fmt: skip
    spread_grad = spread_grad and family != "softmax"
    mask_grad = mask_grad and problem.mask_kind == "additive"
    if state.numel() == 0 or problem.keys == 0:
        return (
            torch.zeros_like(query),
            torch.zeros_like(key),
            torch.zeros_like(value),
            torch.zeros_like(spread) if spread_grad else None,
            torch.zeros_like(mask) if mask_grad and mask is not None else None,
        )
    grad_output = grad_output.to(problem.dtype)
    output, state = output.contiguous(), state.contiguous()
    with_lse = grad_lse is not None
    slope = state if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(state[2:])
    grads = {
        name: torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    noise_dots = torch.empty_like(state[0]) if spread_grad else state
    grad_mask: Tensor | None = None

    tensors = (
        problem.query, problem.key, problem.value, *problem.words_and_mask, grad_output, slope, delta, state
    )  # fmt: skip
    strides = (*problem.strides, *grad_output.stride())
    sizes = (problem.samples, *problem.sizes, problem.scale, problem.query_offset)
    planes = problem.batch * problem.heads
    with problem.device():
        rows = blocks[0] if blocks else 64
        triton_backward.row_dots_kernel[(triton.cdiv(problem.rows, rows) * planes * problem.samples,)](
            grad_output, output, delta, *grad_output.stride(), problem.batch, problem.heads, problem.rows,
            value_features=problem.value_features, block_value_features=_power_of_two(problem.value_features),
            block_rows=rows, enable_fp_fusion=True,
        )  # fmt: skip

        launch = _launch(_KEY_VALUE, problem.dtype, problem.widest, blocks)
        programs = triton.cdiv(problem.keys, launch.keys) * problem.batch * problem.key_heads
        triton_backward.key_value_kernel[(programs,)](
            *tensors, grads["key"], grads["value"], *strides, *sizes,
            mask_kind=problem.mask_kind, with_lse=with_lse, even_keys=problem.keys % launch.keys == 0,
            even_rows=problem.rows % launch.rows == 0, **problem.settings(launch),
        )  # fmt: skip

        launch = _launch(_QUERY, problem.dtype, problem.widest, blocks)
        triton_query.query_kernel[(triton.cdiv(problem.rows, launch.rows) * planes,)](
            *tensors, grads["query"], noise_dots, *strides, *sizes,
            mask_kind=problem.mask_kind, with_lse=with_lse, with_spread=spread_grad,
            even_keys=problem.keys % launch.keys == 0, **problem.settings(launch),
        )  # fmt: skip

        if mask_grad and mask is not None:
            grad_mask = torch.empty(mask.shape, dtype=mask.dtype, device=mask.device)
            sum_rows = mask.shape[2] < problem.rows
            sum_keys = mask.shape[3] < problem.keys
            programs = mask.shape[0] * mask.shape[1]
            programs *= 1 if sum_rows else triton.cdiv(problem.rows, launch.rows)
            programs *= 1 if sum_keys else triton.cdiv(problem.keys, launch.keys)
            triton_query.mask_kernel[(programs,)](
                *tensors, grad_mask, *strides, *mask.shape[:2], *sizes,
                with_lse=with_lse, sum_rows=sum_rows, sum_keys=sum_keys, **problem.settings(launch),
            )  # fmt: skip

    grad_spread: Tensor | None = None
    if spread_grad:
        # Unit noise n: Weibull adds n/k to the logit, LogNormal adds σn.
        grad_spread = noise_dots.sum((0, 2))
        if family == "weibull":
            grad_spread = -grad_spread / problem.spread.square()
        grad_spread = grad_spread.to(spread.dtype)
    return grads["query"], grads["key"], grads["value"], grad_spread, grad_mask
