"""A target alone: with a draft made from it, or with what repeats, it writes plain decoding's text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALLEST, compiled
from plain_texts import SAMPLED, assert_equal_to_plain

from yggdrasil import loading
from yggdrasil.api import Pair, load_pair
from yggdrasil.bundle import read_bundle
from yggdrasil.cli import main
from yggdrasil.cli.compile import _config
from yggdrasil.cli.main import _parser
from yggdrasil.compiler.weights import FILE_NAME
from yggdrasil.config import AUTO, GenerateConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.shape import REPEATS, ShapePolicy
from yggdrasil.report.run import Run
from yggdrasil.state import Row, Shape, StepResult
from yggdrasil.step.choice import VERIFY_ALL, Calibration, Choice
from yggdrasil.step.rows import StepOverRows
from yggdrasil.trace import Trace

REPEATING = "The red fox ran. The owl saw the fox. The red fox ran. The owl"
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"draft_layers": 1, "weights": "int4"})


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def pair(
    request: pytest.FixtureRequest, ygg_home: Path, llama_folders: tuple[str, str], kernels: None
) -> LoadedPair:
    """The Llama target in bfloat16 with a draft made from it and the smallest menu."""
    config = replace(SMALLEST, **{"draft_weights": AUTO, **request.param})
    name = "-".join(["alone", *map(str, request.param.values())])
    compiled(ygg_home, name, llama_folders[:1], config)
    return load_pair(name)


@pytest.mark.parametrize("sampling", (SamplingConfig(), SAMPLED), ids=("greedy", "sampled"))
def test_speculation_with_a_draft_made_from_the_target_writes_what_plain_decoding_writes(
    pair: LoadedPair, sampling: SamplingConfig
) -> None:
    assert_equal_to_plain(pair, sampling)


def test_the_bundle_has_the_choice_and_the_cache_of_the_kept_layers(pair: LoadedPair) -> None:
    bundle = read_bundle(pair.bundle.name)
    own = bundle.own_draft
    assert own is not None
    assert own == pair.bundle.own_draft
    assert len(bundle.models) == 1
    assert bundle.config.draft_weights == own.chosen.weights
    assert bundle.kv_draft.num_layers == len(own.chosen.layers) == bundle.config.draft_layers
    assert "made from it" in repr(pair)


def test_the_command_of_the_pair_asks_for_the_same_draft(pair: LoadedPair) -> None:
    _, *words = shlex.split(pair.bundle.command)
    options = _parser().parse_args(words)
    asked = _config(options)
    config = pair.bundle.config
    assert (options.target, options.draft) == (pair.bundle.models[0], None)
    assert (asked.weights, asked.draft_weights) == (config.weights, config.draft_weights)
    assert asked.draft_layers == config.draft_layers


def test_tensors_that_both_models_have_are_stored_once(pair: LoadedPair) -> None:
    from safetensors import safe_open

    config = pair.bundle.config
    with safe_open(pair.bundle.folder / "draft" / FILE_NAME, framework="pt") as file:
        stored = set(file.keys())
    draft = pair.engine.draft.weights
    assert "model.model.embed_tokens.weight" not in stored
    assert torch.equal(
        draft["model.model.embed_tokens.weight"],
        pair.engine.target.weights["model.model.embed_tokens.weight"],
    )
    has_own = {name for name in stored if name.endswith(".packed")}
    assert bool(has_own) == (config.weights != config.draft_weights)


def test_what_repeats_is_verified_without_a_forward_of_the_draft(pair: LoadedPair) -> None:
    prompt = pair.tokenizer.encode(REPEATING)
    draft = pair.engine.draft
    for sampling in (SamplingConfig(), SAMPLED):
        config = GenerateConfig(max_new_tokens=48, ignore_eos=True, sampling=sampling)
        plain = Run(pair, prompt, replace(config, plain=True)).complete()
        before = draft.graph_ms
        for guard in (True, False):
            run = Run(pair, prompt, replace(config, draft=False), guard=guard).complete()
            assert run.tokens == plain.tokens
        assert draft.graph_ms == before
        assert max(result.verified for result in run.results) > 1
        assert {result.shape for result in run.results} == {REPEATS}


class Alternating(ShapePolicy):
    """What repeats for two steps, whose tokens the draft's KV lacks, then a tree of the draft."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.steps = 0

    def choose(self, rows: Sequence[Row]) -> Choice:
        self.steps += 1
        shape = REPEATS if self.steps % 3 else Shape(2, 3)
        return Choice((shape,), (self.calibration,), VERIFY_ALL)

    def observe(self, result: StepResult) -> None: ...


@pytest.mark.parametrize("sampling", (SamplingConfig(), SAMPLED), ids=("greedy", "sampled"))
@pytest.mark.parametrize("is_native", (True, False), ids=("native", "reference"))
def test_the_draft_catches_up_after_steps_without_it(
    pair: LoadedPair, is_native: bool, sampling: SamplingConfig
) -> None:
    models = pair.engine.target, pair.engine.draft
    engine = pair.engine
    if not is_native:
        stepper = StepOverRows(*models, Trace())
        engine = Engine(*models, max_context=pair.bundle.max_context, stepper=stepper)
    prompt = pair.tokenizer.encode(REPEATING)
    config = GenerateConfig(max_new_tokens=48, ignore_eos=True, sampling=sampling)
    plain = Run(pair, prompt, replace(config, plain=True)).complete()
    policy = Alternating(pair.acceptance.nearest(sampling.temperature).calibration)
    results = list(engine.generate(prompt, policy, config))
    assert [token for result in results for token in result.tokens] == plain.tokens
    assert any(result.accepted for result in results if result.shape == Shape(2, 3))


def test_the_command_for_several_ranks_leaves_out_what_they_cannot_share(
    pair: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "num_ranks", lambda: 2)
    with pytest.raises(ArtifactError, match="compiled for 1 process, this run has 2") as refused:
        loading.load_bundle(pair.bundle.name)
    assert "--nproc-per-node 2" in str(refused.value)
    assert "--weights" not in str(refused.value)


def test_show_and_list_describe_the_draft(pair: LoadedPair, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "pair", "--pair", pair.bundle.name]) == 0
    shown = capsys.readouterr().out
    own = pair.bundle.own_draft
    assert own is not None
    for line in ("draft made from it", *own.lines):
        assert line in shown
    assert main(["list"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if f"{pair.bundle.name} " in line]
    weights = own.chosen.weights
    assert line.endswith("made from it" if weights == "bf16" else f"made from it in {weights}")


def test_the_python_interface_generates_without_the_draft(
    ygg_home: Path, llama_folders: tuple[str, str], kernels: None
) -> None:
    compiled(ygg_home, "alone", llama_folders[:1], replace(SMALLEST, draft_weights=AUTO))
    pair: Pair = load_pair("alone")
    plain = pair.generate(REPEATING, max_new_tokens=24, plain=True)
    assert pair.generate(REPEATING, max_new_tokens=24, draft=False).tokens == plain.tokens
