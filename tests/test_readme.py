"""The Python of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)  # noqa: S102
    assert capsys.readouterr().out.startswith("torch.Size([32, 3])")
    assert namespace["loss"].requires_grad  # type: ignore[attr-defined]


def test_engine_page_runs() -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    exec(block, {})  # noqa: S102 - it compares weights and draws itself


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "studies").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert target.startswith("http") or (document.parent / target).exists(), f"{document.name}: {target}"
