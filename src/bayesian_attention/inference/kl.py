"""Collecting the divergence of a model's forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bayesian_attention.checks import at_least
from bayesian_attention.layers.stochastic import KLTerm, StochasticAttention
from bayesian_attention.names import look_up

REDUCTIONS = {"sum": None, "mean": None}


def stochastic_layers(model: nn.Module) -> list[StochasticAttention]:
    """All stochastic attention in ``model``, each once, in the order of ``model.modules()``."""
    return [module for module in model.modules() if isinstance(module, StochasticAttention)]


def track_kl(model: nn.Module) -> nn.Module:
    """Let ``model`` delimit its forward passes, so that the divergence of each is collected whole.

    Two hooks on ``model`` clear what its layers recorded before a pass and close the records after it. A
    layer that is called several times in a pass then contributes every time, and the recomputation of a
    checkpointed block contributes nothing twice. :func:`kl_divergence` does this by itself; call it
    beforehand if a layer is shared or if the model runs before its divergence is first read.

    Returns:
        ``model``, for chaining. Calling it again changes nothing.
    """
    if _open_records not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_open_records)
        # always_call: an exception inside the pass must not leave the records open.
        model.register_forward_hook(_close_records, always_call=True)
    for layer in stochastic_layers(model):
        layer.tracked = True
    return model


def kl_divergence(model: nn.Module, *, reduction: str = "sum", examples: int | None = None) -> Tensor:
    """KL(posterior ‖ prior) of the attention weights in the last forward pass of ``model``.

    Args:
        model: the module whose forward pass was called.
        reduction: "sum" is the term of the evidence lower bound: per example, the sum over layers, heads,
            queries and keys. Add it to a negative log-likelihood averaged over examples. The weights are
            local latent variables: their divergence is never divided by the size of the data set.
            "mean" averages over the valid entries of each call, then over the calls, as the published
            experiments do; it is far smaller.
        examples: for "sum", what the sum over the batch is divided by: the number of examples that the
            likelihood is averaged over. By default the batch size that all attention calls share. Graphs
            have none: give the number of labelled nodes in the loss.

    Returns:
        float32 (or wider) scalar, differentiable; 0 for a model whose attention is deterministic.

    Raises:
        ValueError: ``model`` has no stochastic attention, or the number of examples is unknown.
        RuntimeError: nothing was recorded, or what was recorded is not whole.
    """
    look_up("reduction", reduction, REDUCTIONS)
    layers = stochastic_layers(model)
    if not layers:
        raise ValueError("model: has no stochastic attention; is it converted, or built of this library's layers?")
    tracked = all(layer.tracked for layer in layers) and _open_records in model._forward_pre_hooks.values()
    if not tracked:
        _check_single_calls(layers)
        track_kl(model)
    if any(layer.ran_outside for layer in layers):
        raise RuntimeError(
            "a layer of the model has run since its last pass, but not in a pass of the model itself (a part was "
            "called alone, or model.forward() in place of model()), so the recorded divergence is not that of the "
            "last call; call the model itself, and read its divergence before running parts of it"
        )
    terms = [term for layer in layers for term in layer.kl_terms]
    for layer in layers:
        layer.calls_since_read = 0
    if not terms:
        if all(layer.prior is None for layer in layers):
            return torch.zeros(())
        raise RuntimeError(
            "no divergence recorded: the model has made no forward pass since it was built, "
            "or recording was off (see recording())"
        )
    if torch.is_grad_enabled() and any(layer.training for layer in layers):
        lost = [term for term in terms if not term.differentiable]
        if lost:
            raise RuntimeError(
                "the divergence was recorded without gradients, so training would ignore it; "
                "use checkpoint(..., use_reentrant=False), and no torch.no_grad() around the forward pass"
            )
    if reduction == "mean":
        return torch.stack([_to(terms[0], t.total / t.entries.clamp_min(1)) for t in terms]).mean()
    return torch.stack([_to(terms[0], t.total) for t in terms]).sum() / max(_examples(terms, examples), 1)


@contextmanager
def recording(model: nn.Module, active: bool) -> Iterator[None]:
    """Switch the recording of divergences on or off within a block, for instance off while evaluating."""
    layers = stochastic_layers(model)
    before = [layer.record_kl for layer in layers]
    for layer in layers:
        layer.record_kl = active
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.record_kl = value


def _to(first: KLTerm, value: Tensor) -> Tensor:
    """Terms of a model that is spread over devices meet on the first one."""
    return value.to(first.total.device)


def _examples(terms: list[KLTerm], examples: int | None) -> int:
    """What the sum is divided by."""
    if examples is not None:
        return at_least("kl_divergence", "examples", examples, 1)
    sizes = {term.examples for term in terms}
    size = next(iter(sizes))
    if len(sizes) > 1 or size is None:
        seen = "a graph" if size is None else f"batch sizes {sorted(s for s in sizes if s is not None)}"
        raise ValueError(
            f"examples: cannot be told from the attention ({seen}); give the number of examples that the "
            "likelihood is averaged over, or use reduction='mean'"
        )
    return size


def _check_single_calls(layers: list[StochasticAttention]) -> None:
    """The first read of an untracked model is whole only if each layer ran once."""
    if any(layer.calls_since_read > 1 for layer in layers):
        raise RuntimeError(
            "a layer ran more than once before the divergence was first read, so its last call alone is known; "
            "call track_kl(model) once, before the first forward pass"
        )


def _open_records(module: nn.Module, args: tuple[Any, ...]) -> None:
    for layer in stochastic_layers(module):
        # Open already, by this very module: a pass that Ctrl-C ended, of which hooks are not told.
        if not layer.inside_forward or layer.opened_by == id(module):
            # Terms that nobody has read are about to go: a root above, not yet tracked, must hear of it.
            layer.calls_since_read = layer.calls_since_read + 1 if layer.kl_terms else 1
            layer.kl_terms = []
            layer.ran_outside = False
            layer.call_number = 0
            layer.tracked = layer.inside_forward = True
            layer.opened_by = id(module)


def _close_records(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
    for layer in stochastic_layers(module):
        if layer.opened_by == id(module):
            layer.inside_forward = False
            layer.last_pass = layer.pass_state() if torch.is_grad_enabled() else None
            # A checkpointed block that runs again in the backward pass repeats its first call's noise.
            layer.call_number = 0
