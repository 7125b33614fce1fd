"""The trial of a grammar: whether it compiles within limits of time and memory, in a process of its own.

llguidance limits the size of a grammar, but not the time of its first state, which a schema of a line can
make as long as its author likes. A thread cannot be stopped, so a process tries every grammar first:

```
Trial  -- rules -->  server: has read the tokenizer  -- fork -->  compiles; the system ends it at a limit
       <- verdict --                                 <- status --
```

This file is also the program of that process, and imports nothing of the package: a start takes no longer
than that of llguidance, and every fork begins with a small memory and a clock at zero.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["MOST_BYTES", "MOST_S", "Trial", "Verdict"]

MOST_S = 2  # of processor time, so a busy machine refuses no grammar
MOST_BYTES = 256 << 20  # of address space
MEMORY = "/proc/self/statm"  # pages of address space, and others
# keywords of JSON schema that hold schemas: by name, in a list, one; and those that references need
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("prefixItems", "anyOf", "allOf", "oneOf")
SINGLE = ("items", "additionalProperties", "contains", "propertyNames", "not")
SHARED = ("$defs", "definitions")


class Verdict(NamedTuple):
    """How a trial ended.

    Args:
        fault: Why the grammar does not compile; empty if it does.
        num_bytes: Of memory that compiling it took.
        place: The part of a JSON schema that has the fault, as a JSON pointer; empty for the whole.
    """

    fault: str
    num_bytes: int = 0
    place: str = ""


class Trial:
    """Tries grammars. One at a time: a caller holds a lock.

    Args:
        setup: `tokenizer` (its JSON), `vocab`, `ends`, and the `limits` of llguidance.
        most_s: Seconds of processor time.
    """

    def __init__(self, setup: Mapping[str, Any], *, most_s: int = MOST_S) -> None:
        self._setup = json.dumps({**setup, "most_s": most_s})
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None

    def run(self, rules: str) -> Verdict:
        """Try a grammar in llguidance's form; starts the process if there is none.

        Raises:
            ChildProcessError: the process ended, and so did a second one, or the system did not let the
                trials run to their limits.
        """
        for _ in range(2):
            answer = self._answer(rules)
            if not answer.endswith("\n"):
                self._end()
            elif (verdict := json.loads(answer)) is not None:
                return Verdict(*verdict)
        raise ChildProcessError("the process that tries grammars was ended twice")

    def _answer(self, rules: str) -> str:
        """A line; less if the process ends."""
        try:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(rules) + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except BrokenPipeError:
            return ""

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of forks that are ended
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a Ctrl-C is for the parent, which may finish its requests
        )
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(self._setup + "\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, also within a trial, and wait for its end."""
    process.kill()
    process.communicate()


def _serve(lines: Iterable[str]) -> None:
    """Answer every grammar with a line."""
    import llguidance

    lines = iter(lines)
    setup = json.loads(next(lines))
    vocabulary = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab"], eos_token=setup["ends"])
    limits = llguidance.LLParserLimits(**setup["limits"])

    def compiled(rules: str) -> str:
        try:
            matcher = llguidance.LLMatcher(vocabulary, rules, log_level=0, limits=limits)
        except ValueError as error:  # not UTF-8
            return str(error)
        fault: str = matcher.get_error()
        return fault

    for line in lines:
        read_end, write_end = os.pipe()
        fork = os.fork()
        if fork == 0:
            _limit_(setup["most_s"])
            for verdict in _verdicts(json.loads(line), compiled):
                os.write(write_end, json.dumps(verdict).encode() + b"\n")
            os._exit(0)
        os.close(write_end)
        with open(read_end, encoding="utf-8") as answer:
            verdicts = answer.read().splitlines()
        _, status, used = os.wait4(fork, 0)
        ended = _ended(status, used.ru_utime + used.ru_stime, setup["most_s"])
        print(verdicts[-1] if verdicts else json.dumps(ended), flush=True)


def _verdicts(rules: str, compiled: Callable[[str], str]) -> Iterator[Verdict]:
    """The verdict about a grammar, and after a fault in a JSON schema the one that has its place, too.

    Args:
        compiled: Compiles a grammar; returns its fault.
    """
    before_bytes = _peak_bytes()
    verdict = Verdict(compiled(rules), _peak_bytes() - before_bytes)
    yield verdict
    [grammar, *_] = json.loads(rules)["grammars"]
    schema = grammar.get("json_schema")
    if verdict.fault and isinstance(schema, dict):
        shared = {key: schema[key] for key in SHARED if key in schema}

        def has_fault(part: Mapping[str, Any]) -> bool:
            alone = {"grammars": [{"json_schema": {**shared, **part}}]}
            return compiled(json.dumps(alone)) == verdict.fault

        yield verdict._replace(place=_place(schema, has_fault))


def _place(schema: Mapping[str, Any], has_fault: Callable[[Mapping[str, Any]], bool]) -> str:
    """JSON pointer of the smallest part of a schema that has its fault.

    >>> _place({"items": {"anyOf": [{}, {"type": "nul"}]}}, lambda part: "'nul'" in str(part))
    '/items/anyOf/1'
    """
    for path, part in _parts(schema):
        if has_fault(part):
            names = (name.replace("~", "~0").replace("/", "~1") for name in path)
            return "".join(f"/{name}" for name in names) + _place(part, has_fault)
    return ""


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """The schemas directly within a schema, with their paths."""
    found: list[tuple[tuple[str, ...], Any]]
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found = [((key, name), part) for name, part in value.items()]
        elif key in LISTED and isinstance(value, list):
            found = [((key, str(place)), part) for place, part in enumerate(value)]
        else:
            found = [((key,), value)] if key in SINGLE else []
        yield from ((path, part) for path, part in found if isinstance(part, dict))


def _limit_(most_s: int) -> None:
    """Let the system end this process after a time, and refuse it memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    if os.path.exists(MEMORY):
        with open(MEMORY) as memory:
            now_bytes = int(memory.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MOST_BYTES,) * 2)


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _ended(status: int, used_s: float, most_s: int) -> Verdict | None:
    """The verdict about the grammar of a fork that was ended; None if the fork was not at its limits.

    A system without memory kills processes that have done nothing wrong.

    Args:
        used_s: Processor time of the fork.
    """
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by == signal.SIGXCPU or used_s >= most_s:
        return Verdict(f"it is too complex: it does not compile in {most_s} s")
    if ended_by in (signal.SIGKILL, signal.SIGTERM):
        return None
    return Verdict(f"it is too complex: it does not compile in {MOST_BYTES >> 20} MB")


if __name__ == "__main__":
    _serve(sys.stdin)
