import pytest
import torch

from bayesian_attention.engine import reference
from bayesian_attention.engine.rows import DenseRows, NoiseAddress
from bayesian_attention.posteriors import Softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_zero_and_leaves_logits_as_they_are(dtype):
    logits = torch.linspace(-2, 2, 24, dtype=dtype).view(2, 3, 4)
    noise = Softmax().log_noise(logits.sigmoid(), 0.0)
    assert noise.dtype == dtype
    assert torch.equal(logits + noise, logits)


@pytest.mark.parametrize("address", [None, NoiseAddress(3)])
def test_weights_are_the_softmax_whether_sampled_or_not(address):
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    w = reference.log_weights(logits, DenseRows(), Softmax(), 0.0, address).exp()
    torch.testing.assert_close(w, logits.softmax(-1))


def test_it_has_no_settings():
    assert Softmax().to_dict() == {"name": "softmax"}
    with pytest.raises(TypeError, match="shape"):
        Softmax(shape=1.0)
