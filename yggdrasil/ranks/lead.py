"""Rank 0: a target whose forwards and KV moves also run on the other ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from yggdrasil.compiler.model import CompiledModel
from yggdrasil.errors import RankLost
from yggdrasil.kernels.gather import failure
from yggdrasil.kv import KVCache, KVShape
from yggdrasil.ranks.launch import num_ranks, rank
from yggdrasil.ranks.link import COMMIT, FORWARD, LOAD, STOP, GroupLink, Link, Message

__all__ = ["Leader", "LeadingCache", "LeadingModel", "leader", "leading"]


class Leader:
    """Rank 0's end of the link; Ctrl-C does not interrupt an exchange.

    Attributes:
        is_lost: Whether another rank is gone.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._in_exchange = False
        self._interrupted = False
        self.is_lost = False

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A block that Ctrl-C interrupts only at its end: the others would wait for the rest."""
        self._in_exchange = True
        try:
            yield
        except RankLost:
            self.is_lost = True
            raise
        finally:
            self._in_exchange = False
            if self._interrupted:
                self._interrupted = False
                raise KeyboardInterrupt

    def on_interrupt(self, *_: object) -> None:
        """The handler of Ctrl-C."""
        if not self._in_exchange:
            raise KeyboardInterrupt
        self._interrupted = True

    def load(self, bundle: Any, device: str) -> None:
        """Make every rank load its shard of a bundle."""
        with self.exchange():
            self.link.message(Message(LOAD))
            self.link.payload(bundle)
            self.link.use_device(device)

    def stop(self) -> None:
        """Release the others.

        If a rank was lost, send nothing: a rank that hangs would not receive it. The others notice the end
        of this process.
        """
        if not self.is_lost:
            with suppress(RankLost), self.exchange():
                self.link.message(Message(STOP))


class LeadingCache(KVCache):
    """Rank 0's KV cache; if accepted entries have to move, every rank moves its own."""

    def __init__(self, leader: Leader, shape: KVShape, *, dtype: torch.dtype, device: str) -> None:
        super().__init__(shape, dtype=dtype, device=device)
        self._leader = leader

    def keep_(self, row: int, start: int, path: Sequence[int]) -> None:
        """`KVCache.keep_` on every rank; a chain moves nothing, so no message is sent."""
        if any(offset != place for place, offset in enumerate(path)):
            with self._leader.exchange():
                self._leader.link.message(Message(COMMIT, start, len(path)))
                self._leader.link.tensor(torch.tensor(path, dtype=torch.int64))
        super().keep_(row, start, path)


class LeadingModel(CompiledModel[KVCache]):
    """Rank 0's shard of the target; a forward runs on every rank.

    Raises:
        RankLost: from `forward`, if another rank has ended or does not answer in time.

    Cost: two broadcasts before a graph; `graph_ms` includes waiting for the other ranks.
    """

    def __init__(self, leader: Leader, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._leader = leader

    def forward(self, meta_NM: Tensor) -> tuple[Tensor, Tensor]:
        with self._leader.exchange():
            self._leader.link.message(Message(FORWARD, len(meta_NM)))
            self._leader.link.tensor(meta_NM)
            try:
                return super().forward(meta_NM)
            except RuntimeError as error:
                if failure():
                    raise RankLost(rank(), num_ranks(), failure()) from error
                raise

    def graph_object(self, meta_NM: Tensor) -> None:
        """None: a forward needs messages, which the C++ step does not send."""


_leader: Leader | None = None


def leader() -> Leader:
    """The leader of this run; only inside `leading`."""
    assert _leader is not None, "a target of several ranks is loaded inside leading()"
    return _leader


@contextmanager
def leading() -> Iterator[Leader]:
    """A run of rank 0: connect to the others, and always release them at the end.

    Raises:
        RankLost: the others did not connect.
    """
    global _leader
    link = GroupLink()
    _leader = Leader(link)
    before = signal.signal(signal.SIGINT, _leader.on_interrupt)
    try:
        yield _leader
    finally:
        signal.signal(signal.SIGINT, before)
        _leader.stop()
        _leader = None
        link.close()
