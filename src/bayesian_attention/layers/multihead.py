"""Multi-head attention, a drop-in for ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention.engine.reference import MASKED_BELOW, dense_logits
from bayesian_attention.layers.stochastic import StochasticAttention
from bayesian_attention.numerics import autocast_off, wide
from bayesian_attention.posteriors import Posterior, Weibull
from bayesian_attention.priors import Prior


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with random attention weights.

    The constructor, the forward pass and the state_dict keys are those of the original; ``stoch.*`` keys
    come on top where posterior or prior have parameters. With sampling off the outputs are the original's.

    Padding counts in the divergence neither as keys nor, in self-attention (``query is key``), as queries.

    Two differences, both on purpose. A row whose keys are all masked gives attention weights of 0 (the
    original gives NaN). And PyTorch's fused inference path, which would bypass the random weights in
    evaluation mode, is never taken, also not by a ``TransformerEncoderLayer`` around this module.

    Args:
        embed_dim: as the original.
        num_heads: as the original.
        *args: as the original, in its order.
        posterior: family of the weights; ``Weibull()`` by default.
        prior: prior of the weights; see :class:`StochasticAttention`.
        **kwargs: as the original.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        posterior: Posterior | None = None,
        prior: Prior | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        self.stoch = StochasticAttention(posterior or Weibull(), prior, heads=self.num_heads, key_dim=self.head_dim).to(
            self.out_proj.weight.device, torch.promote_types(self.out_proj.weight.dtype, torch.float32)
        )
        # TransformerEncoderLayer takes its fused path, which calls no attention module at all, only
        # where nothing is hooked.
        self.register_forward_pre_hook(_keep_off_the_fused_path)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As ``torch.nn.MultiheadAttention.forward``, with the weights really used for the second result.

        Raises:
            ValueError: nested tensors, or shapes that do not fit.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "query, key, value: nested tensors are not supported; pad them and pass key_padding_mask "
                "(inside a TransformerEncoder: build it with enable_nested_tensor=False)"
            )
        # Self-attention: the queries are the keys, so what pads the keys pads the queries too.
        own = query is key
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                "query, key, value: must all have 3 dimensions, or 2 without a batch; "
                f"got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(f"value: shape {tuple(value.shape)} does not fit key's {tuple(key.shape)}")
        batch_dim = 0 if self.batch_first else 1
        if batched and key.shape[batch_dim] != query.shape[batch_dim]:
            raise ValueError(f"key: batch of {key.shape[batch_dim]} is not query's {query.shape[batch_dim]}")
        if is_causal and attn_mask is None:
            raise ValueError("is_causal: is a hint about attn_mask, which must be given beside it")
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        q, k, v = self._project(query, key, value)
        mask = self._merge(attn_mask, key_padding_mask, q, k)
        query_valid = _not_padding(key_padding_mask) if own and key_padding_mask is not None else None
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self._bias(self.bias_k, k)], dim=2)
            v = torch.cat([v, self._bias(self.bias_v, v)], dim=2)
            mask = _one_more_key(mask)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = _one_more_key(mask)

        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights or dropout > 0:
            with autocast_off(q):
                logits, rows = dense_logits(q, k, mask=mask, is_causal=False, scale=self.head_dim**-0.5, query_offset=0)
            weights = F.dropout(self.stoch.weights(logits, rows, k, query_valid=query_valid).to(v.dtype), dropout)
            mixed = weights @ v
        else:
            mixed = self.stoch.attend(q, k, v, mask=mask, query_valid=query_valid).output
        output = self.out_proj(mixed.transpose(1, 2).flatten(2))

        if not need_weights:
            weights = None
        elif weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads, each (B, H, L, D)."""
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, matrix, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, matrix, bias in zip((query, key, value), matrices, biases, strict=True)
        )
        return q, k, v

    def _bias(self, bias: Tensor, keys: Tensor) -> Tensor:
        """The extra key or value of ``add_bias_kv``, (B, H, 1, D)."""
        return bias.view(1, self.num_heads, 1, self.head_dim).expand(keys.shape[0], -1, -1, -1).to(keys.dtype)

    def _merge(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """One mask of the engine's kind (boolean True: attend, or additive) from the two of PyTorch."""
        batch, heads, queries, keys = *q.shape[:3], k.shape[2]
        for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise ValueError(f"{name}: must be boolean or floating point; got {mask.dtype}")
        if attn_mask is not None:
            shapes = [(queries, keys), (batch * heads, queries, keys)]
            if tuple(attn_mask.shape) not in shapes:
                raise ValueError(f"attn_mask: must have shape {shapes[0]} or {shapes[1]}; got {tuple(attn_mask.shape)}")
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(batch, heads, queries, keys)
        if key_padding_mask is not None:
            if tuple(key_padding_mask.shape) != (batch, keys):
                raise ValueError(
                    f"key_padding_mask: must have shape {(batch, keys)}; got {tuple(key_padding_mask.shape)}"
                )
            key_padding_mask = key_padding_mask.view(batch, 1, 1, keys)
        masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            # PyTorch's True means: leave out.
            return ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
        additive = [
            torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
            if mask.dtype == torch.bool
            else wide(mask).masked_fill(mask <= MASKED_BELOW, -torch.inf)
            for mask in masks
        ]
        return additive[0] if len(additive) == 1 else additive[0] + additive[1]


def _not_padding(key_padding_mask: Tensor) -> Tensor:
    """Which of the positions (B, L) are no padding, bool (B, 1, L)."""
    padding = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask <= MASKED_BELOW
    return ~padding.unsqueeze(1)


def _one_more_key(mask: Tensor | None) -> Tensor | None:
    """The mask with a last key that every query may attend to."""
    if mask is None:
        return None
    return F.pad(mask, (0, 1), value=True) if mask.dtype == torch.bool else F.pad(mask, (0, 1))


def _keep_off_the_fused_path(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing, by being there."""
