"""Bayesian attention for graphs: PyTorch Geometric's convolutions with random edge weights.

A node's row are the edges that point to it, so the prior and the normalisation are over its neighbours,
never over all nodes. The convolutions' own code runs unchanged: each class here rebuilds the one method
that calls ``softmax`` with that name bound to the stochastic weights.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bayesian_attention.engine.rows import SegmentRows
from bayesian_attention.layers.stochastic import StochasticAttention
from bayesian_attention.posteriors import Posterior, Weibull
from bayesian_attention.priors import Prior

try:
    from torch_geometric.inspector import Inspector
    from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
    from torch_geometric.typing import OptTensor
except ImportError as error:  # pragma: no cover
    raise ImportError("graph layers need PyTorch Geometric: pip install 'bayesian-attention[graph]'") from error


class _Call(NamedTuple):
    """What the stochastic softmax must know; it travels in the place of ``ptr``, which only softmax reads."""

    layer: _BayesianConv
    source: Tensor


class _BayesianConv(MessagePassing):
    """What the three convolutions share."""

    #: Names of the linear maps that make the keys; the first that the instance has is used.
    _key_maps: tuple[str, ...] = ()

    def _become_bayesian(self, stoch: StochasticAttention) -> None:
        """Give an initialised convolution its stochastic attention."""
        self.stoch = stoch
        if self.stoch.prior is not None and self.stoch.prior.needs_keys:
            self._key_map().register_forward_hook(_remember)

    def _key_map(self) -> nn.Module:
        maps = (getattr(self, name, None) for name in self._key_maps)
        return next(found for found in maps if found is not None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the convolution's own."""
        # What a pass that failed half-way left behind must not stand for this pass's keys.
        _forget(self._key_map())
        return super().forward(*args, **kwargs)

    def _weights(self, logits: Tensor, index: Tensor, source: Tensor, count: int | None) -> Tensor:
        """Weights (E, H) for logits (E, H)."""
        rows = SegmentRows(index, source, int(index.max()) + 1 if count is None else count)
        keys = _forget(self._key_map())
        if keys is not None:
            keys = keys.view(-1, self.heads, self.out_channels).transpose(0, 1)
        return self.stoch.weights(logits, rows, keys)


def _attention_of(conv: MessagePassing, posterior: Posterior | None, prior: Prior | None) -> StochasticAttention:
    """The stochastic attention that fits a convolution."""
    stoch = StochasticAttention(posterior or Weibull(), prior, heads=conv.heads, key_dim=conv.out_channels)
    stoch.on_graph = True
    like = next(conv.parameters())
    return stoch.to(like.device, torch.promote_types(like.dtype, torch.float32)).train(conv.training)


def _remember(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Keep the first output of a pass: where one map serves sources and targets, the sources come first."""
    module.__dict__.setdefault("stochastic_keys", output)


def _forget(module: nn.Module) -> Tensor | None:
    """Give back what was remembered, and remember it no longer."""
    return module.__dict__.pop("stochastic_keys", None)


def _stochastic_softmax(logits: Tensor, index: Tensor, call: _Call, count: int | None = None) -> Tensor:
    """Takes the place of ``torch_geometric.utils.softmax``."""
    return call.layer._weights(logits, index, call.source, count)


def _with_stochastic_softmax(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with the global name ``softmax`` bound to the stochastic weights."""
    code: CodeType = method.__code__
    if "softmax" not in code.co_names:
        raise ImportError(
            f"{method.__qualname__} of the installed torch_geometric calls no softmax; this version is not supported"
        )
    namespace = {**method.__globals__, "softmax": _stochastic_softmax}
    return FunctionType(code, namespace, method.__name__, method.__defaults__, method.__closure__)


_GAT_UPDATE = _with_stochastic_softmax(GATConv.edge_update)
_GATV2_UPDATE = _with_stochastic_softmax(GATv2Conv.edge_update)
_TRANSFORMER_MESSAGE = _with_stochastic_softmax(TransformerConv.message)


class BayesianGATConv(_BayesianConv, GATConv):
    """``torch_geometric.nn.GATConv`` with random attention weights.

    Source: Veličković et al., "Graph attention networks", ICLR 2018; Fan et al., "Bayesian Attention
    Modules", NeurIPS 2020, section 4.1.

    Args:
        *args: as the original.
        posterior: family of the weights; ``Weibull()`` by default.
        prior: prior of the weights; see :class:`StochasticAttention`. The keys are the projected sources.
        **kwargs: as the original.
    """

    _key_maps = ("lin", "lin_src")

    def __init__(
        self, *args: Any, posterior: Posterior | None = None, prior: Prior | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_bayesian(_attention_of(self, posterior, prior))

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: OptTensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int | None,
        edge_index_j: Tensor,
    ) -> Tensor:
        """The original's, with stochastic weights."""
        if index.numel() == 0:
            # The original returns before its softmax; the pass still has a divergence, of zero.
            return self._weights(alpha_j, index, edge_index_j, dim_size or 0)
        return _GAT_UPDATE(self, alpha_j, alpha_i, edge_attr, index, _Call(self, edge_index_j), dim_size)


class BayesianGATv2Conv(_BayesianConv, GATv2Conv):
    """``torch_geometric.nn.GATv2Conv`` with random attention weights.

    Source: Brody, Alon and Yahav, "How attentive are graph attention networks?", ICLR 2022.

    Args:
        *args: as the original.
        posterior: family of the weights; ``Weibull()`` by default.
        prior: prior of the weights; see :class:`StochasticAttention`. The keys are the projected sources.
        **kwargs: as the original.
    """

    _key_maps = ("lin_l",)

    def __init__(
        self, *args: Any, posterior: Posterior | None = None, prior: Prior | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_bayesian(_attention_of(self, posterior, prior))

    def edge_update(
        self,
        x_j: Tensor,
        x_i: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        dim_size: int | None,
        edge_index_j: Tensor,
    ) -> Tensor:
        """The original's, with stochastic weights."""
        return _GATV2_UPDATE(self, x_j, x_i, edge_attr, index, _Call(self, edge_index_j), dim_size)


class BayesianTransformerConv(_BayesianConv, TransformerConv):
    """``torch_geometric.nn.TransformerConv`` with random attention weights.

    Source: Shi et al., "Masked label prediction", IJCAI 2021.

    Args:
        *args: as the original.
        posterior: family of the weights; ``Weibull()`` by default.
        prior: prior of the weights; see :class:`StochasticAttention`. The keys are those of the nodes,
            without what edge features add to them.
        **kwargs: as the original.
    """

    _key_maps = ("lin_key",)

    def __init__(
        self, *args: Any, posterior: Posterior | None = None, prior: Prior | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._become_bayesian(_attention_of(self, posterior, prior))

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: int | None,
        edge_index_j: Tensor,
    ) -> Tensor:
        """The original's, with stochastic weights."""
        call = _Call(self, edge_index_j)
        return _TRANSFORMER_MESSAGE(self, query_i, key_j, value_j, edge_attr, index, call, size_i)


_BAYESIAN: dict[type[MessagePassing], type[_BayesianConv]] = {
    GATConv: BayesianGATConv,
    GATv2Conv: BayesianGATv2Conv,
    TransformerConv: BayesianTransformerConv,
}


def make_bayesian(
    conv: MessagePassing, posterior: Posterior | None = None, prior: Prior | None = None
) -> MessagePassing:
    """Turn an existing convolution into its Bayesian form, in place, weights kept.

    Args:
        conv: a GATConv, GATv2Conv or TransformerConv of PyTorch Geometric.
        posterior: family of the weights; ``Weibull()`` by default.
        prior: prior of the weights.

    Returns:
        ``conv``, of the Bayesian class.

    Raises:
        TypeError: it is another kind of module.
    """
    bayesian = _BAYESIAN.get(type(conv))
    if bayesian is None:
        kinds = ", ".join(kind.__name__ for kind in _BAYESIAN)
        raise TypeError(f"conv: must be exactly one of {kinds}; got {type(conv).__name__}")
    # First what can fail, then what changes conv.
    stoch = _attention_of(conv, posterior, prior)
    conv.__class__ = bayesian
    _inspect_again(conv)
    conv._become_bayesian(stoch)
    return conv


def _inspect_again(conv: MessagePassing) -> None:
    """Repeat what MessagePassing's constructor learns from the signatures of its class."""
    inspector = conv.inspector = Inspector(type(conv))
    inspector.inspect_signature(conv.message)
    inspector.inspect_signature(conv.aggregate, exclude=[0, "aggr"])
    inspector.inspect_signature(conv.message_and_aggregate, [0])
    inspector.inspect_signature(conv.update, exclude=[0])
    inspector.inspect_signature(conv.edge_update)
    special = conv.special_args
    conv._user_args = inspector.get_flat_param_names(["message", "aggregate", "update"], exclude=special)
    conv._fused_user_args = inspector.get_flat_param_names(["message_and_aggregate", "update"], exclude=special)
    conv._edge_user_args = inspector.get_param_names("edge_update", exclude=special)
    conv._set_jittable_templates()
