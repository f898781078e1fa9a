"""Data-parallel training computes the gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bayesian_attention as ba
from tests.inference.models import Encoder, encoder, features

BATCH, RANKS = 4, 2


def model() -> Encoder:
    return encoder(first=ba.Weibull(2.0, learned=True), second=ba.LogNormal(0.5, learned=True))


def loss(network: nn.Module, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    with ba.sampling(network, True, seed=7, batch_ids=ids):
        nll = network(x).square().mean()
    return ba.elbo_loss(network, nll, weight=0.5).loss


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    network = DistributedDataParallel(model())
    ids = torch.arange(BATCH).chunk(RANKS)[rank]
    for _ in range(2):
        network.zero_grad()
        loss(network, features(BATCH, 3, 8)[ids], ids).backward()
    if rank == 0:
        torch.save([parameter.grad for parameter in network.parameters()], f"{folder}/gradients.pt")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch is built without torch.distributed")
def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
    network = model()
    loss(network, features(BATCH, 3, 8), torch.arange(BATCH)).backward()
    gradients = torch.load(tmp_path / "gradients.pt")
    torch.testing.assert_close(gradients, [parameter.grad for parameter in network.parameters()])
