"""Digests of files, and when a file is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from yggdrasil.errors import ArtifactError
from yggdrasil.store import artifacts
from yggdrasil.store.digests import LEDGER_NAME, KnownFile, Ledger, read_files


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes were read, in order."""
    names: list[str] = []
    digest_file = artifacts.digest_file
    monkeypatch.setattr(artifacts, "digest_file", lambda path: names.append(path.name) or digest_file(path))
    return names


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """The ledger of a build with two files."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "deep" / "b").write_bytes(b"b" * 1000)
    built = Ledger(tmp_path)
    built.record("a")
    built.record("deep/b")
    return built


def expected(ledger: Ledger) -> dict[str, str]:
    return ledger.digests(["a", "deep/b"])


def flip(path: Path, *, keep_time: bool = False) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    status = path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + (0 if keep_time else 1_000_000)))


def test_unchanged_files_are_not_read_at_a_start(ledger: Ledger, read: list[str]) -> None:
    assert expected(ledger)["a"] == "ba7816bf8f01"
    Ledger(ledger.folder).check(expected(ledger), "c")
    assert read == []


def test_a_touched_file_is_read_once(ledger: Ledger, read: list[str]) -> None:
    (ledger.folder / "a").write_bytes(b"abc")
    os.utime(ledger.folder / "a", (1, 1))
    for _ in range(2):
        Ledger(ledger.folder).check(expected(ledger), "c")
    assert read == ["a"]


def test_a_store_that_was_copied_is_read_once(ledger: Ledger, read: list[str]) -> None:
    (ledger.folder / LEDGER_NAME).unlink()
    for _ in range(2):
        Ledger(ledger.folder).check(expected(ledger), "c")
    assert sorted(read) == ["a", "b"]


def test_a_flipped_bit_is_named_with_the_command_every_time(ledger: Ledger) -> None:
    flip(ledger.folder / "deep" / "b")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="deep/b: corrupt .*; run `ygg compile`"):
            Ledger(ledger.folder).check(expected(ledger), "ygg compile")
    assert Ledger(ledger.folder).whole(["a", "deep/b", "other"]) == {"a"}


def test_only_a_full_check_finds_a_flip_that_left_size_and_time(ledger: Ledger) -> None:
    flip(ledger.folder / "a", keep_time=True)
    Ledger(ledger.folder).check(expected(ledger), "c")
    with pytest.raises(ArtifactError, match="a: corrupt"):
        Ledger(ledger.folder).check(expected(ledger), "c", full=True)
    assert Ledger(ledger.folder).whole(["a", "deep/b"]) == {"deep/b"}


@pytest.mark.parametrize("content", (b"", b"{", b'{"files": []}', b"[" * 100_000))
def test_a_damaged_ledger_is_no_knowledge(ledger: Ledger, read: list[str], content: bytes) -> None:
    (ledger.folder / LEDGER_NAME).write_bytes(content)
    assert Ledger(ledger.folder).whole(["a"]) == set()
    Ledger(ledger.folder).check(expected(ledger), "c")
    assert sorted(read) == ["a", "b"]


def test_a_ledger_of_wrong_types_is_no_knowledge(ledger: Ledger) -> None:
    for files in ([], {"a": []}, {"a": {"size": 3}}):
        artifacts.save_json(ledger.folder / LEDGER_NAME, {"files": files})
        assert Ledger(ledger.folder).whole(["a"]) == set()


def test_missing_files_folders_and_pipes_are_not_files(ledger: Ledger) -> None:
    for name, make in (("gone", None), ("folder", Path.mkdir), ("pipe", os.mkfifo)):
        path = ledger.folder / name
        if make is not None:
            make(path)
        with pytest.raises(ArtifactError, match=f"{name}: (missing|corrupt .it is not a file)"):
            ledger.check({name: "0" * 12}, "c")


def test_a_ledger_that_cannot_be_written_does_not_matter(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    os.utime(ledger.folder / "a", (1, 1))
    monkeypatch.setattr(artifacts, "save_json", closed)
    Ledger(ledger.folder).check(expected(ledger), "c")


def test_sources_known_from_an_earlier_build_are_not_read(tmp_path: Path, read: list[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "one", tmp_path / "two"]
    known = read_files(paths)
    (tmp_path / "two").write_text("three")
    assert [
        file.digest == before.digest
        for file, before in zip(read_files(paths, known=known), known, strict=True)
    ] == [True, False]
    assert sorted(read) == ["one", "two", "two"]


def test_a_file_that_is_gone_has_not_changed(tmp_path: Path) -> None:
    assert not KnownFile(str(tmp_path / "gone"), 1, 1, "0" * 12).changed()
    (tmp_path / "gone").write_text("x")
    assert KnownFile(str(tmp_path / "gone"), 1, 1, "0" * 12).changed()
