from __future__ import annotations

from pathlib import Path

import pytest

from bayesian_attention.data.folder import FOLDER_VARIABLE, find

RELATIVE = "sets/example.npz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sets").mkdir()
    (tmp_path / RELATIVE).write_bytes(b"data")
    return tmp_path


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests mean the same on a machine that has a data folder."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)


def test_below_the_given_folder(folder: Path):
    assert find("example", RELATIVE, folder) == folder / RELATIVE


def test_below_the_folder_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    assert find("example", RELATIVE) == folder / RELATIVE


def test_the_given_folder_comes_first(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    with pytest.raises(ValueError, match="example: there is no ") as info:
        find("example", RELATIVE, other)
    assert str(other / RELATIVE) in str(info.value)
    monkeypatch.setenv(FOLDER_VARIABLE, str(other))
    assert find("example", RELATIVE, folder) == folder / RELATIVE


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_folder_the_message_says_how_to_get_the_data(monkeypatch: pytest.MonkeyPatch, value: str | None):
    if value is not None:
        monkeypatch.setenv(FOLDER_VARIABLE, value)
    with pytest.raises(ValueError, match=r"^example: ") as info:
        find("example", RELATIVE)
    for part in (FOLDER_VARIABLE, "--data", RELATIVE, "docs/data.md"):
        assert part in str(info.value)


def test_a_missing_file_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"^example: ") as info:
        find("example", RELATIVE)
    assert str(tmp_path / "none" / RELATIVE) in str(info.value)
    assert "docs/data.md" in str(info.value)


def test_a_folder_is_no_data_file(tmp_path: Path):
    (tmp_path / RELATIVE).mkdir(parents=True)
    with pytest.raises(ValueError, match="example: there is no"):
        find("example", RELATIVE, tmp_path)


def test_cora_needs_no_folder_but_comes_from_one_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    assert find("cora", "planetoid/cora.npz").is_file()
    with pytest.raises(ValueError, match="cora: there is no "):
        find("cora", "planetoid/cora.npz", tmp_path)
    (tmp_path / "planetoid").mkdir()
    (tmp_path / "planetoid" / "cora.npz").write_bytes(b"data")
    assert find("cora", "planetoid/cora.npz", tmp_path) == tmp_path / "planetoid" / "cora.npz"
