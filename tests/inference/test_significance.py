import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bayesian_attention.inference.significance import two_leading_p_values


def draws(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(dim=-1).to(dtype)


def expected(log_probabilities, test, values):
    """Example by example, with scipy's own tests."""
    x = log_probabilities.double().numpy()
    flat = x.reshape(x.shape[0], -1, x.shape[-1])
    p = []
    for i in range(flat.shape[1]):
        order = np.argsort(np.exp(flat[:, i]).mean(axis=0))[::-1]
        compared = flat[:, i] if values == "log_probabilities" else np.exp(flat[:, i])
        first, second = compared[:, order[0]], compared[:, order[1]]
        if test == "paired":
            p.append(stats.ttest_rel(first, second).pvalue)
        else:
            p.append(stats.ttest_ind(first, second, equal_var=False).pvalue)
    return np.array(p).reshape(x.shape[1:-1])


@pytest.mark.parametrize("values", ["log_probabilities", "probabilities"])
@pytest.mark.parametrize("test", ["paired", "welch"])
@pytest.mark.parametrize("shape", [(2, 7, 3), (20, 4, 5, 2), (5, 3)])
def test_agrees_with_scipy(shape, test, values):
    x = draws(*shape)
    p = two_leading_p_values(x, test=test, values=values)
    assert p.shape == shape[1:-1]
    np.testing.assert_allclose(p.numpy(), expected(x, test, values), rtol=1e-9)


def test_default_is_the_paired_test_on_logits():
    logits = torch.randn(9, 6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    p = two_leading_p_values(logits.log_softmax(dim=-1))
    reference = stats.ttest_rel(logits[..., 0].numpy(), logits[..., 1].numpy(), axis=0).pvalue
    np.testing.assert_allclose(p.numpy(), reference, rtol=1e-9)


def test_shared_noise_separates_paired_from_welch():
    noise = torch.randn(20, 1, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    own = torch.randn(20, 1, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = torch.tensor([-2.0, -2.3], dtype=torch.float64) + 0.5 * noise.clamp(-2, 2) + 0.01 * own
    assert two_leading_p_values(x).item() < 1e-10 < 0.01 < two_leading_p_values(x, test="welch").item()


def test_leading_classes_are_those_of_the_mean_probability_not_of_the_mean_log():
    # Class 2 has the lowest mean log-probability but the second-highest mean probability.
    probabilities = torch.tensor([[0.6, 0.399, 0.001], [0.6, 0.001, 0.399], [0.5, 0.05, 0.45]], dtype=torch.float64)
    x = probabilities.log().unsqueeze(1)
    p = two_leading_p_values(x)
    assert p.item() == pytest.approx(stats.ttest_rel(x[:, 0, 0], x[:, 0, 2]).pvalue, rel=1e-9)
    assert p.item() != pytest.approx(stats.ttest_rel(x[:, 0, 0], x[:, 0, 1]).pvalue, rel=1e-3)


def test_leading_classes_are_found_where_probabilities_underflow():
    second = torch.tensor([-900.0, -910.0, -905.0, -899.0], dtype=torch.float64)
    x = torch.stack([torch.zeros(4), torch.full((4,), -1000.0), second], dim=-1).double()
    assert two_leading_p_values(x).item() == pytest.approx(stats.ttest_rel(np.zeros(4), second).pvalue, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", ["log_probabilities", "probabilities"])
@pytest.mark.parametrize("test", ["paired", "welch"])
def test_deterministic_draws_give_exactly_one(test, values, dtype):
    x = draws(1, 50, 4, dtype=dtype).expand(7, 50, 4)
    assert torch.equal(
        two_leading_p_values(x, test=test, values=values),
        torch.ones(50, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
    )


@pytest.mark.parametrize("test", ["paired", "welch"])
def test_rounding_is_no_variation_but_more_than_rounding_is(test):
    x = draws(1, 30, 4).expand(10, 30, 4)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rounding = x.float() * (1 + torch.finfo(torch.float32).eps * noise.clamp(-1, 1)).float()
    assert bool((two_leading_p_values(rounding, test=test) == 1).all())
    real = (x * (1 + 1e-4 * noise)).float()
    assert bool((two_leading_p_values(real, test=test) < 1).all())


def test_paired_constant_difference_counts_as_identical_while_welch_sees_two_varying_classes():
    shift = torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64).unsqueeze(-1)
    x = torch.tensor([-2.0, -3.0], dtype=torch.float64) - shift
    assert two_leading_p_values(x).item() == 1
    assert 0 < two_leading_p_values(x, test="welch").item() < 1


@pytest.mark.parametrize("values", ["log_probabilities", "probabilities"])
@pytest.mark.parametrize("test", ["paired", "welch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_probabilities_never_give_nan(dtype, test, values):
    x = draws(6, 5, 3, dtype=dtype).clone()
    x[0, 0, 1] = x[:, 1, 2] = x[:, 2, :2] = x[2:, 3, 0] = x[:, 4] = -math.inf
    p = two_leading_p_values(x, test=test, values=values)
    assert bool(((p >= 0) & (p <= 1)).all())
    assert p[4] == 1


def test_a_draw_that_underflows_does_not_undo_agreement():
    second = torch.tensor([-90.0, -95.0, -92.0, -200.0, -99.0])
    x = torch.stack([torch.zeros(5), second], dim=-1)
    underflowed = x.exp().log()
    assert bool(underflowed.isinf().any())
    assert two_leading_p_values(underflowed).item() < 1e-5


def test_zero_ranks_below_every_finite_value():
    # −∞ must not overtake a class whose log-probability is lower than the log of the smallest float32.
    finite = torch.tensor([-300.0, -310.0, -320.0])
    x = torch.stack([torch.zeros(3), finite, torch.full((3,), -math.inf)], dim=-1)
    assert two_leading_p_values(x).item() == pytest.approx(stats.ttest_rel(np.zeros(3), finite).pvalue, rel=1e-5)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 6), st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**31), st.sampled_from(["paired", "welch"])
)
def test_examples_and_order_of_draws_do_not_matter(count, examples, classes, seed, test):
    x = draws(count, examples, classes, seed=seed)
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.1, -math.inf, x)
    p = two_leading_p_values(x, test=test)
    alone = torch.stack([two_leading_p_values(x[:, i], test=test) for i in range(examples)])
    torch.testing.assert_close(p, alone, rtol=1e-12, atol=0)
    torch.testing.assert_close(p, two_leading_p_values(x.flip(0), test=test), rtol=1e-6, atol=1e-12)


def test_a_zero_counts_the_same_whatever_else_is_in_the_batch():
    x = torch.zeros(3, 2, 2)
    x[:, 0, 1] = torch.tensor([-math.inf, -90.0, -95.0])
    x[:, 1, 1] = torch.tensor([-5000.0, -6000.0, -7000.0])
    assert torch.equal(two_leading_p_values(x)[:1], two_leading_p_values(x[:, :1]))


def test_half_precision_input_gives_float32():
    x = draws(8, 6, 3, dtype=torch.float16)
    p = two_leading_p_values(x)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, two_leading_p_values(x.float()), rtol=1e-6, atol=0)


def test_no_examples_give_no_p_values():
    assert two_leading_p_values(torch.zeros(3, 0, 2)).shape == (0,)
    assert two_leading_p_values(torch.zeros(3, 4, 0, 2).half()).dtype == torch.float32


def test_gradients_do_not_flow():
    assert not two_leading_p_values(draws(3, 2, 2).requires_grad_()).requires_grad


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 4, 3), r"log_probabilities: .* at least two of each; got \(1, 4, 3\)"),
        (torch.zeros(4, 3, 1), r"log_probabilities: .* at least two of each; got \(4, 3, 1\)"),
        (torch.zeros(4), r"log_probabilities: .* got \(4,\)"),
        (torch.zeros(4, 3, 2, dtype=torch.long), "log_probabilities: must be floating point; got torch.int64"),
        (torch.full((4, 3, 2), math.nan), "log_probabilities: must be at most 0 and not NaN .* nan"),
        (torch.full((4, 3, 2), 2.5), "log_probabilities: must be at most 0 and not NaN .* 2.5"),
        (torch.full((4, 3, 2), math.inf), "log_probabilities: must be at most 0 and not NaN .* inf"),
    ],
)
def test_bad_input_is_named(x, message):
    with pytest.raises(ValueError, match=message):
        two_leading_p_values(x)


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="test: must be 'paired' or 'welch'; got 'wilcoxon'"):
        two_leading_p_values(draws(3, 2, 2), test="wilcoxon")
    with pytest.raises(ValueError, match=r"values: must be .* got 'logits'"):
        two_leading_p_values(draws(3, 2, 2), values="logits")


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"pip install '?bayesian-attention\[metrics\]"):
        two_leading_p_values(draws(3, 2, 2))
