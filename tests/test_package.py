"""The package as a whole."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import bayesian_attention as ba

SOURCE = Path(ba.__file__).parent

#: Each may import those before it.
LAYERS = ("posteriors", "priors", "divergences", "engine", "layers", "inference", "metrics", "data", "tasks", "report")


def test_the_core_imports_neither_hosts_nor_extras() -> None:
    extras = {"torch_geometric", "torchmetrics", "scipy", "sklearn", "matplotlib", "jinja2", "pandas", "typer", "rich"}
    code = f"import sys, bayesian_attention; print(sorted({extras!r} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    assert all(hasattr(ba, name) for name in ba.__all__)
    assert ba.__version__ == metadata.version("bayesian-attention")


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down(package: str) -> None:
    above = LAYERS[LAYERS.index(package) + 1 :]
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayesian_attention."):
                assert node.module.split(".")[1] not in above, f"{path}:{node.lineno}"  # type: ignore[union-attr]


def test_nothing_unpickles() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert text.count("np.load(") == text.count("allow_pickle=False"), path
