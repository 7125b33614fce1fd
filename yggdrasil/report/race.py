"""Plain and speculative decoding of one prompt: recorded one after another, replayed on one clock.

A recording that takes long is drawn as it comes, between steps, when the runs' clocks stand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from yggdrasil.config import GenerateConfig
from yggdrasil.pair import LoadedPair
from yggdrasil.report.live import PROMPT, last_lines, side_by_side
from yggdrasil.report.run import Run

__all__ = ["Race", "drawn_live", "record_race", "replay"]

RUNS = ("green", "cyan")  # two runs of accepted tokens next to each other differ in colour
REPLAY_S = 8.0  # a replay in slow motion takes about that long
FRAME_S = 1 / 25
LIVE_AFTER_S = 1.0  # a shorter recording is not disturbed
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Race:
    """Two finished runs of one request.

    Args:
        plain: Decoded without speculation.
        speculative: Decoded with the pair's policy.
    """

    plain: Run
    speculative: Run

    @property
    def ratio(self) -> float:
        """How many times as fast speculation was, from the prompt to the last token."""
        return self.plain.total_ms / self.speculative.total_ms

    @property
    def default_slow(self) -> float:
        """The slow motion in which the replay can be followed; 1 for a model that is slow itself."""
        return max(1.0, REPLAY_S * 1e3 / self.plain.total_ms)

    def summary(self) -> str:
        """Both runs' figures, and how they compare."""
        lines = [f"{name:<12} {_figures(run)}" for name, run in self._named()]
        return "\n".join([*lines, f"{self._sameness()}, {self.ratio:.1f} times as fast, measured just now"])

    def frame(self, console: Console, prompt: str, now_ms: float) -> Table:
        """Both texts as they were after some milliseconds; infinitely many: what is recorded."""
        columns = []
        for name, run in self._named():
            clock = f"{name}, {min(now_ms, run.total_ms):.0f} ms"
            is_done = run.total_ms <= now_ms < math.inf
            header = Text(clock, "bold green" if is_done else "bold")
            columns.append(Group(header, last_lines(_text_at(run, prompt, now_ms), console)))
        return side_by_side(console, *columns)

    def _named(self) -> tuple[tuple[str, Run], tuple[str, Run]]:
        return ("plain", self.plain), ("speculation", self.speculative)

    def _sameness(self) -> str:
        """Whether the texts are equal, which linear layers that are not exact, on a GPU, do not ensure."""
        pairs = enumerate(zip_longest(self.plain.text, self.speculative.text))
        place = next((place for place, (one, other) in pairs if one != other), None)
        return "same text" if place is None else f"the texts differ after {place} characters"


def record_race(
    pair: LoadedPair,
    prompt: Sequence[int],
    config: GenerateConfig,
    watch: Callable[[Race], object] = lambda race: None,
) -> Race:
    """Run one request without speculation and with it, each from nothing, after a short one for warmth.

    Args:
        watch: Called after every step, with what is recorded so far; its time is not the runs'.
    """
    race = Race(*(Run(pair, prompt, replace(config, plain=plain)) for plain in (True, False)))
    for run in (race.plain, race.speculative):
        Run(pair, prompt, _short(run.config)).complete()
        for _ in run.steps():
            watch(race)
    return race


def _figures(run: Run) -> str:
    """Those of the whole run: its rate is the one that the ratio compares."""
    result = run.result
    rate = len(result.tokens) / result.total_ms * 1e3
    time_and_rate = f"{result.total_ms:.0f} ms, {rate:.0f} tokens/s"
    return f"{len(result.tokens)} tokens in {time_and_rate}, {result.aal:.2f} tokens a pass"


def _short(config: GenerateConfig) -> GenerateConfig:
    limit = config.max_new_tokens
    return replace(config, max_new_tokens=WARM_UP_TOKENS if limit is None else min(limit, WARM_UP_TOKENS))


@contextmanager
def drawn_live(console: Console, prompt: str) -> Iterator[Callable[[Race], None]]:
    """What draws a race while it is recorded, if that takes long; the drawing is gone after the block."""
    next_s = time.perf_counter() + LIVE_AFTER_S
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:

        def draw(race: Race) -> None:
            nonlocal next_s
            if time.perf_counter() >= next_s:
                live.update(race.frame(console, prompt, math.inf), refresh=True)
                next_s = time.perf_counter() + FRAME_S

        yield draw


def replay(race: Race, console: Console, prompt: str, slow: float) -> None:
    """Show both texts as they came, side by side; the last frame stays.

    Args:
        slow: Seconds of the replay for a second of the runs.
    """
    end_ms = max(race.plain.total_ms, race.speculative.total_ms)
    start = time.perf_counter()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        now_ms = 0.0
        while now_ms < end_ms:
            now_ms = min(end_ms, (time.perf_counter() - start) * 1e3 / slow)
            live.update(race.frame(console, prompt, now_ms), refresh=True)
            time.sleep(FRAME_S)


def _text_at(run: Run, prompt: str, now_ms: float) -> Text:
    """The text of a run after some milliseconds; what a step brought with accepted tokens is coloured."""
    text = Text.assemble((prompt, PROMPT))
    coloured = 0
    for chunk in run.chunks:
        if chunk.ms > now_ms:
            break
        text.append(chunk.text, RUNS[coloured % 2] if chunk.accepted else "default")
        coloured += chunk.accepted > 0
    return text
