from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk
from torch import nn
from torch.nn import functional as F

from bayesian_attention.data import Graph
from bayesian_attention.inference import ClassificationPrediction, kl_divergence
from bayesian_attention.posteriors import Weibull
from bayesian_attention.priors import ConstantPrior
from bayesian_attention.tasks.method import Method
from bayesian_attention.tasks.node_classification import (
    EarlyStopping,
    Recipe,
    build,
    epoch_loss,
    evaluate,
    mean_logits,
    optimizer,
    predictive,
    run,
    train,
)
from tests.tasks.graphs import CLASSES, METHODS, NODES, SHORT

NAN = float("nan")
BAYESIAN = {name: method for name, method in METHODS.items() if method.prior is not None}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=list(METHODS))
each_bayesian = pytest.mark.parametrize("method", BAYESIAN.values(), ids=list(BAYESIAN))


class TestRecipe:
    def test_defaults_are_those_of_the_paper(self):
        recipe = Recipe()
        assert (recipe.hidden, recipe.heads, recipe.dropout) == (8, 8, 0.6)
        assert (recipe.learning_rate, recipe.weight_decay, recipe.patience) == (0.005, 5e-4, 100)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("hidden", 0),
            ("heads", 1.5),
            ("patience", 0),
            ("max_epochs", 0),
            ("samples", 1),
            ("kl_ramp", -1),
            ("dropout", 1.0),
            ("dropout", -0.1),
            ("learning_rate", 0.0),
            ("learning_rate", NAN),
            ("weight_decay", -1.0),
            ("kl_reduction", "median"),
        ],
    )
    def test_out_of_range(self, name: str, value: object):
        with pytest.raises(ValueError, match=f"Recipe.*{name}"):
            Recipe(**{name: value})

    def test_with_settings(self):
        recipe = Recipe(heads=3).with_settings("dropout=0.4, patience=7,kl_reduction=sum")
        assert recipe == Recipe(heads=3, dropout=0.4, patience=7, kl_reduction="sum")
        assert Recipe().with_settings("") == Recipe()
        with pytest.raises(ValueError, match=r"recipe: setting: no 'patence'. Did you mean 'patience'"):
            Recipe().with_settings("patence=3")


class TestEarlyStopping:
    @staticmethod
    def follow(patience: int, losses: Sequence[float], accuracies: Sequence[float]) -> tuple[int | None, int, int]:
        """The epoch after which it stops, that of the weights kept, that of the weights of the lowest loss."""
        stopping, model = EarlyStopping(patience), nn.Linear(1, 1, bias=False)
        stop = None
        for epoch, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True)):
            nn.init.constant_(model.weight, epoch)
            if stopping.update(model, epoch, loss, accuracy):
                stop = epoch
                break
        nn.init.constant_(model.weight, -9)
        kept, lowest = ([*state.values(), torch.tensor([-1.0])][0] for state in (stopping.kept, stopping.lowest))
        assert stopping.kept_epoch == int(kept)
        return stop, int(kept), int(lowest)

    @pytest.mark.parametrize(
        ("patience", "losses", "accuracies", "outcome"),
        [
            # Always better.
            (2, [3, 2, 1], [0.1, 0.2, 0.3], (None, 2, 2)),
            # Equal to the best is as good as better.
            (1, [1, 1, 1], [0.5, 0.5, 0.5], (None, 2, 2)),
            # Only the loss, or only the accuracy: kept is the first, and patience begins anew.
            (2, [3, 2, 1, 0.5], [0.9, 0.1, 0.1, 0.1], (None, 0, 3)),
            (2, [1, 2, 2, 2], [0.1, 0.2, 0.3, 0.4], (None, 0, 0)),
            # Neither for two epochs in a row.
            (2, [1, 2, 2, 0], [0.5, 0.4, 0.4, 0.9], (2, 0, 0)),
            # One better epoch between.
            (2, [1, 2, 0.9, 2, 2], [0.5, 0.4, 0.4, 0.4, 0.4], (4, 0, 2)),
            # Bests are tracked apart: accuracy 0.6 of epoch 1 must be reached, with the loss 1 of epoch 0.
            (9, [1, 2, 1, 0.9], [0.5, 0.6, 0.5, 0.6], (None, 3, 3)),
            # A loss that is no number is never better.
            (2, [NAN, NAN, NAN], [0.5, 0.4, 0.4], (2, -1, -1)),
            (3, [NAN, 1, NAN], [0.1, 0.2, 0.2], (None, 1, 1)),
        ],
    )
    def test_sequences(self, patience: int, losses: list[float], accuracies: list[float], outcome: tuple):
        assert self.follow(patience, losses, accuracies) == outcome


class TestOptimizer:
    @each_method
    def test_every_parameter_once_and_the_penalty_on_weights_alone(self, graph: Graph, method: Method):
        torch.manual_seed(0)
        model = build(graph, method, SHORT)
        recipe = dataclasses.replace(SHORT, weight_decay=0.25, learning_rate=0.125)
        groups = optimizer(model, recipe).param_groups
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decay = {names[id(p)]: group["weight_decay"] for group in groups for p in group["params"]}
        assert sum(len(group["params"]) for group in groups) == len(decay) == len(names)
        assert {group["lr"] for group in groups} == {0.125}
        decayed = {"project", "first.att_src", "first.att_dst", "second.lin.weight", "second.att_src", "second.att_dst"}
        assert {name for name, value in decay.items() if value} == decayed
        assert set(decay.values()) <= {0.0, 0.25}


class TestLoss:
    def test_softmax_has_the_cross_entropy_of_the_training_nodes(self, graph: Graph):
        torch.manual_seed(0)
        recipe = dataclasses.replace(SHORT, dropout=0.0)
        model = build(graph, METHODS["softmax"], recipe)
        nodes = graph.splits["train"]
        expected = sk.log_loss(graph.y[nodes], model().detach().double().softmax(dim=1)[nodes], labels=range(CLASSES))
        assert epoch_loss(model, graph, METHODS["softmax"], recipe, 0).item() == pytest.approx(expected, rel=1e-5)

    @each_bayesian
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_the_divergence_is_added_with_its_weight_and_ramp(self, graph: Graph, method: Method, reduction: str):
        recipe = dataclasses.replace(SHORT, dropout=0.0, kl_reduction=reduction, kl_ramp=10)
        torch.manual_seed(0)
        model = build(graph, method, recipe).train()

        def loss(weight: float, recipe: Recipe, epoch: int) -> float:
            torch.manual_seed(1)
            return epoch_loss(model, graph, dataclasses.replace(method, kl_weight=weight), recipe, epoch).item()

        bare = loss(0.0, recipe, 5)
        kl = kl_divergence(model, reduction=reduction, examples=len(graph.splits["train"])).item()
        assert kl > 0
        steady = dataclasses.replace(recipe, kl_ramp=0)
        for current, epoch, weight in (
            (recipe, 0, 0),
            (recipe, 5, 1),
            (recipe, 10, 2),
            (recipe, 99, 2),
            (steady, 0, 2),
        ):
            assert loss(2.0, current, epoch) == pytest.approx(bare + weight * kl, rel=1e-4)


class TestTrain:
    @each_method
    def test_a_seed_determines_everything(self, graph: Graph, method: Method):
        outcomes = []
        for seed in (0, 0, 1):
            torch.rand(7 + seed)
            seen: list[tuple[int, float]] = []
            training = train(graph, method, SHORT, seed, lambda *args, seen=seen: seen.append(args))
            outcomes.append((training, seen))
        (one, seen), (two, seen_again), (other, _) = outcomes
        assert seen == seen_again
        assert [epoch for epoch, _ in seen] == [0, 1, 2]
        assert all(0 <= accuracy <= 1 for _, accuracy in seen)
        assert (one.epochs, one.kept_epoch) == (two.epochs, two.kept_epoch)
        assert one.epochs == 3
        assert one.seconds > 0
        for name, tensor in one.model.state_dict().items():
            assert torch.equal(tensor, two.model.state_dict()[name])
            assert torch.equal(one.lowest_loss[name], two.lowest_loss[name])
        assert not torch.equal(one.model.project, other.model.project)
        draws = [predictive(training.model, SHORT, 0).logits for training, _ in outcomes]
        assert torch.equal(draws[0], draws[1])

    @each_method
    def test_methods_start_from_the_same_weights(self, graph: Graph, method: Method):
        torch.manual_seed(5)
        plain = build(graph, METHODS["softmax"], SHORT).state_dict()
        torch.manual_seed(5)
        state = build(graph, method, SHORT).state_dict()
        for name, tensor in plain.items():
            assert torch.equal(tensor, state[name])
        assert all(".stoch." in name for name in set(state) - set(plain))

    @each_method
    def test_an_easy_graph_is_learned(self, graph: Graph, method: Method):
        recipe = Recipe(hidden=4, heads=4, max_epochs=80, learning_rate=0.02)
        training = train(graph, method, recipe, 0)
        test = graph.splits["test"]
        accuracy = sk.accuracy_score(graph.y[test], mean_logits(training.model)[test].argmax(dim=1))
        # The largest class has a share of about a third; 29 nodes.
        assert accuracy > 0.75
        assert not training.model.training

    def test_patience_ends_it(self, graph: Graph):
        recipe = dataclasses.replace(SHORT, max_epochs=2000, patience=5, learning_rate=0.1)
        training = train(graph, METHODS["softmax"], recipe, 0)
        assert training.kept_epoch < training.epochs < 2000

    def test_the_weights_of_the_kept_epoch_are_those_of_the_model(self, graph: Graph):
        recipe = dataclasses.replace(SHORT, max_epochs=40, learning_rate=0.1)
        accuracies: list[float] = []
        training = train(graph, BAYESIAN["weibull"], recipe, 3, lambda _, accuracy: accuracies.append(accuracy))
        nodes = graph.splits["val"]
        accuracy = sk.accuracy_score(graph.y[nodes], mean_logits(training.model)[nodes].argmax(dim=1))
        assert accuracy == pytest.approx(accuracies[training.kept_epoch])

    def test_a_loss_that_is_never_finite_is_an_error(self, graph: Graph):
        recipe = dataclasses.replace(SHORT, learning_rate=1e30)
        with pytest.raises(FloatingPointError, match="no finite validation loss"):
            train(graph, Method(Weibull(), ConstantPrior(), 1e38), recipe, 0)


class TestPredictive:
    def test_softmax_gives_equal_draws(self, graph: Graph):
        torch.manual_seed(0)
        prediction = predictive(build(graph, METHODS["softmax"], SHORT), SHORT, 0)
        assert prediction.logits.shape == (2, NODES, CLASSES)
        assert torch.equal(prediction.logits[0], prediction.logits[1])
        assert (prediction.epistemic < 1e-6).all()

    @each_bayesian
    def test_draws_differ_and_follow_the_seed(self, graph: Graph, method: Method):
        torch.manual_seed(0)
        model = build(graph, method, SHORT)
        one, two, other = (predictive(model, SHORT, seed).logits for seed in (0, 0, 1))
        assert one.shape == (SHORT.samples, NODES, CLASSES)
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        assert len({tuple(draw.flatten().tolist()) for draw in one}) == SHORT.samples


class TestRun:
    @pytest.fixture(scope="class", params=list(METHODS))
    @classmethod
    def result(cls, request: pytest.FixtureRequest, graph: Graph):
        # So few epochs that some answers are wrong.
        recipe = dataclasses.replace(SHORT, max_epochs=8, learning_rate=0.02, samples=6)
        return METHODS[request.param], recipe, *run(graph, METHODS[request.param], recipe, 1)

    def test_metrics_agree_with_scikit_learn(self, graph: Graph, result):
        _, _, _, metrics, arrays = result
        y, label = arrays["target"], arrays["probabilities"].argmax(axis=1)
        p = arrays["probabilities"].astype(np.float64)
        p /= p.sum(axis=1, keepdims=True)
        truth = np.eye(CLASSES)[y]
        wrong = label != y
        assert 0 < wrong.sum() < len(y)
        expected = {
            "accuracy": sk.accuracy_score(y, label),
            "nll": sk.log_loss(y, p, labels=range(CLASSES)),
            "brier": sum(sk.brier_score_loss(truth[:, c], p[:, c]) for c in range(CLASSES)),
            "auroc_error": sk.roc_auc_score(wrong, arrays["entropy"]),
            "ece": self.calibration_error(p.max(axis=1), ~wrong),
            "ece_classwise": np.mean([self.calibration_error(p[:, c], truth[:, c]) for c in range(CLASSES)]),
            "aurc": np.mean(np.cumsum(wrong[np.argsort(arrays["entropy"])]) / np.arange(1, len(y) + 1)),
        }
        for level in (0.01, 0.05, 0.1):
            certain = arrays["p_value"] <= level
            expected[f"pavpu_{level}"] = (certain == ~wrong).mean()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name

    @staticmethod
    def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
        gaps = stats.binned_statistic(confidence, correct - confidence, "sum", bins=10, range=(0, 1)).statistic
        return np.abs(gaps).sum() / len(confidence)

    def test_arrays(self, graph: Graph, result):
        method, _, training, _, arrays = result
        test = graph.splits["test"].numpy()
        np.testing.assert_array_equal(arrays["node"], test)
        np.testing.assert_array_equal(arrays["target"], graph.y.numpy()[test])
        np.testing.assert_array_equal(arrays["label_all"][test], arrays["probabilities"].argmax(axis=1))
        np.testing.assert_allclose(arrays["entropy"], stats.entropy(arrays["probabilities"], axis=1), rtol=1e-4)
        np.testing.assert_array_equal(arrays["edge_index"], training.model.edge_index.numpy())
        assert all(array.dtype != object for array in arrays.values())
        sums = np.bincount(arrays["edge_index"][1], arrays["attention_mean"], NODES)
        np.testing.assert_allclose(sums, 1, rtol=1e-5)
        degree = np.bincount(arrays["edge_index"][1], minlength=NODES)[arrays["edge_index"][1]]
        assert (arrays["attention_std"][degree == 1] == 0).all()
        assert ((arrays["attention_std"][degree > 1] > 0) == (method.prior is not None)).all()
        if method.prior is None:
            assert (arrays["p_value"] == 1).all()
            np.testing.assert_allclose(arrays["epistemic"], 0, atol=1e-6)

    def test_metrics_with_prefixes_and_endings(self, graph: Graph, result):
        _, recipe, training, metrics, _ = result
        base = {
            name for name in metrics if not name.startswith(("val_", "lowest_loss_")) and "mean_weights" not in name
        } - {"kept_epoch"}
        assert metrics["kept_epoch"] == training.kept_epoch
        assert {f"{prefix}{name}" for prefix in ("", "val_", "lowest_loss_") for name in base} <= set(metrics)
        for split, prefix in (("test", ""), ("val", "val_")):
            nodes = graph.splits[split]
            logits, y = mean_logits(training.model)[nodes], graph.y[nodes]
            assert metrics[f"{prefix}accuracy_mean_weights"] == pytest.approx(
                sk.accuracy_score(y, logits.argmax(dim=1))
            )
            loss = sk.log_loss(y, logits.double().softmax(dim=1), labels=range(CLASSES))
            assert metrics[f"{prefix}nll_mean_weights"] == pytest.approx(loss, rel=1e-5)
        draws = predictive(training.model, recipe, 1).logits.double().softmax(dim=2).mean(dim=0)[graph.splits["val"]]
        y = graph.y[graph.splits["val"]]
        assert metrics["val_nll"] == pytest.approx(sk.log_loss(y, draws, labels=range(CLASSES)), rel=1e-5)


@pytest.mark.parametrize("method", [METHODS["softmax"], METHODS["weibull"]], ids=["softmax", "weibull"])
def test_the_weights_of_the_lowest_loss_are_measured_too(graph: Graph, method: Method):
    recipe = dataclasses.replace(SHORT, max_epochs=30, learning_rate=0.05)
    training, metrics, _ = run(graph, method, recipe, 0)
    assert not torch.equal(training.lowest_loss["project"], training.model.project)
    training.model.load_state_dict(training.lowest_loss)
    nodes = graph.splits["test"]
    draws = predictive(training.model, recipe, 0).logits.double().softmax(dim=2).mean(dim=0)[nodes]
    loss = sk.log_loss(graph.y[nodes], draws, labels=range(CLASSES))
    assert metrics["lowest_loss_nll"] == pytest.approx(loss, rel=1e-5)
    assert metrics["nll"] != pytest.approx(loss, rel=1e-3)


def test_attention_draws_are_those_of_the_predictions(graph: Graph):
    method, recipe = BAYESIAN["lognormal+learned"], dataclasses.replace(SHORT, max_epochs=1)
    training, _, arrays = run(graph, method, recipe, 4)
    seen = []
    second = training.model.second
    original = type(second.stoch).weights

    def weights(*args, **kwargs):
        seen.append(original(second.stoch, *args, **kwargs))
        return seen[-1]

    second.stoch.weights = weights
    predictive(training.model, recipe, 4)
    stacked = torch.stack(seen).squeeze(-1)
    assert stacked.shape[0] == recipe.samples
    np.testing.assert_allclose(arrays["attention_mean"], stacked.mean(dim=0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(arrays["attention_std"], stacked.std(dim=0), rtol=1e-3, atol=1e-7)


def test_all_answers_right_leaves_the_detection_of_errors_undefined(graph: Graph):
    logits = 5.0 * F.one_hot(graph.y, CLASSES).expand(2, -1, -1)
    results = evaluate(ClassificationPrediction(logits), graph, "test")
    assert results["accuracy"] == 1
    assert math.isnan(results["auroc_error"])
