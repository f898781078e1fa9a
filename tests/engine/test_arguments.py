"""Arguments of ``attend`` that are refused, by name."""

import pytest
import torch

from bayesian_attention.engine import attend
from bayesian_attention.posteriors import Weibull
from tests.engine.inputs import qkv


def bad(name: str, pattern: str, **changes: object) -> object:
    return pytest.param(changes, f"^{name}: .*{pattern}", id=f"{name}-{pattern}")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        bad("query", "floating point; got torch.int64", query=torch.ones(2, 4, 5, 8, dtype=torch.int64)),
        bad("key", "floating point", key=torch.ones(2, 4, 7, 8, dtype=torch.bool)),
        bad("value", "floating point", value=torch.ones(2, 4, 7, 8, dtype=torch.complex64)),
        bad("query", r"\(5, 8\)", query=torch.ones(5, 8)),
        bad("key", r"\(7, 8\)", key=torch.ones(7, 8)),
        bad("value", r"\(8,\)", value=torch.ones(8)),
        bad("key", "has 9 features, query has 8", key=torch.ones(2, 4, 7, 9)),
        bad("value", r"\(2, 4, 6, 8\) does not fit", value=torch.ones(2, 4, 6, 8)),
        bad("value", r"\(2, 2, 7, 8\) does not fit", value=torch.ones(2, 2, 7, 8)),
        bad("key", r"batch shape \(3,\)", key=torch.ones(3, 4, 7, 8), value=torch.ones(3, 4, 7, 8)),
        bad("key", r"batch shape \(\)", key=torch.ones(4, 7, 8), value=torch.ones(4, 7, 8)),
        bad("key", "3 heads do not divide query's 4", key=torch.ones(2, 3, 7, 8), value=torch.ones(2, 3, 7, 8)),
        bad("key", "8 heads do not divide", key=torch.ones(2, 8, 7, 8), value=torch.ones(2, 8, 7, 8)),
        bad("key", "0 heads", key=torch.ones(2, 0, 7, 8), value=torch.ones(2, 0, 7, 8)),
        bad("key", "float64", key=torch.ones(2, 4, 7, 8, dtype=torch.float64)),
        bad("value", "float64", value=torch.ones(2, 4, 7, 8, dtype=torch.float64)),
        bad("key", "float32 .* float64", query=torch.ones(2, 4, 5, 8, dtype=torch.float64)),
        bad("mask", "boolean or floating point; got torch.int64", mask=torch.ones(5, 7, dtype=torch.int64)),
        bad("mask", r"\(5, 6\) does not broadcast", mask=torch.ones(5, 6)),
        bad("mask", r"\(3, 1, 5, 7\) does not broadcast", mask=torch.ones(3, 1, 5, 7)),
        bad("mask", r"\(1, 2, 4, 5, 7\) does not broadcast", mask=torch.ones(1, 2, 4, 5, 7)),
        bad("posterior", "has 3 heads, query has 4", posterior=Weibull(2.0, learned=True).build(3)),
        bad("attend", "samples must be a whole number of at least 1; got 0", samples=0),
        bad("attend", "samples must be a whole number of at least 1; got 2.0", samples=2.0),
        bad("seed", "integer of at most 64 bits; got 1.0", seed=1.0),
        bad("seed", "integer of at most 64 bits; got 18446744073709551616", seed=2**64),
        bad("seed", "must hold integers; got torch.float32", seed=torch.tensor(1.0)),
        bad("sample_index", "integer of at most 64 bits; got 1.5", sample_index=1.5),
        bad("batch_ids", "3 identities", batch_ids=torch.arange(3)),
        bad("sample_index", "needs batch_ids", sample_index=torch.arange(2)),
        bad("sample_index", r"\(1,\)", sample_index=torch.arange(1), batch_ids=torch.arange(2)),
        bad("backend", "Did you mean 'reference'", backend="refrence"),
        bad("backend", "Did you mean 'auto'", backend="Auto"),
        bad("backend", "Known: auto", backend="cuda"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(changes, pattern):
    q, k, v = qkv(dtype=torch.float32)
    arguments = {"query": q, "key": k, "value": v, "posterior": Weibull(2.0), **changes}
    with pytest.raises(ValueError, match=pattern):
        attend(**arguments)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors_are_refused(name):
    arguments = dict(zip(("query", "key", "value"), qkv(dtype=torch.float32), strict=True))
    arguments[name] = torch.nested.nested_tensor([torch.ones(4, 3, 8), torch.ones(4, 5, 8)])
    with pytest.raises(ValueError, match=f"^{name}: nested"):
        attend(**arguments, posterior=Weibull(2.0))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"key": torch.empty(1, 2, 4, 3, device="meta")}, ValueError, "key: is on meta, query is on cpu"),
        ({"value": torch.empty(1, 2, 4, 3, device="meta")}, ValueError, "value: is on meta"),
        ({"mask": torch.empty(4, 4, dtype=torch.bool, device="meta")}, ValueError, "mask: is on meta"),
        ({"query": None}, TypeError, "query: must be a tensor; got NoneType"),
        ({"mask": [[True]]}, TypeError, "mask: must be a tensor; got list"),
        ({"query": torch.zeros(1, 0, 4, 3)}, ValueError, "key: 2 heads do not divide query's 0"),
        ({"query_offset": 1.5}, ValueError, "query_offset: must be an integer; got 1.5"),
    ],
)
def test_other_devices_and_types_are_refused_by_name(backend, changed, error, message):
    x = torch.zeros(1, 2, 4, 3)
    with pytest.raises(error, match=message):
        attend(**{"query": x, "key": x, "value": x, "posterior": Weibull(), "backend": backend, **changed})
