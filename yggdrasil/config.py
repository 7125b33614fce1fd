"""Configurations: frozen, validated once; the command line takes its defaults from here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any, TypeVar

from yggdrasil.errors import ConfigError
from yggdrasil.layout import PAGE_LEN

__all__ = [
    "AUTO",
    "DEFAULT_NEW_TOKENS",
    "MOST_COUNT",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "WEIGHTS",
    "CompileConfig",
    "GenerateConfig",
    "GrammarConfig",
    "ProcessorConfig",
    "SamplingConfig",
    "ServeConfig",
    "from_dict",
]


T = TypeVar("T")

HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
ORIGIN = re.compile(r"[a-z][a-z\d+.-]*://[^/\sA-Z]+")  # as browsers send it
GRAMMARS = ("json", "regex", "choice", "grammar")
MOST_GRAMMAR_CHARS = 1 << 16
MOST_PENALTY = 100.0  # OpenAI's limit of a bias; much larger numbers are infinite in float32
MOST_COUNT = 2**31 - 1  # of tokens; the step counts in 64 bits
WEIGHTS = ("bf16", "int8", "int4")
AUTO = "auto"  # the format of a draft's weights if it is made from the target and `ygg compile` chooses it
TOOL_PARSERS = ("hermes", "llama3", "mistral", "json")
REASONING_PARSERS = ("think",)
DEFAULT_NEW_TOKENS = 256  # of a request without a limit, if the context has room


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(name, value, allowed)


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most


@dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """What a text must be.

    Args:
        kind: "json": an instance of a JSON schema; "regex": what the whole of a regular expression matches;
            "choice": one of some texts; "grammar": a sentence of a grammar in the dialect of Lark.
        source: The schema as JSON, the expression, a JSON list of the texts, or the grammar.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMARS, "kind", self.kind, f"one of {', '.join(GRAMMARS)}")
        num_chars = len(self.source)
        allowed = f"a text of 1 to {MOST_GRAMMAR_CHARS} characters"
        _require(1 <= num_chars <= MOST_GRAMMAR_CHARS, self.kind, f"{num_chars} characters", allowed)

    @classmethod
    def of(cls, kind: str, value: Any) -> GrammarConfig:
        """A grammar from a value: a schema (an object, or its JSON), texts to choose from, or a text."""
        if kind == "choice":
            is_texts = isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)
            _require(is_texts and all(value) and len(value) > 0, kind, value, "texts that are not empty")
        elif kind == "json" and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ConfigError(kind, value, f"a JSON schema ({error})") from None
        if kind == "json":
            _require(isinstance(value, dict | bool), kind, value, "a JSON schema, which is an object")
        is_text = isinstance(value, str)
        _require(is_text or kind in ("choice", "json"), kind, value, "a text")
        try:
            source = value if is_text else json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:  # a set, a circle, nested too deeply
            raise ConfigError(kind, value, f"what JSON can spell ({error})") from None
        return cls(kind=kind, source=source)


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Changes of the target's logits that depend on the text so far, in the order of the fields.

    They come before temperature and filters. Names and meaning are those of transformers' processors and of
    OpenAI's API.

    Args:
        logit_bias: (token, value) pairs; the value is added to the token's logit, and -inf bans it.
        repetition_penalty: Divides a logit above 0 and multiplies one below 0, of tokens that prompt or
            output contain; 1 changes nothing.
        presence_penalty: Subtracted from the logits of tokens that the output contains.
        frequency_penalty: Subtracted once for every time that the output contains a token.
        no_repeat_ngram_size: No sequence of this many tokens occurs twice in prompt and output; 0 allows
            all.
        banned: Sequences of tokens that are never completed.
        min_tokens: Emitted tokens before which `ends` are banned.
        ends: Tokens that end the text.
        grammar: The text up to its end-of-text token must be a sentence of it. Where nothing else leaves a
            token that it allows, its tokens are equally likely.
    """

    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    grammar: GrammarConfig | None = None

    def __post_init__(self) -> None:
        most = MOST_PENALTY
        for token, value in self.logit_bias:
            is_allowed = -most <= value <= most or value == -math.inf
            allowed = f"from {-most:g} to {most:g}, or -inf to ban a token"
            _require(is_allowed, "logit_bias", {token: value}, allowed)
        biased = [token for token, _ in self.logit_bias]
        _require(len(set(biased)) == len(biased), "logit_bias", biased, "every token once")
        for token in (*biased, *chain.from_iterable(self.banned), *self.ends):
            _require(_is_whole(token, MOST_COUNT), "token", token, f"an id, from 0 to {MOST_COUNT}")
        penalty = self.repetition_penalty
        allowed = f"from {1 / most:g} to {most:g}"
        _require(1 / most <= penalty <= most, "repetition_penalty", penalty, allowed)
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            _require(-most <= penalty <= most, name, penalty, f"from {-most:g} to {most:g}")
        for name in ("no_repeat_ngram_size", "min_tokens"):
            count = getattr(self, name)
            _require(_is_whole(count, MOST_COUNT), name, count, f"a whole number, 0 (off) to {MOST_COUNT}")
        _require(all(self.banned), "banned", self.banned, "sequences of at least one token")

    @property
    def largest_token(self) -> int:
        """The largest id that it names; -1 without any."""
        biased = (token for token, _ in self.logit_bias)
        return max((*biased, *chain.from_iterable(self.banned), *self.ends), default=-1)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a token is taken from the target's logits.

    Args:
        temperature: 0 takes the likeliest token; above 0 samples.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens up to this probability mass; 1 keeps all.
        min_p: Drop tokens less likely than this fraction of the likeliest; 0 keeps all.
        seed: Key of the random numbers: the same seed gives the same text, with speculation and without.
        processors: Changes of the logits before all this; None without any.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    processors: ProcessorConfig | None = None

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number, 0 or above",
        )
        is_count = isinstance(self.top_k, int) and self.top_k >= 0
        _require(is_count, "top_k", self.top_k, "a whole number, 0 (off) or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        _require(_is_whole(self.seed, 2**63 - 1), "seed", self.seed, "a whole number from 0 to 2**63 - 1")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingConfig:
        """A sampling from fields of this class and of `ProcessorConfig`, by name.

        Args:
            options: `logit_bias` may be a mapping, and `banned` lists of tokens.
        """
        names = {each.name for each in fields(ProcessorConfig)}
        chosen = {name: value for name, value in options.items() if name in names}
        chosen["logit_bias"] = tuple(sorted(dict(chosen.get("logit_bias", ())).items()))
        chosen["banned"] = tuple(map(tuple, chosen.get("banned", ())))
        processors = ProcessorConfig(**chosen)
        own = {name: value for name, value in options.items() if name not in names}
        return cls(**own, processors=None if processors == ProcessorConfig() else processors)

    def ending_with(self, ends: Collection[int], vocab: int) -> SamplingConfig:
        """The same sampling for a text that these tokens end; those without a logit cannot come anyway.

        Args:
            vocab: V of the target.
        """
        if self.processors is None or self.processors.min_tokens == 0:
            return self
        known = tuple(sorted(token for token in ends if token < vocab))
        return replace(self, processors=replace(self.processors, ends=known))


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """One request.

    Args:
        max_new_tokens: Most tokens to emit; None takes the smaller of DEFAULT_NEW_TOKENS and the rest of
            the context.
        stop: Texts that end the output; they are not part of it.
        stop_tokens: Tokens that end the output, in addition to the model's own; they are part of it.
        ignore_eos: Continue after the end-of-text token, for measurements.
        plain: Decode without speculation.
        draft: Run the draft model. Without it the target verifies only what repeats in the text. It takes
            effect where a policy is made for the request, as commands and `Pair.generate` do.
        inspect: Give every result the drafted tree and the target's token at each node. The text is the
            same; a step takes a fraction of a millisecond longer, and without this nothing.
        sampling: How tokens are taken.
    """

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    plain: bool = False
    draft: bool = True
    inspect: bool = False
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        limit = self.max_new_tokens
        _require(
            limit is None or (isinstance(limit, int) and limit >= 1),
            "max_new_tokens",
            limit,
            "a whole number, at least 1",
        )
        is_texts = isinstance(self.stop, tuple | list) and all(
            isinstance(text, str) and text for text in self.stop
        )
        _require(is_texts, "stop", self.stop, "a tuple of texts that are not empty")
        is_tokens = all(type(token) is int and token >= 0 for token in self.stop_tokens)
        _require(is_tokens, "stop_tokens", self.stop_tokens, "token ids, 0 or above")
        has_end = self.grammar is None or not self.ignore_eos
        _require(has_end, "ignore_eos", self.ignore_eos, "False with a grammar, which ends the text")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> GenerateConfig:
        """A request from fields of this class and those that `SamplingConfig.of` takes, by name.

        Args:
            options: `stop` may be one text, or any texts.
        """
        names = {each.name for each in fields(cls)}
        own = {name: value for name, value in options.items() if name in names}
        stop = own.get("stop", ())
        own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        own["stop_tokens"] = tuple(own.get("stop_tokens", ()))
        rest = {name: value for name, value in options.items() if name not in names}
        return cls(**own, sampling=SamplingConfig.of(rest))

    @property
    def grammar(self) -> GrammarConfig | None:
        """What the text must be, if anything."""
        processors = self.sampling.processors
        return None if processors is None else processors.grammar

    def ends(self, eos_tokens: Collection[int]) -> frozenset[int]:
        """The tokens that end the output of a model with these end-of-text tokens."""
        return frozenset(self.stop_tokens) | frozenset(() if self.ignore_eos else eos_tokens)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What `ygg compile` builds.

    Args:
        dtype: Type of weights, activations and KV: "bfloat16" or "float32".
        device: "cpu" or "cuda".
        ranks: Processes that share the target; each has one shard.
        max_context: Most tokens of prompt and output together; a multiple of 16. None takes the models' own
            limit, at most 2048.
        widths: Menu of draft widths W; each is a draft graph, except that those below 4 share one.
        max_depth: Most growth steps D.
        verify_widths: Menu of verified widths K; each is a target graph. A tree runs as the next wider one,
            and its padding takes time.
        prefill_chunk: Tokens of a prompt that run together: the largest graph of both models, so larger
            than any width.
        num_candidates: Children a node can have, C; at least the largest width.
        calibration_texts: Texts used to calibrate acceptance and to train the depth predictor: the first
            ones of the file.
        calibration_tokens: Tokens decoded after the prompt from each text.
        calibration_budget_s: Most seconds for writing these texts and drafting along them, estimated from a
            few timed passes. If all would take longer, there are fewer trees, then fewer texts, then
            shallower trees.
        exact: Linear layers add in the same order in every graph, so that speculation writes what plain
            decoding writes, bit for bit. On a CPU they always do.
        compress: Store bf16 weights without loss in three quarters of their bytes. None does so on a CPU
            with AMX for models larger than its caches: it expands them while it waits for memory.
        weights: Format of the target's linear layers: "bf16" keeps them in `dtype`, "int8" and "int4" round
            them (kernels/quantisation.py).
        draft_weights: The same for the draft. "auto" is for a draft that is made from the target, and is
            replaced by the best measured format.
        draft_layers: Layers of a draft that is made from the target; None is replaced by the best number.
            Where a draft is given it stays None.
    """

    dtype: str = "bfloat16"
    device: str = "cpu"
    ranks: int = 1
    max_context: int | None = None
    widths: tuple[int, ...] = (1, 2, 4, 8)
    max_depth: int = 16
    verify_widths: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32, 48, 64)
    prefill_chunk: int = 128
    num_candidates: int = 8
    calibration_texts: int = 64
    calibration_tokens: int = 20
    calibration_budget_s: float = 90.0
    exact: bool = True
    compress: bool | None = None
    weights: str = "bf16"
    draft_weights: str = "bf16"
    draft_layers: int | None = None

    def __post_init__(self) -> None:
        _require(self.dtype in ("bfloat16", "float32"), "dtype", self.dtype, "bfloat16 or float32")
        _require(self.device in ("cpu", "cuda"), "device", self.device, "cpu or cuda")
        _require(
            self.exact or self.device == "cuda",
            "exact",
            self.exact,
            "True on a cpu, where every graph is exact at no cost",
        )
        _require(self.ranks >= 1, "ranks", self.ranks, "at least 1")
        for name, known in (("weights", WEIGHTS), ("draft_weights", (*WEIGHTS, AUTO))):
            weights = getattr(self, name)
            _require(weights in known, name, weights, f"one of {', '.join(known)}")
            is_allowed = self.can_round or weights in ("bf16", AUTO)
            _require(is_allowed, name, weights, "bf16, except on a cpu in one process")
        layers = self.draft_layers
        _require(layers is None or layers >= 1, "draft_layers", layers, "at least 1")
        _require(
            not self.compress or self.can_compress,
            "compress",
            self.compress,
            "False, except for bfloat16 on a cpu in one process, where weights are not rounded",
        )
        context = self.max_context
        _require(
            context is None or (context >= 32 and context % PAGE_LEN == 0),
            "max_context",
            context,
            f"a multiple of {PAGE_LEN}, at least 32",
        )
        for name in ("widths", "verify_widths"):
            menu = getattr(self, name)
            _require(
                len(menu) > 0 and list(menu) == sorted(set(menu)) and menu[0] >= 1,
                name,
                menu,
                "ascending numbers, each at least 1",
            )
        _require(self.max_depth >= 1, "max_depth", self.max_depth, "at least 1")
        widest = max(self.widths[-1], self.verify_widths[-1])
        _require(
            self.prefill_chunk > widest,
            "prefill_chunk",
            self.prefill_chunk,
            f"above {widest}, the largest of widths and verify_widths",
        )
        _require(
            self.num_candidates >= self.widths[-1],
            "num_candidates",
            self.num_candidates,
            f"at least the largest width, {self.widths[-1]}",
        )
        _require(self.calibration_texts >= 1, "calibration_texts", self.calibration_texts, "at least 1")
        _require(self.calibration_tokens >= 1, "calibration_tokens", self.calibration_tokens, "at least 1")
        budget_s = self.calibration_budget_s
        _require(
            math.isfinite(budget_s) and budget_s > 0,
            "calibration_budget_s",
            budget_s,
            "a finite number of seconds above 0",
        )

    @property
    def lowering(self) -> dict[str, Any]:
        """The fields that graphs depend on: all except those of the calibration."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("calibration_")}

    @property
    def can_round(self) -> bool:
        """Whether weights can be rounded."""
        return self.device == "cpu" and self.ranks == 1

    @property
    def can_compress(self) -> bool:
        """Whether weights of one of the models can be compressed.

        Shards would get different sizes, but share one graph.
        """
        keeps_weights = "bf16" in (self.weights, self.draft_weights)
        return self.dtype == "bfloat16" and self.can_round and keeps_weights

    @property
    def rounded(self) -> str:
        """The formats of rounded weights, as a suffix of a pair's name; empty if all are kept."""
        target = "" if self.weights == "bf16" else f"-{self.weights}"
        return target if self.draft_weights in ("bf16", AUTO) else f"{target}-draft-{self.draft_weights}"

    @property
    def max_nodes(self) -> int:
        """Most provisional KV indices of a step: the tree, and a head draft after each verified node."""
        return 1 + self.widths[-1] * self.max_depth + self.verify_widths[-1]

    @property
    def path_depth(self) -> int:
        """Longest path that metadata holds, in edges: a head draft ahead of time is below a leaf."""
        return self.max_depth + 1


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """How `ygg serve` batches, where it listens and how it ends.

    Args:
        policy: Name of the policy that chooses trees or chains; see policy/gamma/registry.py.
        gamma_max: Most draft tokens of a chain; None takes 7, or less for a pair of shallower trees.
        max_batch: Most rows at once; None takes 32, or less for a pair of smaller graphs.
        kv_memory_bytes: Memory for the KV pages of both models; None takes what a full batch of the longest
            rows needs, at most half of the free memory.
        max_queue: Most requests that wait for a row.
        elastic: Use the draft's memory for KV pages while speculation is off and pages are scarce.
        tau_low: Pages are scarce if fewer than this share of all are free.
        persist_steps: Steps in a row with scarce pages and no speculation before the draft leaves; the
            paper gives no number, 8 was not tuned.
        tool_parser: Format of the model's tool calls; None takes the one that its chat template asks for.
        reasoning_parser: How the model marks its reasoning, for every chat; None leaves it in the answer.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        allow_hosts: More host names that clients may use for this server.
        allow_origins: Origins of the web pages that may read answers; `*` is all.
        drain_seconds: Seconds that running requests get to finish after a signal.
        shadow: Share of the requests that are decoded both ways, from 0 to 1; see serve/shadow.py.
        page: Have a page at `/`.
    """

    policy: str = "trees"
    gamma_max: int | None = None
    max_batch: int | None = None
    kv_memory_bytes: int | None = None
    max_queue: int = 256
    elastic: bool = True
    tau_low: float = 0.1
    persist_steps: int = 8
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    shadow: float = 0.0
    page: bool = True

    def __post_init__(self) -> None:
        _require(self.gamma_max is None or self.gamma_max >= 0, "gamma_max", self.gamma_max, "0 or above")
        _require(self.max_batch is None or self.max_batch >= 1, "max_batch", self.max_batch, "at least 1")
        _require(
            self.kv_memory_bytes is None or self.kv_memory_bytes > 0,
            "kv_memory",
            self.kv_memory_bytes,
            "above 0 bytes",
        )
        _require(self.max_queue >= 1, "max_queue", self.max_queue, "at least 1")
        _require(0 < self.tau_low < 1, "tau_low", self.tau_low, "between 0 and 1")
        _require(self.persist_steps >= 1, "persist_steps", self.persist_steps, "at least 1")
        # the resolver would take the rest of a division by 65536
        _require(0 <= self.port < 2**16, "port", self.port, "from 0 to 65535")
        is_parser = self.tool_parser in (None, *TOOL_PARSERS)
        _require(is_parser, "tool_parser", self.tool_parser, f"one of {', '.join(TOOL_PARSERS)}")
        is_parser = self.reasoning_parser in (None, *REASONING_PARSERS)
        known = f"one of {', '.join(REASONING_PARSERS)}"
        _require(is_parser, "reasoning_parser", self.reasoning_parser, known)
        for name in self.allow_hosts:
            is_name = HOST_NAME.fullmatch(name) is not None
            _require(is_name, "allow_host", name, "a name alone, without scheme and port: gpu.example.org")
        for origin in self.allow_origins:
            is_origin = origin == "*" or ORIGIN.fullmatch(origin) is not None
            _require(is_origin, "allow_origin", origin, "scheme and host: https://chat.example.org, or *")
        _require(
            math.isfinite(self.drain_seconds) and self.drain_seconds >= 0,
            "drain_seconds",
            self.drain_seconds,
            "a finite number, 0 or above",
        )
        _require(0 <= self.shadow <= 1, "shadow", self.shadow, "from 0 to 1")
        compares = self.shadow == 0 or self.policy != "off"
        _require(compares, "shadow", self.shadow, "left out with --policy off, which never speculates")


def from_dict(kind: type[T], payload: dict[str, Any]) -> T:
    """A config from JSON; lists become tuples, unknown keys are errors."""
    known = {entry.name for entry in fields(kind)}  # type: ignore[arg-type]
    for key in payload:
        _require(key in known, kind.__name__, key, f"one of {sorted(known)}")
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in payload.items()}
    )
