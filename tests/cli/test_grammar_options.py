"""Options of `ygg generate` that restrict the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from yggdrasil.cli.main import _parser, main
from yggdrasil.cli.request import request_config
from yggdrasil.config import GrammarConfig
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair

SCHEMA = {"type": "object", "properties": {"café": {"type": "integer"}}}


def grammar(*options: str) -> GrammarConfig | None:
    """The grammar of a command line."""
    return request_config(_parser().parse_args(["generate", "Once", *options])).grammar


def test_every_kind_of_grammar_is_an_option(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    rules = tmp_path / "rules.lark"
    rules.write_text('start: "a"', encoding="utf-8")
    assert grammar() is None
    assert grammar("--json-schema", str(schema)) == GrammarConfig.of("json", SCHEMA)
    assert grammar("--grammar", str(rules)) == GrammarConfig.of("grammar", 'start: "a"')
    assert grammar("--regex", "a+") == GrammarConfig.of("regex", "a+")
    assert grammar("--choice", "a", "--choice", "b") == GrammarConfig.of("choice", ["a", "b"])


def test_a_file_that_cannot_be_read_or_is_no_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="json_schema"):
        grammar("--json-schema", str(tmp_path / "missing"))
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        grammar("--grammar", str(broken))
    broken.write_text("{")
    with pytest.raises(ConfigError, match="a JSON schema"):
        grammar("--json-schema", str(broken))


def test_a_schema_that_does_not_compile_is_named_by_its_option_and_its_place(
    tiny: LoadedPair, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--json` is another option, the form of the output."""
    broken = tmp_path / "broken"
    broken.write_text('{"properties": {"a": {"type": "b"}}}')
    assert main(["generate", "Once", "--pair", tiny.bundle.name, "--json-schema", str(broken)]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("ygg generate: --json-schema: ")
    assert "(at /properties/a: " in line


def test_two_grammars_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grammar("--regex", "a", "--choice", "b")
    assert "not allowed with" in capsys.readouterr().err
