"""Text under a grammar: trees write what plain decoding writes, and it is a sentence of the grammar."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from test_exact import PROMPTS, SHAPES, decode

from yggdrasil.config import GenerateConfig, GrammarConfig, ProcessorConfig, SamplingConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ConfigError, YggError
from yggdrasil.pair import LoadedPair
from yggdrasil.state import Shape
from yggdrasil.step.processors import paths_of
from yggdrasil.step.rows import StepOverRows
from yggdrasil.text.grammar import Grammars
from yggdrasil.trace import Trace

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "old", "happy"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = """
start: item ("," item)~1..4
item: " " /[a-c]{1,3}/ | "[" start "]"
"""
GRAMMARS = {
    "schema": GrammarConfig.of("json", PERSON),
    "choice": GrammarConfig.of("choice", [" the red fox", " the old dog", ' a river\n"x"']),
    "regex": GrammarConfig.of("regex", r"( (the|a) (red|old|small) (fox|dog|owl) (and|or)){2,3} ran\."),
    "lark": GrammarConfig.of("grammar", LARK),
}


def by_stages(pair: LoadedPair) -> LoadedPair:
    """The pair with the specification of the step."""
    models = pair.engine.target, pair.engine.draft
    engine = Engine(
        *models,
        max_context=pair.bundle.max_context,
        eos_tokens=pair.bundle.eos_tokens,
        tokenizer=pair.tokenizer,
        stepper=StepOverRows(*models, Trace()),
    )
    return replace(pair, engine=engine)


def sampled(grammar: GrammarConfig, temperature: float = 0.0, **options: Any) -> SamplingConfig:
    return SamplingConfig.of({"grammar": grammar, "temperature": temperature, "seed": 3, **options})


def is_person(text: str) -> bool:
    """Whether a text is an instance of PERSON."""
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 99
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"red", "old", "happy"}
    )


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("name", GRAMMARS)
def test_trees_write_the_text_of_plain_decoding(tiny: LoadedPair, name: str, temperature: float) -> None:
    options: dict[str, Any] = {"sampling": sampled(GRAMMARS[name], temperature), "num_tokens": 220}
    for prompt in PROMPTS[:2]:
        plain = decode(tiny, prompt, None, plain=True, **options)
        for shape in SHAPES:
            assert decode(tiny, prompt, shape, **options) == plain, str(shape)
        assert decode(by_stages(tiny), prompt, SHAPES[3], **options) == plain
        assert plain[-1] in tiny.bundle.eos_tokens
        text = tiny.tokenizer.decode(plain[:-1])
        match name:
            case "schema":
                assert is_person(text)
            case "choice":
                assert text in json.loads(GRAMMARS[name].source)
            case "regex":
                assert re.fullmatch(GRAMMARS[name].source, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 7},
        {"enum": ["yes", None, 4.5]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{3}$"}]},
        {"$ref": "#/$defs/pair", "$defs": {"pair": {"properties": {"a": {"const": 1}}, "required": ["a"]}}},
    ],
    ids=str,
)
def test_an_answer_is_an_instance_of_the_schema(tiny: LoadedPair, schema: Any) -> None:
    checks: dict[str, Any] = {
        "minimum": lambda value: value in (5, 6, 7),
        "enum": lambda value: value in ("yes", None, 4.5),
        "items": lambda value: len(value) == 2 and {*map(type, value)} == {bool},
        "anyOf": lambda value: value is None or re.fullmatch("[a-f]{3}", value),
        "$ref": lambda value: not isinstance(value, dict) or value.get("a") == 1,
    }
    check = next(check for key, check in checks.items() if key in schema)
    for seed in range(3):
        sampling = sampled(GrammarConfig.of("json", schema), 1.0, seed=seed)
        tokens = decode(tiny, PROMPTS[0], None, sampling=sampling, num_tokens=120)
        if tokens[-1] in tiny.bundle.eos_tokens:
            assert check(json.loads(tiny.tokenizer.decode(tokens[:-1])))
        else:
            assert "$ref" in schema  # which allows any other member, of any length


ATOMS = st.sampled_from(["a", "[b-e]", "fox", r"\d", " ", "é", "(x|yz)", "[^a-z\n]"])
REGEXES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(REGEXES, st.sampled_from([Shape(1, 4), Shape(4, 4)]), st.sampled_from([0.0, 1.0]))
def test_text_under_a_regex_is_matched_by_it_and_is_that_of_plain_decoding(
    tiny: LoadedPair, regex: str, shape: Shape, temperature: float
) -> None:
    options: dict[str, Any] = {"num_tokens": 80}
    options["sampling"] = sampled(GrammarConfig.of("regex", regex), temperature)
    tokens = decode(tiny, PROMPTS[0], shape, **options)
    assert tokens == decode(tiny, PROMPTS[0], shape, plain=True, **options)
    assume(tokens[-1] in tiny.bundle.eos_tokens)
    text = tiny.tokenizer.decode(tokens[:-1])
    assert re.fullmatch(regex, text)


def test_tokens_that_the_grammar_forces_are_drafted_and_accepted(tiny: LoadedPair) -> None:
    """The draft would never write this text."""
    forced = "QXZJ 90817 {[@#]} WQ"
    sampling = sampled(GrammarConfig.of("choice", [forced]), 1.0)
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    config = GenerateConfig(sampling=sampling)
    # all nodes are verified, whatever a graph takes on this machine
    policy = tiny.policy(temperature=1.0, shape=Shape(1, 4, 5))
    results = list(tiny.engine.generate(tokens, policy, config))
    assert all(result.accepted == 4 for result in results[:-1])
    emitted = [token for result in results for token in result.tokens]
    assert tiny.tokenizer.decode(emitted[:-1]) == forced


@pytest.mark.parametrize("shape", (Shape(2, 1, 16, graft=15), Shape(1, 0, 16, graft=15)), ids=str)
def test_a_forced_run_is_grafted_and_needs_no_growth_steps(tiny: LoadedPair, shape: Shape) -> None:
    """In both forms of the step: as many tokens as a path has room for are in the tree, and accepted."""
    forced = "QXZJ 9 {[@#]}"
    sampling = sampled(GrammarConfig.of("choice", [forced]), 1.0)
    tokens = tiny.tokenizer.encode(PROMPTS[0])
    rendered = []
    for pair in (tiny, by_stages(tiny)):
        policy = tiny.policy(temperature=1.0, shape=shape)
        results = list(pair.engine.generate(tokens, policy, GenerateConfig(sampling=sampling)))
        emitted = [token for result in results for token in result.tokens]
        assert tiny.tokenizer.decode(emitted[:-1]) == forced
        assert results[0].accepted == pair.engine.target.max_depth - 2 + shape.depth
        rendered.append([(result.tokens, result.tree.render()) for result in results])
    assert rendered[0] == rendered[1]


def drafted_paths(
    pair: LoadedPair, sampling: SamplingConfig, shape: Shape
) -> list[tuple[list[int], list[tuple[int, ...]]]]:
    """For every step the text before it, and the paths of its drafted nodes; the counts agree with them."""
    config = GenerateConfig(max_new_tokens=60, sampling=sampling, inspect=True)
    policy = pair.policy(temperature=sampling.temperature, shape=shape)
    emitted: list[int] = []
    steps = []
    for result in pair.engine.generate(pair.tokenizer.encode(PROMPTS[0]), policy, config):
        assert result.inspection is not None
        tree = result.inspection.tree
        assert result.drafted == len(tree) == 1 + len(result.values)
        assert tree.token_N[[*result.inspection.kept]].tolist() == result.tree.token_N.tolist()
        steps.append(([*emitted], paths_of(tree, slice(1, len(tree)))))
        emitted += result.tokens
    return steps


NARROW_SHAPES = (Shape(4, 4), Shape(4, 4, 8), Shape(4, 4, graft=8))


@pytest.mark.parametrize("temperature", (0.0, 0.8))
@pytest.mark.parametrize("name", ("schema", "choice"))
def test_no_token_that_the_grammar_forbids_is_drafted(
    tiny: LoadedPair, name: str, temperature: float
) -> None:
    """Four places a growth step are often more than a grammar allows: the others are padding."""
    grammar = GRAMMARS[name]
    grammars = Grammars(tiny.tokenizer, tiny.engine.target.vocab, tiny.bundle.eos_tokens)
    for shape in NARROW_SHAPES:
        steps = drafted_paths(tiny, sampled(grammar, temperature), shape)
        assert drafted_paths(by_stages(tiny), sampled(grammar, temperature), shape) == steps
        matcher = grammars.state(grammar)
        for emitted, paths in steps:
            matcher.follow_(emitted)
            assert all(matcher.allowed_V(path[:-1])[path[-1]] for path in paths), (shape, emitted)
        assert 0 < sum(len(paths) for _, paths in steps) < 16 * len(steps)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_no_token_that_is_banned_is_drafted(tiny: LoadedPair, temperature: float) -> None:
    allowed = {*tiny.tokenizer.encode(" the red fox")}
    assert len(allowed) < 4
    banned = tuple((token,) for token in range(tiny.engine.target.vocab) if token not in allowed)
    sampling = SamplingConfig(temperature=temperature, seed=3, processors=ProcessorConfig(banned=banned))
    for shape in NARROW_SHAPES:
        steps = drafted_paths(tiny, sampling, shape)
        assert drafted_paths(by_stages(tiny), sampling, shape) == steps
        assert {token for _, paths in steps for path in paths for token in path} <= allowed
        assert sum(len(paths) for _, paths in steps) > 0


def test_a_grammar_decides_where_bans_leave_no_token(tiny: LoadedPair) -> None:
    grammar = GrammarConfig.of("choice", [" fox"])
    for shape in SHAPES:
        sampling = sampled(grammar, min_tokens=9)
        tokens = decode(tiny, PROMPTS[0], shape, sampling=sampling, stop_tokens=())
        assert tiny.tokenizer.decode(tokens[:-1]) == " fox"
        assert tokens[-1] in tiny.bundle.eos_tokens


def test_a_grammar_that_gets_too_complex_is_an_error_and_no_text(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yggdrasil.text.grammar.LIMITS", {"step_max_items": 8, "verbose_errors": False})
    source = 'start: "$" a\na: | a a | /[a-z ]/ a /[a-z ]/ | /[ -~]/'
    sampling = SamplingConfig(processors=ProcessorConfig(grammar=GrammarConfig.of("grammar", source)))
    for pair in (tiny, by_stages(tiny)):
        for shape in (Shape(1, 4), Shape(4, 4)):
            with pytest.raises(YggError, match="too complex"):
                decode(pair, PROMPTS[0], shape, sampling=sampling)


def test_a_grammar_needs_the_end_of_a_text(tiny: LoadedPair) -> None:
    with pytest.raises(ConfigError, match="ignore_eos"):
        decode(tiny, PROMPTS[0], None, sampling=sampled(GRAMMARS["regex"]), ignore_eos=True)
