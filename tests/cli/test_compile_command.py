"""`ygg compile`: the command that messages name makes the pair that they speak of."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace

import pytest

from yggdrasil.bundle import compile_command
from yggdrasil.cli.compile import _config
from yggdrasil.cli.main import _parser
from yggdrasil.config import AUTO, CompileConfig

CHOSEN = (
    {"dtype": "float32"},
    {"compress": True},
    {"compress": False},
    {"weights": "int8"},
    {"draft_weights": "int4"},
    {"calibration_budget_s": 30.0},
    {"device": "cuda", "exact": False},
    {"weights": "int4", "draft_weights": "int8", "calibration_budget_s": 12.5},
)
WITHOUT_OPTION = {  # of the tests, or of torchrun
    *("widths", "max_depth", "verify_widths", "prefill_chunk", "num_candidates"),
    *("calibration_texts", "calibration_tokens", "ranks"),
}


ALONE = (
    {"draft_weights": AUTO},
    {"draft_weights": "bf16", "draft_layers": 3},
    {"weights": "int8", "draft_weights": "int4", "draft_layers": 6},
)


@pytest.mark.parametrize("chosen", ALONE, ids=str)
def test_the_command_of_a_target_alone_asks_for_the_same_draft(chosen: dict[str, object]) -> None:
    config = replace(CompileConfig(max_context=256), **chosen)  # type: ignore[arg-type]
    _, *words = shlex.split(compile_command("mine", ("target",), config, ""))
    options = _parser().parse_args(words)
    assert _config(options) == config
    assert (options.target, options.draft, options.name) == ("target", None, "mine")


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_the_command_of_a_pair_compiles_the_same_pair(chosen: dict[str, object]) -> None:
    config = replace(CompileConfig(max_context=256), **chosen)  # type: ignore[arg-type]
    _, *words = shlex.split(compile_command("mine", ("target", "draft"), config, "stories.txt"))
    options = _parser().parse_args(words)
    assert _config(options) == config
    assert (options.target, options.draft, options.name) == ("target", "draft", "mine")
    assert str(options.calibration) == "stories.txt"


def test_every_option_of_a_compilation_is_tried() -> None:
    tried = {name for chosen in (*CHOSEN, *ALONE) for name in chosen} | {"max_context"}
    assert {each.name for each in fields(CompileConfig)} - WITHOUT_OPTION == tried
