"""Node classification on a citation graph, with the published GAT and its training recipe."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesian_attention import metrics
from bayesian_attention.checks import at_least, finite, positive
from bayesian_attention.data import Graph
from bayesian_attention.inference import (
    ClassificationPrediction,
    LinearWeight,
    elbo_loss,
    predict,
    recording,
    sampling,
)
from bayesian_attention.inference.kl import REDUCTIONS, stochastic_layers
from bayesian_attention.names import look_up
from bayesian_attention.tasks.assignments import assignments
from bayesian_attention.tasks.gat import GAT
from bayesian_attention.tasks.method import Method

Progress = Callable[[int, float], None]

#: Smallest values of a recipe's whole numbers. A spread over draws needs two of them.
_LEAST = {"hidden": 1, "heads": 1, "patience": 1, "max_epochs": 1, "kl_ramp": 0, "samples": 2}


@dataclass(frozen=True)
class Recipe:
    """How the GAT is built and trained; the same for every method.

    Source: Veličković et al., "Graph attention networks", ICLR 2018, section 3.3.

    Attributes:
        hidden: features a head of the first layer.
        heads: heads of the first layer.
        dropout: on inputs and attention weights.
        learning_rate: of Adam.
        weight_decay: L2 penalty on the model's weights, not on biases, posteriors and priors.
        patience: epochs without a better validation loss or accuracy before training stops.
        max_epochs: where training stops in any case.
        kl_reduction: "mean" or "sum"; "sum" is taken per labelled training node.
        kl_ramp: epochs over which the weight of the divergence rises from zero; 0: none.
        samples: posterior draws of the predictive distribution.
    """

    hidden: int = 8
    heads: int = 8
    dropout: float = 0.6
    learning_rate: float = 0.005
    weight_decay: float = 5e-4
    patience: int = 100
    max_epochs: int = 5000
    kl_reduction: str = "mean"
    kl_ramp: int = 0
    samples: int = 20

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        for name, least in _LEAST.items():
            at_least("Recipe", name, getattr(self, name), least)
        positive("Recipe", "learning_rate", self.learning_rate)
        if not 0 <= finite("Recipe", "dropout", self.dropout) < 1:
            raise ValueError(f"Recipe: dropout must be at least 0 and less than 1; got {self.dropout!r}")
        if finite("Recipe", "weight_decay", self.weight_decay) < 0:
            raise ValueError(f"Recipe: weight_decay must not be negative; got {self.weight_decay!r}")
        look_up("Recipe: kl_reduction", self.kl_reduction, REDUCTIONS)

    def with_settings(self, text: str) -> Recipe:
        """The recipe with some settings replaced, as in ``dropout=0.4,patience=200``.

        Raises:
            ValueError: an unknown setting (with near matches), or a value out of range.
        """
        names = {field.name: None for field in fields(self)}
        return replace(self, **{name: value for name, _, value in assignments("recipe", text, names)})


@dataclass
class EarlyStopping:
    """The published rule for when to stop and which weights to keep.

    The model is kept when both validation loss and accuracy are at their best so far; training stops when
    neither has been for ``patience`` epochs.

    An early epoch of lucky accuracy can so be kept while the loss is still far from its lowest, which leaves
    the probabilities of a half-trained model. The weights of the lowest loss are kept beside it.
    """

    patience: int
    best_loss: float = float("inf")
    best_accuracy: float = 0.0
    waited: int = 0
    kept: dict[str, Tensor] = field(default_factory=dict)
    kept_epoch: int = -1
    lowest: dict[str, Tensor] = field(default_factory=dict)

    def update(self, model: nn.Module, epoch: int, loss: float, accuracy: float) -> bool:
        """Take an epoch's results; True when training should stop."""
        better_loss = math.isfinite(loss) and loss <= self.best_loss
        better_accuracy = accuracy >= self.best_accuracy
        if better_loss:
            self.lowest = copy.deepcopy(model.state_dict())
        if better_loss and better_accuracy:
            self.kept = self.lowest
            self.kept_epoch = epoch
        self.best_loss = min(self.best_loss, loss)
        self.best_accuracy = max(self.best_accuracy, accuracy)
        self.waited = 0 if better_loss or better_accuracy else self.waited + 1
        return self.waited >= self.patience


@dataclass(frozen=True, eq=False)
class Training:
    """A trained model and how it came about.

    Attributes:
        model: the GAT, in evaluation mode, with the weights that the published rule keeps.
        lowest_loss: the state of the model at its lowest validation loss.
        epochs: epochs run.
        kept_epoch: the epoch whose weights were kept, from 0.
        seconds: wall-clock time of the training.
    """

    model: GAT
    lowest_loss: dict[str, Tensor]
    epochs: int
    kept_epoch: int
    seconds: float


def build(graph: Graph, method: Method, recipe: Recipe, classes: int | None = None) -> GAT:
    """An untrained model, its weights drawn from PyTorch's global generator.

    Args:
        graph: the graph.
        method: the attention.
        recipe: everything else.
        classes: number of classes; by default as many as the graph's labels have.
    """
    return GAT(
        graph,
        method.posterior,
        method.prior,
        hidden=recipe.hidden,
        heads=recipe.heads,
        dropout=recipe.dropout,
        classes=classes,
    )


def optimizer(model: GAT, recipe: Recipe) -> torch.optim.Optimizer:
    """Adam with the L2 penalty on the weights alone."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (free if "bias" in name or ".stoch." in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=recipe.learning_rate)


def epoch_loss(model: GAT, graph: Graph, method: Method, recipe: Recipe, epoch: int) -> Tensor:
    """The training loss of one pass, differentiable."""
    train = graph.splits["train"]
    nll = F.cross_entropy(model()[train], graph.y[train])
    if method.prior is None:
        return nll
    weight = method.kl_weight
    if recipe.kl_ramp:
        weight = LinearWeight(weight, recipe.kl_ramp)(epoch)
    return elbo_loss(model, nll, weight=weight, reduction=recipe.kl_reduction, examples=len(train)).loss


def mean_logits(model: GAT) -> Tensor:
    """Logits with the attention at its posterior mean, (N, C), without gradients."""
    model.eval()
    with torch.no_grad(), recording(model, False):
        return model()


def train(graph: Graph, method: Method, recipe: Recipe, seed: int, progress: Progress | None = None) -> Training:
    """Train one model.

    Args:
        graph: the data.
        method: the attention.
        recipe: everything else.
        seed: of initialisation, dropout and posterior draws.
        progress: called after each epoch with its number and the validation accuracy.

    Returns:
        The model with the weights of the best validation epoch.

    Raises:
        FloatingPointError: no epoch gave a finite validation loss.
    """
    torch.manual_seed(seed)
    model = build(graph, method, recipe)
    adam = optimizer(model, recipe)
    stopping = EarlyStopping(recipe.patience)
    val, labels = graph.splits["val"], graph.y[graph.splits["val"]]
    begun = time.perf_counter()
    epoch = 0
    for epoch in range(recipe.max_epochs):
        model.train()
        adam.zero_grad()
        epoch_loss(model, graph, method, recipe, epoch).backward()
        adam.step()
        logits = mean_logits(model)[val]
        accuracy = (logits.argmax(dim=-1) == labels).double().mean().item()
        if progress is not None:
            progress(epoch, accuracy)
        if stopping.update(model, epoch, F.cross_entropy(logits, labels).item(), accuracy):
            break
    if not stopping.kept:
        raise FloatingPointError("training gave no finite validation loss; lower the learning rate or the KL weight")
    model.load_state_dict(stopping.kept)
    model.eval()
    return Training(model, stopping.lowest, epoch + 1, stopping.kept_epoch, time.perf_counter() - begun)


def predictive(model: GAT, recipe: Recipe, seed: int) -> ClassificationPrediction:
    """The predictive distribution of all nodes; a deterministic model gives two equal draws."""
    if not stochastic_layers(model):
        return ClassificationPrediction(mean_logits(model).expand(2, -1, -1))
    return predict(model, model.edge_index, samples=recipe.samples, seed=seed)


def attention_draws(model: GAT, recipe: Recipe, seed: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over draws of the output layer's weights, (E,) each."""
    draws = []
    stochastic = bool(stochastic_layers(model))
    model.eval()
    with torch.no_grad(), recording(model, False):
        for index in range(recipe.samples if stochastic else 2):
            context: AbstractContextManager[None] = (
                sampling(model, True, seed=seed, sample_index=index) if stochastic else nullcontext()
            )
            with context:
                draws.append(model.attention()[1].squeeze(-1))
    stacked = torch.stack(draws)
    return stacked.mean(dim=0), stacked.std(dim=0)


def evaluate(prediction: ClassificationPrediction, graph: Graph, split: str) -> dict[str, float]:
    """Metrics of the nodes of one split, by their plain names, as fractions and nats."""
    nodes = graph.splits[split]
    target = graph.y[nodes]
    mean = prediction.mean[nodes].double()
    # The mean of float32 probabilities is off one by rounding, and more so summed over classes.
    mean = mean / mean.sum(dim=-1, keepdim=True)
    correct = mean.argmax(dim=-1) == target
    entropy = prediction.entropy[nodes]
    with warnings.catch_warnings():
        # All right, or all wrong, in a small test set: the NaN says it.
        warnings.filterwarnings("ignore", message="ErrorAUROC is NaN")
        error_auroc = metrics.ErrorAUROC()(entropy, correct)
    results: dict[str, Tensor] = {
        "accuracy": metrics.Accuracy()(mean, target),
        "nll": metrics.NegativeLogLikelihood()(mean, target),
        "brier": metrics.BrierScore()(mean, target),
        "ece": metrics.CalibrationError()(mean, target),
        "ece_classwise": metrics.CalibrationError(classwise=True)(mean, target),
        "aurc": metrics.AURC()(entropy, correct),
        "auroc_error": error_auroc,
    }
    log_probabilities = prediction.log_probabilities[:, nodes]
    for level in (0.01, 0.05, 0.1):
        results[f"pavpu_{level}"] = metrics.PAvPU(level=level)(log_probabilities, target)
    return {name: float(value) for name, value in results.items()}


def run(
    graph: Graph,
    method: Method,
    recipe: Recipe,
    seed: int,
    progress: Progress | None = None,
) -> tuple[Training, dict[str, float], dict[str, np.ndarray]]:
    """Train, predict and measure.

    Returns:
        The training, its metrics, and the arrays that a report draws. The metrics are those of the test
        nodes; with the prefix ``val_`` those of the validation nodes; with ``lowest_loss_`` those of the test
        nodes for the weights of the lowest validation loss; with the ending ``_mean_weights`` those of the
        attention at its posterior mean; and ``kept_epoch``.
    """
    training = train(graph, method, recipe, seed, progress)
    prediction = predictive(training.model, recipe, seed)
    point = ClassificationPrediction(mean_logits(training.model).unsqueeze(0))
    results = evaluate(prediction, graph, "test")
    validation = evaluate(prediction, graph, "val")
    results |= {f"val_{name}": value for name, value in validation.items()}
    for split, prefix in (("test", ""), ("val", "val_")):
        nodes = graph.splits[split]
        hits = point.label[nodes] == graph.y[nodes]
        results[f"{prefix}accuracy_mean_weights"] = float(hits.double().mean())
        results[f"{prefix}nll_mean_weights"] = float(F.cross_entropy(point.logits[0, nodes], graph.y[nodes]))
    results["kept_epoch"] = float(training.kept_epoch)
    mean, std = attention_draws(training.model, recipe, seed)
    other = copy.deepcopy(training.model)
    other.load_state_dict(training.lowest_loss)
    for name, value in evaluate(predictive(other, recipe, seed), graph, "test").items():
        results[f"lowest_loss_{name}"] = value
    arrays = {
        "node": graph.splits["test"],
        "target": graph.y[graph.splits["test"]],
        "probabilities": prediction.mean[graph.splits["test"]],
        "entropy": prediction.entropy[graph.splits["test"]],
        "epistemic": prediction.epistemic[graph.splits["test"]],
        "p_value": prediction.p_value[graph.splits["test"]],
        "label_all": prediction.label,
        "edge_index": training.model.edge_index,
        "attention_mean": mean,
        "attention_std": std,
    }
    return training, results, {name: array.numpy() for name, array in arrays.items()}
