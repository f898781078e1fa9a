import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bayesian_attention.files import replacing, writable_folder


@pytest.mark.parametrize("before", [None, "old"])
def test_the_file_appears_whole_at_the_end(tmp_path, before):
    path = tmp_path / "file.json"
    if before is not None:
        path.write_text(before)
    with replacing(path) as temporary:
        assert temporary.parent == path.parent
        temporary.write_text("ne")
        assert (path.read_text() if path.exists() else None) == before
        with temporary.open("a") as file:
            file.write("w")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_all_is_as_before(tmp_path, before, error):
    path = tmp_path / "file.json"
    if before is not None:
        path.write_text(before)

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        write()
    assert [(p, p.read_text()) for p in tmp_path.iterdir()] == ([(path, "old")] if before else [])


def test_a_block_that_writes_nothing_is_an_error_and_keeps_the_file(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert [(p, p.read_text()) for p in tmp_path.iterdir()] == [(path, "old")]


def test_a_process_killed_while_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    program = """
import os, signal, sys
from pathlib import Path
from bayesian_attention.files import replacing
with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program, str(path)]).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    # The next writer is another process, so what was left behind is not in its way.
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        assert writable_folder(folder, "--out") == folder
        assert list(folder.iterdir()) == []


def test_what_is_in_the_folder_stays(tmp_path):
    (tmp_path / "kept").write_text("kept")
    writable_folder(tmp_path, "--out")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept", "kept")]


@pytest.mark.parametrize("below", ["", "sub"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    path = tmp_path / "file" / below
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        ValueError, match=r"^--out: cannot write to the folder .*file.* \((File exists|Not a directory)\)"
    ):
        writable_folder(path, "--out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"^--out: cannot write to the folder .* \(Permission denied\)"):
        writable_folder(tmp_path, "--out")
    tmp_path.chmod(0o700)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(ValueError, match=r"^--out: cannot write to the folder .* \(No space left on device\)"):
        writable_folder(tmp_path, "--out")
