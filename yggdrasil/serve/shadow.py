"""Shadow decoding: a share of requests is decoded twice, plainly for the client and then with speculation.

```
client's request --> plain row ---- events ----> client
                         | end
                         v
                     shadow row --> compared: tokens, reason of the end, milliseconds after the first token
```

The shadow begins when its request has ended, so it does not slow its client down, and both run at about the
same load. It is one more request for all others, and begins only while no request waits. A request that is
cancelled or fails has no shadow.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from yggdrasil.serve.request import Event, Request, ShadowReport

__all__ = ["Shadow"]

ENDS = ("stop", "length")


@dataclass
class Shadow:
    """Draws requests, and compares both decodings of each.

    Args:
        rate: Share of the requests, from 0 to 1.
        observer: Receives every comparison.

    Attributes:
        compared: Requests that were decoded twice.
        differences: Those whose tokens or whose ends differ. Must stay 0.
        plain_ms: Milliseconds after the first token of all plain decodings.
        speculative_ms: The same of their shadows.
    """

    rate: float
    observer: Callable[[ShadowReport], None]
    compared: int = 0
    differences: int = 0
    plain_ms: float = 0.0
    speculative_ms: float = 0.0
    _random: random.Random = field(default_factory=random.Random)

    def draws(self, request: Request) -> bool:
        """Whether this request gets a shadow; one that asks for plain decoding never does."""
        is_plain = request.config.plain or request.speculation == 0
        return not is_plain and self._random.random() < self.rate

    def served(self, request: Request, submit: Callable[[Request], None]) -> Request:
        """The request as its client gets it: plain if it was drawn, else as it is.

        Args:
            submit: Queues the shadow, when the request has ended.
        """
        if not self.draws(request):
            return request
        shadow = replace(request, is_shadow=True, num_top=None, prompt_top=None, trees=False)
        pair = _Pair(request, lambda pair: submit(replace(shadow, on_event=partial(pair.on_shadow, self))))
        return replace(request, speculation=0, on_event=pair.on_plain)

    def add_(self, report: ShadowReport) -> None:
        """Count a comparison."""
        self.compared += 1
        self.differences += report.differs
        self.plain_ms += report.plain_ms
        self.speculative_ms += report.speculative_ms
        self.observer(report)

    @property
    def state(self) -> dict[str, Any]:
        """Totals in JSON values; `time_ratio` is above 1 where speculation is faster."""
        ratio = self.plain_ms / self.speculative_ms if self.speculative_ms else None
        return {
            "rate": self.rate,
            "requests": self.compared,
            "differences": self.differences,
            "time_ratio": None if ratio is None else round(ratio, 4),
        }


class _Pair:
    """Both decodings of a request; all calls come from the batcher's thread."""

    def __init__(self, request: Request, begin: Callable[[_Pair], None]) -> None:
        self._request = request
        self._begin = begin
        self._plain: list[Event] = []
        self._shadow: list[Event] = []

    def on_plain(self, event: Event) -> None:
        self._request.on_event(event)
        self._plain.append(event)
        if event.finish in ENDS:
            self._begin(self)

    def on_shadow(self, shadow: Shadow, event: Event) -> None:
        self._shadow.append(event)
        if event.finish not in (None, "cancelled"):
            shadow.add_(self._report())

    def _report(self) -> ShadowReport:
        plain, speculative = ([token for event in each for token in event.tokens] for each in self._both)
        ends = [each[-1].finish for each in self._both]
        differs = plain != speculative or ends[0] != ends[1]
        if differs:
            pairs = zip(plain, speculative, strict=False)
            same = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
            place = min(len(plain), len(speculative)) if same is None else same
            message = "shadow decoding differs from plain decoding at token %d of %d; ends: %s, %s"
            logging.getLogger(__name__).error(message, place, len(plain), *ends)
        return ShadowReport(differs, *(_decoding_ms(each[-1]) for each in self._both))

    @property
    def _both(self) -> tuple[list[Event], list[Event]]:
        return self._plain, self._shadow


def _decoding_ms(last: Event) -> float:
    """Milliseconds after the first token; the prompt is computed once and shared."""
    assert last.report is not None
    return last.report.total_ms - last.report.ttft_ms
