import pytest

from bayesian_attention.priors import ConstantPrior, ContextualPrior, LearnedPrior, prior_from_dict, prior_named


@pytest.mark.parametrize("kind", [ConstantPrior, LearnedPrior, ContextualPrior])
def test_priors_are_found_by_name(kind):
    assert prior_named(kind.name) is kind
    assert prior_from_dict({"name": kind.name}) == kind()


@pytest.mark.parametrize(
    ("name", "near"), [("contextal", "contextual"), ("const", "constant"), ("Learned", "learned"), ("learn", "learned")]
)
def test_near_matches_are_offered(name, near):
    with pytest.raises(
        ValueError, match=f"prior: no '{name}'. Did you mean .*'{near}'.* Known: constant, contextual, le"
    ):
        prior_named(name)


def test_settings_from_a_file_are_checked_as_any_other():
    with pytest.raises(ValueError, match="ContextualPrior: hidden must be a whole number of at least 1; got '10'"):
        prior_from_dict({"name": "contextual", "hidden": "10"})
    with pytest.raises(TypeError, match="alpha"):
        prior_from_dict({"name": "constant", "alpha": 1.0})
