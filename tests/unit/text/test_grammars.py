"""Grammars: what compiles, what is kept, and that the state of a text depends on the text alone."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from yggdrasil.config import MOST_GRAMMAR_CHARS, GrammarConfig
from yggdrasil.errors import ConfigError, YggError
from yggdrasil.pair import LoadedPair
from yggdrasil.text import grammar as grammar_module
from yggdrasil.text.grammar import Grammars

DEEP = '{"items": ' * 700 + "true" + "}" * 700
WORDS = GrammarConfig.of("regex", "( fox| dog){1,3}")


@pytest.fixture(scope="module")
def grammars(tiny: LoadedPair) -> Grammars:
    return Grammars(tiny.tokenizer, tiny.bundle.vocab, tiny.bundle.eos_tokens)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json", {"type": "objectt"}, "objectt"),
        ("json", {"properties": {"a": {"pattern": "("}}}, "at /properties/a: .*unclosed group"),
        ("json", {"not": {}}, "not"),
        ("json", {"items": {"anyOf": [{}, {"properties": {"a/b": {"type": "b"}}}]}}, "a~1b: Invalid type"),
        ("json", {"$defs": {"a": {"type": "b"}}, "properties": {"c": {"$ref": "#/$defs/a"}}}, "at /"),
        ("json", "{", "JSON schema"),
        ("json", [1], "an object"),
        ("regex", "(", "unclosed group"),
        ("regex", 4, "a text"),
        ("choice", [], "not empty"),
        ("choice", ["a", ""], "not empty"),
        ("grammar", "start: b", r"at 1\(8\): unknown name"),
        ("xml", "a", "kind"),
        ("json", DEEP, "recursion"),
        ("json", {"const": "\ud800"}, "JSON schema that compiles"),
        ("regex", "\ud800", "surrogates"),
        ("choice", ["\ud800"], "choice that compiles"),
        ("grammar", 'start: "\ud800"', "surrogates"),
        ("regex", "a" * (MOST_GRAMMAR_CHARS + 1), "65536"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(
    grammars: Grammars, kind: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        grammars.state(GrammarConfig.of(kind, value))
    assert "\n" not in str(caught.value)


def test_a_grammar_too_complex_for_its_first_token_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yggdrasil.text.grammar.LIMITS", {"step_max_items": 8, "verbose_errors": False})
    source = "start: a\na: | a a | /[a-z ]/ a /[a-z ]/ | /[ -~]/"
    with pytest.raises(ConfigError, match=r"simpler \(the grammar is too complex"):
        grammars.state(GrammarConfig.of("grammar", source))


def test_forced_tokens_are_those_that_alone_are_allowed_up_to_the_end(
    grammars: Grammars, tiny: LoadedPair
) -> None:
    state = grammars.state(GrammarConfig.of("choice", ["a red fox ran", "a red dog ran"]))
    shared = tiny.tokenizer.encode("a red ", special_tokens=False)
    assert state.forced(9) == tuple(shared)[: len(state.forced(9))] != ()
    assert state.forced(1) == (shared[0],)
    assert state.forced(0) == ()
    text = tiny.tokenizer.encode("a red fox", special_tokens=False)
    state.follow_(text)
    *rest, end = state.forced(99)
    assert tiny.tokenizer.decode(rest) == " ran"
    assert end in tiny.bundle.eos_tokens
    state.follow_([*text, *rest, end])
    assert len(state.forced(99)) == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.sampled_from([" fox", " dog", " f", "ox", "x"]), max_size=5), max_size=4))
def test_the_state_of_a_text_does_not_depend_on_the_texts_before(
    grammars: Grammars, tiny: LoadedPair, texts: list[list[str]]
) -> None:
    state = grammars.state(WORDS)
    for words in texts:
        tokens = [token for word in words for token in tiny.tokenizer.encode(word, special_tokens=False)]
        state.follow_(tokens)
        state.words((tokens[0],) if tokens else (1, 2))
        fresh = grammars.state(WORDS)
        fresh.follow_(tokens)
        assert np.array_equal(state.words(()), fresh.words(()))
        assert np.array_equal(grammars.state(WORDS).words(tuple(tokens)), fresh.words(()))


def test_only_the_end_is_allowed_after_the_end_and_off_the_grammar(
    grammars: Grammars, tiny: LoadedPair
) -> None:
    [end] = tiny.bundle.eos_tokens
    state = grammars.state(GrammarConfig.of("choice", ["a"]))
    [a] = tiny.tokenizer.encode("a", special_tokens=False)
    for path in ((a,), (a, end), (a, end, a), (a + 1, a)):
        assert state.allowed_V(path).nonzero()[0].tolist() == [end]
    assert state.allowed_V(()).nonzero()[0].tolist() == [a]


def test_grammars_that_were_used_last_are_kept_within_a_limit_of_bytes(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_one = grammars._compile

    def counted(config: GrammarConfig) -> Any:
        compiled.append(config.source)
        return compile_one(config)._replace(num_bytes=len(config.source))

    monkeypatch.setattr(grammars, "_compile", counted)
    monkeypatch.setattr(grammars, "_compiled", OrderedDict())
    monkeypatch.setattr(grammar_module, "KEPT_BYTES", 10)
    a, b, c = (GrammarConfig.of("regex", letter * 4) for letter in "abc")
    for config in (a, b, a, c, a, b):
        grammars.state(config)
    assert compiled == [config.source for config in (a, b, c, b)]
    assert [grammars.knows(config) for config in (a, b, c)] == [True, True, False]
    long = GrammarConfig.of("regex", "d" * 40)
    grammars.state(long)
    grammars.state(long)
    assert compiled[4:] == [long.source]


def test_a_grammar_that_takes_more_memory_counts_more(grammars: Grammars) -> None:
    many = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(500)}}
    sizes = [
        grammars._compile(GrammarConfig.of("json", schema)).num_bytes for schema in ({"type": "null"}, many)
    ]
    assert sizes[1] > sizes[0] + (1 << 20)


def test_a_grammar_that_is_known_does_not_wait_for_one_that_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.state(WORDS)
    begun = threading.Event()
    ended = threading.Event()
    compile_one = grammars._compile

    def slow(config: GrammarConfig) -> Any:
        begun.set()
        assert ended.wait(10)
        return compile_one(config)

    monkeypatch.setattr(grammars, "_compile", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(grammars.state, GrammarConfig.of("regex", "slow"))
        assert begun.wait(10)
        grammars.state(WORDS)
        assert not other.done()
        ended.set()
        assert other.result().allowed_V(()).any()


def test_two_threads_with_one_new_grammar_compile_it_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_wait = threading.Barrier(2, timeout=10)
    compiled = []
    compile_one = grammars._compile
    lock = grammars._compiling

    class Lock:
        def __enter__(self) -> None:
            both_wait.wait()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def counted(config: GrammarConfig) -> Any:
        compiled.append(config)
        return compile_one(config)

    monkeypatch.setattr(grammars, "_compiling", Lock())
    monkeypatch.setattr(grammars, "_compile", counted)
    config = GrammarConfig.of("regex", "once and for all")
    with ThreadPoolExecutor(2) as pool:
        for state in pool.map(grammars.state, (config, config)):
            assert state.allowed_V(()).any()
    assert compiled == [config]


def test_a_grammar_is_tried_once_even_if_it_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.state(WORDS)
    assert grammars._trial is not None
    run = grammars._trial.run
    tried = []

    def counted(rules: str) -> Any:
        tried.append(rules)
        return run(rules)

    monkeypatch.setattr(grammars._trial, "run", counted)
    wrong = GrammarConfig.of("regex", "wrong(")
    right = GrammarConfig.of("regex", "right")
    for act in (grammars.state, grammars.state, grammars.check):
        with pytest.raises(ConfigError, match="unclosed group"):
            act(wrong)
    for act in (grammars.check, grammars.state):
        act(right)
    assert len(tried) == 2
    monkeypatch.setattr(grammar_module, "KEPT_VERDICTS", 1)
    monkeypatch.setattr(grammars, "_verdicts", OrderedDict())
    for config in (wrong, wrong):
        with pytest.raises(ConfigError):
            grammars.check(config)
    grammars.check(GrammarConfig.of("regex", "another"))
    with pytest.raises(ConfigError):
        grammars.check(wrong)
    assert len(tried) == 5
    assert len(grammars._verdicts) == 1


def test_a_grammar_that_is_only_checked_is_not_kept(grammars: Grammars) -> None:
    config = GrammarConfig.of("regex", "checked")
    grammars.check(config)
    assert not grammars.knows(config)


def test_a_trial_that_ends_early_is_no_fault_of_the_grammar_and_not_remembered(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.state(WORDS)

    def ended(rules: str) -> Any:
        raise ChildProcessError("ended twice")

    config = GrammarConfig.of("regex", "unlucky")
    monkeypatch.setattr(grammars._trial, "run", ended)
    with pytest.raises(YggError, match="cannot be tried: ended twice") as failed:
        grammars.state(config)
    assert not isinstance(failed.value, ConfigError)
    monkeypatch.undo()
    assert grammars.state(config).allowed_V(()).any()


def test_a_tokenizer_that_the_library_cannot_read_is_no_fault_of_the_grammar(tiny: LoadedPair) -> None:
    class Unreadable:
        source = '{"version": "1.0", "model": {"type": "Unknown"}}'

    grammars = Grammars(Unreadable(), tiny.bundle.vocab, tiny.bundle.eos_tokens)  # type: ignore[arg-type]
    with pytest.raises(YggError, match="cannot use this tokenizer") as failed:
        grammars.state(WORDS)
    assert not isinstance(failed.value, ConfigError)


def test_without_the_library_the_error_has_the_command(
    tiny: LoadedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(YggError, match=r"pip install 'yggdrasil-decoding\[grammar\]'"):
        Grammars(tiny.tokenizer, tiny.bundle.vocab, tiny.bundle.eos_tokens).state(WORDS)


def test_a_model_without_an_end_of_text_token_has_no_grammars(tiny: LoadedPair) -> None:
    with pytest.raises(ConfigError, match="end-of-text"):
        Grammars(tiny.tokenizer, tiny.bundle.vocab, ()).state(WORDS)


def test_an_end_token_without_a_logit_is_no_end(tiny: LoadedPair) -> None:
    vocab = tiny.bundle.vocab
    ends = (*tiny.bundle.eos_tokens, vocab + 40)
    state = Grammars(tiny.tokenizer, vocab, ends).state(WORDS)
    expected = Grammars(tiny.tokenizer, vocab, tiny.bundle.eos_tokens).state(WORDS)
    assert np.array_equal(state.words(()), expected.words(()))


def test_a_model_whose_end_tokens_have_no_logits_takes_no_grammar(tiny: LoadedPair) -> None:
    with pytest.raises(ConfigError, match="no end-of-text token"):
        Grammars(tiny.tokenizer, tiny.bundle.vocab, (tiny.bundle.vocab,)).state(WORDS)
