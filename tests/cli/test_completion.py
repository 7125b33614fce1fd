"""`ygg completion`: what a shell completes."""

from __future__ import annotations

import builtins
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from yggdrasil.bundle import Bundle
from yggdrasil.cli import main
from yggdrasil.store import artifacts

Capture = pytest.CaptureFixture[str]

PAIRS: list[str] = []  # stands for those of the store

pytest.importorskip("argcomplete")


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line, after it has read the script."""
    command = folder / "ygg"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m yggdrasil "$@"\n')
    command.chmod(0o755)
    script = (
        "source <(ygg completion bash); "
        f"COMP_LINE={shlex.quote(line)}; COMP_POINT={len(line)}; COMP_TYPE=9; "
        '_python_argcomplete ygg; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ygg gen", ["generate"]),
        ("ygg chat --sys", ["--system"]),
        ("ygg show pla", ["plan"]),
        ("ygg completion f", ["fish"]),
        ("ygg generate --pair tin", PAIRS),
        ("ygg verify tin", PAIRS),
    ],
)
def test_bash_completes_verbs_options_and_pairs(
    line: str, words: list[str], tiny_bundle: Bundle, tmp_path: Path
) -> None:
    expected = (
        [name for name in artifacts.pair_names() if name.startswith("tin")] if words is PAIRS else words
    )
    assert completed(line, tmp_path) == expected


@pytest.mark.parametrize("shell", ("bash", "zsh", "fish"))
def test_every_shell_has_a_script_that_asks_ygg(shell: str, capsys: Capture) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "_ARGCOMPLETE" in out
    assert "ygg" in out


def test_an_unknown_shell_is_refused(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "'tcsh' is none of bash, zsh, fish" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *arguments: object, **options: object) -> object:
        if name == "argcomplete":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'yggdrasil-decoding[completion]'" in capsys.readouterr().err
