"""Atomic writes, access rights, removal of temporaries, and errors of a store that cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from yggdrasil.errors import ConfigError, StoreError
from yggdrasil.store import artifacts
from yggdrasil.store.storage import (
    make_folder,
    put,
    remove,
    scratch_for_graphs,
    store_errors,
    sweep,
    temporary_folder,
    write_whole,
)


@pytest.fixture
def umask() -> Iterator[None]:
    """Puts it back."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("mask", "folder_mode", "file_mode"),
    [(0o022, 0o755, 0o644), (0o000, 0o755, 0o644), (0o077, 0o700, 0o600), (0o027, 0o750, 0o640)],
)
def test_written_files_follow_umask_and_are_never_writable_by_others(
    tmp_path: Path, umask: None, mask: int, folder_mode: int, file_mode: int
) -> None:
    os.umask(mask)
    artifacts.save_json(tmp_path / "a" / "b" / "c.json", {})
    with artifacts.atomic_directory(tmp_path / "a" / "whole") as folder:
        (folder / "deep").mkdir(mode=0o777)
        (folder / "deep" / "library.so").touch(mode=0o777)
        os.close(os.open(folder / "private", os.O_CREAT, 0o600))
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert modes == {file_mode}
    assert {
        path.stat().st_mode & 0o777
        for path in (tmp_path / "a", *(tmp_path / "a").rglob("*"))
        if path.is_dir()
    } == {folder_mode}


def test_a_file_takes_the_place_of_a_folder_and_a_folder_that_of_a_file(tmp_path: Path) -> None:
    for name, make in (("file", Path.touch), ("folder", Path.mkdir)):
        make(tmp_path / name)
    make_folder(tmp_path / "taken" / "deep")
    put(tmp_path / "file", tmp_path / "taken")
    assert (tmp_path / "taken").is_file()
    put(tmp_path / "folder", tmp_path / "taken")
    assert (tmp_path / "taken").is_dir()


def test_a_folder_that_cannot_be_removed_is_a_problem_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "current.json")  # as `rmtree` does

    monkeypatch.setattr("shutil.rmtree", closed)
    (tmp_path / "pair").mkdir()
    with (
        pytest.raises(StoreError, match=f"{tmp_path / 'pair'}: cannot be written .permission denied."),
        store_errors(tmp_path),
    ):
        remove(tmp_path / "pair")


def test_temporaries_of_ended_processes_are_removed_and_others_stay(tmp_path: Path) -> None:
    for name in (".graph.pt2.abandon8", ".nfs00000001", "graph.pt2"):
        (tmp_path / name).mkdir()
    (tmp_path / ".bundle.json.abandon8").touch()
    with temporary_folder(tmp_path, "mine") as mine:
        sweep([tmp_path, tmp_path / "nowhere"])
        assert len(list(tmp_path.iterdir())) == 5  # too young, all of them
        sweep([tmp_path], older_than_s=0)
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, ".nfs00000001", "graph.pt2"}
    assert not mine.exists()


def test_the_next_process_removes_graphs_unpacked_by_a_killed_one(tmp_path: Path) -> None:
    script = (
        "import os, signal; from yggdrasil.store import storage; storage.YOUNG_S = 0; "
        "scratch = storage.scratch_for_graphs(); scratch.__enter__()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def run(end: str) -> None:
        subprocess.run([sys.executable, "-c", script + end], env=environment, check=False)

    run("open(os.environ['TMPDIR'] + '/graph.so', 'w'); os.kill(os.getpid(), signal.SIGKILL)")
    [left] = tmp_path.iterdir()
    assert (left / "graph.so").exists()
    run("import subprocess")
    assert list(tmp_path.iterdir()) == []


def test_graphs_are_unpacked_in_a_folder_of_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    with scratch_for_graphs():
        folder = Path(os.environ["TMPDIR"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert folder.parent == Path(tempfile.gettempdir())
    assert "TMPDIR" not in os.environ
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    with scratch_for_graphs():
        assert os.environ["TMPDIR"] == str(folder)
    assert os.environ["TMPDIR"] == "/elsewhere"


def full(path: Path) -> Exception:
    return OSError(errno.ENOSPC, "No space left on device", str(path / "x"))


def read_only(path: Path) -> Exception:
    return OSError(errno.EROFS, "Read-only file system", str(path))


def closed_above(path: Path) -> Exception:
    return PermissionError(errno.EACCES, "Permission denied", str(path.parent))


def compiler(path: Path) -> Exception:
    return RuntimeError(
        "C++ compile error\nfatal error: error writing to /tmp/x.s: No space left on device"
    )


def unpacking(path: Path) -> Exception:
    return RuntimeError(
        "Failed to extract zip file a.so to destination file b.so, "
        "mz_zip error string: write callback failed"
    )


def in_a_worker(path: Path) -> Exception:
    return RuntimeError(
        f"the graph could not be built:\nPermissionError: [Errno 13] Permission denied: '{path}/x'"
    )


def wrapped(path: Path) -> Exception:
    error = ValueError("a library gave up")
    error.__cause__ = full(path)
    return error


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (full, "no space left on device.; make room in "),
        (read_only, "read-only file system.; set YGG_HOME to a folder that you can write"),
        (closed_above, "permission denied.; set YGG_HOME"),
        (compiler, "no space left on device.; make room in "),
        (unpacking, "no space left on device.; make room in "),
        (in_a_worker, "permission denied.; set YGG_HOME"),
        (wrapped, "no space left on device.; make room in "),
        (lambda path: FileExistsError(errno.EEXIST, "File exists", str(path)), "file exists.; move away"),
    ],
)
def test_a_store_that_cannot_be_written_is_one_line_with_a_remedy(
    tmp_path: Path, make: object, problem: str
) -> None:
    with pytest.raises(StoreError, match=f"cannot be written .{problem}"), store_errors(tmp_path / "store"):
        raise make(tmp_path / "store")  # type: ignore[operator]


def test_a_folder_that_the_file_system_does_not_make_is_one_line() -> None:
    with pytest.raises(
        StoreError, match="/proc/store: cannot be written .no folder can be made there.; set"
    ):
        make_folder(Path("/proc/store/pair"))


@pytest.mark.parametrize(
    "error",
    (
        RuntimeError("a bug of ours"),
        RuntimeError("g++: Permission denied"),
        PermissionError(errno.EACCES, "Permission denied", "/models/theirs"),
        ConfigError("a", 1, "2"),
    ),
)
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, store_errors(tmp_path / "store"):
        raise error
    assert raised.value is error


def test_a_file_of_the_user_is_written_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_whole(path, b"one")
    path.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to(path)
    write_whole(link, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777, link.is_symlink()) == (b"two", 0o640, True)

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"three")
    assert path.read_bytes() == b"two"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"page")
    assert os.read(reader, 10) == b"page"
    os.close(reader)
    assert pipe.is_fifo()
