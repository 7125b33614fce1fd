"""Batchers over the shared tiny pair, and what every request must write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.layout import PAGE_LEN
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.protocol import GammaPolicy, Load
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import open_batcher
from yggdrasil.serve.pages import PagePool
from yggdrasil.serve.request import Event, Request

# 4 rows of 8 drafts are more than the largest graph verifies
CONFIG = ServeConfig(policy="off", gamma_max=8, max_batch=4)


class Schedule(FixedGamma):
    """Any gamma at any step, and any share of it verified, from a list; the last entry stays."""

    def __init__(self, gammas: Sequence[int], budgets: Sequence[int] = (10**6,)) -> None:
        super().__init__(0)
        self._gammas = list(gammas)
        self._budgets = list(budgets)

    def select(self, load: Load) -> int:
        return min(self._gammas.pop(0) if len(self._gammas) > 1 else self._gammas[0], load.deepest)

    def verified(self, load: Load, gamma: int, values: Sequence[Sequence[float]]) -> int:
        assert load.drafts_max is not None, "a batcher reports what its menu holds"
        return min(self._budgets.pop(0) if len(self._budgets) > 1 else self._budgets[0], load.drafts_max)


@dataclass
class Client:
    """Asks once and keeps what it receives."""

    prompt: Sequence[int]
    config: GenerateConfig
    speculation: int | None = None
    num_top: int | None = None
    events: list[Event] = field(default_factory=list)

    def request(self) -> Request:
        return Request(
            prompt=self.prompt,
            config=self.config,
            speculation=self.speculation,
            num_top=self.num_top,
            on_event=self.events.append,
        )

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None


class Bench:
    """One set of graphs for a module's tests: each test gets a batcher with an empty pool over them."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self._opened = open_batcher(pair.bundle, CONFIG)

    def batcher(
        self, policy: GammaPolicy, *, num_pages: int | None = None, num_rows: int | None = None
    ) -> Batcher:
        """A fresh batcher; fewer pages or rows make them scarce."""
        opened = self._opened
        pool = pool_over(opened, num_pages or opened.pool.num_pages, num_rows or CONFIG.max_batch)
        return Batcher(
            opened.target,
            opened.draft,
            pool,
            policy,
            tokenizer=opened.tokenizer,
            max_context=opened.max_context,
            gamma_max=CONFIG.gamma_max,
            eos_tokens=opened.eos_tokens,
            vocab=opened.vocab,
        )

    def reference(self, client: Client) -> list[int]:
        """What the engine writes for this request alone, without speculation."""
        config = replace(client.config, plain=True)
        return [
            token
            for result in self.pair.engine.generate(client.prompt, plain_policy(), config)
            for token in result.tokens
        ]


def pool_over(opened: Batcher, num_pages: int, num_rows: int) -> PagePool:
    """An empty pool whose table the graphs of an opened batcher read."""
    pool = PagePool(num_pages, num_rows=num_rows, max_indices=opened.pool.table_BP.shape[1] * PAGE_LEN)
    opened.pool.table_BP.fill_(0)
    pool.table_BP = opened.pool.table_BP[:num_rows]
    return pool


def run(batcher: Batcher, *, check: bool = True) -> int:
    """Steps until nothing is left."""
    steps = 0
    while batcher.step() is not None:
        if check:
            batcher.check()
        steps += 1
        assert steps < 2000, "no progress"
    batcher.check()
    return steps
