"""Small models that the tests of this folder share."""

import torch
from torch import Tensor, nn

import bayesian_attention as ba


def features(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def attention(
    heads: int = 2, posterior: ba.Posterior | None = None, prior: ba.Prior | None = None
) -> ba.MultiheadAttention:
    return ba.MultiheadAttention(8, heads, batch_first=True, posterior=posterior, prior=prior)


class Encoder(nn.Module):
    """Self-attention over x, then cross-attention to a memory of another length; logits of three classes."""

    def __init__(self, first: ba.Posterior | None = None, second: ba.Posterior | None = None) -> None:
        super().__init__()
        self.first = attention(2, first or ba.Weibull(2.0), None if first else ba.ConstantPrior(0.5, 2.0))
        self.second = attention(4, second or ba.LogNormal(0.7), None if second else ba.ConstantPrior(loc=-1, scale=2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, memory: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.head(self.second(x, memory, memory, padding)[0]).mean(dim=1)


class Shared(nn.Module):
    """One attention layer called twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x, x, x)[0]
        return self.layer(x, x, x)[0]


class Outer(nn.Module):
    """A model around another, with a layer of its own behind it."""

    def __init__(self, inner: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.last(x, x, x)[0]


def encoder(seed: int = 0, **posteriors: ba.Posterior) -> Encoder:
    torch.manual_seed(seed)
    return Encoder(**posteriors).double()
