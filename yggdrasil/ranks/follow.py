"""The other ranks: follow the messages of rank 0."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.kernels import load_kernels
from yggdrasil.kv import KVCache
from yggdrasil.loading import target_arguments
from yggdrasil.models.protocol import TokenModel
from yggdrasil.ranks.launch import rank
from yggdrasil.ranks.link import COMMIT, FORWARD, LOAD, STOP, GroupLink, Link

__all__ = ["follow", "follow_run", "load_shard"]


def follow(link: Link, load: Callable[[Any], TokenModel]) -> None:
    """Follow the messages of rank 0 until STOP.

    Args:
        load: Loads this rank's model from the object that rank 0 sends.

    Raises:
        RankLost: rank 0 or another rank has ended.
    """
    model: TokenModel | None = None
    while (message := link.message()).kind != STOP:
        if message.kind == LOAD:
            model = load(link.payload())
            continue
        assert model is not None, "rank 0 loads before it runs"
        if message.kind == FORWARD:
            model.forward(link.tensor(model.meta(message.first)))
        else:
            assert message.kind == COMMIT, message
            path = link.tensor(torch.empty(message.second, dtype=torch.int64))
            model.cache.keep_(0, message.first, path.tolist())


def follow_run() -> None:
    """Run a process with a rank above 0, to its end.

    Raises:
        RankLost: rank 0 ended without STOP.
        ArtifactError: this rank's shard does not load.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and sends STOP
    link = GroupLink()

    def load(bundle: Bundle) -> TokenModel:
        link.use_device(bundle.config.device)
        return load_shard(bundle)

    follow(link, load)
    link.close()


def load_shard(bundle: Bundle) -> CompiledModel[KVCache]:
    """This rank's shard of the target, with the KV cache of its heads."""
    bundle.check_files(rank())
    load_kernels(bundle.command)
    cache = KVCache(bundle.kv_target, dtype=bundle.dtype, device=bundle.config.device)
    return CompiledModel(**target_arguments(bundle, rank()), cache=cache)
