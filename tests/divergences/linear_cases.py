"""Calls of dense attention, and their divergence as the sum over all entries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bayesian_attention.divergences import Divergence, entrywise, linear_divergence, reduce_valid
from bayesian_attention.posteriors import LogNormal, Posterior, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior, LearnedPrior, Prior, PriorModule

FEATURES = 5

#: A family and one of its priors, with settings that are no defaults.
PAIRS: dict[str, tuple[Posterior, Prior]] = {
    "weibull-constant": (Weibull(3.0), ConstantPrior(concentration=0.7, rate=1.3)),
    "weibull-learned": (Weibull(3.0), LearnedPrior(concentration=0.7, rate=1.3)),
    "weibull-contextual": (Weibull(3.0), ContextualPrior(rate=0.8)),
    "weibull-contextual-heads": (Weibull(3.0), ContextualPrior(share_heads=False, hidden=None)),
    "lognormal-constant": (LogNormal(0.6), ConstantPrior(loc=-1.5, scale=0.7)),
    "lognormal-learned": (LogNormal(0.6), LearnedPrior(loc=-1.5, scale=0.7)),
    "lognormal-contextual": (LogNormal(0.6), ContextualPrior(scale=0.7)),
    "lognormal-contextual-heads": (LogNormal(0.6), ContextualPrior(share_heads=False, activation="tanh")),
}


@dataclass(frozen=True)
class Call:
    """One call, as of ``linear_divergence``; tensors that are floating point are differentiated."""

    posterior: Posterior
    prior: PriorModule
    query: Tensor
    key: Tensor
    spread: float | Tensor
    scale: float | None = None
    valid: Tensor | None = None
    bias: Tensor | None = None
    is_causal: bool = False
    query_offset: int = 0
    query_valid: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Call:
        """The same numbers in another dtype, on a graph of their own."""
        prior = self.prior.spec.build(self.prior.family, self.query.shape[-3], self.key.shape[-1]).to(dtype)
        prior.load_state_dict(self.prior.state_dict())
        converted = {
            name: value.detach().to(dtype).requires_grad_()
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return replace(self, prior=prior, **converted)

    def inputs(self) -> dict[str, Tensor]:
        """What the divergence is differentiated by."""
        tensors = {k: v for k, v in vars(self).items() if isinstance(v, Tensor) and v.is_floating_point()}
        return tensors | {f"prior.{name}": p for name, p in self.prior.named_parameters()}

    def logits(self) -> tuple[Tensor, Tensor]:
        """Logits (…, H, Lq, Lk), and whether the query sees the key."""
        scale = 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale
        logits = (self.query * scale) @ self.repeated(self.key).transpose(-1, -2)
        if self.bias is not None:
            logits = logits + self.bias.unsqueeze(-2)
        places = torch.arange(logits.shape[-2]).unsqueeze(-1) + self.query_offset
        seen = torch.arange(logits.shape[-1]) <= places if self.is_causal else torch.tensor(True)
        if self.valid is not None:
            seen = seen & self.valid.unsqueeze(-2)
        return logits, seen.expand_as(logits)

    def repeated(self, key: Tensor) -> Tensor:
        return key.repeat_interleave(self.query.shape[-3] // key.shape[-3], dim=-3)

    def dense(self) -> Divergence:
        """The sum over entries."""
        logits, seen = self.logits()
        spread = self.spread.view(-1, 1, 1) if isinstance(self.spread, Tensor) and self.spread.dim() else self.spread
        log_prior = None
        if self.prior.needs_keys:
            scores = self.prior.scores(self.repeated(self.key)).unsqueeze(-2).expand_as(logits)
            log_prior = (scores - log_sum_exp(scores, seen, empty=0.0).unsqueeze(-1)).masked_fill(~seen, 0.0)
        parameters = self.prior.distribution(log_prior, lambda x: x.view(-1, 1, 1))
        log_mean = (logits - log_sum_exp(logits, seen, empty=0.0).unsqueeze(-1)).masked_fill(~seen, 0.0)
        counted = seen if self.query_valid is None else seen & self.query_valid.unsqueeze(-1)
        return reduce_valid(entrywise(self.posterior, spread, log_mean, parameters), counted)

    def linear(self, lse: Tensor | None = None) -> Divergence:
        """The divergence in linear time; by default the log-sum-exp depends on the inputs."""
        lse = log_sum_exp(*self.logits()) if lse is None else lse
        result = linear_divergence(
            self.posterior, self.spread, self.prior, self.query, self.key, lse, scale=self.scale, valid=self.valid,
            bias=self.bias, is_causal=self.is_causal, query_offset=self.query_offset, query_valid=self.query_valid,
        )  # fmt: skip
        assert result is not None
        return result

    def gradients(self, total: Tensor) -> dict[str, Tensor]:
        """Of the total, by every input; 0 where an input has no part in it."""
        inputs = self.inputs()
        return dict(zip(inputs, torch.autograd.grad(total, list(inputs.values()), materialize_grads=True), strict=True))


def log_sum_exp(logits: Tensor, seen: Tensor, empty: float = -math.inf) -> Tensor:
    """Of each row over what it sees; ``empty`` for a row that sees nothing, without a NaN for its gradient."""
    if logits.shape[-1] == 0:
        return logits.sum(-1) + empty
    none = ~seen.any(-1)
    safe = logits.masked_fill(~seen, -math.inf).masked_fill(none.unsqueeze(-1), 0.0)
    return safe.logsumexp(-1).masked_fill(none, empty)


def call(
    pair: str, queries: int = 7, keys: int = 7, *, batch: tuple[int, ...] = (2,), heads: int = 2, kv_heads: int = 2,
    features: int = FEATURES, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any,
) -> Call:  # fmt: skip
    """Of normal queries and keys."""
    posterior, spec = PAIRS[pair]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = 2 * normal(*batch, heads, queries, features), normal(*batch, kv_heads, keys, features)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        prior = spec.build(posterior.prior_family, heads, features)
    for parameter in prior.parameters():
        parameter.data = parameter.data + 0.5 * normal(*parameter.shape)
    settings.setdefault("spread", torch.tensor(posterior.parameter, dtype=torch.float64))
    return Call(posterior, prior, query, key, **settings).to(dtype)


def padding(keys: int, batch: int = 2) -> Tensor:
    """Valid keys (batch, 1, keys): about two thirds, in no order; at least one where there is one."""
    valid = torch.rand(batch, 1, keys, generator=torch.Generator().manual_seed(1)) < 0.65
    valid[..., -1:] = True
    return valid


def compare(one: Call, rtol: float = 1e-10) -> None:
    """Value and gradients of the linear form against the sum over entries, each relative to its largest part."""
    dense, linear = one.dense(), one.linear()
    assert linear.total.shape == linear.entries.shape == ()
    assert linear.total.dtype == linear.entries.dtype == one.query.dtype
    assert linear.entries.item() == dense.entries.item()
    torch.testing.assert_close(linear.total, dense.total, rtol=rtol, atol=1e-12)
    expected, found = one.gradients(dense.total), one.gradients(linear.total)
    for name, gradient in expected.items():
        size = gradient.abs().max().item() if gradient.numel() else 0.0
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=rtol * size + 1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
