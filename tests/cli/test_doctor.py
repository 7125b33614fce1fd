"""`ygg doctor`: what it finds on a machine that has everything, and on one that lacks something."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import pytest

from yggdrasil.bundle import BUNDLED, Bundle
from yggdrasil.cli import doctor, main
from yggdrasil.cli.doctor import Finding
from yggdrasil.offline import forecast
from yggdrasil.store import artifacts

Capture = pytest.CaptureFixture[str]


def found(name: str) -> Finding:
    """The first finding of a name."""
    return next(finding for finding in doctor.findings() if finding.name == name)


def test_a_machine_that_has_everything_is_in_order(tiny_bundle: Bundle, capsys: Capture) -> None:
    stored = [finding for finding in doctor.findings() if finding.value.startswith("tiny, ")]
    assert [finding.state for finding in stored] == ["ok"]
    for name in ("python", "compiler", "store"):
        assert found(name).state == "ok"
    assert str(artifacts.root()) in found("store").value


def test_the_exit_code_tells_whether_something_is_in_the_way(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [Finding("ok", "disk", "much"), Finding("note", "threads", "busy", "wait")]
    monkeypatch.setattr(doctor, "findings", lambda: iter(notes))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == (
        "ok    disk       much\nnote  threads    busy\n                 wait\nnothing is in the way\n"
    )
    notes.append(Finding("fail", "store", "gone", "make it"))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("fail  store      gone\n                 make it\nto fix: 1\n")


def test_a_missing_compiler_is_in_the_way() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        finding = found("compiler")
    assert (finding.state, finding.value) == ("fail", "no C++ compiler that works")
    assert "install" in finding.fix


def test_a_store_that_others_can_write_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "later"))
    assert found("store").state == "ok"  # the nearest folder that exists counts
    tmp_path.chmod(0o777)
    finding = found("store")
    assert finding.state == "fail"
    assert f"chmod go-w {tmp_path}" in finding.fix


def test_a_store_that_cannot_be_read_is_in_the_way_and_the_rest_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))

    def closed(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    with monkeypatch.context() as patched:
        patched.setattr("os.listdir", closed)
        finding = found("pair")
        assert (finding.state, finding.value) == ("fail", "they cannot be listed")
        assert f"run `chmod a+rX {tmp_path / 'compile_cache'}`" in finding.fix
        assert found("packages")
        assert main(["list"]) == 2
    assert "cannot be read (permission denied)" in capsys.readouterr().err


def test_a_store_in_which_no_folder_can_be_made_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for root in ("/proc", "/proc/store"):
        monkeypatch.setenv("YGG_HOME", root)
        finding = found("store")
        assert (finding.state, finding.fix) == ("fail", "YGG_HOME=FOLDER ygg ...")
        assert finding.value.startswith(f"{root} cannot be written (")
        for verb in ("list", "verify none", "rm none", "show pair"):
            assert main(verb.split()) in (0, 2)
            assert len("".join(capsys.readouterr()).splitlines()) == 1, verb


def test_a_file_in_the_place_of_the_store_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "file"))
    finding = found("store")
    assert finding.state == "fail"
    assert "it is a file" in finding.fix
    found("packages")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("to fix: 1\n")


def test_a_pair_that_cannot_be_used_is_in_the_way(copied: Path) -> None:
    assert found("pair").state == "ok"
    (copied / "compile_cache" / "tiny" / "current.json").unlink()
    finding = found("pair")
    assert finding.state == "fail"
    assert finding.value == "tiny: not compiled to the end; run `ygg compile TARGET DRAFT --name tiny`"
    assert "ygg rm tiny" in finding.fix


def test_the_bundled_pair_that_was_interrupted_has_a_command_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    (tmp_path / "compile_cache" / BUNDLED).mkdir(parents=True)
    assert found("pair").value == f"{BUNDLED}: not compiled to the end; run `ygg compile`"


def test_an_empty_store_names_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    assert found("pair").value.startswith("none yet; `ygg generate` compiles")


def test_load_memory_and_disk_that_are_short_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert found("threads").state == "note"
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8000000 kB\nMemAvailable: 1000000 kB\n")
    monkeypatch.setattr(forecast, "MEMINFO", meminfo)
    assert found("memory")[:3] == ("note", "memory", "1.0 GB free")
    meminfo.write_text("nothing")
    assert found("memory").value.startswith("unknown")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(9, 8, 1000))
    assert found("disk").state == "note"


def test_a_processor_without_known_features_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "cpu_flags", lambda: "x86_64 some avx2 (9 flags, 0)")
    assert found("processor").value.endswith("kernels for AVX2")
    monkeypatch.setattr(artifacts, "cpu_flags", lambda: "sparc")
    assert found("processor").state == "note"


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module == "fastapi" else module)
    finding = found("packages")
    assert finding.value == "not installed: serve (ygg serve)"
    assert finding.fix == "pip install 'yggdrasil-decoding[serve]'"


def test_every_extra_for_users_is_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert doctor.EXTRAS.keys() | {"bench", "test"} == project["optional-dependencies"].keys()
    for extra, (_, module) in doctor.EXTRAS.items():
        assert any(module in package for package in project["optional-dependencies"][extra])
