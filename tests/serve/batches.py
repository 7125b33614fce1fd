"""Batchers over the shared tiny pair, and the text that every request must get.

Shapes: P = pages of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from yggdrasil.config import GenerateConfig, ServeConfig
from yggdrasil.layout import PAGE_LEN
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.gamma.fixed import FixedGamma
from yggdrasil.policy.gamma.protocol import BatchPolicy, Load
from yggdrasil.policy.uncalibrated import plain_policy
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.load import load_batcher
from yggdrasil.serve.pages import PagePool
from yggdrasil.serve.request import Event, Request
from yggdrasil.step.choice import VerifyMenu, verify_most
from yggdrasil.text.grammar import GrammarState

# 8 rows of 4 drafts are more than the largest graph verifies
CONFIG = ServeConfig(policy="off", gamma_max=4, max_batch=8)


class Schedule(FixedGamma):
    """Takes the gamma and the number of verified drafts of every step from lists; the last entries stay."""

    def __init__(self, gammas: Sequence[int], budgets: Sequence[int] = (10**6,)) -> None:
        super().__init__(0)
        self._gammas = list(gammas)
        self._budgets = list(budgets)

    def select(self, load: Load) -> int:
        return min(self._gammas.pop(0) if len(self._gammas) > 1 else self._gammas[0], load.deepest)

    def menu(self, load: Load, gamma: int, num_drafts: int) -> VerifyMenu:
        assert load.drafts_max is not None, "a batcher always sets this"
        budget = self._budgets.pop(0) if gamma and len(self._budgets) > 1 else self._budgets[0]
        return verify_most(min(budget, load.drafts_max))


@dataclass
class Client:
    """Makes one request and keeps its events."""

    prompt: Sequence[int]
    config: GenerateConfig
    speculation: int | None = None
    num_top: int | None = None
    prompt_top: int | None = None
    workload: str = ""
    trees: bool = False
    events: list[Event] = field(default_factory=list)

    def request(self) -> Request:
        return Request(
            prompt=self.prompt,
            config=self.config,
            speculation=self.speculation,
            num_top=self.num_top,
            prompt_top=self.prompt_top,
            workload=self.workload,
            trees=self.trees,
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
    """One set of graphs for a module's tests; each test gets a batcher with an empty pool over them."""

    def __init__(self, pair: LoadedPair) -> None:
        self.pair = pair
        self._loaded = load_batcher(pair.bundle, CONFIG)

    def batcher(
        self, policy: BatchPolicy, *, num_pages: int | None = None, num_rows: int | None = None
    ) -> Batcher:
        """A new batcher, by default with all pages and rows."""
        loaded = self._loaded
        pool = pool_over(loaded, num_pages or loaded.pool.num_pages, num_rows or CONFIG.max_batch)
        return Batcher(
            loaded.target,
            loaded.draft,
            pool,
            policy,
            tokenizer=loaded.tokenizer,
            max_context=loaded.max_context,
            gamma_max=CONFIG.gamma_max,
            eos_tokens=loaded.eos_tokens,
            vocab=loaded.vocab,
        )

    def reference(self, client: Client) -> list[int]:
        """The tokens that the engine emits for this request alone, without speculation."""
        config = replace(client.config, plain=True)
        return [
            token
            for result in self.pair.engine.generate(client.prompt, plain_policy(), config)
            for token in result.tokens
        ]


def pool_over(loaded: Batcher, num_pages: int, num_rows: int) -> PagePool:
    """An empty pool whose table the graphs of a loaded batcher read."""
    pool = PagePool(num_pages, num_rows=num_rows, max_indices=loaded.pool.table_BP.shape[1] * PAGE_LEN)
    loaded.pool.table_BP.fill_(0)
    pool.table_BP = loaded.pool.table_BP[:num_rows]
    return pool


def submit(batcher: Batcher, *clients: Client) -> None:
    """Queue the request of every client."""
    for client in clients:
        batcher.submit(batcher.ticket(client.request()))


def run(batcher: Batcher, *, check: bool = True) -> int:
    """Run steps until no request is left; returns their number."""
    steps = 0
    while batcher.step() is not None:
        if check:
            batcher.scheduler.check()
        steps += 1
        assert steps < 2000, "no progress"
    batcher.scheduler.check()
    return steps


def is_sentence(state: GrammarState, pair: LoadedPair, text: str, after: tuple[int, ...] = ()) -> bool:
    """Whether a grammar allows a whole text after some tokens, and its end."""
    tokens = [*after, *pair.tokenizer.encode(text, special_tokens=False), *pair.bundle.eos_tokens]
    return all(state.allowed_V(tuple(tokens[:place]))[token] for place, token in enumerate(tokens))
