"""The Python interface: a compiled pair that writes text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from yggdrasil import pair as compiled
from yggdrasil.bundle import BUNDLED
from yggdrasil.config import GenerateConfig, GrammarConfig, SamplingConfig, ServeConfig
from yggdrasil.engine import check_tokens, checked_prompt
from yggdrasil.errors import ConfigError, UsageError, YggError
from yggdrasil.offline.on_demand import compiled_name
from yggdrasil.report.run import Result, Run
from yggdrasil.state import PLAIN, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yggdrasil.serve.batcher import Batcher
    from yggdrasil.serve.chat import ChatTemplate
    from yggdrasil.serve.request import Event
    from yggdrasil.step.decoding_tree import DecodingTree

__all__ = ["Options", "Pair", "load_pair"]

Messages = Sequence[Mapping[str, Any]]
GRAMMARS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
LIVE = ("shape",)  # options of a run, not of a request
NUMBERS: dict[str, tuple[type, ...]] = {"float": (int, float), "int": (int,), "bool": (bool,)}
MESSAGES = 'a list of messages: {"role": "user", "content": "Hello!"}'
NAMES = {"float": "a number", "int": "a whole number", "bool": "True or False"}


class Options(TypedDict, total=False):
    """What a text can ask for; what is left out has the model's own default, as in `ygg generate`.

    `ban` are texts that are never written. At most one of the last four: the text is an instance of a JSON
    schema, matches a regular expression, is one of some texts, or is a sentence of a Lark grammar.
    """

    max_new_tokens: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    ignore_eos: bool
    plain: bool
    draft: bool
    inspect: bool
    shape: Shape
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int
    min_tokens: int
    logit_bias: Mapping[int, float]
    ban: str | Sequence[str]
    model_defaults: bool
    json_schema: Mapping[str, Any] | str
    regex: str
    choice: Sequence[str]
    grammar: str


@dataclass(frozen=True, repr=False)
class Pair(compiled.LoadedPair):
    """A compiled pair that writes text: the target's own, greedy or sampled with the same seed.

    `engine` and `policy` are the parts that decode, for programs of their own.

    Example: a text, a stream, a batch and a conversation.
        >>> from yggdrasil import load_pair
        >>> def write():
        ...     pair = load_pair()
        ...     result = pair.generate("Once upon a time", max_new_tokens=64)
        ...     print(result, result.tok_per_s)
        ...     for text in pair.stream("The little dog", temperature=0.8, seed=7):
        ...         print(text, end="", flush=True)
        ...     results = pair.generate(["One day", "The sun"], stop=".")
        ...     print(pair.chat([{"role": "user", "content": "Hello!"}]))
    """

    _one_batch: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @overload
    def generate(self, prompt: str | list[int], **options: Unpack[Options]) -> Result: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[Options]) -> list[Result]: ...

    def generate(self, prompt: Any, **options: Unpack[Options]) -> Any:
        """Continue one prompt, or each of a list of them as a batch.

        A prompt is a text or a list of token ids. A batch has the rows of `ygg serve`; its texts are those
        that each prompt has alone.

        Raises:
            ConfigError: an unknown option, a value that is not allowed, or a prompt that does not fit.
        """
        if _is_prompt(prompt):
            return self.stream(prompt, **options).complete().result
        if not isinstance(prompt, list | tuple) or not all(map(_is_prompt, prompt)):
            allowed = "a text, a list of token ids, or a list of these"
            raise ConfigError("prompt", prompt, allowed)
        if options.get("shape") is not None:
            raise ConfigError("shape", str(options["shape"]), "left out for a list; a batch chooses shapes")
        config = self.config(**options)
        return self.batch([(self.tokens(each), config) for each in prompt])

    def stream(self, prompt: str | Sequence[int] | Messages, **options: Unpack[Options]) -> Run:
        """Continue one prompt, or answer a conversation, while the text is read: by `for` or `async for`.

        An engine decodes one text at a time, so read each to its end first. What a prompt has in common
        with the beginning of the last text is not computed again: a further turn costs its new tokens.

        Raises:
            ConfigError: at the call, as `generate`; for a prompt that does not fit, when it is read.
        """
        config = self.config(**options)
        shape = options.get("shape")
        if config.plain and shape is not None:
            raise ConfigError("shape", str(shape), "left out together with plain")
        if not config.draft and shape is not None:
            raise ConfigError("shape", str(shape), "left out together with draft=False")
        if _has_messages(prompt):
            tokens = self.chat_tokens(prompt)  # type: ignore[arg-type]
            config = replace(config, stop=(*config.stop, *self.template.stops))
        else:
            tokens = self.tokens(prompt)  # type: ignore[arg-type]
        shape = PLAIN if config.plain else shape
        policy = self.policy(temperature=config.sampling.temperature, shape=shape, draft=config.draft)
        return Run(self, tokens, config, policy=policy, keep=True)

    def chat(self, messages: str | Messages, **options: Unpack[Options]) -> Result:
        """The model's answer to a conversation, or to one message of a user.

        Args:
            messages: As OpenAI's: `{"role": "user", "content": "Hello!"}`. The model's own chat template
                renders them; a model without one gets lines such as `user: Hello!`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not _has_messages(messages):
            raise ConfigError("messages", messages, f"a text, or {MESSAGES}")
        return self.stream(messages, **options).complete().result

    def tree(self, prompt: str | Sequence[int], sampling: SamplingConfig | None = None) -> DecodingTree:
        """The root of a tree over a prompt, for a loop of one's own: examples/loop.py.

        Args:
            sampling: How tokens are taken; by default with the model's own settings, as in `generate`.

        Raises:
            ConfigError: a prompt that does not fit, a grammar, or a `sampling` of another type.
        """
        if not isinstance(sampling, SamplingConfig | None):
            raise ConfigError("sampling", sampling, "a yggdrasil.SamplingConfig")
        sampling = sampling or self.config().sampling
        calibration = self.acceptance.nearest(sampling.temperature).calibration
        return self.engine.tree(self.tokens(prompt), sampling, calibration)

    def config(self, **options: Any) -> GenerateConfig:
        """The request that options make, with the model's own defaults."""
        _check_options(options)
        chosen = {name: value for name, value in options.items() if name not in LIVE}
        with_defaults = chosen.pop("model_defaults", True)
        defaults = self.bundle.defaults if with_defaults else {}
        ban = chosen.pop("ban", ())
        banned = self.tokenizer.spellings([ban] if isinstance(ban, str) else ban)
        chosen["banned"] = [*defaults.get("banned", ()), *banned]
        return GenerateConfig.of({**defaults, **_with_grammar(chosen)})

    def tokens(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a prompt, with those that the tokenizer puts around a text."""
        if not isinstance(prompt, str):
            tokens = checked_prompt(prompt)
            check_tokens(tokens, self.engine.vocab)
            return tokens
        return self._encoded(prompt, special_tokens=True)

    def chat_tokens(self, messages: Messages) -> list[int]:
        """The prompt that the assistant's answer to these messages continues."""
        text = self.template.render(messages)
        return self._encoded(text, special_tokens=not self.template.is_own)

    @cached_property
    def template(self) -> ChatTemplate:
        """The target's chat template, or the default one."""
        from yggdrasil.serve.chat import load_chat_template

        return load_chat_template(self.bundle.models[0])

    def _encoded(self, text: str, *, special_tokens: bool) -> list[int]:
        if not _is_utf8(text):
            raise ConfigError("prompt", text, "text in UTF-8")
        return self.tokenizer.encode(text, special_tokens=special_tokens)

    def batch(self, requests: Sequence[tuple[Sequence[int], GenerateConfig]]) -> list[Result]:
        """Decode prompts together, in the rows of a server.

        Args:
            requests: Token ids, and what to do with them.

        Raises:
            ConfigError: a prompt that does not fit, a request without draft, or a pair of several ranks.
        """
        from yggdrasil.serve.request import Request

        if not all(config.draft for _, config in requests):
            raise ConfigError("draft", False, "left out for a list; a batch has the pair's draft")
        events: list[list[Event]] = [[] for _ in requests]
        rows = [
            Request(prompt=prompt, config=config, on_event=kept.append)
            for (prompt, config), kept in zip(requests, events, strict=True)
        ]
        with self._one_batch:
            tickets = [self._batcher.ticket(request) for request in rows]
            with self._whole_batcher() as batcher:
                for ticket in tickets:
                    batcher.submit(ticket)
                while batcher.step() is not None:
                    pass
        return [_result(kept) for kept in events]

    @contextmanager
    def _whole_batcher(self) -> Iterator[Batcher]:
        """The batcher; a block that fails or is interrupted leaves none with half a step."""
        try:
            yield self._batcher
        except BaseException:
            self.__dict__.pop("_batcher", None)
            raise

    @cached_property
    def _batcher(self) -> Batcher:
        """The rows of a server over the graphs of this pair; its weights are mapped, not copied."""
        from yggdrasil.serve.load import load_batcher

        if self.bundle.config.ranks > 1:
            raise ConfigError("prompt", "a list", "one prompt for a pair of several ranks")
        return load_batcher(self.bundle, ServeConfig(elastic=False))


def load_pair(
    name: str | None = None,
    *,
    target: str | None = None,
    draft: str | None = None,
    dataset: str | None = None,
) -> Pair:
    """Load a pair by name, or by its models; without arguments the bundled one.

    The bundled pair, and a pair given by its models, are compiled first if they are not yet; that takes
    minutes, once, and shows its progress on standard error. A target alone gets a draft made from it.

    Args:
        name: Name of a pair that `ygg compile` made.
        target: Folder or hub id of the target.
        draft: Folder or hub id of the draft.
        dataset: Calibration text whose acceptance and depth predictor to use; by default the last one
            compiled.

    Raises:
        UsageError: the target is missing, or both a name and models are given.
        ConfigError: a name that is no text.
        ArtifactError: the pair is unknown, corrupt or stale; names the command that fixes it.
    """
    for what, value in (("name", name), ("dataset", dataset)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(what, value, "a text")
    if name is not None and (target is not None or draft is not None):
        raise UsageError("a name cannot be combined with target and draft", f"load_pair({name!r})")
    if target is None and draft is not None:
        raise UsageError("the target is missing", "load_pair(target=..., draft=...)")
    given = tuple(str(model) for model in (target, draft) if model is not None)
    models = given or None
    name = BUNDLED if name is None else name
    found = compiled.load_pair(compiled_name(name, models), dataset=dataset)
    return Pair(**{each.name: getattr(found, each.name) for each in fields(found) if each.init})


def _is_prompt(prompt: object) -> bool:
    """Whether it is a text or a list of token ids, one of them at least."""
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list | tuple) and bool(prompt) and all(type(each) is int for each in prompt)


def _has_messages(prompt: object) -> bool:
    """Whether it is a list of messages. Raises ConfigError for one that lacks a role or a text."""
    if not isinstance(prompt, list | tuple) or not any(isinstance(each, Mapping) for each in prompt):
        return False
    wrong = next((each for each in prompt if not _is_message(each)), None)
    if wrong is not None:
        raise ConfigError("messages", wrong, MESSAGES)
    return True


def _is_message(message: object) -> bool:
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        and _is_calls(message.get("tool_calls"))
    )


def _is_calls(calls: object) -> bool:
    """Whether they are calls of functions that JSON can spell, or none."""
    if calls is None:
        return True
    return isinstance(calls, list | tuple) and all(
        isinstance(call, Mapping) and _is_json(call.get("function")) for call in calls
    )


def _is_json(value: object) -> bool:
    """Whether it is an object that JSON can spell."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, Mapping)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that does not exist, or a value of another type."""
    kinds = Options.__annotations__
    for name, value in options.items():
        if name not in kinds:
            near = get_close_matches(name, kinds, n=1)
            fix = f"did you mean {near[0]}?" if near else ""
            raise ConfigError("option", name, f"one of {', '.join(kinds)}", fix)
        kind = getattr(kinds[name], "__forward_arg__", str(kinds[name])).partition(" | ")[0]
        if kind in NUMBERS and (value is not None or name != "max_new_tokens"):
            is_number = isinstance(value, NUMBERS[kind]) and (kind == "bool" or not isinstance(value, bool))
            if not is_number:
                raise ConfigError(name, value, NAMES[kind])
        if name in CHECKS and not CHECKS[name][0](value):
            raise ConfigError(name, value, CHECKS[name][1])


def _is_texts(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list | tuple) and all(
        isinstance(text, str) and _is_utf8(text) for text in texts
    )


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_ids(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(token) is int for token in value)


def _is_bias(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and all(type(token) is int for token in value)
        and all(isinstance(each, int | float) for each in value.values())
    )


CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "stop": (_is_texts, "a text or a list of texts, in UTF-8"),
    "ban": (_is_texts, "a text or a list of texts, in UTF-8"),
    "stop_tokens": (_is_ids, "a list of token ids"),
    "logit_bias": (_is_bias, "a number for every token id, as in {13: -2.5}"),
    "shape": (lambda value: value is None or isinstance(value, Shape), "a yggdrasil.Shape"),
}
"""What the values of options that are not numbers must be."""


def _with_grammar(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their grammar, if any, as a `GrammarConfig`."""
    named = [name for name in GRAMMARS if options.get(name) is not None]
    if len(named) > 1:
        raise ConfigError(named[0], options[named[0]], f"left out together with {named[1]}")
    rest = {name: value for name, value in options.items() if name not in GRAMMARS}
    if not named:
        return {**rest, "grammar": None}
    try:
        return {**rest, "grammar": GrammarConfig.of(GRAMMARS[named[0]], options[named[0]])}
    except ConfigError as error:
        raise error.renamed(named[0]) from None


def _result(events: Sequence[Event]) -> Result:
    """The text of one row of a batch."""
    report = events[-1].report
    assert report is not None
    if events[-1].error:
        raise YggError(events[-1].error)
    tokens = tuple(token for event in events for token in event.tokens)
    later_ms = report.total_ms - report.ttft_ms
    later = len(tokens) - len(events[0].tokens)
    return Result(
        "".join(event.text for event in events),
        tokens,
        report.finish,
        report.prompt_tokens,
        report.target_passes,
        report.ttft_ms,
        report.total_ms,
        later / later_ms * 1e3 if later and later_ms else 0.0,
    )
