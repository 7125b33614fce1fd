"""A run that is read step by step: what happens between two steps, and when its reader is cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from yggdrasil.api import Pair
from yggdrasil.kernels.compilations import count_compilation

PROMPT = "Once upon a time"


def test_a_cancelled_reader_does_not_block_the_loop(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pair.generate(PROMPT, max_new_tokens=20).text
    run = pair.stream(PROMPT, max_new_tokens=20)
    step = pair.engine.step
    is_inside = threading.Event()
    go = threading.Event()
    was_freed: list[bool] = []

    def waiting(*arguments: Any) -> Any:
        is_inside.set()
        was_freed.append(go.wait(10))
        return step(*arguments)

    async def read() -> None:
        async for _ in run:
            pass

    async def cancelled() -> bool:
        reader = asyncio.create_task(read())
        while not is_inside.is_set():
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.wait((reader,))
        return reader.cancelled()

    with monkeypatch.context() as patched:
        patched.setattr(pair.engine, "step", waiting)
        assert asyncio.run(cancelled())
    assert was_freed == [True]
    assert run.text  # the step has ended, and the text goes on after it
    run.complete()
    assert run.text == expected


def test_a_program_may_compile_between_the_steps_of_a_stream(pair: Pair) -> None:
    runs = [pair.stream(PROMPT, max_new_tokens=20) for _ in range(2)]
    for run in runs:
        next(iter(run))
        count_compilation()
    for run in runs:  # in the order in which they began
        run.close()
        count_compilation()


def test_a_step_compiles_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.engine, "step", lambda *arguments: count_compilation())
    with pytest.raises(RuntimeError, match="inside the decode loop"):
        pair.generate(PROMPT)
    count_compilation()
