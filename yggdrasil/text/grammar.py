"""Grammars: which tokens may follow a text, at every node of a tree.

llguidance has the matcher; it is an optional dependency. A matcher is copied for every path that is looked
at. It decides nothing else: a text is right if every token was allowed when it came.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from yggdrasil.config import GrammarConfig
from yggdrasil.errors import ConfigError, UsageError, YggError
from yggdrasil.text.tokenizer import Tokenizer
from yggdrasil.text.trial import Trial, Verdict

__all__ = ["WHITESPACE", "GrammarState", "Grammars"]

Words = NDArray[np.int32]

KEPT_GRAMMARS = 32  # compiled; while texts are decoded, one may grow by 40 MB, the states of its lexer
KEPT_VERDICTS = 128  # of trials, also of grammars that do not compile
KEPT_BYTES = 256 << 20  # that compiling them took
# A state takes up to 2 kB. 50 000 units of fuel are 4 ms, 10 000 items half a millisecond.
LIMITS: dict[str, Any] = {
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# a blank, or the beginning of an indented line: without a limit, some models write blanks for ever
WHITESPACE: Any = {"whitespace_pattern": r" |\n {0,16}|\n\t{0,8}"}
INSTALL = "pip install 'yggdrasil-decoding[grammar]'"


class Grammars:
    """Compiles grammars for the tokens of a model, and keeps those that were used last.

    Every method may be called from any thread.

    Args:
        vocab: V: columns of the target's logits.
        ends: End-of-text tokens of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._ends = sorted(token for token in ends if token < vocab)
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        self._vocabulary: Any = None
        self._trial: Trial | None = None
        self._verdicts: OrderedDict[GrammarConfig, Verdict] = OrderedDict()  # held: _compiling
        self._compiled: OrderedDict[GrammarConfig, _Compiled] = OrderedDict()

    def knows(self, config: GrammarConfig) -> bool:
        """Whether `state` need not compile a grammar."""
        with self._lock:
            return config in self._compiled

    def state(self, config: GrammarConfig) -> GrammarState:
        """The state of a text that has not begun.

        Raises:
            ConfigError: the grammar does not compile, or not within the limits of a trial, or has too many
                first tokens to tell them apart, or the model has no end-of-text token.
            YggError: llguidance is not installed or cannot read the tokenizer, or there can be no trial.

        Cost: milliseconds if the grammar is not among those that are kept, and at most twice the time of a
            trial; the first one takes as long as reading a tokenizer. Other threads run meanwhile.
        """
        compiled = self._found(config)
        if compiled is None:
            with self._compiling:  # one at a time; those that are known wait for none
                compiled = self._found(config)  # another thread may have compiled it meanwhile
                if compiled is None:
                    compiled = self._compile(config)
                    self._keep_(config, compiled)
        with self._lock:
            state = GrammarState(compiled.matcher.deep_copy(), self._vocab, self._ends)
        if state.stuck:
            raise ConfigError(config.kind, config.source, f"simpler ({state.stuck})")
        return state

    def check(self, config: GrammarConfig) -> None:
        """Only try a grammar; raises the errors of its trial as `state` does."""
        with self._compiling:
            self._tried(config)

    def _found(self, config: GrammarConfig) -> _Compiled | None:
        """A grammar that is kept; it is now the one that was used last."""
        with self._lock:
            compiled = self._compiled.get(config)
            if compiled is not None:
                self._compiled.move_to_end(config)
            return compiled

    def _keep_(self, config: GrammarConfig, compiled: _Compiled) -> None:
        """Keep a grammar, and forget those that were used the longest time ago; the last one stays."""
        with self._lock:
            self._compiled[config] = compiled
            while len(self._compiled) > 1 and (
                len(self._compiled) > KEPT_GRAMMARS
                or sum(kept.num_bytes for kept in self._compiled.values()) > KEPT_BYTES
            ):
                self._compiled.popitem(last=False)

    def _compile(self, config: GrammarConfig) -> _Compiled:
        rules, num_bytes = self._tried(config)
        import llguidance

        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._vocabulary, rules, log_level=0, limits=limits)
        return _Compiled(matcher, max(num_bytes, len(rules)))

    def _tried(self, config: GrammarConfig) -> tuple[str, int]:
        """A grammar as llguidance reads it, and the bytes that compiling it takes.

        Raises:
            ConfigError, YggError: those of `state`.
        """
        self._read_tokenizer_()
        if not self._ends:
            raise ConfigError(config.kind, config.source, "left out: the model has no end-of-text token")
        rules = ""
        try:
            rules = _rules(config)
            verdict = self._verdict(config, rules)
        except ValueError as error:  # not UTF-8, or nested too deeply
            verdict = Verdict(str(error))
        if verdict.fault:
            place = f"at {verdict.place}: " if verdict.place else ""
            allowed = f"a {_name(config.kind)} that compiles ({place}{_line(verdict.fault)})"
            raise ConfigError(config.kind, config.source, allowed)
        return rules, verdict.num_bytes

    def _verdict(self, config: GrammarConfig, rules: str) -> Verdict:
        """That of a trial; a grammar is not tried again while its verdict is kept."""
        verdict = self._verdicts.pop(config, None)
        if verdict is None:
            assert self._trial is not None
            try:
                verdict = self._trial.run(rules)
            except ChildProcessError as error:
                raise YggError(f"grammars cannot be tried: {error}") from None
        self._verdicts[config] = verdict
        if len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    def _read_tokenizer_(self) -> None:
        """Read the tokenizer once, here and for the trials: a fault is none of any grammar."""
        try:
            import llguidance
        except ImportError:
            raise UsageError("grammars need llguidance", INSTALL) from None
        if self._trial is not None or not self._ends:
            return
        source = self._tokenizer.source
        try:
            self._vocabulary = llguidance.LLTokenizer(source, n_vocab=self._vocab, eos_token=self._ends)
        except ValueError as error:
            raise YggError(f"grammars cannot use this tokenizer: {_line(str(error))}") from None
        self._trial = Trial(
            {"tokenizer": source, "vocab": self._vocab, "ends": self._ends, "limits": LIMITS}
        )


class _Compiled(NamedTuple):
    """A grammar that is kept.

    Args:
        matcher: At the beginning of a text.
        num_bytes: Of memory that it takes, at most.
    """

    matcher: Any
    num_bytes: int


def _rules(config: GrammarConfig) -> str:
    """A grammar as llguidance reads it."""
    from llguidance import LLMatcher

    match config.kind:
        case "json":
            rules: str = LLMatcher.grammar_from_json_schema(config.source, defaults=WHITESPACE)
        case "regex":
            rules = LLMatcher.grammar_from_regex(config.source)
        case "choice":
            texts = (json.dumps(text) for text in json.loads(config.source))
            rules = LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case _:
            rules = LLMatcher.grammar_from_lark(config.source)
    return rules


def _name(kind: str) -> str:
    return {"json": "JSON schema", "regex": "regular expression", "choice": "choice"}.get(kind, kind)


def _line(message: str) -> str:
    """A message of several lines in one."""
    return " ".join(message.split())


@dataclass(slots=True)
class _Node:
    """A path.

    Args:
        matcher: At its end; None after the end of the text and off the grammar.
        words: A bit for every token: whether it may come next.
        address: Of the words.
        failure: Why the matcher cannot go on; empty if it can.
    """

    matcher: Any
    words: Words
    address: int
    failure: str = ""

    def allows(self, token: int) -> bool:
        return bool(self.words.item(token >> 5) >> (token & 31) & 1)


class GrammarState:
    """Where one text is in its grammar, and where the paths of the tree below it would be.

    Args:
        matcher: At the beginning of the text.
        vocab: V.
        ends: The only tokens that are allowed after an end-of-text token, and off the grammar.
    """

    def __init__(self, matcher: Any, vocab: int, ends: Sequence[int]) -> None:
        self.vocab = vocab
        self._ends = frozenset(ends)
        self._end_words = np.zeros((vocab + 31) // 32, dtype=np.int32)
        for token in ends:
            self._end_words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._beginning = self._reached(matcher)
        self._emitted: list[int] = []
        self._nodes: dict[tuple[int, ...], _Node] = {(): self._beginning}

    @property
    def stuck(self) -> str:
        """Why not even the first token can be decided; empty if it can."""
        return self._beginning.failure

    def follow_(self, emitted: Sequence[int]) -> None:
        """Move to the end of a text, from which paths count. Forgets the paths if it has moved.

        Args:
            emitted: All tokens since the beginning, in any relation to those before.
        """
        known = len(self._emitted)
        if list(emitted[:known]) != self._emitted:
            known = 0
            self._nodes = {(): self._beginning}
        if len(emitted) > known:
            self._nodes = {(): self._node(tuple(emitted[known:]))}
        self._emitted = list(emitted)

    def address(self, path: tuple[int, ...]) -> int:
        """Address of `words`."""
        return self._node(path).address

    def words(self, path: tuple[int, ...]) -> Words:
        """A bit for every token: whether it may follow the text and a path.

        Aliasing: kept until `follow_` moves.
        """
        return self._node(path).words

    def allowed_V(self, path: tuple[int, ...]) -> NDArray[np.bool_]:
        """The same, a boolean for every token."""
        bits = np.unpackbits(self.words(path).view(np.uint8), bitorder="little")
        return bits[: self.vocab].astype(np.bool_)

    def forced(self, most: int) -> tuple[int, ...]:
        """The next tokens of the text, as far as one alone is allowed, at most this many.

        An end-of-text token is the last one.

        Cost: a mask for each, which a step over these tokens needs as well.
        """
        path: tuple[int, ...] = ()
        while len(path) < most and not (path and path[-1] in self._ends):
            bits = int.from_bytes(self.words(path), "little")
            if bits.bit_count() != 1:
                break
            path = (*path, bits.bit_length() - 1)
        return path

    def failure(self, tokens: Sequence[int]) -> str:
        """Why a token of these, which follow the text, could not be decided; empty if all could."""
        nodes = (self._nodes.get(tuple(tokens[:place])) for place in range(len(tokens)))
        return next((node.failure for node in nodes if node is not None and node.failure), "")

    def _node(self, path: tuple[int, ...]) -> _Node:
        node = self._nodes.get(path)
        if node is not None:
            return node
        node = self._nodes[()]
        for length in range(1, len(path) + 1):
            known = self._nodes.get(path[:length])
            node = self._child(node, path[length - 1]) if known is None else known
            self._nodes[path[:length]] = node
        return node

    def _child(self, parent: _Node, token: int) -> _Node:
        if parent.matcher is None or token in self._ends or not parent.allows(token):
            return self._end(parent.failure)
        matcher = parent.matcher.deep_copy()
        matcher.consume_token(token)
        return self._reached(matcher)

    def _reached(self, matcher: Any) -> _Node:
        words = np.empty_like(self._end_words)
        address = words.ctypes.data
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        if matcher.is_error():
            return self._end(f"the grammar is too complex for this text ({_line(matcher.get_error())})")
        return _Node(matcher, words, address)

    def _end(self, failure: str) -> _Node:
        return _Node(None, self._end_words, self._end_words.ctypes.data, failure)
