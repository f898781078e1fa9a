"""Additive attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bayesian_attention.checks import at_least
from bayesian_attention.engine.rows import DenseRows
from bayesian_attention.layers.stochastic import StochasticAttention
from bayesian_attention.posteriors import Posterior, Weibull
from bayesian_attention.priors import Prior


class AdditiveAttention(nn.Module):
    """Additive attention whose weights are random: logit_ij = vᵀ tanh(W_q q_i + W_k k_j + b).

    Source: Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and
    translate", ICLR 2015, appendix A.1.2. This is the attention of recurrent translation and captioning.

    Args:
        query_dim: features of a query.
        key_dim: features of a key.
        hidden_dim: width of the tanh layer.
        posterior: family of the weights.
        prior: prior of the weights; see :class:`StochasticAttention`.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        hidden_dim: int,
        *,
        posterior: Posterior | None = None,
        prior: Prior | None = None,
    ) -> None:
        super().__init__()
        query_dim = at_least("AdditiveAttention", "query_dim", query_dim, 1)
        key_dim = at_least("AdditiveAttention", "key_dim", key_dim, 1)
        hidden_dim = at_least("AdditiveAttention", "hidden_dim", hidden_dim, 1)
        self.query_proj = nn.Linear(query_dim, hidden_dim, bias=False)
        self.key_proj = nn.Linear(key_dim, hidden_dim)
        self.score = nn.Linear(hidden_dim, 1, bias=False)
        self.stoch = StochasticAttention(posterior or Weibull(), prior, heads=1, key_dim=hidden_dim)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix the values.

        Args:
            query: (B, Lq, query_dim), or (B, query_dim) for one query an example.
            key: (B, Lk, key_dim).
            value: (B, Lk, Dv); the keys by default.
            mask: boolean, True: attend; (B, Lk), or (B, Lq, Lk).

        Returns:
            Context (B, Lq, Dv) and weights (B, Lq, Lk); without the Lq dimension for a 2-dimensional query.

        Raises:
            ValueError: shapes that do not fit.
        """
        single = query.dim() == 2
        if single:
            query = query.unsqueeze(1)
        if query.dim() != 3 or key.dim() != 3 or query.shape[0] != key.shape[0]:
            raise ValueError(
                "query, key: must have shapes (B, Lq, query_dim) and (B, Lk, key_dim); "
                f"got {tuple(query.shape)} and {tuple(key.shape)}"
            )
        for name, x, linear in (("query", query, self.query_proj), ("key", key, self.key_proj)):
            if x.shape[-1] != linear.in_features:
                raise ValueError(f"{name}: must have {linear.in_features} features; got {x.shape[-1]}")
        value = key if value is None else value
        if value.dim() != 3 or value.shape[:2] != key.shape[:2]:
            raise ValueError(f"value: shape {tuple(value.shape)} does not fit key's {tuple(key.shape)}")
        if mask is not None:
            if mask.dtype != torch.bool:
                raise ValueError(f"mask: must be boolean, True where a key may be attended to; got {mask.dtype}")
            shapes = [(key.shape[0], key.shape[1]), (key.shape[0], query.shape[1], key.shape[1])]
            if tuple(mask.shape) not in shapes:
                raise ValueError(f"mask: must have shape {shapes[0]} or {shapes[1]}; got {tuple(mask.shape)}")
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask[:, None, None]
        projected = self.key_proj(key)
        features = torch.tanh(self.query_proj(query).unsqueeze(2) + projected.unsqueeze(1))
        logits = self.score(features).squeeze(-1).unsqueeze(1)
        weights = self.stoch.weights(logits, DenseRows(mask), projected.unsqueeze(1)).squeeze(1)
        context = weights @ value
        return (context.squeeze(1), weights.squeeze(1)) if single else (context, weights)
