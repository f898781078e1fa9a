import pytest

from bayesian_attention.posteriors import LogNormal, Softmax, Weibull, posterior_from_dict, posterior_named


@pytest.mark.parametrize("family", [Softmax, Weibull, LogNormal])
def test_families_are_found_by_name(family):
    assert posterior_named(family.name) is family


@pytest.mark.parametrize(
    ("name", "near"), [("weibul", "weibull"), ("Weibull", "weibull"), ("log_normal", "lognormal"), ("soft", "softmax")]
)
def test_near_matches_are_offered(name, near):
    with pytest.raises(ValueError, match=f"attention: no '{name}'. Did you mean '{near}'.* Known: lognormal, softmax"):
        posterior_named(name)


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(ValueError, match=r"attention: no 'xyz'\. Known: lognormal, softmax, weibull\."):
        posterior_named("xyz")


def test_settings_from_a_file_are_checked_as_any_other():
    with pytest.raises(ValueError, match="Weibull: shape must be a positive, finite number; got '10'"):
        posterior_from_dict({"name": "weibull", "shape": "10"})
    with pytest.raises(TypeError, match="sigma"):
        posterior_from_dict({"name": "lognormal", "sigma": 1.0})
    assert posterior_from_dict({"name": "weibull"}) == Weibull()
