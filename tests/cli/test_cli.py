"""The command line on a compiled pair: its output, and one clear line for every error."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
from conftest import TINY

import yggdrasil
from yggdrasil.bundle import Bundle
from yggdrasil.cli import main, show
from yggdrasil.cli import request as request_options
from yggdrasil.kernels.compilations import compilations
from yggdrasil.loading import load_bundle, load_models
from yggdrasil.offline import inputs, pipeline, tuning
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.policy.depth import PREDICTOR_FORMAT
from yggdrasil.report.run import Run
from yggdrasil.schedule.choice import PlanChoice, PlanSearch
from yggdrasil.store import artifacts
from yggdrasil.store.artifacts import digest_file, save_json

KEYS = (
    "text", "token_ids", "num_tokens", "target_passes", "aal", "ttft_ms", "tpot_ms", "tok_per_s",
    "compilations", "stages_ms", "speculation", "seed", "device", "dtype",
)  # fmt: skip
PROMPT = "Once upon a time"
PNG = b"\x89PNG\r\n"

pytestmark = pytest.mark.usefixtures("tiny_bundle")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing else to do, whatever else it does."""
    monkeypatch.setattr(Run, "slowdown", 1.0)


def generate(capture: Capture, *arguments: str) -> dict[str, Any]:
    """The JSON object of one run on the compiled pair, after checking that it is all there is on standard
    output.
    """
    assert main(["generate", PROMPT, "--pair", "tiny", "--max-new-tokens", "24", "--json", *arguments]) == 0
    lines = capture.readouterr().out.splitlines()
    assert len(lines) == 1
    report: dict[str, Any] = json.loads(lines[0])
    return report


def test_json_has_every_key_and_the_figures_agree(capsys: Capture) -> None:
    before = compilations()
    report = generate(capsys, "--ignore-eos")
    assert [key for key in KEYS if key not in report] == []
    assert compilations() == before
    assert report["num_tokens"] == len(report["token_ids"]) == 24
    assert 1 <= report["target_passes"] <= 24
    assert report["aal"] == pytest.approx(24 / report["target_passes"])
    assert (report["seed"], report["device"], report["dtype"], report["pair"]) == (
        0,
        "cpu",
        "float32",
        "tiny",
    )
    assert set(report["stages_ms"]) >= {"prefill", "policy", "draft", "prune", "verify", "accept", "commit"}
    assert report["finish_reason"] == "length"
    assert report["text"].startswith(" there was a")
    assert "measured_speedup" not in report  # nothing of this run measures plain decoding


def test_a_loaded_pair_compiles_nothing_in_a_fresh_process(ygg_home: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "yggdrasil",
            "generate",
            PROMPT,
            "--pair",
            "tiny",
            "--max-new-tokens",
            "7",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["compilations"] == 0
    assert done.stderr == ""


def test_collections_pass_over_the_loaded_pair_while_text_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            frozen.append(gc.get_freeze_count())
            return super().write(text)

    monkeypatch.setattr("sys.stdout", Screen())
    before = gc.get_freeze_count()
    assert main(["generate", PROMPT, "--pair", "tiny", "--max-new-tokens", "8"]) == 0
    assert min(frozen) > before
    assert gc.get_freeze_count() == 0


def test_the_heap_is_thawed_where_bindings_count_what_is_left_at_the_end(ygg_home: Path) -> None:
    words = ["generate", PROMPT, "--pair", "tiny", "--max-new-tokens", "7"]
    script = f"import sys, triton; from yggdrasil.cli import main; sys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_plain_gives_the_same_tokens(capsys: Capture) -> None:
    report = generate(capsys, "--plain", "--ignore-eos")
    assert report["token_ids"] == generate(capsys, "--ignore-eos")["token_ids"]
    assert (report["speculation"], report["target_passes"], report["aal"]) == ("off", 24, 1.0)


def test_the_same_seed_writes_the_same_text(capsys: Capture) -> None:
    options = ("--temperature", "1.0", "--top-p", "0.95", "--ignore-eos")
    first, second, other = (
        generate(capsys, *options, "--seed", seed)["token_ids"] for seed in ("3", "3", "4")
    )
    assert first == second != other
    assert generate(capsys, *options, "--seed", "3", "--plain")["token_ids"] == first


def test_text_streams_to_stdout_and_nothing_else(capsys: Capture, quiet: None) -> None:
    text = generate(capsys)["text"]
    assert main(["generate", PROMPT, "--pair", "tiny", "--max-new-tokens", "24"]) == 0
    assert capsys.readouterr() == (f"{text}\n", "")


def test_stats_and_trees_go_to_stderr(capsys: Capture) -> None:
    text = generate(capsys)["text"]
    assert (
        main(["generate", PROMPT, "--pair", "tiny", "--max-new-tokens", "24", "--stats", "--show-tree"])
        == 0
    )
    out, err = capsys.readouterr()
    assert out == f"{text}\n"
    assert "tokens per pass" in err
    assert "the profile predicts" in err
    assert "measured" not in err
    assert " *" in err


def test_stop_ends_the_text_before_it(capsys: Capture) -> None:
    text = generate(capsys)["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    report = generate(capsys, "--stop", "never said", "--stop", stop)
    assert report["text"] == text[: text.index(stop)]
    assert report["finish_reason"] == "stop"


def test_a_dash_reads_the_prompt_from_stdin(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generate(capsys)["token_ids"]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main(["generate", "-", "--pair", "tiny", "--max-new-tokens", "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == expected


def test_unquoted_words_are_one_prompt(capsys: Capture) -> None:
    expected = generate(capsys)["token_ids"]
    for words in (
        ("Once", "upon", "a", "time", "--pair", "tiny"),
        ("--pair", "tiny", *PROMPT.split()),
        ("Once", "upon", "--pair", "tiny", "a", "time"),
    ):
        assert main(["generate", "--json", *words, "-n", "24"]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == expected


@pytest.mark.parametrize("option", ("-n", "--max-tokens", "--max-new-tokens"))
def test_the_limit_has_the_names_that_others_give_it(option: str, capsys: Capture) -> None:
    assert main(["generate", PROMPT, "--pair", "tiny", option, "3", "--json", "--ignore-eos"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 3


def test_steps_that_take_several_times_their_profile_are_noted_on_stderr(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "slowdown", 2.9)
    report = generate(capsys)
    monkeypatch.setattr(Run, "slowdown", 3.4)
    assert main(["generate", PROMPT, "--pair", "tiny", "-n", "24", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["text"] == report["text"]
    assert re.fullmatch(
        r"ygg generate: the machine is busy: steps took 3\.4 times .*; "
        r"end other programs, .*: ygg compile .*\n",
        err,
    )


def test_a_usual_pace_is_not_noted(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for slowdown in (2.9, None):
        monkeypatch.setattr(Run, "slowdown", slowdown)
        generate(capsys)
        assert main(["generate", PROMPT, "--pair", "tiny", "-n", "8"]) == 0
        assert capsys.readouterr().err == ""


def test_bare_ygg_shows_help_and_that_is_no_error(capsys: Capture) -> None:
    """As docker, cargo and gh do: nothing that was asked for failed. (git exits with 1.)"""
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert "ygg generate" in out
    assert err == ""


def test_version_is_the_package_s(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"ygg {yggdrasil.__version__}\n"


@pytest.mark.parametrize(
    ("words", "verb", "complaint"),
    [
        (
            "generate x --tempurature 1",
            "ygg generate",
            "there is no option --tempurature; did you mean --temperature?",
        ),
        ("generate x --temp 1", "ygg generate", "there is no option --temp; did you mean --temperature?"),
        (
            "generate x --max-new 3",
            "ygg generate",
            "there is no option --max-new; did you mean --max-new-tokens?",
        ),
        ("generate x --jsn=1", "ygg generate", "there is no option --jsn; did you mean --json?"),
        ("generate x -n many", "ygg generate", "--max-new-tokens: 'many' is not a whole number"),
        ("generate x --top-p much", "ygg generate", "--top-p: 'much' is not a number"),
        ("generate x --seed", "ygg generate", "--seed: a value is missing"),
        ("compile a b c", "ygg compile", "'c' is one too many"),
        ("show", "ygg show", "an argument is missing: what$"),
        ("show plans", "ygg show", "'plans' is none of pair, profile, plan, .*; did you mean plan?"),
        ("serve tiny", "ygg serve", "'tiny' is one too many; did you mean --pair tiny?"),
        ("serve --prot 1", "ygg serve", "there is no option --prot; did you mean --port?"),
        ("serve --name tiny", "ygg serve", "there is no option --name; did you mean --pair?"),
        ("generate x --model m", "ygg generate", "there is no option --model; did you mean --pair?"),
        ("generat x", "ygg", "'generat' is none of .*; did you mean generate?"),
    ],
)
def test_a_wrong_command_line_shows_usage_and_the_nearest_word(
    words: str, verb: str, complaint: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"usage: {verb} [")
    assert re.search(complaint.replace("?", r"\?"), lines[-1])
    assert lines[-1].startswith(f"{verb}: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--draft", "b"), "--target is missing: ygg generate --target TARGET --draft b"),
        (("--target", "a"), "tokenizer: 'a' is not allowed"),
        (("--target", "a", "--draft", "none"), "tokenizer: 'a' is not allowed"),
    ],
)
def test_a_draft_without_a_target_is_refused_and_a_target_alone_is_read(
    arguments: tuple[str, ...], complaint: str, capfd: Capture
) -> None:
    assert complaint in refused(capfd, "generate", PROMPT, *arguments)


def test_names_of_models_are_checked_before_anything_is_looked_up_on_the_hub(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up on a hub that does not answer is tried again and again."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("yggdrasil.models.hub._hub_answers", lambda: False)
    refused(capfd, "generate", PROMPT, "--target", "a")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-n", "100000"), "--max-new-tokens: 100000 .*at most 4"),
        (("--predictor", "poems"), "--predictor: 'poems' is not allowed; it must be stories"),
        (("--temperature", "nan"), "--temperature: nan"),
        (("word " * 600,), r"prompt: '\d+ tokens' .*shorter than the context of 4"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_compiled(
    arguments: tuple[str, ...],
    complaint: str,
    llama_folders: tuple[str, str],
    capfd: Capture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    monkeypatch.setattr(pipeline, "compile_pair", lambda *args, **kwargs: pytest.fail("compiles"))
    monkeypatch.setattr(
        "yggdrasil.offline.on_demand.bundled_models", lambda: tuple(map(Path, llama_folders))
    )
    target = ("--target", llama_folders[0])
    for models in ((), target, (*target, "--draft", llama_folders[1])):
        assert re.search(complaint, refused(capfd, "generate", PROMPT, *models, *arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_calibration_file_is_refused_before_models_are_read(
    llama_folders: tuple[str, str], capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "describe_pair", lambda *args: pytest.fail("reads the models"))
    assert "--calibration: " in refused(
        capfd, "compile", *llama_folders, "--name", "x", "--calibration", str(tmp_path / "no.txt")
    )


@pytest.mark.parametrize("words", ((b"caf\xe9",), (b"fine", b"\xff"), (b"-",)))
@pytest.mark.parametrize("verb", ("generate", "show tree"))
def test_a_prompt_that_is_no_text_is_one_line(verb: str, words: tuple[bytes, ...], ygg_home: Path) -> None:
    command = [sys.executable, "-m", "yggdrasil", *verb.split(), "--pair", "tiny", *words]
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.fullmatch(
        rb"ygg \w+: prompt: b'\\x(e9|ff)' is not allowed; it must be text in UTF-8, which byte \d is not\n",
        done.stderr,
    )


def shell(script: str) -> tuple[int, str, str]:
    """Exit code of `ygg`, standard output and standard error of a shell line."""
    ygg = f"{shlex.quote(sys.executable)} -m yggdrasil"
    done = subprocess.run(
        ["bash", "-c", script.replace("ygg", ygg) + "; exit ${PIPESTATUS[0]}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "command",
    (f"generate {PROMPT} --pair tiny -n 200 --ignore-eos", "show pair --pair tiny", "--help", "--version"),
)
def test_a_reader_that_goes_away_is_no_error(command: str, ygg_home: Path) -> None:
    assert shell(f"ygg {command} | head -c 0") == (0, "", "")


@pytest.mark.parametrize("buffered", (True, False))
def test_standard_output_that_cannot_be_written_is_one_line(
    buffered: bool, ygg_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "" if buffered else "1")
    for command in (
        f"generate {PROMPT} --pair tiny -n 8",
        f"generate {PROMPT} --pair tiny -n 8 --json",
        "show pair --pair tiny",
        "--version",
    ):
        code, out, err = shell(f"ygg {command} >&-")
        assert (code, out) == (2, "")
        assert re.fullmatch("ygg: standard output is closed; .*\n", err)
        if Path("/dev/full").exists():
            code, out, err = shell(f"ygg {command} > /dev/full")
            assert (code, out) == (2, "")
            assert re.fullmatch("ygg.*: standard output cannot be written .*\n", err)


@pytest.mark.parametrize("where", ("2>&-", "2> >(exit)", "2> /dev/full"))
def test_messages_that_cannot_be_written_change_neither_text_nor_exit_code(
    where: str, ygg_home: Path
) -> None:
    command = f"ygg generate {PROMPT} --pair tiny -n 8 --show-tree --stats"
    code, text, _ = shell(command)
    assert shell(f"{command} {where}") == (code, text, "")
    assert code == 0
    assert shell(f"ygg generate {PROMPT} --pair tiny -n 0 {where}") == (2, "", "")


def test_standard_input_that_is_closed_is_empty(ygg_home: Path) -> None:
    code, out, err = shell("ygg generate - --pair tiny <&-")
    assert (code, out) == (2, "")
    assert re.fullmatch("ygg generate: the prompt is empty: .*\n", err)
    code, out, _ = shell("ygg chat --pair tiny <&-")
    assert (code, out) == (0, "")


@pytest.mark.parametrize("command", ("generate -", "show tree -", "chat"))
def test_standard_input_that_cannot_be_read_is_one_line(command: str, ygg_home: Path) -> None:
    code, out, err = shell(f"ygg {command} --pair tiny 0> /dev/null")
    assert (code, out) == (2, "")
    assert re.search("ygg .*: standard input cannot be read .bad file descriptor.: .*\n$", err)
    assert "Traceback" not in err


def test_text_is_written_in_utf_8_whatever_the_locale(ygg_home: Path, capsys: Capture) -> None:
    text = generate(capsys, "--temperature", "2", "--seed", "5", "--ignore-eos")["text"]
    assert not text.isascii()
    options = ["--pair", "tiny", "-n", "24", "--temperature", "2", "--seed", "5", "--ignore-eos"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "yggdrasil", "generate", PROMPT, *options],
        capture_output=True,
        env=environment,
        check=True,
    )
    assert done.stdout.decode() == f"{text}\n"


SHOWN = {
    "pair": (["target graphs [2, 4, 8, 16, 32]", "predicted speedup"], []),
    "profile": (["context  tokens", "tiny-latency.png"], ["tiny-acceptance.png", "tiny-latency.png"]),
    "plan": (["plan of an iteration", "sequential", "tiny-plan.png"], ["tiny-plan.png"]),
    "predictor": (
        ["depth predictor (stories)", "the constant at", "growth that stops", "tiny-stories-predictor.png"],
        ["tiny-stories-predictor.png"],
    ),
    "step": (["[verify ", "tiny-step.png"], ["tiny-step.png"]),
    "tree": (["drafted", "*"], []),
}


@pytest.mark.parametrize("what", SHOWN)
def test_show_prints_and_writes_pngs_to_out(what: str, capsys: Capture, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path)] if SHOWN[what][1] else []
    assert main(["show", what, "--pair", "tiny", *options]) == 0
    out = capsys.readouterr().out
    expected, images = SHOWN[what]
    for words in expected:
        assert words in out
    assert sorted(path.name for path in tmp_path.iterdir()) == images
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in images)


def test_everything_that_show_has_is_shown_here(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    assert f"{{{','.join(SHOWN)}}}" in capsys.readouterr().out


def refused(capture: Capture, *arguments: str) -> str:
    """The one line on standard error of a run that exits with 2 and prints nothing."""
    capture.readouterr()
    assert main(arguments) == 2
    out, err = capture.readouterr()
    assert out == ""
    # a busy machine shows the phase of the checks first
    lines = [line for line in err.splitlines(keepends=True) if not line.startswith("check the pair")]
    assert len(lines) == 1, err
    assert lines[0].endswith("\n")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--temperature", "-1"), "--temperature: -1.0"),
        (("--temperature", "nan"), "--temperature: nan"),
        (("--top-p", "0"), "--top-p: 0.0"),
        (("--top-p", "nan"), "--top-p: nan"),
        (("--top-k", "-1"), "--top-k: -1"),
        (("--min-p", "-0.1"), "--min-p: -0.1"),
        (("--min-p", "nan"), "--min-p: nan"),
        (("--seed", "-1"), "--seed: -1"),
        (("--max-new-tokens", "0"), "--max-new-tokens: 0"),
        (("--max-tokens", "-5"), "--max-new-tokens: -5"),
        (("-n", "9999"), "--max-new-tokens: 9999 .*at most .*256"),
        (("--stop", ""), "--stop: "),
        (("--stop", "\udcff"), "--stop: .*text in UTF-8"),
        (("--ban", "\udcff"), "--ban: .*text in UTF-8"),
        (("--ban", ""), "--ban: '' is not allowed; it must be a text that is not empty"),
        (("--regex", "\udcff"), "--regex: "),
        (("--choice", "\udcff"), "--choice: "),
        (("--min-tokens", "9" * 30), "--min-tokens: 9"),
        (
            ("--target", "a"),
            "--pair cannot be combined with --target and --draft: ygg generate --pair tiny",
        ),
        (("--target", "a", "--draft", "b"), "--pair cannot be combined with --target and --draft"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], complaint: str, capfd: Capture
) -> None:
    assert re.search(complaint, refused(capfd, "generate", PROMPT, "--pair", "tiny", *arguments))


def test_a_prompt_that_is_missing_or_too_long_is_one_line(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "a prompt is missing: ygg generate" in refused(capfd, "generate", "--pair", "tiny")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "the prompt is empty" in refused(capfd, "generate", "-", "--pair", "tiny")
    line = refused(capfd, "show", "tree", "", "--pair", "tiny")
    assert line.endswith('the prompt is empty: ygg show tree "Once upon a time"\n')
    assert "shorter than the context of 256 tokens" in refused(
        capfd, "generate", "fox " * 400, "--pair", "tiny"
    )


@pytest.mark.parametrize("arguments", (("generate", PROMPT), ("show", "pair")))
def test_an_unknown_pair_names_the_known_ones(arguments: tuple[str, ...], capfd: Capture) -> None:
    line = refused(capfd, *arguments, "--pair", "nobody")
    assert "no compiled pair named 'nobody'" in line
    assert "tiny" in line
    assert "ygg compile TARGET DRAFT --name nobody" in line


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", PROMPT, "--pair", ""), "no compiled pair named '' .*--name NAME`"),
        (
            ("generate", PROMPT, "--pair", "tiny", "--predictor", ""),
            "no predictor named '' .known: stories",
        ),
        (("generate", PROMPT, "--target", ""), "model: '' is not allowed; it must be a folder"),
        (("generate", PROMPT, "--target", "a", "--draft", ""), "model: '' is not allowed"),
        (("show", "pair", ""), "no compiled pair named ''"),
        (("verify", ""), "no compiled pair named ''"),
        (("compile", ""), "model: '' is not allowed"),
        (("compile", "a", "b", "--name", ""), "--name: '' is not allowed"),
    ],
    ids=str,
)
def test_an_empty_name_is_refused_and_not_the_default(
    arguments: tuple[str, ...], complaint: str, ygg_home: Path, capfd: Capture
) -> None:
    """A script passes one if its variable is not set."""
    assert re.search(complaint, refused(capfd, *arguments))


@pytest.mark.parametrize("what", ("pair", "profile", "plan", "predictor"))
def test_the_word_after_what_needs_no_prompt_is_the_pair(what: str, capfd: Capture) -> None:
    assert "no compiled pair named 'nobody'" in refused(capfd, "show", what, "nobody")
    for names in (("nobody", "else"), ("nobody", "--pair", "else")):
        assert "--pair" in refused(capfd, "show", what, *names)
    assert "ygg show " in refused(capfd, "show", what, *names)


@pytest.mark.parametrize(
    ("what", "option"),
    (
        ("pair", "--out"),
        ("tree", "--out"),
        ("step", "--html"),
        ("plan", "--temperature"),
        ("profile", "--seed"),
    ),
)
def test_show_refuses_an_option_that_would_change_nothing(
    what: str, option: str, capfd: Capture, tmp_path: Path
) -> None:
    value = "0" if option in ("--temperature", "--seed") else str(tmp_path)
    line = refused(capfd, "show", what, "--pair", "tiny", option, value)
    assert option in line
    assert "left out except for" in line


def test_show_of_the_bundled_pair_shows_how_to_compile_it(
    capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    assert refused(capfd, "show", "pair").endswith(
        "no compiled pair named 'tinystories' (known: none yet); run `ygg compile`\n"
    )


def test_show_needs_an_existing_folder(capfd: Capture, tmp_path: Path) -> None:
    assert "--out" in refused(
        capfd, "show", "profile", "--pair", "tiny", "--out", str(tmp_path / "nowhere")
    )


def test_a_search_that_measured_nothing_has_no_chart_and_shows_why(
    tiny: LoadedPair, capsys: Capture, tmp_path: Path
) -> None:
    unmeasured = replace(tiny, plan=PlanChoice(PlanSearch(0.0, 9.0), PlanSearch(1.0, 9.0)))
    show._show_plan(unmeasured, Namespace(out=tmp_path))
    out = capsys.readouterr().out
    assert "time or context did not suffice" in out
    assert "no chart" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ("profile", "plan", "predictor", "step"))
def test_a_folder_that_cannot_be_written_is_one_line_after_what_was_printed(
    what: str, tiny_bundle: Bundle, capfd: Capture
) -> None:
    assert main(["show", what, "--pair", "tiny", "--out", "/proc"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(r"--out: '/proc' is not allowed; it must be a folder that you can write", line)


def test_compile_refuses_a_wrong_folder_a_missing_tokenizer_and_another_vocabulary(
    capfd: Capture, tmp_path: Path, llama_folders: tuple[str, str], ygg_home: Path
) -> None:
    from transformers import LlamaConfig

    target, draft = llama_folders
    bare = tmp_path / "bare"
    other = tmp_path / "other"
    shutil.copytree(target, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    LlamaConfig(vocab_size=500, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        other
    )
    before = sorted(path.name for path in (ygg_home / "compile_cache").iterdir())
    assert "model: " in refused(capfd, "compile", str(tmp_path / "nowhere"), draft)
    assert "model: " in refused(capfd, "compile", target, str(tmp_path / "nowhere"))
    assert "File name too long" in refused(capfd, "compile", "a" * 300, draft)
    assert "File name too long" in refused(capfd, "compile", target, "a" * 300)
    assert "tokenizer: " in refused(capfd, "compile", str(bare), draft)
    line = refused(capfd, "compile", target, str(other), "--name", "mismatch")
    assert "384" in line
    assert "500" in line
    assert "--name: 'a/b'" in refused(capfd, "compile", target, draft, "--name", "a/b")
    assert "--calibration: " in refused(
        capfd, "compile", target, draft, "--name", "x", "--calibration", str(tmp_path / "no.txt")
    )
    assert "--max-context: 1000" in refused(
        capfd, "compile", target, draft, "--name", "x", "--max-context", "1000"
    )
    assert "--max-context: 4096" in refused(
        capfd, "compile", target, draft, "--name", "x", "--max-context", "4096"
    )
    assert sorted(path.name for path in (ygg_home / "compile_cache").iterdir()) == before


@pytest.mark.parametrize(
    "name", (None, "", ".", "..", "-x", "_x", ".hidden", "a b", "a/b", "kernels", "tinystories", "a" * 101)
)
def test_a_name_that_is_no_folder_of_its_own_is_refused_with_the_command(
    name: str | None, capfd: Capture, tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"  # where no name is given it is the folder's
    folder.mkdir()
    arguments = [] if name is None else [f"--name={name}"]
    line = refused(capfd, "compile", str(folder), "draft", *arguments)
    assert f"name: {'kernels' if name is None else name!r} is not allowed" in line
    assert line.endswith(f"; ygg compile {folder} draft --name NAME\n")


def test_the_default_name_of_a_pair_is_its_target_folder(
    llama_folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(Exception):
        pass

    def note(*args: Any, name: str, **kwargs: Any) -> None:
        raise Found(name)

    monkeypatch.setattr(pipeline, "compile_pair", note)
    # the folders are empty
    monkeypatch.setattr(request_options, "_check_uncompiled", lambda *arguments: None)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    for target in (".", "../mine/", str(tmp_path / "mine"), "org/mine"):
        with pytest.raises(Found, match="^mine$"):
            main(["compile", target, llama_folders[1]])
        with pytest.raises(Found, match="^mine$"):
            main(["compile", target])
        with pytest.raises(Found, match="^mine-draft-int8$"):
            main(["compile", target, "--draft-weights", "int8"])
        with pytest.raises(Found, match="^mine-int8-draft-int4$"):
            main(["compile", target, llama_folders[1], "--weights", "int8", "--draft-weights", "int4"])
    with pytest.raises(Found, match="^tinystories-int4$"):
        main(["compile", "--weights", "int4"])
    (tmp_path / ".my models").mkdir()
    with pytest.raises(Found, match="^my-models-[0-9a-f]{12}$"):
        main(["generate", "x", "--target", "../.my models", "--draft", llama_folders[1]])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--draft-layers", "0"), "--draft-layers: 0 is not allowed; it must be at least 1"),
        (("--draft-layers", "3"), "--draft-layers: 3 .* at most 2, the layers of the target"),
        (("--weights", "int4", "--draft-weights", "int8"), "--draft-weights: 'int8' .*the target's, int4"),
        (("--weights", "int4", "--draft-layers", "2"), "--draft-layers: 2 .* from 1 to 1"),
    ],
)
def test_a_draft_that_cannot_be_made_from_the_target_is_refused_in_one_line(
    arguments: tuple[str, ...], complaint: str, llama_folders: tuple[str, str], capfd: Capture
) -> None:
    assert re.search(complaint, refused(capfd, "compile", llama_folders[0], "--name", "x", *arguments))


def test_layers_of_a_given_draft_are_not_dropped(llama_folders: tuple[str, str], capfd: Capture) -> None:
    line = refused(capfd, "compile", *llama_folders, "--name", "x", "--draft-layers", "1")
    assert "--draft-layers: 1 is not allowed; it must be left out where a draft is given" in line


def test_a_name_without_models_is_refused(capfd: Capture) -> None:
    assert "ygg compile TARGET DRAFT --name mine" in refused(capfd, "compile", "--name", "mine")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    payload = json.loads(path.read_text())
    del payload[artifacts.SEAL]  # what else reads it is to notice
    change(payload)
    save_json(path, payload)


def snapshot(root: Path) -> dict[str, str]:
    """Digests by path, but of what only remembers when files were read."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "verified.json"]
    return {str(path.relative_to(root)): digest_file(path) for path in files}


def predictor_file(bundle: Bundle, name: str) -> Path:
    return bundle.predictor_folder(bundle.dataset) / name


NO_TRIAL = {
    "plan": {"name": "none", "placements": [{"stage": "verify", "resource": "main"}]},
    "gain95": None,
}
DAMAGES: dict[str, tuple[Callable[[Bundle], None], str]] = {
    "truncated bundle.json": (
        lambda bundle: truncate(bundle.folder / "bundle.json"),
        "bundle.json: corrupt",
    ),
    "bundle.json without a field": (
        lambda bundle: edit(bundle.folder / "bundle.json", lambda payload: payload.pop("kv_draft")),
        "bundle.json: corrupt .'kv_draft'",
    ),
    "bundle.json with an unknown option": (
        lambda bundle: edit(
            bundle.folder / "bundle.json", lambda payload: payload["config"].update(speed=9)
        ),
        "bundle.json: corrupt .*'speed'",
    ),
    "foreign processor": (
        lambda bundle: edit(
            bundle.folder / "bundle.json", lambda payload: payload["machine"].update(cpu_flags="sparc")
        ),
        "bundle.json: stale: cpu_flags was 'sparc' and is now",
    ),
    "foreign torch": (
        lambda bundle: edit(
            bundle.folder / "bundle.json", lambda payload: payload["machine"].update(torch="1.0")
        ),
        "stale: torch was '1.0'",
    ),
    "truncated current.json": (
        lambda bundle: truncate(bundle.folder.parent / "current.json"),
        "current.json: corrupt",
    ),
    "bundle gone": (lambda bundle: shutil.rmtree(bundle.folder), "bundle.json: missing"),
    "truncated weights": (
        lambda bundle: truncate(bundle.folder / "target" / "weights.safetensors"),
        "weights.safetensors: corrupt",
    ),
    "missing weights": (
        lambda bundle: (bundle.folder / "draft" / "weights.safetensors").unlink(),
        "weights.safetensors: missing",
    ),
    "truncated graph": (
        lambda bundle: truncate(bundle.folder / "target" / "tokens_4.pt2"),
        r"tokens_4\.pt2: corrupt",
    ),
    "missing graph": (
        lambda bundle: (bundle.folder / "draft" / "tokens_4.pt2").unlink(),
        r"tokens_4\.pt2: ",
    ),
    "missing tokenizer": (
        lambda bundle: (bundle.folder / "tokenizer.json").unlink(),
        "tokenizer.json: missing;",
    ),
    "truncated profile": (lambda bundle: truncate(bundle.profile_path), r"\.json: corrupt"),
    "profile of another compilation": (
        lambda bundle: edit(bundle.profile_path, lambda payload: payload.update(fingerprint="0" * 12)),
        "stale: measured for",
    ),
    "calibration without a table": (
        lambda bundle: edit(
            predictor_file(bundle, "acceptance.json"), lambda payload: payload.pop("by_temperature")
        ),
        "acceptance.json: corrupt",
    ),
    "truncated plan": (lambda bundle: truncate(bundle.plan_path), r"-plan\.json: corrupt"),
    "plan of another compilation": (
        lambda bundle: edit(bundle.plan_path, lambda payload: payload.update(fingerprint="0" * 12)),
        "stale: measured for",
    ),
    "plan that is none": (
        lambda bundle: edit(bundle.plan_path, lambda payload: payload["greedy"].update(trial=NO_TRIAL)),
        r"-plan\.json: corrupt .*placements of draft",
    ),
    "plan of the former format": (
        lambda bundle: edit(bundle.plan_path, lambda payload: payload.pop("format")),
        r"-plan\.json: stale: written in format 1, current is 4",
    ),
    "predictor of another compilation": (
        lambda bundle: edit(
            predictor_file(bundle, "predictor.json"), lambda payload: payload.update(fingerprint="0" * 12)
        ),
        "predictor.json: stale: measured for fingerprint 000000000000",
    ),
    "predictor of the former format": (
        lambda bundle: edit(
            predictor_file(bundle, "predictor.json"), lambda payload: payload.pop("format")
        ),
        f"predictor.json: stale: written in format 1, current is {PREDICTOR_FORMAT}",
    ),
    "predictor without its weights": (
        lambda bundle: predictor_file(bundle, "predictor.safetensors").unlink(),
        "predictor.json: corrupt .predictor.safetensors",
    ),
    "truncated predictor weights": (
        lambda bundle: truncate(predictor_file(bundle, "predictor.safetensors")),
        "predictor.json: corrupt .predictor.safetensors was not written together with it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artifact_is_one_line_with_a_command_and_no_file_changes(
    damage: str, copied: Path, capfd: Capture
) -> None:
    bundle = load_bundle("tiny")
    assert bundle.folder.is_relative_to(copied)
    inflict, complaint = DAMAGES[damage]
    inflict(bundle)
    before = snapshot(copied)
    line = refused(capfd, "generate", PROMPT, "--pair", "tiny")
    assert re.search(complaint, line), line
    assert "; run `ygg compile " in line
    assert snapshot(copied) == before


def test_notes_on_a_pair_are_shown_and_printed_by_compile(
    copied: Path, llama_folders: tuple[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = replace(load_bundle("tiny"), notes=("one thing", "another"))
    noted.save()
    assert main(["show", "pair", "--pair", "tiny"]) == 0
    assert "  note: one thing\n  note: another\n" in capsys.readouterr().out
    monkeypatch.setattr(pipeline, "compile_pair", lambda *models, **options: noted)
    assert main(["compile", *llama_folders, "--name", "tiny"]) == 0
    err = capsys.readouterr().err
    assert "ygg compile: note: one thing\nygg compile: note: another\n" in err


def test_an_unsupported_model_is_refused_by_name_and_leaves_no_pair(
    ygg_home: Path, capfd: Capture, tmp_path: Path
) -> None:
    import transformers as t

    sizes = {
        "vocab_size": tiny_pair.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    t.DiffLlamaForCausalLM(t.DiffLlamaConfig(**sizes, num_key_value_heads=2)).save_pretrained(
        tmp_path / "diff"
    )
    tiny_pair.save_tokenizer(tmp_path / "diff")
    assert main(["compile", str(tmp_path / "diff"), str(tmp_path / "diff"), "--name", "diff"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]  # after the phases that went well
    assert (
        "DiffLlamaForCausalLM, whose layer 0 asks for attention 2 times in a forward, is not supported"
        in line
    )
    assert [
        path.name
        for path in (ygg_home / "compile_cache" / "diff").rglob("*")
        if path.suffix in (".safetensors", ".pt2")
    ] == []


def test_weights_that_changed_since_compilation_are_stale(
    copied: Path, capfd: Capture, tmp_path: Path
) -> None:
    changed = tmp_path / "model.safetensors"
    changed.write_bytes(b"other weights")
    edit(
        load_bundle("tiny").folder / "bundle.json",
        lambda payload: payload["sources"][0].update(path=str(changed)),
    )
    assert re.search(
        "stale: .*model.safetensors has changed", refused(capfd, "generate", PROMPT, "--pair", "tiny")
    )


def test_sources_that_are_gone_do_not_matter(copied: Path, capsys: Capture, tmp_path: Path) -> None:
    edit(
        load_bundle("tiny").folder / "bundle.json",
        lambda payload: [source.update(path=str(tmp_path / "gone")) for source in payload["sources"]],
    )
    generate(capsys)


def test_compiling_again_builds_only_missing_or_damaged_files(
    copied: Path, llama_folders: tuple[str, str], capsys: Capture
) -> None:
    folder = load_bundle("tiny").folder
    before = compilations()
    kept = {name: digest for name, digest in snapshot(folder).items() if name != "bundle.json"}
    (folder / "bundle.json").unlink()
    truncate(folder / "draft" / "tokens_4.pt2")
    calibration = tiny_pair.save_calibration(copied / "stories.txt")
    again = compile_pair(
        *llama_folders,
        name="tiny",
        config=TINY,
        calibration=calibration,
        progress=tiny_pair.SilentProgress(),
    )
    assert again.folder == folder
    assert compilations() == before + 1
    graph = "draft/tokens_4.pt2"
    assert {
        name: digest for name, digest in snapshot(folder).items() if name not in ("bundle.json", graph)
    } == {name: digest for name, digest in kept.items() if name != graph}
    assert len(load_models(again)) == 2
    generate(capsys)


def test_outdated_builds_are_removed_after_the_new_one_is_complete(
    copied: Path, llama_folders: tuple[str, str], capsys: Capture
) -> None:
    folder = load_bundle("tiny").folder
    other_options, other_torch, other_processor = (
        shutil.copytree(folder, folder.with_name(name)) for name in ("0" * 12, "1" * 12, "2" * 12)
    )
    edit(other_torch / "bundle.json", lambda payload: payload["machine"].update(torch="1.0"))
    edit(
        other_processor / "bundle.json",
        lambda payload: payload["machine"].update(torch="1.0", cpu_flags="sparc"),
    )
    calibration = tiny_pair.save_calibration(copied / "stories.txt")
    progress = Phases()
    compile_pair(*llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress)
    assert {path for path in folder.parent.iterdir() if path.is_dir()} == {
        folder,
        other_options,
        other_processor,
    }
    assert progress.names[-1] == "remove outdated builds"
    generate(capsys)


def test_an_interrupt_after_the_verb_prints_no_traceback() -> None:
    script = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
atexit.register(lambda: print("ended"))
atexit.register(os.kill, os.getpid(), signal.SIGINT)
from yggdrasil.cli import main
sys.exit(main(["list"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("ended\n")
    assert not done.stderr


@pytest.mark.parametrize("is_imported", (False, True), ids=("run", "imported"))
def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path, is_imported: bool) -> None:
    """Not for that of the module that began the verb: it ends after the verb."""
    module = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); whole = 1"
    (tmp_path / "interrupted.py").write_text(module)
    script = """
import signal, time
from yggdrasil.cli.interrupt import between_imports
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
try:
    with between_imports():
        import interrupted
        print(interrupted.whole)
        time.sleep(60)
except KeyboardInterrupt:
    print("ended")
"""
    (tmp_path / "verb.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", "import verb" if is_imported else script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=50)
    assert done.stdout.split() == ["1", "ended"]


def test_an_interrupted_recompilation_leaves_the_pair_that_was_there(
    copied: Path, llama_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    old = load_bundle("tiny")
    calibration = tiny_pair.save_calibration(copied / "stories.txt")
    monkeypatch.setattr(inputs, "machine_fields", lambda: {**old.machine, "torch": "the next one"})
    new = inputs.describe_pair(*llama_folders, "tiny", TINY, calibration)
    shutil.copytree(old.folder, new.folder)  # its graphs are built: what is left is to measure
    before = snapshot(copied)

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "fit_predictor", interrupt)  # in the last phase
    with pytest.raises(KeyboardInterrupt):
        compile_pair(
            *llama_folders,
            name="tiny",
            config=TINY,
            calibration=calibration,
            progress=tiny_pair.SilentProgress(),
        )
    assert {name: digest for name, digest in snapshot(copied).items() if name in before} == before
    generate(capsys)


class Phases(tiny_pair.SilentProgress):
    """Notes what is reported; runs `meanwhile` when a compilation begins to wait for another."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.names: list[str] = []
        self._meanwhile = meanwhile

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        self.names.append(name)
        if name == "wait for another run":
            self._meanwhile()
        yield


@contextmanager
def held(home: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that compiles the pair: it has the lock until its standard input is closed."""
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    path = home / "compile_cache" / "tiny" / artifacts.LOCK_NAME
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_compilation_waits_for_the_first_and_takes_its_result(
    copied: Path, calibration: Path, llama_folders: tuple[str, str]
) -> None:
    with held(copied) as other:
        assert other.stdin is not None
        progress = Phases(meanwhile=other.stdin.close)
        found = compile_pair(
            *llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress
        )
    assert progress.names == ["check the pair", "wait for another run"]
    assert found == load_bundle("tiny")


def test_a_second_compilation_goes_on_where_the_first_broke_off(
    copied: Path, calibration: Path, llama_folders: tuple[str, str]
) -> None:
    (load_bundle("tiny").folder / "bundle.json").unlink()
    with held(copied) as other:
        assert other.stdin is not None
        progress = Phases(meanwhile=other.stdin.close)
        found = compile_pair(
            *llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress
        )
    assert progress.names[:3] == ["check the pair", "wait for another run", "compile operators"]
    assert found == load_bundle("tiny")


def test_a_single_compilation_does_not_wait(
    copied: Path, calibration: Path, llama_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Phases()
    monkeypatch.setattr(pipeline, "_compile", lambda bundle, texts, num_workers, progress: bundle)
    compile_pair(*llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress)
    compile_pair(*llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress)
    assert progress.names == 2 * ["check the pair"]


def test_another_calibration_text_gives_another_predictor_of_the_same_graphs(
    copied: Path, llama_folders: tuple[str, str], capsys: Capture
) -> None:
    before = load_bundle("tiny")
    built = compilations()
    other = copied / "other.txt"
    other.write_text(
        "\n\n".join(reversed(tiny_pair.save_calibration(copied / "stories.txt").read_text().split("\n\n")))
    )
    again = compile_pair(
        *llama_folders, name="tiny", config=TINY, calibration=other, progress=tiny_pair.SilentProgress()
    )
    assert again.folder == before.folder
    assert compilations() == built
    assert again.datasets == ["other", "stories"]
    assert load_pair("tiny").dataset == "other"
    assert load_pair("tiny", dataset="stories").dataset == "stories"
    generate(capsys, "--predictor", "stories")


def test_every_phase_advances_and_never_past_its_total(
    copied: Path, calibration: Path, llama_folders: tuple[str, str]
) -> None:
    progress = tiny_pair.CountedProgress()
    compile_pair(*llama_folders, name="tiny", config=TINY, calibration=calibration, progress=progress)
    counted = {name for name, total in progress.totals.items() if total > 1}
    assert {
        "check the pair",
        "check exactness",
        "write texts",
        "draft trees",
        "measure latencies",
        "measure the host",
        "train depth predictor",
    } < counted
    for name in counted:
        assert 0 < progress.done[name] <= progress.totals[name], name
    assert progress.done["write texts"] == progress.totals["write texts"]
    assert progress.done["draft trees"] == progress.totals["draft trees"]


@pytest.mark.parametrize("budget", ("0", "-5", "nan"))
def test_a_calibration_without_a_budget_is_refused_before_it_begins(budget: str, capfd: Capture) -> None:
    assert f"--calibration-budget: {float(budget)}" in refused(
        capfd, "compile", "--calibration-budget", budget
    )


def test_an_unknown_predictor_is_refused_with_the_known_ones(copied: Path, capfd: Capture) -> None:
    line = refused(capfd, "generate", PROMPT, "--pair", "tiny", "--predictor", "poems")
    assert "no predictor named 'poems' (known: stories)" in line
    assert "--calibration poems.txt" in line


@pytest.fixture
def threads_restored() -> Iterator[None]:
    """For tests that set the process's number of threads."""
    before = yggdrasil.get_num_threads()
    yield
    yggdrasil.set_num_threads(before)


@pytest.mark.usefixtures("threads_restored")
def test_the_number_of_threads_changes_no_text_and_a_different_one_is_noted(
    tiny_bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for count in ("1", "3"):
        assert main(["generate", PROMPT, "--pair", "tiny", "-n", "24", "--threads", count]) == 0
        assert yggdrasil.get_num_threads() == int(count)
        shown = capfd.readouterr()
        texts.append(shown.out)
        assert ("the pair was measured with --threads 1, this run has 3" in shown.err) == (count == "3")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("verb", (["generate", PROMPT], ["serve"]))
@pytest.mark.parametrize("count", ("0", "1000"))
def test_a_number_of_threads_that_cannot_be_is_refused(
    tiny_bundle: Bundle, capfd: pytest.CaptureFixture[str], verb: list[str], count: str
) -> None:
    line = refused(capfd, *verb, "--pair", "tiny", "--threads", count)
    assert f"--threads: {count} is not allowed; it must be from 1 to 256" in line
