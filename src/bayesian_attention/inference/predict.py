"""``predict``: posterior draws of a model's output for a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from bayesian_attention.checks import at_least, finite
from bayesian_attention.engine.rows import IdentityError
from bayesian_attention.inference.kl import recording, stochastic_layers
from bayesian_attention.inference.prediction import ClassificationPrediction, RegressionPrediction
from bayesian_attention.inference.sampling import sampling
from bayesian_attention.layers.multihead import MultiheadAttention
from bayesian_attention.names import look_up
from bayesian_attention.numerics import wide

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


@overload
def predict(
    model: nn.Module,
    inputs: Inputs,
    *,
    samples: int = ...,
    seed: int = ...,
    task: Literal["classification"] = ...,
    batch_size: int | None = ...,
    samples_per_pass: int = ...,
    output: Callable[[Any], Tensor] | None = ...,
) -> ClassificationPrediction: ...


@overload
def predict(
    model: nn.Module,
    inputs: Inputs,
    *,
    samples: int = ...,
    seed: int = ...,
    task: Literal["regression"],
    batch_size: int | None = ...,
    samples_per_pass: int = ...,
    output: Callable[[Any], Tensor] | None = ...,
    noise_std: float | Literal["predicted"] | None = ...,
) -> RegressionPrediction: ...


def predict(
    model: nn.Module,
    inputs: Inputs,
    *,
    samples: int = 20,
    seed: int = 0,
    task: str = "classification",
    batch_size: int | None = None,
    samples_per_pass: int = 1,
    output: Callable[[Any], Tensor] | None = None,
    noise_std: float | Literal["predicted"] | None = None,
) -> ClassificationPrediction | RegressionPrediction:
    """Draw the attention weights ``samples`` times and gather the model's outputs.

    The model runs in evaluation mode without gradients, and is put back as it was. The same seed gives the
    same draws, whatever ``batch_size`` and ``samples_per_pass``. Outputs are kept on the CPU, draw by draw,
    so the memory in use is that of one pass and of the outputs.

    Args:
        model: any module with stochastic attention.
        inputs: a tensor, a sequence of positional or a mapping of keyword arguments of ``model``.
        samples: number of draws S.
        seed: seed of the draws.
        task: "classification": the output is logits (B, …, C); "regression": numbers (B, …).
        batch_size: run this many rows at a time. Every tensor among the inputs whose first dimension is that
            of the first tensor is split. By default all at once; a graph cannot be split.
        samples_per_pass: draws evaluated in one pass, by repeating the rows. More is faster on small
            batches and takes as many times the memory. A graph takes 1.
        output: picks the tensor from what the model returns; by default the return value itself, its
            ``logits``, or its first item.
        noise_std: for regression, the standard deviation of the observations around the model's mean; or
            "predicted" where the output's last dimension holds mean and log variance.

    Returns:
        A prediction with S draws on the CPU.

    Raises:
        ValueError: no stochastic attention in ``model``, or arguments out of range.
    """
    look_up("task", task, {"classification": None, "regression": None})
    samples = at_least("predict", "samples", samples, 1)
    samples_per_pass = at_least("predict", "samples_per_pass", samples_per_pass, 1)
    if noise_std is not None and task != "regression":
        raise ValueError("noise_std: only regression has one")
    if noise_std not in (None, "predicted") and finite("predict", "noise_std", noise_std) < 0:
        raise ValueError(f"predict: noise_std must not be negative; got {noise_std!r}")
    if not any(layer.posterior.spec.stochastic for layer in stochastic_layers(model)):
        raise ValueError(
            "model: has no stochastic attention, so all draws would be the same; call the model itself instead"
        )
    arguments = _Arguments(inputs)
    if arguments.rows == 0:  # nothing to split or repeat
        batch_size, samples_per_pass = None, 1
    if batch_size is not None or samples_per_pass > 1:
        _check_rows(model, arguments, "batch_size" if batch_size is not None else "samples_per_pass")
    rows = arguments.rows if batch_size is None else at_least("predict", "batch_size", batch_size, 1)
    whole = batch_size is None and samples_per_pass == 1
    on_graph = any(layer.on_graph for layer in stochastic_layers(model))  # its nodes number themselves
    pieces: list[Tensor] = []
    with _evaluating(model), torch.no_grad(), recording(model, False):
        for first in range(0, max(arguments.rows, 1), max(rows, 1)):
            part = arguments if batch_size is None else arguments.slice(first, min(first + rows, arguments.rows))
            ids = None if on_graph or part.rows == 0 else torch.arange(first, first + part.rows)
            draws = []
            for start in range(0, samples, samples_per_pass):
                count = min(samples_per_pass, samples - start)
                try:
                    draws.append(_draw(model, part, ids, seed, start, count, samples_per_pass, output))
                except IdentityError:
                    # The first dimension is no batch, but the length of a sequence, say. Run whole, such a
                    # model's attention can number its own rows.
                    if ids is None or not whole:
                        raise
                    ids = None
                    draws.append(_draw(model, part, ids, seed, start, count, samples_per_pass, output))
            pieces.append(torch.cat(draws))
    outputs = torch.cat(pieces, dim=1)
    if task == "classification":
        return ClassificationPrediction(outputs)
    if noise_std == "predicted":
        if outputs.shape[-1] != 2:
            raise ValueError(
                f"noise_std: 'predicted' needs mean and log variance in the last dimension; got {tuple(outputs.shape)}"
            )
        return RegressionPrediction(outputs[..., 0], outputs[..., 1].exp())
    return RegressionPrediction(outputs, None if noise_std is None else outputs.new_tensor(float(noise_std) ** 2))


def _check_rows(model: nn.Module, arguments: _Arguments, argument: str) -> None:
    """Refuse to split or repeat rows that are no examples: the nodes of a graph, or the steps of sequences."""
    if any(layer.on_graph for layer in stochastic_layers(model)):
        raise ValueError(f"{argument}: a graph cannot be split or repeated; leave it out")
    sequence_first = [m for m in model.modules() if isinstance(m, MultiheadAttention) and not m.batch_first]
    if not sequence_first or arguments.rows < 2:
        return
    # Their batch is dimension 1. That is the model's own affair if it turns its inputs round; if not, the rows
    # here are time steps. One row and two tell the cases apart.
    sizes: list[list[int]] = []
    with _evaluating(model), torch.no_grad(), recording(model, False), ExitStack() as hooks:
        for module in sequence_first:
            handle = module.register_forward_pre_hook(
                lambda _, args, kwargs: sizes[-1].append((args[0] if args else kwargs["query"]).shape[1]),
                with_kwargs=True,
            )
            hooks.callback(handle.remove)
        for count in (1, 2):
            sizes.append([])
            arguments.slice(0, count).call(model)
    if sizes[1] != [2 * size for size in sizes[0]]:
        raise ValueError(
            f"{argument}: the model has attention with batch_first=False, and dimension 0 of the inputs is not its "
            "batch, so the rows are no examples; leave it out, or put the batch first"
        )


def _draw(
    model: nn.Module,
    part: _Arguments,
    ids: Tensor | None,
    seed: int,
    start: int,
    count: int,
    samples_per_pass: int,
    output: Callable[[Any], Tensor] | None,
) -> Tensor:
    """Draws ``start`` to ``start + count`` of some rows, identified by ``ids``, (count, rows, …) on the CPU."""
    index: int | Tensor = start
    if samples_per_pass > 1:
        ids = None if ids is None else ids.repeat(count)
        index = torch.arange(start, start + count).repeat_interleave(part.rows)
        part = part.repeat(count)
    with sampling(model, True, seed=seed, sample_index=index, batch_ids=ids):
        result = _pick(part.call(model)) if output is None else output(part.call(model))
    result = wide(result).cpu()
    if samples_per_pass == 1:
        return result.unsqueeze(0)
    if result.shape[0] != part.rows:
        raise ValueError(
            f"samples_per_pass: the output has {result.shape[0]} rows for {part.rows // count} rows repeated "
            f"{count} times; this model does not treat rows one by one, use samples_per_pass=1"
        )
    return result.unflatten(0, (count, -1))


def _pick(result: Any) -> Tensor:
    """The tensor of a model's return value."""
    if isinstance(result, Tensor):
        return result
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return result[0]
    raise ValueError(f"output: cannot tell which part of a {type(result).__name__} is the prediction; give output=")


class _Arguments:
    """The arguments of a model, and how to slice and repeat the rows in them."""

    def __init__(self, inputs: Inputs, has_rows: Sequence[bool] | None = None) -> None:
        if isinstance(inputs, Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, (Sequence, Mapping)) or isinstance(inputs, str):
            raise TypeError(f"inputs: must be a tensor, a sequence or a mapping; got {type(inputs).__name__}")
        self.inputs = inputs
        values = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
        first = next((value for value in values if isinstance(value, Tensor) and value.dim()), None)
        if first is None:
            raise ValueError("inputs: there is no tensor with rows among them")
        self.rows = first.shape[0]
        # Settled by the whole inputs: a mask (L, L) has no rows, though a piece may happen to have L.
        self.has_rows = has_rows or [
            isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.rows for value in values
        ]

    def call(self, model: nn.Module) -> Any:
        return model(**self.inputs) if isinstance(self.inputs, Mapping) else model(*self.inputs)

    def slice(self, start: int, stop: int) -> _Arguments:
        return self._map(lambda rows: rows[start:stop])

    def repeat(self, times: int) -> _Arguments:
        return self._map(lambda rows: rows.repeat(times, *[1] * (rows.dim() - 1)))

    def _map(self, change: Callable[[Tensor], Tensor]) -> _Arguments:
        values = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        changed = [change(value) if own else value for value, own in zip(values, self.has_rows, strict=True)]
        inputs = dict(zip(self.inputs, changed, strict=True)) if isinstance(self.inputs, Mapping) else changed
        return _Arguments(inputs, self.has_rows)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within a block; each module returns to the mode it had."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
