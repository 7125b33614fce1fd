"""What repeats in a text: where its end occurred before, and how often that showed the next token.

```
... the red fox ran . Then the red fox     the last 3 tokens occurred before: "ran ." may follow again
    |---------|               |-----|      q("ran") from a match of 3, q(".") from one of 4, ...
```

kernels/repeats.cpp does the same for the step in C++; a test holds them equal.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "LONGEST",
    "MIN_EDGE",
    "MIN_PATH",
    "NO_GRAFT",
    "Evidence",
    "Graft",
    "Match",
    "Repeats",
    "longest_match",
]

LONGEST = 16  # tokens of a match that count
NUM_BANDS = LONGEST.bit_length()  # 1, 2-3, 4-7, 8-15 and 16 tokens
HALF_LENGTH = 1.5  # a match of this many tokens is right half of the time, before the text shows more
PRIOR_HITS = 4.0  # that assumption counts as this many right predictions
PRIOR_TOKENS = 6.0  # what all bands show counts as this many predictions of a band
MEMORY = 32.0  # after this many predictions the weight of old ones fades
MOST_OBSERVED = 64  # after long plain decoding: what was emitted before these has faded anyway
MIN_PATH = 0.15  # nodes that are less likely than this are not grafted
MIN_EDGE = 0.6  # next to a draft, nor those less likely after their parent: its own candidates are better


class Evidence(ctypes.Structure):
    """How matches predicted the emitted tokens of a text: by band of match lengths, and all together.

    `missed_tokens` is the sum of the lengths of those that were wrong.
    """

    _fields_ = (
        ("num_read", ctypes.c_int64),
        ("hits", NUM_BANDS * ctypes.c_double),
        ("seen", NUM_BANDS * ctypes.c_double),
        ("num_seen", ctypes.c_double),
        ("num_hits", ctypes.c_double),
        ("missed_tokens", ctypes.c_double),
    )


class Match(NamedTuple):
    """An earlier place that is equal to the end of a text.

    Args:
        next_pos: Position of the token that followed there; -1 without a match.
        length: Equal tokens, at most LONGEST.
    """

    next_pos: int
    length: int


class Graft(NamedTuple):
    """A chain of tokens that may follow a text.

    Args:
        tokens: Of the chain, first the root's child.
        log_probs: For each the log-probability that it is right if those before it are.
    """

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]


NO_GRAFT = Graft((), ())


class Repeats:
    """The repetitions of one text, which only grows.

    Args:
        prompt_len: Tokens of the prompt: it is searched, but not predicted.

    Example:
        >>> repeats = Repeats(prompt_len=5)
        >>> repeats.follow_([7, 8, 9, 7, 8])
        >>> repeats.graft(2).tokens
        (9, 7)
    """

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self.tokens = array("q")
        self.evidence = Evidence(num_read=prompt_len)

    def follow_(self, tokens: Sequence[int]) -> None:
        """Take the tokens that a text has gained; a text that was cut is taken anew."""
        known = len(self.tokens)
        if len(tokens) < known or (known and tokens[known - 1] != self.tokens[-1]):
            self.__init__(self._prompt_len)  # type: ignore[misc]
            known = 0
        self.tokens.extend(tokens[known:])

    def graft(self, most: int, min_edge: float = 0.0) -> Graft:
        """The likeliest chain after the text, at most this many tokens.

        Args:
            min_edge: The chain ends before a token that is less likely after those before it.

        Cost: a pass over the text for this chain, and one for each of the last MOST_OBSERVED tokens that
            were emitted since the last call.
        """
        self._observe_()
        match = longest_match(self.tokens, len(self.tokens))
        tokens: list[int] = []
        log_probs: list[float] = []
        path = 0.0
        for place in range(most if match.length else 0):
            edge = self._log_prob(min(match.length + place, LONGEST))
            path += edge
            if path < math.log(MIN_PATH) or edge < math.log(max(min_edge, MIN_PATH)):
                break
            at = match.next_pos + place
            # where the match overlaps the end of the text, the chain goes on with itself
            tokens.append(self.tokens[at] if at < len(self.tokens) else tokens[at - len(self.tokens)])
            log_probs.append(edge)
        return Graft(tuple(tokens), tuple(log_probs))

    def _observe_(self) -> None:
        """Count what matches predicted of the tokens emitted since the last call."""
        evidence = self.evidence
        for position in range(max(evidence.num_read, len(self.tokens) - MOST_OBSERVED), len(self.tokens)):
            match = longest_match(self.tokens, position)
            if match.length == 0:
                continue
            band = _band(match.length)
            fading = MEMORY / max(MEMORY, evidence.seen[band] + 1.0)
            is_hit = self.tokens[match.next_pos] == self.tokens[position]
            evidence.hits[band] = fading * (evidence.hits[band] + is_hit)
            evidence.seen[band] = fading * (evidence.seen[band] + 1.0)
            fading = MEMORY / max(MEMORY, evidence.num_seen + 1.0)
            evidence.num_hits = fading * (evidence.num_hits + is_hit)
            evidence.missed_tokens = fading * (evidence.missed_tokens + (0 if is_hit else match.length))
            evidence.num_seen = fading * (evidence.num_seen + 1.0)
        evidence.num_read = max(evidence.num_read, len(self.tokens))

    def _log_prob(self, length: int) -> float:
        """The logarithm of the share of right predictions by matches of this length.

        Source: the posterior mean of a Beta distribution, whose prior is length / (length + half). With
        these odds the lengths of the wrong predictions sum up to half for each right one, so the text's
        predictions of all bands give half.
        """
        evidence = self.evidence
        band = _band(length)
        half = (evidence.missed_tokens + PRIOR_HITS * HALF_LENGTH) / (evidence.num_hits + PRIOR_HITS)
        prior = PRIOR_TOKENS * length / (length + half)
        return math.log((evidence.hits[band] + prior) / (evidence.seen[band] + PRIOR_TOKENS))


def _band(length: int) -> int:
    return length.bit_length() - 1


def longest_match(tokens: Sequence[int], end: int) -> Match:
    """The earlier place whose tokens before it equal the most tokens before `end`; of equal ones the last.

    Args:
        end: Tokens of the text that count.
    """
    best = Match(-1, 0)
    for place in range(end - 1, 0, -1):
        length = 0
        while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if length > best.length:
            best = Match(place, length)
        if length == LONGEST:
            break
    return best
