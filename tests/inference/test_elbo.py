import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesian_attention as ba
from bayesian_attention.engine.rows import DenseRows
from bayesian_attention.layers import StochasticAttention
from tests.inference.models import Encoder, encoder, features

X, TARGET = features(6, 5, 8), torch.tensor([0, 1, 2, 0, 1, 2])


def nll(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X), TARGET)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_loss_is_the_likelihood_plus_the_weighted_divergence(reduction, weight):
    model = encoder()
    with ba.sampling(model, True, seed=0):
        given = nll(model)
        terms = ba.elbo_loss(model, given, weight=weight, reduction=reduction)
        kl = ba.kl_divergence(model, reduction=reduction)
    assert terms.nll is given
    assert terms.weight == weight
    assert terms.kl.item() == kl.item() > 0
    assert terms.loss.item() == pytest.approx(given.item() + weight * kl.item(), rel=1e-12)
    assert terms.loss.shape == ()


def test_by_default_the_loss_is_the_bound():
    model = encoder()
    terms = ba.elbo_loss(model, nll(model))
    assert terms.weight == 1.0
    torch.testing.assert_close(terms.kl, ba.kl_divergence(model, reduction="sum", examples=6))


def test_examples_scale_the_divergence_alone():
    model = encoder()
    given = nll(model)
    six, two = ba.elbo_loss(model, given), ba.elbo_loss(model, given, examples=2)
    torch.testing.assert_close(two.kl, 3 * six.kl)
    assert two.nll is six.nll


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("prior", [ba.LearnedPrior(), ba.ContextualPrior(hidden=4)])
@pytest.mark.parametrize("posterior", [ba.Weibull(3.0, learned=True), ba.LogNormal(0.5, learned=True)])
def test_gradients_reach_every_parameter(posterior, prior, reduction):
    torch.manual_seed(0)
    model = encoder()
    for layer in (model.first, model.second):
        layer.stoch = StochasticAttention(posterior, prior, heads=layer.num_heads, key_dim=layer.head_dim).double()
    torch.manual_seed(1)
    terms = ba.elbo_loss(model, nll(model), reduction=reduction)
    terms.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if parameter.dim() > 1 or "stoch" in name:
            assert parameter.grad.abs().max() > 0, name


def test_the_gradient_is_the_sum_of_both_gradients():
    model = encoder(first=ba.Weibull(2.0, learned=True))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradient(weight: float, of: str) -> list[Tensor]:
        with ba.sampling(model, True, seed=0):
            terms = ba.elbo_loss(model, nll(model), weight=weight)
        found = torch.autograd.grad(getattr(terms, of), parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]

    for total, a, b in zip(gradient(0.3, "loss"), gradient(0.3, "nll"), gradient(0.3, "kl"), strict=True):
        torch.testing.assert_close(total, a + 0.3 * b)


def test_a_deterministic_model_has_its_likelihood_for_loss():
    model = Encoder(ba.Softmax(), ba.Softmax()).double()
    terms = ba.elbo_loss(model, nll(model))
    assert terms.kl.item() == 0
    assert terms.loss.item() == terms.nll.item()


def test_a_missing_pass_and_a_wrong_reduction_are_refused():
    model = encoder()
    with pytest.raises(RuntimeError, match="no divergence recorded"):
        ba.elbo_loss(model, torch.zeros(()))
    given = nll(model)
    with pytest.raises(ValueError, match="reduction: no 'average'"):
        ba.elbo_loss(model, given, reduction="average")
    with pytest.raises(ValueError, match="examples must be a whole number of at least 1"):
        ba.elbo_loss(model, given, examples=0)


class _Mixture(nn.Module):
    """One query an example attends to keys; its class is drawn with probability Σ_j W_j table[key j, class].

    The values are fixed, so the weights W = S / ΣS are the only latent variables. Under a prior
    S_j ~ Gamma(α, β), independent and identical, E[W_j] = 1/n: the likelihood is linear in W, so the
    evidence of an example is the mean of its values' probabilities, exactly.
    """

    def __init__(self, table: Tensor, shape: float, concentration: float, rate: float) -> None:
        super().__init__()
        self.table = table
        self.logits = nn.Parameter(torch.zeros(table.shape[:2], dtype=torch.float64))
        prior = ba.ConstantPrior(concentration=concentration, rate=rate)
        self.stoch = StochasticAttention(ba.Weibull(shape, learned=True), prior, heads=1).double()

    def forward(self, draws: int) -> Tensor:
        """Class probabilities (draws · examples, classes)."""
        logits, table = self.logits.repeat(draws, 1), self.table.repeat(draws, 1, 1)
        weights = self.stoch.weights(logits[:, None, None, :], DenseRows())
        return (weights.squeeze(1) @ table).squeeze(1)


def bound(model: _Mixture, target: Tensor, draws: int) -> tuple[float, float]:
    """Negative evidence lower bound of the data, summed over examples, and its Monte Carlo standard error."""
    with torch.no_grad(), ba.sampling(model.eval(), True, seed=0):
        each = F.nll_loss(model(draws).log(), target.repeat(draws), reduction="none")
        loss = ba.elbo_loss(model, each.mean()).loss * len(target)
    return loss.item(), each.view(draws, -1).sum(dim=1).std().item() / math.sqrt(draws)


def data(seed: int) -> tuple[Tensor, Tensor, float]:
    """Class probabilities of the values (examples, keys, classes), targets and −log evidence."""
    table = (2 * features(5, 4, 3, seed=seed)).softmax(dim=-1)
    target = torch.tensor([0, 1, 2, 1, 0])
    evidence = table.mean(dim=1).gather(1, target[:, None])
    return table, target, -evidence.log().sum().item()


@pytest.mark.parametrize(
    ("concentration", "rate", "shape", "seed"), [(1.0, 4.0, 1.0, 0), (0.5, 2.0, 0.8, 1), (2.0, 8.0, 1.5, 2)]
)
def test_the_loss_bounds_the_negative_log_evidence(concentration, rate, shape, seed):
    """False-alarm rate below 1e-6 a case: the mean may stray by five standard errors."""
    table, target, evidence = data(seed)
    model = _Mixture(table, shape, concentration, rate)
    loss, error = bound(model, target, draws=4000)
    assert loss > evidence - 5 * error
    # Training tightens the bound; it must not break it.
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    model.train()
    torch.manual_seed(seed)
    for _ in range(60):
        optimiser.zero_grad()
        ba.elbo_loss(model, F.nll_loss(model(16).log(), target.repeat(16))).loss.backward()
        optimiser.step()
    trained, error = bound(model, target, draws=4000)
    assert evidence - 5 * error < trained < loss


def test_the_bound_is_tight_where_posterior_and_prior_agree_and_the_weights_do_not_matter():
    """A Weibull of shape 1 and mean 1/n is the prior Gamma(1, rate n); equal values make W irrelevant."""
    table, target, _ = data(0)
    table = table[:, :1].expand(-1, 4, -1)
    evidence = -table[:, 0].gather(1, target[:, None]).log().sum().item()
    loss, error = bound(_Mixture(table, shape=1.0, concentration=1.0, rate=4.0), target, draws=50)
    assert loss == pytest.approx(evidence, rel=1e-12)
    assert error == pytest.approx(0, abs=1e-12)


def test_a_prior_further_away_costs_the_divergence_of_two_exponentials():
    table, target, _ = data(0)
    near, _ = bound(_Mixture(table, shape=1.0, concentration=1.0, rate=4.0), target, draws=2)
    far, _ = bound(_Mixture(table, shape=1.0, concentration=1.0, rate=8.0), target, draws=2)
    # KL(Exp(4) ‖ Exp(8)) = log(4/8) + 8/4 − 1, for each of 5 · 4 weights.
    assert far - near == pytest.approx(20 * (math.log(0.5) + 1), rel=1e-9)
