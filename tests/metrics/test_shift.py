import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from bayesian_attention.metrics import OutOfDistributionAUROC
from tests.metrics.helpers import check_splits, fed


def data(levels=None):
    generator = np.random.default_rng(1)
    is_ood = generator.random(150) < 0.3
    uncertainty = generator.normal(size=150) + 0.8 * is_ood
    if levels is not None:
        uncertainty = np.round(uncertainty * levels) / levels
    return torch.tensor(uncertainty), torch.tensor(is_ood)


@pytest.mark.parametrize("levels", [None, 1])
def test_agrees_with_scikit_learn(levels):
    u, ood = data(levels)
    auroc = fed(OutOfDistributionAUROC(), u, ood).compute()
    assert auroc.item() == pytest.approx(roc_auc_score(ood, u), rel=1e-12)
    assert auroc.dtype == torch.float64


def test_higher_uncertainty_means_out_of_distribution():
    u = torch.tensor([0.1, 0.2, 0.8, 0.9])
    assert fed(OutOfDistributionAUROC(), u, u > 0.5).compute() == 1
    assert fed(OutOfDistributionAUROC(), u, u < 0.5).compute() == 0
    assert fed(OutOfDistributionAUROC(), torch.ones(4), u > 0.5).compute() == 0.5


@pytest.mark.parametrize("is_ood", [True, False])
def test_one_kind_of_input_gives_nan_with_one_warning(is_ood):
    metric = fed(OutOfDistributionAUROC(), torch.rand(5), torch.full((5,), is_ood))
    with pytest.warns(UserWarning, match="OutOfDistributionAUROC is NaN: it needs input from both") as warned:
        assert math.isnan(metric.compute().item())
    assert len(warned) == 1


@pytest.mark.parametrize("levels", [None, 1])
def test_cutting_into_batches_changes_nothing(levels):
    check_splits(OutOfDistributionAUROC(), *data(levels))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"is_ood: must be boolean .* got torch.int64"):
        OutOfDistributionAUROC().update(torch.zeros(2), torch.zeros(2).long())
    with pytest.raises(ValueError, match="uncertainty: must not be NaN"):
        OutOfDistributionAUROC().update(torch.full((2,), math.nan), torch.zeros(2).bool())


@pytest.mark.filterwarnings("ignore:The ``compute`` method:UserWarning")
def test_no_data_is_an_error():
    with pytest.raises(ValueError, match="OutOfDistributionAUROC: no data"):
        OutOfDistributionAUROC().compute()
