"""How fast is generation next to other programs that want the processor?

Next to 0, 1, 2 and 4 processes that never rest, the bundled pair and the one at real size decode held-out
prompts, greedily and by the default policy, each arm in a process of its own and one after the other: with
all threads, with one, and, with `--earlier`, the package of another checkout, which has compiled both pairs
in its own artifact root. Every arm is started several times: where the weights of a process lie in memory
makes it some per cent faster or slower than the next one.

Refuted where, with all threads, generation next to two processes is below 0.35 of its speed next to none;
where it is below 0.8 of the speed of one thread next to as many; where, next to none, it is below 0.99 of
the earlier checkout's; or where two arms write different tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.lib.claim import Claim, Log, Option, prompts_option, tokens_option
from bench.lib.harness import TextMismatchError, ratio, spread
from bench.lib.pair import TEST_TEXT
from bench.lib.subject import PAIR_NAME
from yggdrasil.bundle import BUNDLED
from yggdrasil.errors import UsageError
from yggdrasil.offline.traces import read_texts

ALL = "all threads"
ONE = "one thread"
EARLIER = "earlier"
LOADS = (0, 1, 2, 4)
MIN_OF_IDLE = 0.35
MIN_OF_ONE = 0.8
MIN_OF_EARLIER = 0.99
LOADED = 2  # processes next to which MIN_OF_IDLE is wanted
EARLIER_LOADED_PROMPTS = 2  # next to a busy process it may take a hundred times as long
PROMPT_CHARACTERS = 80
REPEATS = {BUNDLED: 4, PAIR_NAME: 1}  # a tenth of a second is one or two turns of the scheduler
PAUSE_S = 0.05  # between two arms, in which the threads of the last one go to sleep
BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""  # until its standard input ends: with this process, however that ends
ROOT = Path(__file__).parent.parent


class Decoder:
    """An arm: a process that decodes what it is sent.

    Args:
        pair: Name of a compiled pair.
        num_tokens: New tokens of every prompt.
        environment: What differs from this process's.
    """

    def __init__(self, pair: str, num_tokens: int, environment: Mapping[str, str]) -> None:
        command = [
            sys.executable,
            str(ROOT / "bench" / "lib" / "contended_decoder.py"),
            pair,
            str(num_tokens),
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
        self._answer()

    def decode(self, prompt: str) -> dict[str, Any]:
        """Milliseconds and tokens of one prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("an arm has ended; what it printed stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """A block next to `count` processes that never rest."""
    processes = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(count)
    ]
    time.sleep(0.5 if processes else 0.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure_load(
    arms: Mapping[str, Decoder], prompts: Sequence[str], load: int, turn: int
) -> dict[str, list[float]]:
    """Tokens per second by arm and prompt; the first prompt starts with arm `turn`, each with the next.

    Raises:
        TextMismatchError: two arms wrote different tokens.
    """
    rates: dict[str, list[float]] = {name: [] for name in arms}
    with busy_processes(load):
        for index, prompt in enumerate(prompts):
            names = [name for name in arms if name != EARLIER or not load or index < EARLIER_LOADED_PROMPTS]
            start = (turn + index) % len(names)
            answers = {}
            for name in [*names[start:], *names[:start]]:
                time.sleep(PAUSE_S)
                answers[name] = arms[name].decode(prompt)
                rates[name].append(len(answers[name]["tokens"]) / answers[name]["ms"] * 1e3)
            if any(answer["tokens"] != answers[ALL]["tokens"] for answer in answers.values()):
                raise TextMismatchError(
                    f"arms differ on prompt {index} next to {load} processes: no speed is reported"
                )
    return rates


def measure_pair(
    name: str, options: argparse.Namespace, prompts: Sequence[str], log: Log
) -> dict[str, Any]:
    """One pair at every load, and which parts of the claim held."""
    prompts = [*prompts] * REPEATS[name]
    settings: dict[str, dict[str, str]] = {ALL: {}, ONE: {"OMP_NUM_THREADS": "1"}}
    if options.earlier:
        settings[EARLIER] = {"PYTHONPATH": str(options.earlier), "YGG_HOME": str(options.earlier_home)}
    rates: dict[int, dict[str, list[float]]] = {load: {arm: [] for arm in settings} for load in LOADS}
    for start in range(options.starts):
        with ExitStack() as stack:
            arms = {arm: Decoder(name, options.tokens, setting) for arm, setting in settings.items()}
            for arm in arms.values():
                stack.callback(arm.close)
                arm.decode(prompts[0])
            for load in LOADS:
                if start and load:
                    arms.pop(EARLIER, None)
                for arm, found in measure_load(arms, prompts[start :: options.starts], load, start).items():
                    rates[load][arm] += found
                log(
                    f"{name}, start {start + 1} of {options.starts}, next to {load}: "
                    + ", ".join(f"{arm} {spread(each)['median']:.0f}" for arm, each in rates[load].items())
                )
    return {
        "tok_per_s": {
            str(load): {arm: spread(each) for arm, each in by_arm.items()} for load, by_arm in rates.items()
        },
        "of_idle": {str(load): ratio(rates[load][ALL], rates[0][ALL]) for load in LOADS},
        "of_one_thread": {str(load): ratio(rates[load][ALL], rates[load][ONE]) for load in LOADS},
        "of_earlier": ratio(rates[0][ALL], rates[0][EARLIER]) if options.earlier else None,
    }


def held(found: Mapping[str, Any]) -> dict[str, bool | None]:
    """Every part of the claim, None where it was not measured."""
    earlier = found["of_earlier"]
    return {
        f"next to {LOADED}: at least {MIN_OF_IDLE} of idle": found["of_idle"][str(LOADED)]["median"]
        >= MIN_OF_IDLE,
        f"at least {MIN_OF_ONE} of one thread": all(
            each["median"] >= MIN_OF_ONE for each in found["of_one_thread"].values()
        ),
        f"idle: at least {MIN_OF_EARLIER} of the earlier checkout": None
        if earlier is None
        else earlier["median"] >= MIN_OF_EARLIER,
    }


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Both pairs at every load."""
    if (options.earlier is None) != (options.earlier_home is None):
        raise UsageError("--earlier and --earlier-home belong together", "give both")
    prompts = [text[:PROMPT_CHARACTERS] for text in read_texts(TEST_TEXT)[: options.prompts]]
    pairs = {
        name: measure_pair(name, options, prompts, log)
        for name in ((BUNDLED,) if options.quick else (BUNDLED, PAIR_NAME))
    }
    for found in pairs.values():
        found["held"] = held(found)
    settings = {
        "prompts": options.prompts,
        "repeats": REPEATS,
        "starts": options.starts,
        "tokens": options.tokens,
        "rehearsal": options.quick,
    }
    return {"settings": settings, "pairs": pairs}


def table(result: Mapping[str, Any]) -> str:
    """Pair by pair and load by load."""
    lines = []
    for name, found in result["pairs"].items():
        lines.append(
            f"{name}: tokens/s"
            + "".join(f"{arm:>14}" for arm in found["tok_per_s"]["0"])
            + "   of idle   of one thread"
        )
        for load, by_arm in found["tok_per_s"].items():
            of_idle = found["of_idle"][load]["median"]
            of_one = found["of_one_thread"][load]["median"]
            lines.append(
                f"  next to {load:<12}"
                + "".join(f"{each['median']:>14.0f}" for each in by_arm.values())
                + f"{of_idle:>10.2f}{of_one:>16.2f}"
            )
        if found["of_earlier"] is not None:
            lines.append(
                f"  idle, of the earlier checkout: {found['of_earlier']['median']:.3f} "
                f"{found['of_earlier']['ci95']}"
            )
        lines += [
            f"  {'not measured' if is_held is None else 'held' if is_held else 'MISSED'}: {part}"
            for part, is_held in found["held"].items()
        ]
    return "\n".join(lines)


CLAIM = Claim(
    name="contended",
    doc=__doc__,
    options=(
        prompts_option(12),
        tokens_option(96, quick=32),
        Option("--starts", "processes of every arm, each for a share of the prompts", default=6, quick=1),
        Option("--earlier", "a checkout of the package to compare with", type=Path, metavar="CHECKOUT"),
        Option("--earlier-home", "its artifact root", type=Path, metavar="YGG_HOME"),
    ),
    measure=measure,
    table=table,
    devices=(),
    rehearsal="the bundled pair with 2 prompts of 32 tokens",
)

if __name__ == "__main__":
    CLAIM.main()
