from __future__ import annotations

import json

import pytest

from bayesian_attention.posteriors import LogNormal, Softmax, Weibull
from bayesian_attention.priors import ConstantPrior, ContextualPrior, LearnedPrior
from bayesian_attention.tasks.method import Method, parse_methods

RECIPES = {
    "weibull+constant": Method(Weibull(30.0), ConstantPrior(concentration=2.0), 0.5),
    "lognormal+contextual": Method(LogNormal(0.7), ContextualPrior(hidden=None), 0.25),
}


def refusal(text: str) -> str:
    with pytest.raises(ValueError, match=r"\S") as info:
        parse_methods(text, RECIPES)
    return str(info.value)


class TestMethod:
    @pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), "1", None, True])
    def test_weight(self, weight: object):
        with pytest.raises(ValueError, match="kl_weight"):
            Method(Weibull(), ConstantPrior(), weight)

    def test_a_weight_of_zero_is_allowed(self):
        assert Method(Weibull(), ConstantPrior(), 0).kl_weight == 0.0

    @pytest.mark.parametrize(("posterior", "prior"), [(Softmax(), ConstantPrior()), (Weibull(), None)])
    def test_posterior_and_prior_must_fit(self, posterior, prior):
        with pytest.raises(ValueError, match=r"^prior: .* do not go together"):
            Method(posterior, prior)

    def test_equal_methods_are_equal_data(self):
        whole, real = (
            Method(Weibull(shape), ConstantPrior(rate=1), weight) for shape, weight in ((10, 1), (10.0, 1.0))
        )
        assert whole == real
        assert json.dumps(whole.to_dict()) == json.dumps(real.to_dict())

    @pytest.mark.parametrize(
        "method",
        [
            Method(Softmax()),
            Method(Weibull(3.5, learned=True), ConstantPrior(0.5, 2.0), 0.125),
            Method(LogNormal(0.3), LearnedPrior(scale=0.4), 0.0),
            Method(Weibull(), ContextualPrior(hidden=None, activation="tanh", share_heads=False, rate=3.0), 7),
        ],
        ids=str,
    )
    def test_roundtrip_by_way_of_json(self, method: Method):
        assert Method.from_dict(json.loads(json.dumps(method.to_dict()))) == method


class TestGrammar:
    @pytest.mark.parametrize(
        ("text", "method"),
        [
            ("softmax", Method(Softmax())),
            ("weibull", RECIPES["weibull+constant"]),
            ("weibull+constant", RECIPES["weibull+constant"]),
            ("weibull()", RECIPES["weibull+constant"]),
            (" weibull + constant ", RECIPES["weibull+constant"]),
            ("lognormal+contextual", RECIPES["lognormal+contextual"]),
            ("lognormal", Method(LogNormal(), ConstantPrior())),
            ("weibull+learned", Method(Weibull(), LearnedPrior())),
            ("weibull(shape=3)", Method(Weibull(3.0), ConstantPrior(concentration=2.0), 0.5)),
            (
                "weibull( shape = 3 , learned = True )",
                Method(Weibull(3.0, True), ConstantPrior(concentration=2.0), 0.5),
            ),
            ("weibull(shape=1e3,kl_weight=0)", Method(Weibull(1000.0), ConstantPrior(concentration=2.0), 0.0)),
            ("weibull(prior_concentration=4,prior_rate=.5)", Method(Weibull(30.0), ConstantPrior(4.0, 0.5), 0.5)),
            ("weibull(prior_concentration=none)", Method(Weibull(30.0), ConstantPrior(), 0.5)),
            ("lognormal(prior_loc=-1.5)", Method(LogNormal(), ConstantPrior(loc=-1.5))),
            # Both have a scale.
            ("lognormal+learned(scale=2,prior_scale=3)", Method(LogNormal(2.0), LearnedPrior(scale=3.0))),
            (
                "lognormal+contextual(prior_hidden=4,prior_share_heads=false,prior_activation=tanh)",
                Method(LogNormal(0.7), ContextualPrior(hidden=4, share_heads=False, activation="tanh"), 0.25),
            ),
        ],
    )
    def test_one(self, text: str, method: Method):
        assert parse_methods(text, RECIPES) == {text.strip(): method}

    def test_several_keep_their_order_and_labels(self):
        text = "weibull(shape=3,kl_weight=2), softmax,lognormal+contextual ,weibull"
        labels = ["weibull(shape=3,kl_weight=2)", "softmax", "lognormal+contextual", "weibull"]
        assert list(parse_methods(text, RECIPES)) == labels

    def test_recipes_are_not_changed(self):
        parse_methods("weibull(shape=1,kl_weight=9,prior_rate=9)", RECIPES)
        assert RECIPES["weibull+constant"] == Method(Weibull(30.0), ConstantPrior(concentration=2.0), 0.5)

    @pytest.mark.parametrize(
        "text", ["weibull,softmax,weibull", "weibull(shape=1),weibull(shape=1)", "softmax, softmax"]
    )
    def test_a_method_named_twice(self, text: str):
        label = text.split(",")[0]
        assert refusal(text) == f"attention: {label!r} is named twice"

    @pytest.mark.parametrize(
        ("text", "near"),
        [
            ("weibul", "'weibull'"),
            ("Weibull", "'weibull'"),
            ("log-normal", "'lognormal'"),
            ("soft max", "'softmax'"),
            ("weibull+contextal", "'contextual'"),
            ("weibull+const", "'constant'"),
            ("weibull(shap=1)", "'shape'"),
            ("weibull(klweight=1)", "'kl_weight'"),
            ("weibull(prior_concentraton=1)", "'prior_concentration'"),
        ],
    )
    def test_near_matches(self, text: str, near: str):
        message = refusal(f"softmax,{text}")
        assert f"Did you mean {near}" in message
        assert "Known: " in message

    def test_an_unknown_family_lists_all(self):
        assert all(name in refusal("xyzzy") for name in ("lognormal", "softmax", "weibull"))

    def test_an_unknown_setting_names_the_method_and_all_settings(self):
        message = refusal("weibull(colour=1)")
        known = ("learned", "shape", "kl_weight", "prior_rate", "prior_concentration")
        assert all(part in message for part in ("weibull(colour=1)", "'colour'", *known))

    @pytest.mark.parametrize(
        "text",
        ["", ",", "weibull,", ",weibull", "weibull,,softmax", "weibull(shape=1", "weibull)", "(shape=1)", "+constant",
         "weibull+", "weibull(shape=1)constant", "weibull(shape=1)+constant", "weibull+constant+learned"],
    )  # fmt: skip
    def test_what_cannot_be_read(self, text: str):
        message = refusal(text)
        assert message.startswith(("attention: cannot read", "prior: no", "posterior: no"))

    @pytest.mark.parametrize("text", ["softmax+constant", "softmax + learned"])
    def test_softmax_takes_no_prior(self, text: str):
        assert refusal(text) == f"attention: 'softmax' takes no prior; got {text!r}"

    @pytest.mark.parametrize("setting", ["kl_weight", "shape", "prior_rate"])
    def test_softmax_takes_no_setting(self, setting: str):
        assert repr(setting) in refusal(f"softmax({setting}=1)")

    @pytest.mark.parametrize("text", ["weibull(shape)", "weibull(shape=)", "weibull(learned=true,shape= )"])
    def test_a_setting_without_a_value(self, text: str):
        assert "shape has no value" in refusal(text)

    @pytest.mark.parametrize(
        ("setting", "name"),
        [
            ("shape=0", "shape"),
            ("shape=-1", "shape"),
            ("shape=nan", "shape"),
            ("shape=1e999", "shape"),
            ("shape=ten", "shape"),
            ("shape=true", "shape"),
            ("shape=none", "shape"),
            ("learned=yes", "learned"),
            ("learned=1", "learned"),
            ("kl_weight=-1", "kl_weight"),
            ("kl_weight=much", "kl_weight"),
            ("prior_hidden=0", "hidden"),
            ("prior_hidden=2.5", "hidden"),
            ("prior_share_heads=no", "share_heads"),
            ("prior_activation=swish", "activation"),
            ("prior_rate=0", "rate"),
        ],
    )
    def test_values_out_of_range(self, setting: str, name: str):
        assert name in refusal(f"weibull+contextual({setting})")


def test_settings_given_twice_and_of_another_family_are_named() -> None:
    with pytest.raises(ValueError, match="shape is set twice"):
        parse_methods("weibull(shape=1,shape=2)", {})
    with pytest.raises(ValueError, match="scale has no meaning for a gamma prior"):
        parse_methods("weibull(prior_scale=2)", {})
