"""README and bench/README: commands and programs run or parse, links exist, figures are the results'."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from yggdrasil.bundle import BUNDLED, Bundle
from yggdrasil.cli import main
from yggdrasil.cli.main import _parser
from yggdrasil.loading import load_bundle
from yggdrasil.offline import pipeline
from yggdrasil.store import artifacts

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BENCH_README = ROOT / "bench" / "README.md"
PORT = "8123"  # the server's port in the README
SCRIPTS = sorted(script.stem for script in (ROOT / "bench").glob("claim_*.py"))


def commands(page: Path, start: str) -> list[str]:
    """Every command in a page's code blocks that begins with `start`; continued lines are joined."""
    blocks = re.findall(
        r"^```(?:bash|sh|shell|console|text)?\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    lines = [
        line.strip().removeprefix("$ ")
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|(?!\|)|;", line)]
    return [part for part in parts if part.startswith(start)]


def verb_lines() -> list[list[str]]:
    """Arguments of every `ygg` command."""
    return [shlex.split(command, comments=True)[1:] for command in commands(README, "ygg ")]


def bench_lines() -> list[list[str]]:
    """Module and options of every `python -m bench...`."""
    return [
        shlex.split(command, comments=True)[2:]
        for page in (README, BENCH_README)
        for command in commands(page, "python -m bench.")
    ]


def parse_of(module: str, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """Run a script's `main` until it has parsed its command line."""

    class ReadError(Exception):
        """The command line is parsed."""

    def stop(*args: object) -> None:
        raise ReadError

    real = importlib.import_module("argparse").ArgumentParser.parse_args
    monkeypatch.setattr(
        "argparse.ArgumentParser.parse_args", lambda self, *args: (real(self, *args), stop())
    )
    monkeypatch.setattr(sys, "argv", [module, *options])
    loaded = importlib.import_module(module)
    main = loaded.CLAIM.main if hasattr(loaded, "CLAIM") else loaded.main
    with pytest.raises(ReadError):
        main()


def test_the_readme_shows_every_verb() -> None:
    assert {line[0] for line in verb_lines()} == {"generate", "compile", "race", "show", "serve"}


@pytest.mark.parametrize("line", verb_lines(), ids=" ".join)
def test_commands_of_the_readme_parse(line: list[str]) -> None:
    line = line[: line.index(">")] if ">" in line else line
    assert _parser().parse_args(line).verb == line[0]


def programs() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def home(
    ygg_home: Path,
    tiny_bundle: Bundle,
    llama_folders: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An artifact root and working folder in which the tiny pair has the README's names."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(ygg_home / "compile_cache" / "kernels", folder / "compile_cache" / "kernels")
    for name in ("mine", BUNDLED):
        for store in ("compile_cache", "profiles", "predictors"):
            shutil.copytree(ygg_home / store / "tiny", folder / store / name)
        stored = folder / "compile_cache" / name / tiny_bundle.folder.name / "bundle.json"
        artifacts.save_json(stored, {**artifacts.load_json(stored, ""), "name": name})
    (folder / "path" / "to").mkdir(parents=True)
    for model, path in zip(("target", "draft"), llama_folders, strict=True):
        (folder / "path" / "to" / model).symlink_to(path)
    return folder


@pytest.fixture
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`home` as the working folder; a compilation ends after its checks, because its graphs are there."""
    monkeypatch.setenv("YGG_HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.setattr(
        pipeline, "_compile", lambda bundle, texts, num_workers, progress: load_bundle(bundle.name)
    )
    return home


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[str]:
    """The port of a server that the README's command started."""
    (line,) = [line for line in verb_lines() if line[0] == "serve"]
    any_port = ["0" if word == PORT else word for word in line]
    # the tiny pair's graphs hold 16 rows
    command = [sys.executable, "-m", "yggdrasil", *any_port, "--max-batch", "16"]
    environment = {**os.environ, "YGG_HOME": str(home)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=home) as process:
        assert process.stderr is not None
        greeting = process.stderr.readline()
        found = re.search(r"on http://127\.0\.0\.1:(\d+)\n", greeting)
        try:
            assert found is not None, greeting + process.stderr.read()
            yield found[1]
        finally:
            process.terminate()
            process.communicate()


@pytest.mark.parametrize("line", [line for line in verb_lines() if line[0] != "serve"], ids=" ".join)
def test_commands_of_the_readme_run(
    line: list[str], at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but `ygg serve`, which the next test runs."""
    assert main(line) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert out.strip()
    assert all(Path(name).is_file() for name in re.findall(r"\S+\.png", out))


def test_requests_of_the_readme_are_answered_by_its_server(served: str) -> None:
    requests = re.findall(r"^curl (?:.*\\\n)*.*$", README.read_text(), flags=re.MULTILINE)
    assert requests
    for request in requests:
        done = subprocess.run(
            ["bash", "-c", request.replace(PORT, served)], capture_output=True, text=True, check=True
        )
        answer = json.loads(done.stdout)
        assert answer["choices"][0]["text"], answer


@pytest.mark.parametrize(
    "program",
    [program for program in programs() if PORT not in program],
    ids=lambda program: program.splitlines()[0],
)
def test_programs_of_the_readme_run(
    program: str, at_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(program, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", bench_lines(), ids=" ".join)
def test_scripts_that_are_shown_exist_and_take_these_options(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse_of(line[0], monkeypatch, line[1:])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_claim_can_be_rehearsed_and_print_json_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse_of(f"bench.{name}", monkeypatch, ["--quick", "--json"])


def test_an_option_that_a_script_does_not_have_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse_of("bench.claim_start", monkeypatch, ["--no-such-option"])


@pytest.mark.parametrize("page", (README, BENCH_README), ids=("README", "bench/README"))
def test_every_linked_file_exists(page: Path) -> None:
    text = page.read_text()
    inline = re.findall(r"\]\((?!https?://)([^)]+)\)", text)
    named = re.findall(r"^\[[\w-]+\]: (?!https?://)(\S+)$", text, flags=re.MULTILINE)
    images = re.findall(r'\bsrc(?:set)?="([^"]+)"', text)
    links = [link.partition("#")[0] for link in [*inline, *named, *images]]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


ARMS = {  # arms of a result by the table's name of an engine; the fastest counts
    "transformers, assisted": "transformers assisted",
    "llama.cpp, draft model": r"llama\.cpp.* draft",
    "OpenVINO GenAI, draft model": "OpenVINO speculative",
    "Yggdrasil, without speculation": "plain",
    "Yggdrasil, best chain": "chain",
    "Yggdrasil, tree (the default)": "tree",
}


def test_figures_of_the_table_are_those_of_the_linked_results() -> None:
    text = README.read_text()
    lines = re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE)
    rows = [line.replace("*", "").split(" | ") for line in lines]
    (header,) = [row for row in rows if row[0] == "engine"]
    links = [re.fullmatch(r"\[([\w-]+)\]\((bench/results/\w+\.json)\)", cell) for cell in header[1:]]
    results = [column(*link.groups()) for link in links if link]
    table = {row[0]: row[1:] for row in rows if row[0] in ARMS}
    assert table == {engine: [fastest(result, arm) for result in results] for engine, arm in ARMS.items()}


def column(title: str, path: str) -> dict[str, Any]:
    """A result, or the part of it for the format of weights that a column is named after."""
    result: dict[str, Any] = json.loads((ROOT / path).read_text())
    found: dict[str, Any] = result.get("formats", {title: result})[title]
    return found


def fastest(result: dict[str, Any], pattern: str) -> str:
    """Tokens per second of the fastest arm whose name matches, as the table writes it."""
    found = [arm["tok_per_s"] for name, arm in result["arms"].items() if re.match(pattern, name)]
    return f"{max(found):.1f}" if found else "-"


def test_every_linked_line_begins_a_definition() -> None:
    links = re.findall(r"`[\w.]*?(\w+)`\]\(([\w/.]+)#L(\d+)\)", README.read_text())
    assert links
    assert [
        link
        for link in links
        if not re.search(
            rf"(def|class) {link[0]}\b", (ROOT / link[1]).read_text().splitlines()[int(link[2]) - 1]
        )
    ] == []
