"""Replies in OpenAI's wire format: events become choices, chunks and usage.

The usage also counts `target_passes`. Next to it a reply has its `timings`, those of the slowest choice:

```
queue_ms           from arrival to admission into the batch
first_token_ms     from arrival to the first token
total_ms           from arrival to the end
tokens_per_second  after the first step, all choices together
tokens_per_pass    of the target, all choices together: the AAL
shared_tokens      prompt tokens that another request had computed, of all choices
```

A stream with `"stream_options": {"include_trees": true}` has the tree of each step in a choice's `tree`:

```
shape     of the drafted tree         nodes  [parent, text, log-probability] of every verified node
drafted   its number of nodes         path   accepted nodes, root first, up to the end of the text
ms        of the step                 bonus  text of the target's own token after the path
```
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from yggdrasil.serve.openai import ChatRequest, CompletionRequest, WireRequest
from yggdrasil.serve.reasoning import OPENING, Part, ReasoningParser, separated
from yggdrasil.serve.request import Event, RequestReport, StepTree, TokenLogProb
from yggdrasil.serve.tools import CallDelta, Format, ToolParser, parsed
from yggdrasil.text.tokenizer import Tokenizer

__all__ = ["ChatReply", "CompletionReply", "Reply", "merge"]

MIN_NAMED_ID = 16  # characters of an id that also has a prefix
MIN_LOG_PROB = -9999.0  # JSON has no infinity; OpenAI writes this


def merge(events: Sequence[Event]) -> Event:
    """Merge all events of a row into one."""
    return Event(
        text="".join(event.text for event in events),
        tokens=[token for event in events for token in event.tokens],
        log_probs=[entry for event in events for entry in event.log_probs],
        finish=events[-1].finish,
        prompt_log_probs=events[0].prompt_log_probs,
    )


class Reply:
    """Converts the events of one HTTP request's rows to OpenAI's objects and counts their tokens.

    Args:
        model: Served name of the model.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self, request: WireRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_tokens = sum(map(len, prompts))
        self._emitted = 0
        self._passes = 0
        self._reports: list[RequestReport] = []

    def count(self, event: Event) -> None:
        """Add an event to the usage."""
        self._emitted += len(event.tokens)
        self._passes += bool(event.tokens)
        if event.report is not None:
            self._reports.append(event.report)

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The chunks of a stream for an event of choice `index`."""
        usage = {"usage": None} if self._request.include_usage else {}
        head = {**self._head, "object": self.chunk_kind}
        deltas = self._deltas(index, event)
        if event.tree is not None:
            deltas[-1]["tree"] = self._tree(event.tree, event.tokens)
        return [{**head, "choices": [delta], **usage} for delta in deltas]

    def last_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that includes usage."""
        return {**self._head, "object": self.chunk_kind, "choices": [], **self._counts()}

    def whole(self, choices: Sequence[Event]) -> dict[str, Any]:
        """The reply to a request without `stream`, from one merged event per choice."""
        objects = [self._choice(index, event) for index, event in enumerate(choices)]
        return {**self._head, "object": self.kind, "choices": objects, **self._counts()}

    def _counts(self) -> dict[str, Any]:
        """Usage and timings, at the end of the reply."""
        return {"usage": self._usage(), "timings": self._timings()}

    def _timings(self) -> dict[str, float]:
        """Of the slowest choice, in milliseconds, and rates of all choices."""
        reports = self._reports
        later_ms = max((report.total_ms - report.ttft_ms for report in reports), default=0.0)
        num_later = sum(max(0, report.emitted_tokens - 1) for report in reports)
        return {
            "queue_ms": round(max((report.queue_ms for report in reports), default=0.0), 3),
            "first_token_ms": round(max((report.ttft_ms for report in reports), default=0.0), 3),
            "total_ms": round(max((report.total_ms for report in reports), default=0.0), 3),
            "tokens_per_second": round(num_later / max(later_ms, 1e-3) * 1e3, 3),
            "tokens_per_pass": round(self._emitted / max(1, self._passes), 4),
            "shared_tokens": sum(report.shared_tokens for report in reports),
        }

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._emitted
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._emitted,
            "total_tokens": total,
            "target_passes": self._passes,
        }

    def _tree(self, tree: StepTree, tokens: Sequence[int]) -> dict[str, Any]:
        """The tree of a step. After the end of the text there is no path and no bonus."""
        texts = map(self._spelled, tree.tokens)
        log_probs = [round(max(log_prob, MIN_LOG_PROB), 3) for log_prob in tree.log_probs]
        return {
            "shape": tree.shape,
            "drafted": tree.drafted,
            "nodes": list(zip(tree.parents, texts, log_probs, strict=True)),
            "path": list(tree.path[: len(tokens) + 1]),
            "bonus": self._spelled(tokens[-1]) if len(tokens) == len(tree.path) else "",
            "ms": round(tree.ms, 3),
        }

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, index: int, event: Event) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _spelled(self, token: int) -> str:
        """The text of a token; incomplete characters are escaped as OpenAI does."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + re.sub(r"^b['\"]|['\"]$", "", repr(data))


def _finish(event: Event, *, is_call: bool) -> str | None:
    """The reason of an end: a text that ends with a call ended for it, unless it was cut."""
    return "tool_calls" if is_call and event.finish == "stop" else event.finish


class CompletionReply(Reply):
    """Objects of /v1/completions."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._unsent_echo = dict(enumerate(request.echoed(prompts, tokenizer)))
        self._prompts = [prompt for prompt in prompts for _ in range(request.n)]
        self._prompt_top = request.prompt_logprobs
        self._spelled_bytes: dict[int, bytes] = {}
        self._num_stripped: dict[int, int] = {}
        self._begun: set[int] = set()

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        echo = self._unsent_echo.pop(index, None)
        log_probs = self._log_probs(index, event, echo) if self._request.num_top is not None else None
        choice = {
            "index": index,
            "text": (echo or "") + event.text,
            "logprobs": log_probs,
            "finish_reason": event.finish,
        }
        if self._prompt_top is not None and index not in self._begun:
            choice["prompt_logprobs"] = [None, *map(self._ranked, event.prompt_log_probs)]
        self._begun.add(index)
        return choice

    def _deltas(self, index: int, event: Event) -> list[dict[str, Any]]:
        return [self._choice(index, event)]

    def _log_probs(self, index: int, event: Event, echo: str | None) -> dict[str, Any]:
        """Scores of an event's tokens; with an echo, those of the prompt come first."""
        entries: list[TokenLogProb | None] = [*event.log_probs]
        tokens = [entry.token for entry in event.log_probs]
        offsets = []
        if echo is not None:
            prompt = self._prompts[index]
            entries = [None, *event.prompt_log_probs, *entries]
            tokens = [*prompt, *tokens]
            # special tokens, and a blank that a decoder strips at the beginning, are not in the echo
            spelled = b"".join(map(self._bytes, prompt)).decode(errors="ignore")
            self._num_stripped[index] = len(spelled) - len(echo)
        before = self._spelled_bytes.get(index, b"")
        for token in tokens:
            offset = len(before.decode(errors="ignore")) - self._num_stripped.get(index, 0)
            offsets.append(max(0, offset))
            before += self._bytes(token)
        self._spelled_bytes[index] = before
        scores = [None if entry is None else max(entry.log_prob, MIN_LOG_PROB) for entry in entries]
        tops = [None if entry is None else self._top(entry) for entry in entries]
        return {
            "tokens": [self._spelled(token) for token in tokens],
            "token_logprobs": scores,
            "top_logprobs": tops if self._request.num_top else None,
            "text_offset": offsets,
        }

    def _bytes(self, token: int) -> bytes:
        """The bytes of a token in the text."""
        return b"" if self._tokenizer.is_special(token) else self._tokenizer.token_bytes(token)

    def _top(self, entry: TokenLogProb) -> dict[str, float]:
        """Log-probabilities by text, the emitted token included; of two equal texts the likelier counts."""
        tops: dict[str, float] = {}
        for token, log_prob in (*entry.top[: self._request.num_top], (entry.token, entry.log_prob)):
            tops.setdefault(self._spelled(token), max(log_prob, MIN_LOG_PROB))
        return tops

    def _ranked(self, entry: TokenLogProb) -> dict[str, dict[str, Any]]:
        """Log-probabilities by token id, in the form of vLLM's `prompt_logprobs`."""
        top = [(*pair, rank) for rank, pair in enumerate(entry.top[: self._prompt_top], 1)]
        return {
            str(token): {
                "logprob": max(log_prob, MIN_LOG_PROB),
                "rank": rank,
                "decoded_token": self._spelled(token),
            }
            for token, log_prob, rank in ((entry.token, entry.log_prob, entry.rank), *top)
        }


class ChatReply(Reply):
    """Objects of /v1/chat/completions.

    Args:
        form: How the model writes calls of tools; None if the request offers none.
        separates_reasoning: Reasoning is not part of the content.
    """

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        form: Format | None = None,
        *,
        separates_reasoning: bool = False,
    ) -> None:
        super().__init__(request, model, tokenizer, prompts)
        self._begun: set[int] = set()
        self._form = form
        self._names = [tool.function.name for tool in request.offered]
        self._most_calls = None if request.parallel_tool_calls else 1
        self._parsers: dict[int, ToolParser] = {}
        self._separates_reasoning = separates_reasoning
        self._shows_reasoning = request.include_reasoning is not False
        self._reasoning_is_open = tokenizer.decode(list(prompts[0][-8:])).rstrip().endswith(OPENING)
        self._reasoning_parsers: dict[int, ReasoningParser] = {}

    def _choice(self, index: int, event: Event) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": event.text, "refusal": None}
        finish: str | None = event.finish
        if self._separates_reasoning:
            reasoning, message["content"] = separated(event.text, is_open=self._reasoning_is_open)
            message |= {"reasoning_content": reasoning or None} if self._shows_reasoning else {}
        if self._form is not None:
            whole = parsed(message["content"], self._form, self._names, most_calls=self._most_calls)
            if whole.calls:
                calls = [self._call(name, arguments) for name, arguments in whole.calls]
                message.update(content=whole.content or None, tool_calls=calls)
                finish = _finish(event, is_call=True)
        return {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(event.log_probs),
            "finish_reason": finish,
        }

    def _deltas(self, index: int, event: Event) -> list[dict[str, Any]]:
        """The deltas of an event: the first one has the log-probabilities, the last one the reason."""
        parts = self._parts(index, event)
        text = "".join(part.text for part in parts if not part.is_reasoning)
        deltas: list[dict[str, Any]] = [
            {"reasoning_content": part.text}
            for part in parts
            if part.is_reasoning and self._shows_reasoning
        ]
        if self._form is None:
            deltas += [{"content": text}] if text else []
            finish: str | None = event.finish
        else:
            parser = self._parser(index)
            read = parser.push(text) + (parser.finish() if event.finish else [])
            deltas += [self._delta(each) for each in read]
            finish = _finish(event, is_call=parser.num_calls > 0)
        if not deltas and (event.log_probs or finish or event.tree):
            deltas = [{}]
        if deltas and index not in self._begun:
            self._begun.add(index)
            content = None if "tool_calls" in deltas[0] else ""
            deltas[0] = {"role": "assistant", "content": content, **deltas[0]}
        last = len(deltas) - 1
        return [
            {
                "index": index,
                "delta": delta,
                "logprobs": self._log_probs(() if place else event.log_probs),
                "finish_reason": finish if place == last else None,
            }
            for place, delta in enumerate(deltas)
        ]

    def _parts(self, index: int, event: Event) -> list[Part]:
        """Reasoning and answer in an event; reasoning comes first."""
        if not self._separates_reasoning:
            return [Part(event.text, False)]
        is_open = self._reasoning_is_open
        parser = self._reasoning_parsers.setdefault(index, ReasoningParser(is_open=is_open))
        return parser.push(event.text) + (parser.finish() if event.finish else [])

    def _parser(self, index: int) -> ToolParser:
        assert self._form is not None
        if index not in self._parsers:
            self._parsers[index] = ToolParser(self._form, self._names, most_calls=self._most_calls)
        return self._parsers[index]

    def _delta(self, delta: str | CallDelta) -> dict[str, Any]:
        if isinstance(delta, str):
            return {"content": delta}
        function = {"arguments": delta.arguments}
        entry = self._call(delta.name, delta.arguments) if delta.name else {"function": function}
        return {"tool_calls": [{"index": delta.index, **entry}]}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        assert self._form is not None
        size = self._form.id_chars
        prefix = "call_" if size >= MIN_NAMED_ID else ""
        number = secrets.token_hex(size)[: size - len(prefix)]
        function = {"name": name, "arguments": arguments}
        return {"id": prefix + number, "type": "function", "function": function}

    def _log_probs(self, entries: Sequence[TokenLogProb]) -> dict[str, Any] | None:
        if self._request.num_top is None:
            return None
        content = [
            {
                **self._entry(entry.token, entry.log_prob),
                "top_logprobs": [self._entry(token, log_prob) for token, log_prob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._spelled(token), "logprob": max(log_prob, MIN_LOG_PROB), "bytes": list(data)}
