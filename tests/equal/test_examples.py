"""The examples run, and their texts are the target's own."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import yggdrasil
from yggdrasil.api import Pair
from yggdrasil.config import GenerateConfig, SamplingConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.uncalibrated import plain_policy

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_policy_of_ones_own_changes_no_text(tiny: LoadedPair) -> None:
    policy = example("policy").Doubting(tiny.acceptance.nearest(0.0).calibration)
    prompt = tiny.tokenizer.encode("Once upon a time")
    config = GenerateConfig(max_new_tokens=40, ignore_eos=True)
    results = list(tiny.engine.generate(prompt, policy, config))
    plain = list(tiny.engine.generate(prompt, plain_policy(), config))
    texts = [[token for result in each for token in result.tokens] for each in (results, plain)]
    assert texts[0] == texts[1]
    assert {result.shape.width for result in results} == {1, 4}


@pytest.mark.parametrize(
    "options", ({}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_k": 9, "seed": 1}), ids=str
)
def test_the_loop_of_the_paper_writes_the_text_of_the_engine(pair: Pair, options: dict[str, Any]) -> None:
    decode = example("loop").decode
    for prompt in ("Once upon a time", "Tom", "One day Lily saw a red fox near the café."):
        tokens = decode(pair, prompt, 48, SamplingConfig(**options))
        assert tuple(tokens) == pair.generate(prompt, max_new_tokens=48, **options).tokens
        assert tuple(tokens) == pair.generate(prompt, max_new_tokens=48, plain=True, **options).tokens


def test_the_program_of_the_loop_prints_both_texts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("loop")
    monkeypatch.setattr(module, "load_pair", lambda: pair)
    module.main()
    assert capsys.readouterr().out.count(module.PROMPT) == 2


def test_the_cells_of_the_notebook_run_in_order_and_end_with_pictures(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(yggdrasil, "load_pair", lambda: tiny, raising=False)
    notebook = json.loads((EXAMPLES / "trees.ipynb").read_text())
    names: dict[str, Any] = {}
    pictures = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        *statements, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(statements, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            pictures += hasattr(shown, "_repr_svg_") and shown._repr_svg_().startswith("<svg")
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    assert pictures == 3
    assert "tokens per pass of the target" in capsys.readouterr().out
