import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.special import softmax

import bayesian_attention as ba
from tests.inference.models import features

LOGITS = 2 * features(6, 5, 4, seed=3)
NAMED = ("label", "confidence", "entropy", "aleatoric", "epistemic", "p_value")


def mixture(samples: torch.Tensor, variance: torch.Tensor) -> torch.distributions.Distribution:
    """PyTorch's mixture of the draws, batch shape (B, …)."""
    components = torch.distributions.Normal(samples.movedim(0, -1), variance.expand_as(samples).movedim(0, -1).sqrt())
    weights = torch.distributions.Categorical(torch.ones_like(samples.movedim(0, -1)))
    return torch.distributions.MixtureSameFamily(weights, components)


# Classification


@pytest.mark.parametrize("shape", [(6, 5, 4), (3, 2, 7, 2), (1, 5, 3), (4, 1, 2)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_uncertainties_agree_with_scipy(shape, dtype, rtol):
    logits = 2 * features(*shape)
    prediction = ba.ClassificationPrediction(logits.to(dtype))
    p = softmax(logits.numpy(), axis=-1)
    mean = p.mean(axis=0)
    expected = {
        "samples": p,
        "mean": mean,
        "entropy": stats.entropy(mean, axis=-1),
        "aleatoric": stats.entropy(p, axis=-1).mean(axis=0),
        # Mutual information as the mean divergence of the draws from their mean.
        "epistemic": stats.entropy(p, mean[None], axis=-1).mean(axis=0),
        "label": mean.argmax(axis=-1),
        "confidence": mean.max(axis=-1),
        "std": p.std(axis=0, ddof=1) if shape[0] > 1 else np.zeros(shape[1:]),
    }
    for name, value in expected.items():
        found = getattr(prediction, name)
        assert found.dtype == (torch.int64 if name == "label" else dtype), name
        np.testing.assert_allclose(found.numpy(), value, rtol=rtol, atol=1e-12 if rtol < 1e-6 else 1e-6, err_msg=name)
    assert prediction.p_value.shape == prediction.certain().shape == shape[1:-1]
    assert prediction.certain().dtype == torch.bool


def test_p_values_are_the_paired_test_of_the_two_leading_classes():
    logits = features(8, 5, 2, seed=1)
    prediction = ba.ClassificationPrediction(logits)
    reference = stats.ttest_rel(logits[..., 0].numpy(), logits[..., 1].numpy()).pvalue
    np.testing.assert_allclose(prediction.p_value.numpy(), reference, rtol=1e-9)
    for level in (0.01, 0.3, 0.9):
        assert prediction.certain(level).tolist() == (reference <= level).tolist()
    assert prediction.certain().tolist() == prediction.certain(0.05).tolist()


def test_certainty_asks_for_agreement():
    agree = torch.tensor([[2.0, 0.0], [2.1, 0.0], [1.9, 0.0], [2.2, 0.0]])
    differ = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [1.0, 0.0], [-1.1, 0.0]])
    prediction = ba.ClassificationPrediction(torch.stack([agree, differ], dim=1))
    assert prediction.certain().tolist() == [True, False]


@pytest.mark.parametrize("level", [0, 1, -0.1, 1.5, math.nan])
def test_impossible_levels_are_named(level):
    with pytest.raises(ValueError, match="level: must lie between 0 and 1; got"):
        ba.ClassificationPrediction(LOGITS).certain(level)
    with pytest.raises(ValueError, match="level: must lie between 0 and 1; got"):
        ba.RegressionPrediction(LOGITS).interval(level)


def test_one_draw_has_no_epistemic_uncertainty_and_no_certainty():
    prediction = ba.ClassificationPrediction(LOGITS[:1])
    assert prediction.epistemic.tolist() == [0] * 5
    assert prediction.std.abs().max() == 0
    assert torch.equal(prediction.entropy, prediction.aleatoric)
    assert prediction.p_value.tolist() == [1] * 5
    assert not prediction.certain(0.99).any()


def test_opposite_draws_are_all_epistemic_and_equal_draws_all_aleatoric():
    opposite = ba.ClassificationPrediction(torch.tensor([[[1e3, 0.0]], [[0.0, 1e3]]]))
    assert opposite.epistemic.item() == opposite.entropy.item() == pytest.approx(math.log(2))
    assert opposite.aleatoric.item() == 0
    level = ba.ClassificationPrediction(torch.zeros(5, 1, 3))
    assert level.aleatoric.item() == level.entropy.item() == pytest.approx(math.log(3))
    assert level.epistemic.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e3, 1e20, 1e37])
def test_extreme_logits_stay_finite(scale, dtype):
    logits = (scale * features(6, 5, 4).clamp(-3, 3)).to(dtype)
    logits[0, 0, 0] = -math.inf
    prediction = ba.ClassificationPrediction(logits)
    for name in ("samples", "mean", "std", *NAMED):
        value = getattr(prediction, name)
        assert torch.isfinite(value).all(), name
        assert (value >= 0).all(), name
    torch.testing.assert_close(prediction.mean.sum(dim=-1), torch.ones(5, dtype=dtype))


def test_excluded_classes_have_no_probability():
    logits = LOGITS.clone()
    logits[..., 2] = -math.inf
    prediction = ba.ClassificationPrediction(logits)
    others = ba.ClassificationPrediction(LOGITS[..., [0, 1, 3]])
    assert prediction.mean[:, 2].tolist() == [0] * 5
    for name in ("entropy", "aleatoric", "epistemic", "p_value", "confidence"):
        torch.testing.assert_close(getattr(prediction, name), getattr(others, name))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5), st.floats(0, 50), st.integers(0, 2**31))
def test_uncertainties_keep_their_bounds(draws, rows, classes, scale, seed):
    prediction = ba.ClassificationPrediction(scale * features(draws, rows, classes, seed=seed))
    assert (prediction.epistemic >= 0).all()
    assert (prediction.aleatoric <= prediction.entropy + 1e-12).all()
    assert (prediction.entropy <= math.log(classes) + 1e-12).all()
    assert (prediction.epistemic <= math.log(draws) + 1e-12).all()


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5)])
def test_a_table_has_a_line_a_row(shape):
    logits = features(6, *shape)
    prediction = ba.ClassificationPrediction(logits)
    table = prediction.to_pandas()
    rows = math.prod(shape[:-1])
    assert list(table.columns) == [*NAMED, *(f"p{c}" for c in range(shape[-1]))]
    assert len(table) == rows
    assert table["label"].dtype == np.int64
    np.testing.assert_array_equal(table["entropy"], prediction.entropy.reshape(rows))
    np.testing.assert_array_equal(table.filter(regex=r"^p\d").to_numpy(), prediction.mean.reshape(rows, shape[-1]))
    np.testing.assert_array_equal(table.filter(regex=r"^p\d").to_numpy().argmax(axis=1), table["label"])


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'bayesian-attention\[pandas\]'"):
        ba.ClassificationPrediction(LOGITS).to_pandas()


@pytest.mark.parametrize("shape", [(4,), (3, 5, 1), (0, 5, 3)])
def test_what_is_no_set_of_draws_over_classes_is_refused(shape):
    with pytest.raises(ValueError, match=f"logits: must have shape .* got {re.escape(str(shape))}"):
        ba.ClassificationPrediction(torch.zeros(shape))


def test_predictions_are_frozen_and_compare_by_identity():
    prediction = ba.ClassificationPrediction(LOGITS)
    assert prediction != ba.ClassificationPrediction(LOGITS)
    with pytest.raises(AttributeError):
        prediction.logits = LOGITS


# Regression


SAMPLES, VARIANCE = features(6, 5, seed=1), features(6, 5, seed=2).exp()


@pytest.mark.parametrize("variance", [torch.tensor(0.3).double(), VARIANCE, VARIANCE[0]])
def test_moments_agree_with_pytorchs_mixture(variance):
    prediction = ba.RegressionPrediction(SAMPLES, variance)
    reference = mixture(SAMPLES, variance)
    torch.testing.assert_close(prediction.mean, reference.mean)
    # The epistemic part is the unbiased estimate from six draws, where the mixture has the plain one.
    spread = prediction.epistemic**2 * 5 / 6
    torch.testing.assert_close(spread + prediction.aleatoric**2, reference.variance)
    np.testing.assert_allclose(prediction.epistemic, SAMPLES.numpy().std(axis=0, ddof=1))
    torch.testing.assert_close(prediction.std**2, prediction.epistemic**2 + prediction.aleatoric**2)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (3, 2, 4, 2), (1, 5)])
def test_log_likelihood_agrees_with_pytorchs_mixture(shape):
    samples, variance, target = features(*shape), features(*shape, seed=1).exp(), features(*shape[1:], seed=2)
    found = ba.RegressionPrediction(samples, variance).log_likelihood(target)
    assert found.shape == shape[1:]
    torch.testing.assert_close(found, mixture(samples, variance).log_prob(target))


def test_the_density_integrates_to_one():
    prediction = ba.RegressionPrediction(SAMPLES[:, :1], VARIANCE[:, :1])

    def density(y: float) -> float:
        return prediction.log_likelihood(torch.tensor([y], dtype=torch.float64)).exp().item()

    assert integrate.quad(density, -60, 60, limit=200, points=SAMPLES[:, 0].tolist())[0] == pytest.approx(1, abs=1e-6)


def test_densities_far_away_do_not_underflow():
    prediction = ba.RegressionPrediction(torch.zeros(3, 1), torch.tensor(1.0))
    assert prediction.log_likelihood(torch.tensor([1e3])).item() == pytest.approx(stats.norm.logpdf(1e3), rel=1e-6)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_intervals_are_those_of_a_normal(level):
    prediction = ba.RegressionPrediction(SAMPLES, VARIANCE)
    lower, upper = prediction.interval(level)
    low, high = stats.norm.interval(level, prediction.mean.numpy(), prediction.std.numpy())
    np.testing.assert_allclose(lower, low)
    np.testing.assert_allclose(upper, high)


def test_without_noise_all_uncertainty_is_epistemic():
    prediction = ba.RegressionPrediction(SAMPLES)
    assert prediction.aleatoric.tolist() == [0] * 5
    torch.testing.assert_close(prediction.std, prediction.epistemic)
    with pytest.raises(ValueError, match="noise_variance: a density needs one"):
        prediction.log_likelihood(SAMPLES[0])


def test_one_draw_has_the_noise_alone():
    prediction = ba.RegressionPrediction(SAMPLES[:1], VARIANCE[:1])
    assert prediction.epistemic.tolist() == [0] * 5
    torch.testing.assert_close(prediction.std, VARIANCE[0].sqrt())
    torch.testing.assert_close(
        prediction.log_likelihood(SAMPLES[1]),
        torch.from_numpy(stats.norm.logpdf(SAMPLES[1], SAMPLES[0], VARIANCE[0].sqrt())),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_kept(dtype):
    prediction = ba.RegressionPrediction(SAMPLES.to(dtype), VARIANCE.to(dtype))
    values = [prediction.mean, prediction.std, prediction.aleatoric, prediction.epistemic, *prediction.interval()]
    assert {value.dtype for value in (*values, prediction.log_likelihood(SAMPLES[0].to(dtype)))} == {dtype}


def test_a_regression_table_has_a_line_a_row():
    prediction = ba.RegressionPrediction(features(6, 3, 2), torch.tensor(0.25))
    table = prediction.to_pandas()
    assert list(table.columns) == ["mean", "std", "aleatoric", "epistemic"]
    np.testing.assert_array_equal(table["std"], prediction.std.flatten())
    assert table["aleatoric"].tolist() == [0.5] * 6


@pytest.mark.parametrize("shape", [(4,), (), (0, 4)])
def test_what_is_no_set_of_draws_is_refused(shape):
    with pytest.raises(ValueError, match="samples: must have shape"):
        ba.RegressionPrediction(torch.zeros(shape))


@pytest.mark.parametrize("variance", [-1.0, math.nan])
def test_impossible_variances_are_named(variance):
    with pytest.raises(ValueError, match="noise_variance: must not be negative or NaN"):
        ba.RegressionPrediction(SAMPLES, torch.tensor([1.0, 1.0, 1.0, 1.0, variance]))


def test_no_noise_has_moments_but_no_density():
    prediction = ba.RegressionPrediction(SAMPLES, torch.zeros(()))
    torch.testing.assert_close(prediction.std, prediction.epistemic)
    with pytest.raises(ValueError, match="noise_variance: a density needs a positive one"):
        prediction.log_likelihood(SAMPLES[0])


@pytest.mark.parametrize("shape", [(5, 1), (1,), (), (6, 5)])
def test_targets_of_another_shape_are_named(shape):
    with pytest.raises(ValueError, match=r"target: must have shape \(5,\); got"):
        ba.RegressionPrediction(SAMPLES, VARIANCE).log_likelihood(torch.zeros(shape))
