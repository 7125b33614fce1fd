"""Tool calls in a text: functions that the model calls, in the formats that models write.

```
hermes    I look. <tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>     Hermes, Qwen
llama3    {"name": "sum", "parameters": {"a": 1}}; {...}                            Llama 3
mistral   [TOOL_CALLS] [{"name": "sum", "arguments": {"a": 1}}, {...}]              Mistral
json      {"name": "sum", "arguments": {"a": 1}}     or a list of them              others
```

A text is read chunk by chunk as it is decoded, and the deltas of the result do not depend on where the
text was cut: `parsed` is the fold of `ToolParser`'s deltas. A call begins when its name is complete and is
that of an offered function; an object of any other kind is text. Nothing is ever taken back: a call whose
text ends early keeps the arguments that it has.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORMATS", "CallDelta", "Format", "Parsed", "ToolParser", "format_of", "parsed"]

BLANKS = " \t\r\n"
CLOSING_BRACKETS = {"{": "}", "[": "]"}
VALUE_STARTS = '"{[-0123456789tfn'
ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Format:
    """How a model marks its calls.

    Args:
        opening: Marker before calls; empty if there is none.
        closing: Marker after a call; empty if there is none.
        is_bare: A text that begins with a call needs no marker; a special token is not part of the text.
        between: Characters around calls, other than blanks.
        id_chars: Length of a call's id.
        arguments: The key of the arguments.
        opening_id: The special token that is the opening; None if the model writes it as text.
    """

    opening: str = ""
    closing: str = ""
    is_bare: bool = True
    between: str = ""
    id_chars: int = 24
    arguments: str = "arguments"
    opening_id: int | None = None


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", is_bare=False),
    "llama3": Format("<|python_tag|>", between=";", arguments="parameters"),
    "mistral": Format("[TOOL_CALLS]", between="[,]", id_chars=9),  # templates refuse other lengths
    "json": Format(between="[,]"),
}


def format_of(template: str) -> str:
    """The name of the format that a chat template asks its model for, by the markers that it writes."""
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
    found = next((name for name, mark in marks.items() if mark in template), "json")
    is_llama = '"parameters"' in template and "<|start_header_id|>" in template
    return "llama3" if found == "json" and is_llama else found


@dataclass(frozen=True)
class CallDelta:
    """A part of a call; the first one has its name.

    Args:
        index: Place of the call in the text.
        name: The function; empty in all deltas but the first.
        arguments: The next characters of the arguments, as JSON.
    """

    index: int
    name: str = ""
    arguments: str = ""


@dataclass
class Parsed:
    """A whole text: what is not a call, and the calls as [name, arguments]."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    def add(self, deltas: Iterable[str | CallDelta]) -> None:
        """Append what a parser has returned."""
        for delta in deltas:
            if isinstance(delta, str):
                self.content += delta
            elif delta.name:
                self.calls.append([delta.name, delta.arguments])
            else:
                self.calls[delta.index][1] += delta.arguments


def parsed(text: str, form: Format, names: Collection[str], *, most_calls: int | None = None) -> Parsed:
    """A whole text at once."""
    parser = ToolParser(form, names, most_calls=most_calls)
    whole = Parsed()
    whole.add(parser.push(text))
    whole.add(parser.finish())
    return whole


class ToolParser:
    """Divides a text into content and calls while it is decoded.

    Args:
        form: How the model marks calls.
        names: Functions that were offered.
        most_calls: Calls after this many are left out; None keeps all.

    Attributes:
        num_calls: Calls that have begun.

    Markers and the blanks around them are not content.

    >>> parser = ToolParser(FORMATS["hermes"], ["sum"])
    >>> parser.push('I add. <tool_call>{"name": "sum", "arg')
    ['I add.', CallDelta(index=0, name='sum', arguments='')]
    >>> parser.push('uments": {"a": 1}}</tool_call>')
    [CallDelta(index=0, name='', arguments='{"a": 1}')]
    """

    def __init__(self, form: Format, names: Collection[str], *, most_calls: int | None = None) -> None:
        self.num_calls = 0
        self._form = form
        self._names = frozenset(names)
        self._most_calls = most_calls
        self._held = ""  # read but undecided: blanks, a marker, or an object that may become a call
        self._mark = ""  # the end of it that may become a marker
        self._is_inside = form.is_bare  # where a call may begin
        self._has_called = False  # since the marker
        self._call: _Call | None = None
        self._deltas: list[str | CallDelta] = []

    def push(self, text: str) -> list[str | CallDelta]:
        """Read more text; returns what is now certain."""
        for char in text:
            self._read(char)
        return self._taken()

    def finish(self) -> list[str | CallDelta]:
        """The rest, at the end of the text."""
        is_frame = self._is_inside and self._has_called
        is_blank = self.num_calls > 0 and not self._held.strip(BLANKS)
        if not is_frame and not is_blank:
            self._deltas.append(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> list[str | CallDelta]:
        """The deltas since the last time, neighbours of one kind joined."""
        joined: list[str | CallDelta] = []
        for delta in self._deltas:
            if not delta:
                continue
            last = joined[-1] if joined else None
            if isinstance(delta, str) and isinstance(last, str):
                joined[-1] = last + delta
            elif (
                isinstance(delta, CallDelta)
                and isinstance(last, CallDelta)
                and not (delta.name or last.name)
            ):
                joined[-1] = CallDelta(last.index, "", last.arguments + delta.arguments)
            else:
                joined.append(delta)
        self._deltas = []
        return joined

    def _read(self, char: str) -> None:
        self._held += char
        if self._call is not None:
            self._read_call(self._call, char)
        elif self._is_inside:
            self._read_frame(char)
        else:
            self._read_content()

    def _read_content(self) -> None:
        """Release what cannot be the blanks and the marker before a call."""
        rest = self._held.lstrip(BLANKS)
        while rest and not self._form.opening.startswith(rest):
            self._deltas.append(self._held[: len(self._held) - len(rest) + 1])
            self._held = rest[1:]
            rest = self._held.lstrip(BLANKS)
        if rest and rest == self._form.opening:
            self._is_inside = True
            self._has_called = False

    def _read_frame(self, char: str) -> None:
        """Read markers and separators around calls."""
        marks = [mark for mark in (self._form.opening, self._form.closing) if mark]
        mark = self._mark + char
        if mark in marks:
            self._mark = ""
            self._end_frame(mark)
        elif any(whole.startswith(mark) for whole in marks):
            self._mark = mark
        elif self._mark and self._mark in self._form.between:  # a bracket, not the beginning of a marker
            self._mark = ""
            self._read_frame(char)
        elif self._mark:
            self._give_up()
        elif char == "{":
            self._call = _Call(self._names)
            self._call.read(char)
        elif char in self._form.between:
            self._held = "" if self._has_called else self._held
        elif char not in BLANKS:
            self._give_up()

    def _end_frame(self, mark: str) -> None:
        """After a whole marker: the closing one ends the frame, another opening one changes nothing."""
        if mark == self._form.opening:
            return
        if self._has_called:
            self._held = ""
            self._is_inside = False
        else:
            self._give_up()

    def _read_call(self, call: _Call, char: str) -> None:
        had_begun = call.has_begun
        call.read(char)
        if call.has_begun:
            self._held = char if call.is_broken else ""
            self._send(call, is_first=not had_begun)
        if call.is_broken or (call.is_done and not call.has_begun):
            self._give_up()
        elif call.is_done:
            self._call = None
            self._has_called = True

    def _send(self, call: _Call, *, is_first: bool) -> None:
        self.num_calls += is_first
        arguments = call.take()
        if self._most_calls is not None and self.num_calls > self._most_calls:
            return
        index = self.num_calls - 1
        if is_first:
            self._deltas.append(CallDelta(index, call.name))
        if arguments:
            self._deltas.append(CallDelta(index, "", arguments))

    def _give_up(self) -> None:
        """What is held is no call, so it is content; only its end may be the beginning of a marker."""
        self._call = None
        self._is_inside = False
        self._mark = ""
        opening = self._form.opening
        begun = (size for size in range(len(opening) - 1, 0, -1) if self._held.endswith(opening[:size]))
        kept = next(begun, 0)
        self._deltas.append(self._held[: len(self._held) - kept])
        self._held = self._held[len(self._held) - kept :]


class _Call:
    """A JSON object that calls a function, read character by character.

    Args:
        names: Functions that were offered.

    Attributes:
        name: The function; empty until it is known.
        is_done: The object has ended.
        is_broken: The text is not a call, or no longer one; the last character is not part of it.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name = ""
        self.is_done = False
        self.is_broken = False
        self._names = names
        self._next = "start"  # or key, colon, value, end
        self._key = ""
        self._token = ""  # a key or a value that has not ended; of the arguments only the first character
        self._open: list[str] = []  # closing brackets that are due within a value
        self._is_string = False
        self._is_escaped = False
        self._has_arguments = False
        self._pending = ""  # characters of the arguments that were not taken

    @property
    def has_begun(self) -> bool:
        """Whether this is a call."""
        return bool(self.name)

    def take(self) -> str:
        """The characters of the arguments since the last time."""
        taken = self._pending
        self._pending = ""
        return taken

    def read(self, char: str) -> None:
        """Read the next character of the object."""
        if self._token:
            self._read_token(char)
        elif char not in BLANKS:
            self._read_sign(char)

    def _read_sign(self, char: str) -> None:
        match self._next, char:
            case ("start", "{") | ("end", ","):
                self._next = "key"
            case "key", '"':
                self._begin_token(char)
            case "colon", ":":
                self._next = "value"
            case "value", _ if char in VALUE_STARTS:
                self._begin_token(char)
            case "end", "}":
                self.is_done = True
                if not self._has_arguments:
                    self._pending += "{}"
            case _:
                self.is_broken = True

    def _begin_token(self, char: str) -> None:
        self._token = char
        self._is_string = char == '"'
        self._open = [CLOSING_BRACKETS[char]] if char in CLOSING_BRACKETS else []
        if self._is_streamed:
            self._pending += char

    @property
    def _is_streamed(self) -> bool:
        """Whether the value is the object of the arguments."""
        is_arguments = self._next == "value" and self._key in ARGUMENTS and not self._has_arguments
        return is_arguments and self._token[0] == "{"

    def _read_token(self, char: str) -> None:
        if not self._open and not self._is_string:  # a number or a word
            if char in BLANKS or char in ",}":
                self._end_token()
                return None if self.is_broken else self.read(char)
            self._token += char
            return None
        self._read_nested(char)
        if self.is_broken:
            return None
        if self._is_streamed:
            self._pending += char
        else:
            self._token += char
        if not self._open and not self._is_string:
            self._end_token()
        return None

    def _read_nested(self, char: str) -> None:
        if self._is_string:
            self._is_string = self._is_escaped or char != '"'
            self._is_escaped = char == "\\" and not self._is_escaped
        elif char == '"':
            self._is_string = True
        elif char in CLOSING_BRACKETS:
            self._open.append(CLOSING_BRACKETS[char])
        elif char in CLOSING_BRACKETS.values():
            self.is_broken = self._open.pop() != char

    def _end_token(self) -> None:
        """A key or a value has ended."""
        if self._is_streamed:
            self._has_arguments = True
        else:
            try:
                value = json.loads(self._token, strict=False)
            except (ValueError, RecursionError):
                self.is_broken = True
                return
            self._end_value(value)
        self._next = "colon" if self._next == "key" else "end"
        self._token = ""

    def _end_value(self, value: Any) -> None:
        if self._next == "key":
            self._key = value
        elif self._key == "name" and not self.name:
            self.is_broken = not isinstance(value, str) or value not in self._names
            self.name = "" if self.is_broken else value
        elif self._key in ARGUMENTS and not self._has_arguments and value is not None:
            self.is_broken = not isinstance(value, str)  # some models write the object as a text
            self._has_arguments = True
            self._pending += value if isinstance(value, str) else ""
