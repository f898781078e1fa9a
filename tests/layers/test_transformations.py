"""Layers whose attention runs in blocks, under what PyTorch does to modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import bayesian_attention as ba
from bayesian_attention.engine import backends

LENGTH, WIDTH, HEADS = 96, 16, 2
POSTERIORS = [ba.Weibull(2.0, learned=True), ba.LogNormal(0.5, learned=True)]
#: Tracing and differentiation of the compiler, without its code generation.
EAGER = "aot_eager"
PRIORS = [ba.ConstantPrior(), ba.ContextualPrior(hidden=4)]


class Block(nn.Module):
    """Attention with a residual; the mask pads the second example."""

    def __init__(self, posterior: ba.Posterior, prior: ba.Prior, *, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = ba.MultiheadAttention(WIDTH, HEADS, batch_first=True, posterior=posterior, prior=prior)
        self.causal = causal

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1) if self.causal else None
        return x + self.attention(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[1, 60:] = True
    return x, padding


def step(block: nn.Module, x: Tensor, padding: Tensor, call: Any = None) -> dict[str, Tensor]:
    """Value and gradients of the bound under the global seed 3."""
    block.zero_grad()
    torch.manual_seed(3)
    output = (block if call is None else call)(x, padding)
    loss = output.float().square().mean() + 1e-3 * ba.kl_divergence(block)
    loss.backward()
    return {"loss": loss.detach(), "output": output.detach()} | {
        name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None
    }


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        bound = tolerance * max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(x, expected[name].to(x.dtype), rtol=0, atol=bound, msg=name)


def test_the_layers_here_run_in_blocks():
    q = torch.zeros(2, HEADS, LENGTH, WIDTH // HEADS)
    assert backends.choose("auto", ba.Weibull(), q, q, q) == "blockwise"


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("causal", [False, True])
def test_backends_give_the_same_bound(posterior, prior, causal):
    block = Block(posterior, prior, causal=causal)
    x, padding = inputs()
    ours = step(block, x, padding)
    block.attention.stoch.backend = "reference"
    exact = step(copy.deepcopy(block).double(), x.double(), padding)
    assert_same(ours, exact, 1e-5)
    assert_same(step(block, x, padding), exact, 1e-5)


# Dynamo looks for the gradients of a hook's arguments, and hides what that warns of, but not from an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("prior", PRIORS)
def test_compiled_in_one_graph(posterior, prior):
    torch._dynamo.reset()
    block = Block(posterior, prior)
    x, padding = inputs()
    # A seed a layer, for torch.compile draws other numbers from PyTorch's generator.
    eager = copy.deepcopy(block)
    with ba.sampling(eager, True, seed=5):
        expected = step(eager, x, padding)
    with ba.sampling(block, True, seed=5):
        ours = step(block, x, padding, torch.compile(block, fullgraph=True, backend=EAGER))
    assert_same(ours, expected)


def test_a_training_step_compiles_in_one_graph():
    """Output, divergence and loss together, in a tracked model."""
    torch._dynamo.reset()
    block = Block(POSTERIORS[0], PRIORS[1])
    ba.track_kl(block)
    x, padding = inputs()

    def loss(model: nn.Module) -> Tensor:
        return model(x, padding).square().mean() + 1e-3 * ba.kl_divergence(model)

    results = []
    for model, function in ((copy.deepcopy(block), loss), (block, torch.compile(loss, fullgraph=True, backend=EAGER))):
        with ba.sampling(model, True, seed=5):
            value = function(model)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append({"loss": value.detach()} | gradients)
    assert_same(results[1], results[0])


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_checkpoints_replay_the_draw(posterior, reentrant, causal):
    block = Block(posterior, ba.ContextualPrior(hidden=4), causal=causal)
    x, padding = inputs()
    x.requires_grad_()

    def call(x: Tensor, padding: Tensor) -> Tensor:
        return checkpoint(block, x, padding, use_reentrant=reentrant)

    def gradients(call: Any) -> tuple[Tensor, dict[str, Tensor]]:
        block.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        call(x, padding).square().mean().backward()
        assert x.grad is not None
        return x.grad, {name: p.grad for name, p in block.named_parameters() if p.grad is not None}

    expected, ours = gradients(block), gradients(call)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_noise_and_divergence_alone(posterior, dtype):
    block = Block(posterior, ba.ConstantPrior())
    x, padding = inputs()
    expected = step(block, x, padding)
    divergence = ba.kl_divergence(block)

    def call(x: Tensor, padding: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return block(x, padding)

    ours = step(block, x, padding, call)
    assert_same(ours, expected, 3e-2)
    assert ba.kl_divergence(block).dtype == torch.float32
    torch.testing.assert_close(ba.kl_divergence(block), divergence, rtol=2e-3, atol=0)


def test_copies_draw_alike():
    block = Block(POSTERIORS[0], ba.ConstantPrior())
    x, padding = inputs()
    assert_same(step(copy.deepcopy(block), x, padding), step(block, x, padding), 0.0)


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    block = DistributedDataParallel(Block(POSTERIORS[0], ba.ContextualPrior(hidden=4)))
    torch.manual_seed(17)  # as a script does on every rank
    x, padding = inputs()
    loss = block(x, padding).square().mean() + 1e-3 * ba.kl_divergence(block)
    loss.backward()
    torch.save([block(x, padding).detach()] + [p.grad for p in block.parameters()], f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch is built without torch.distributed")
def test_ranks_draw_different_weights_and_share_gradients(tmp_path: Path):
    mp.spawn(_work, (str(tmp_path),), nprocs=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(one[0], other[0])
    torch.testing.assert_close(one[1:], other[1:])
