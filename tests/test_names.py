import pytest

from bayesian_attention.names import look_up

KNOWN = {"weibull": 1, "lognormal": 2, "softmax": None, "softmin": 4}


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_gives_its_value(name):
    assert look_up("thing", name, KNOWN) is KNOWN[name]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("weibul", "Did you mean 'weibull'?"),
        ("WEIBULL", "Did you mean 'weibull'?"),
        ("log-normal", "Did you mean 'lognormal'?"),
        ("softma", "Did you mean 'softmax' or 'softmin'?"),
    ],
)
def test_near_matches_come_first_then_all_names_in_order(name, hint):
    with pytest.raises(ValueError, match="thing") as caught:
        look_up("thing", name, KNOWN)
    assert str(caught.value) == f"thing: no {name!r}. {hint} Known: lognormal, softmax, softmin, weibull."


@pytest.mark.parametrize("name", ["", "xyz", "q" * 1000])
def test_without_a_near_match_there_is_no_hint(name):
    with pytest.raises(ValueError, match="thing") as caught:
        look_up("thing", name, KNOWN)
    assert str(caught.value) == f"thing: no {name!r}. Known: lognormal, softmax, softmin, weibull."


def test_at_most_three_near_matches_are_offered():
    with pytest.raises(ValueError, match="thing") as caught:
        look_up("thing", "name", {f"name{i}": i for i in range(9)})
    assert str(caught.value).split("Known")[0].count("'name") == 4  # the name itself and three more
