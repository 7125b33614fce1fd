"""Every damaged file of a pair gives one line with a command, never a crash or other text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import damages
import pytest
import tiny_pair
from conftest import TINY

from yggdrasil.cli import main
from yggdrasil.kernels import build as kernels_build
from yggdrasil.kernels import library_path
from yggdrasil.loading import load_bundle
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.pair import LoadedPair
from yggdrasil.store import artifacts

Capture = pytest.CaptureFixture[str]

NOT_LOADED = ("verified.json", "graphs.json")  # files that loading a pair does without


def flip(path: Path, *, keep_time: bool = False) -> None:
    """Change one bit in the middle."""
    content = bytearray(path.read_bytes())
    status = path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_the_files_to_damage_are_all_that_was_written(copied: Path) -> None:
    names = {path.name for path in damages.artifact_files(copied)}
    assert names >= {
        "current.json",
        "bundle.json",
        "tokenizer.json",
        "weights.safetensors",
        "tokens_4.pt2",
        "ygg_kernels.so",
        "acceptance.json",
    }
    bundle = load_bundle("tiny")
    assert {bundle.profile_path, bundle.plan_path, *(bundle.folder / name for name in bundle.files)} <= set(
        damages.artifact_files(copied)
    )


@pytest.mark.parametrize("damage", damages.DAMAGES)
def test_every_damaged_artifact_is_refused_in_one_line_before_loading(
    damage: str, copied: Path, tiny: LoadedPair
) -> None:
    done = subprocess.run(
        [sys.executable, damages.__file__, str(copied), damage], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) >= len(damages.artifact_files(copied)) > 15
    for name, outcome in outcomes:
        if name.startswith("compile_cache/tiny/") and name.endswith(NOT_LOADED):
            assert json.loads(outcome) == text(tiny), "what it holds is read again, or only by later builds"
        else:
            assert "; run `ygg compile" in outcome, (name, outcome)
            assert damage == "missing" or Path(name).name in outcome


def text(pair: LoadedPair) -> list[int]:
    from yggdrasil.config import GenerateConfig

    config = GenerateConfig(max_new_tokens=damages.NUM_TOKENS, ignore_eos=True)
    return [
        token
        for result in pair.engine.generate(pair.tokenizer.encode(damages.PROMPT), pair.policy(), config)
        for token in result.tokens
    ]


def test_compiling_again_builds_only_changed_files(copied: Path, llama_folders: tuple[str, str]) -> None:
    folder = load_bundle("tiny").folder
    damaged = [
        folder / "draft" / "tokens_4.pt2",
        folder / "draft" / "weights.safetensors",
        folder / "tokenizer.json",
    ]
    before = {path: path.stat().st_mtime_ns for path in damages.artifact_files(folder.parent.parent.parent)}
    for path in damaged:
        flip(path, keep_time=True)  # size and time are no reason to trust a file here
    calibration = tiny_pair.save_calibration(copied / "stories.txt")
    again = compile_pair(
        *llama_folders,
        name="tiny",
        config=TINY,
        calibration=calibration,
        progress=tiny_pair.SilentProgress(),
    )
    assert again.folder == folder
    assert main(["verify", "tiny"]) == 0
    built = {
        path
        for path, time in before.items()
        if path.suffix in (".pt2", ".safetensors")
        and folder in path.parents
        and path.stat().st_mtime_ns != time
    }
    assert built == set(damaged[:2])


def test_damaged_operators_are_built_again_and_whole_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def compile_(folder: Path) -> None:
        built.append(folder)
        (folder / kernels_build.LIBRARY_FILE).write_bytes(b"compiled code")

    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    monkeypatch.setattr(kernels_build, "_compile", compile_)
    monkeypatch.setattr(kernels_build, "_is_loaded", lambda: False)
    for _ in range(2):
        kernels_build.build_kernels()
    assert len(built) == 1
    flip(library_path(), keep_time=True)
    kernels_build.build_kernels()
    library_path().with_name("verified.json").unlink()
    kernels_build.build_kernels()
    shutil.rmtree(library_path().parent)
    library_path().parent.touch()  # a file in the folder's place
    kernels_build.build_kernels()
    assert len(built) == 4
    kernels_build.check_kernels("ygg compile", full=True)
    assert [path.name for path in library_path().parent.parent.iterdir()] == [library_path().parent.name]


def test_verify_reads_every_file_whatever_its_time(copied: Path, capsys: Capture) -> None:
    assert main(["verify", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for path in damages.artifact_files(copied):
        assert path.name in NOT_LOADED or any(
            line.startswith("whole ") and line.endswith(f" MB  {path}") for line in lines
        ), path
    flip(load_bundle("tiny").folder / "target" / "tokens_4.pt2", keep_time=True)
    assert main(["verify", "tiny"]) == 2
    assert (
        "tokens_4.pt2: corrupt (its bytes are not those that were written); run `ygg compile "
        in capsys.readouterr().err
    )


def test_list_names_models_size_and_what_a_pair_lacks(copied: Path, capsys: Capture) -> None:
    bundle = load_bundle("tiny")
    shutil.copytree(copied / "compile_cache" / "tiny", copied / "compile_cache" / "old")
    stale = artifacts.load_json(copied / "compile_cache" / "old" / bundle.folder.name / "bundle.json", "")
    stale["machine"]["torch"] = "1.0"
    artifacts.save_json(copied / "compile_cache" / "old" / bundle.folder.name / "bundle.json", stale)
    (copied / "compile_cache" / "broken" / "half").mkdir(parents=True)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["broken", "old", "tiny"]
    assert lines[1].endswith("not compiled to the end; run `ygg compile TARGET DRAFT --name broken`")
    assert "unusable" in lines[2]
    assert "stale: torch was '1.0'" in lines[3]
    assert lines[4].endswith(f" MB  {bundle.models[0]} + {bundle.models[1]}")
    assert lines[4].split()[1] == "current"


def test_an_empty_store_lists_how_to_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    assert main(["list"]) == 0
    assert "ygg compile TARGET DRAFT --name NAME" in capsys.readouterr().out


def test_rm_removes_all_of_one_pair_and_nothing_else(copied: Path, capsys: Capture) -> None:
    for store in damages.STORES:
        shutil.copytree(copied / store / "tiny", copied / store / "other")
    assert main(["rm", "other"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("freed ")
    assert [path.name for path in copied.rglob("other")] == []
    assert main(["verify", "tiny"]) == 0


@pytest.mark.parametrize("name", ("nobody", "kernels", "..", "../tiny", ""))
def test_rm_refuses_what_is_no_pair(name: str, copied: Path, capsys: Capture) -> None:
    assert main(["rm", name]) == 2
    assert (
        f"ygg rm: NAME: {name!r} is not allowed; it must be a pair in {copied}: tiny; ygg list"
        in capsys.readouterr().err
    )
    assert main(["verify", "tiny"]) == 0


def test_rm_leaves_a_pair_that_is_being_compiled(copied: Path, capsys: Capture) -> None:
    lock = copied / "compile_cache" / "tiny" / artifacts.LOCK_NAME
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        assert main(["rm", "tiny"]) == 2
        other.stdin.close()
    assert "being compiled" in capsys.readouterr().err
    assert main(["verify", "tiny"]) == 0


def test_a_store_that_others_can_write_is_refused_with_a_chmod_command(
    copied: Path, capsys: Capture
) -> None:
    (copied / "compile_cache").chmod(0o777)
    assert main(["generate", damages.PROMPT, "--pair", "tiny"]) == 2
    assert capsys.readouterr().err.endswith(f"run `chmod go-w {copied / 'compile_cache'}`\n")
