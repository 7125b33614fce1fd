"""The one command for a GPU does what it lists: its parts are claims that are there and take the flags they
are given.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"
CALLS = re.findall(
    r"^  ([\w-]+)\) (?:claim|run bench\.)\s*(\w+)(.*?);;", SCRIPT.read_text(), flags=re.MULTILINE
)
FLAGS = ("--device", "cuda", "--llama-7b")


def gpu_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "YGG_GPU_FLAGS": " ".join(FLAGS)},
    )


def test_an_unknown_part_is_refused_by_name_and_nothing_runs(tmp_path: Path) -> None:
    done = gpu_script(str(tmp_path), "everything")
    assert done.returncode == 1
    assert "no part is named everything; there are: tests kernels prepare" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["everything.log"]


def test_every_part_is_announced() -> None:
    text = SCRIPT.read_text()
    parts = re.search(r"^ALL=\((.*)\)$", text, flags=re.MULTILINE)
    assert parts is not None
    assert set(parts.group(1).split()) == {"tests", *(part for part, _, _ in CALLS)}
    assert all(re.search(rf"^#   {part}  +\w", text, flags=re.MULTILINE) for part in parts.group(1).split())


@pytest.mark.parametrize(("part", "module", "given"), CALLS, ids=[part for part, _, _ in CALLS])
def test_a_part_takes_the_flags_it_is_given(
    part: str, module: str, given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in given.partition("#")[0].split() if not word.startswith('"$')]
    flags = [*words, *(FLAGS if "FLAGS" in given else ()), *(() if module == "prepare" else ("--json",))]
    monkeypatch.setattr(sys, "argv", [module, *flags, "--help"])
    script = importlib.import_module(f"bench.{module}")
    with pytest.raises(SystemExit) as ended:
        (script.CLAIM.main if hasattr(script, "CLAIM") else script.main)()
    assert ended.value.code == 0, part
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    assert {flag for flag in flags if flag.startswith("--")} <= known
