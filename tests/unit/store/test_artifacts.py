"""Artifacts are written atomically, and damage is reported."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.kernels.compilations import compilations, count_compilation, no_compilation
from yggdrasil.store import artifacts
from yggdrasil.store.artifacts import (
    atomic_directory,
    check_fingerprint,
    digest,
    digest_file,
    entries,
    load_json,
    save_json,
    unreadable,
)


def test_json_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    save_json(path, {"b": [1, 2.5, None], "c": "ü"})
    assert load_json(path, "ygg compile") == {"b": [1, 2.5, None], "c": "ü"}
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    save_json(path, {"old": 1})
    with pytest.raises(TypeError):
        save_json(path, {"new": [0] * 100_000, "unwritable": object()})
    assert load_json(path, "") == {"old": 1}

    def crash(*args: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        save_json(path, {"new": 2})
    assert load_json(path, "") == {"old": 1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "missing"),
        ("", "corrupt"),
        ('{"format": 1, "mod', "corrupt"),
        ("[1, 2]", "corrupt .not a JSON object"),
        (b"\xff\xfe\x00", "corrupt"),
        ('{"a": ' + "[" * 100_000, "corrupt .*recursion"),
        ('{"a": ' + "9" * 5000 + "}", "corrupt .*digits"),
        ('{"format": 1}', "corrupt, or written by another version"),
        ('{"format": 1, "digest": ["no", {"text": 1}]}', "corrupt, or written by another version"),
    ],
)
def test_load_names_the_path_the_problem_and_the_command(
    tmp_path: Path, content: str | bytes | None, problem: str
) -> None:
    path = tmp_path / "bundle.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArtifactError, match=rf"bundle\.json: {problem}.*; run `ygg compile A B --name c`"):
        load_json(path, "ygg compile A B --name c")


def test_every_changed_byte_of_a_json_artifact_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save_json(path, {"latency_ms": [1.5, 2.5], "name": "x"})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert load_json(path, "c") == {"latency_ms": [1.5, 2.5], "name": "x"}  # a blank between values
        except ArtifactError as error:
            assert "corrupt" in str(error)


def test_a_folder_in_a_file_s_place_is_named_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    (path / "deep" / "er").mkdir(parents=True)
    with pytest.raises(ArtifactError, match=r"a\.json: corrupt .it is not a file.*; run `ygg compile`"):
        load_json(path, "ygg compile")
    save_json(path, {"a": 1})
    assert load_json(path, "") == {"a": 1}
    with pytest.raises(ArtifactError, match="corrupt .it is not a file"):
        load_json(path / "below", "")


def test_what_cannot_be_read_is_not_called_missing() -> None:
    error = PermissionError(errno.EACCES, "Permission denied")
    assert str(unreadable(Path("/store/a b"), error, "ygg compile")).endswith(
        "cannot be read (permission denied); run `chmod a+rX '/store/a b'`"
    )


def test_a_folder_that_cannot_be_entered_is_named_and_is_not_called_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "closed" / "store"
    (store / "a").mkdir(parents=True)
    assert entries(store, "*") == [store / "a"]
    assert entries(store / "missing", "*") == entries(tmp_path / "nobody" / "store", "*") == []

    def closed(folder: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", closed)
    with pytest.raises(ArtifactError, match=f"store: cannot be read .*run `chmod a.rX {store}`"):
        entries(store, "*")
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: path != store.parent and access(path, mode))
    with pytest.raises(ArtifactError, match=f"store: cannot be read .*run `chmod a.rX {store.parent}`"):
        entries(store, "*")


def test_fingerprint_names_the_first_field_that_differs() -> None:
    stored = {"format": 1, "torch": "2.12", "cpu_flags": "avx2"}
    check_fingerprint(Path("b"), stored, dict(stored), "ygg compile")
    with pytest.raises(
        ArtifactError, match=r"b: stale: torch was '2\.12' and is now '2\.13'; run `ygg compile`"
    ):
        check_fingerprint(
            Path("b"), stored, {"format": 1, "torch": "2.13", "cpu_flags": "other"}, "ygg compile"
        )
    with pytest.raises(ArtifactError, match="cuda was None and is now '13'"):
        check_fingerprint(Path("b"), stored, {"format": 1, "cuda": "13"}, "ygg compile")


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "store" / "x"
    with pytest.raises(RuntimeError, match="half way"), atomic_directory(path) as temporary:
        (temporary / "part").write_text("1")
        raise RuntimeError("half way")
    assert list(path.parent.iterdir()) == []
    with atomic_directory(path) as temporary:
        (temporary / "part").write_text("1")
        assert not path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["x"]
    assert (path / "part").read_text() == "1"


def test_another_writer_s_directory_wins(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with atomic_directory(path) as mine:
        (mine / "part").write_text("mine")
        with atomic_directory(path) as theirs:
            (theirs / "part").write_text("theirs")
    assert (path / "part").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_root_is_ygg_home_else_the_checkout_of_this_package_else_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "home"))
    assert artifacts.root() == tmp_path / "home"
    assert artifacts.compile_cache() == tmp_path / "home" / "compile_cache"
    monkeypatch.delenv("YGG_HOME")
    monkeypatch.setattr(artifacts, "CHECKOUT", tmp_path)
    (tmp_path / "compile_cache").mkdir()
    assert artifacts.root() == Path.home() / ".cache" / "yggdrasil"  # site-packages may hold anything
    (tmp_path / "pyproject.toml").touch()
    assert artifacts.root() == tmp_path


def test_the_store_does_not_depend_on_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("YGG_HOME")
    before = artifacts.root()
    (tmp_path / "compile_cache").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert artifacts.root() == before != tmp_path


def test_a_root_that_cannot_be_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    for name, problem in (
        ("file", "it is a file"),
        ("file/below", "not a directory"),
        ("link", "a link to nothing"),
        ("circle/below", "too many levels"),
        ("x" * 300, "file name too long"),
    ):
        monkeypatch.setenv("YGG_HOME", str(tmp_path / name))
        with pytest.raises(ConfigError, match=f"YGG_HOME: .* it must be a folder, .*{problem}"):
            artifacts.root()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(artifacts, "CHECKOUT", tmp_path)
    for home in ("", "~/store"):
        monkeypatch.setenv("YGG_HOME", home)
        with pytest.raises(
            ConfigError,
            match="HOME: .* is not allowed; it must be your home folder, or .*; YGG_HOME=FOLDER",
        ):
            artifacts.root()


def test_digests_depend_on_every_part_and_on_the_order(tmp_path: Path) -> None:
    digests = {
        digest("a", "b"),
        digest("b", "a"),
        digest(["a", "b"]),
        digest("a", "b", None),
        digest({"x": 1, "y": 2}),
        digest({"x": 2, "y": 1}),
    }
    assert len(digests) == 6
    assert digest({"x": 1, "y": 2}) == digest({"y": 2, "x": 1})
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_file(tmp_path / "f") == "ba7816bf8f01"  # the beginning of SHA-256 of "abc"


def test_compilations_are_counted_and_can_be_forbidden() -> None:
    before = compilations()
    count_compilation()
    assert compilations() == before + 1
    with no_compilation():
        with pytest.raises(RuntimeError, match="inside the decode loop"):
            count_compilation()
        with no_compilation():
            pass
        with pytest.raises(RuntimeError, match="inside the decode loop"):  # the inner block lifted nothing
            count_compilation()
    count_compilation()
    assert compilations() == before + 2


def test_the_last_of_several_threads_lifts_the_rule() -> None:
    block = no_compilation()
    block.__enter__()
    block.__enter__()
    block.__exit__(None, None, None)  # of the first
    with pytest.raises(RuntimeError, match="inside the decode loop"):
        count_compilation()
    block.__exit__(None, None, None)
    count_compilation()


def test_the_rule_of_dynamo_holds_if_dynamo_is_loaded_while_a_thread_is_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo

    stance = torch._dynamo.eval_frame._stance
    with no_compilation():
        pass
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    block = no_compilation()
    block.__enter__()
    assert torch._dynamo.eval_frame._stance == stance
    monkeypatch.undo()
    with block:
        assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    assert torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
    block.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance == stance


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Xeon 8480
flags\t\t: fpu avx512f avx2 sse2

processor\t: 1
flags\t\t: other
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """`cpu_flags` of a machine whose kernel reports this."""
    monkeypatch.setattr(artifacts, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def flags(content: str) -> str:
        artifacts.CPUINFO.write_text(content)
        artifacts.cpu_flags.cache_clear()
        return artifacts.cpu_flags()

    yield flags
    artifacts.cpu_flags.cache_clear()


def test_a_processor_is_identified_by_its_model_and_every_flag(cpuinfo: Callable[[str], str]) -> None:
    assert re.fullmatch(r"x86_64 Xeon 8480 avx2 avx512f \(4 flags, [0-9a-f]{12}\)", cpuinfo(X86))
    assert cpuinfo(X86.replace("fpu avx512f", "avx512f fpu")) == cpuinfo(X86)  # the order means nothing
    assert cpuinfo(X86.replace("fpu", "gfni")) != cpuinfo(X86)  # a flag that is in no list of ours
    assert cpuinfo(X86.replace("8480", "8592")) != cpuinfo(X86)
    assert cpuinfo("processor: 0\nFeatures: asimd sve\n").startswith("x86_64 asimd sve (2 flags, ")


def test_the_name_of_a_machine_is_a_file_name_and_has_its_gpu() -> None:
    with_gpu = artifacts.machine_name("NVIDIA H100 80GB HBM3")
    assert with_gpu == f"{artifacts.machine_name()}-NVIDIA-H100-80GB-HBM3"
    assert artifacts.machine_name("NVIDIA H200") != with_gpu
