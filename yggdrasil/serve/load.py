"""From a compiled pair's name to a batcher over its graphs.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import CompileConfig, ServeConfig
from yggdrasil.errors import ConfigError
from yggdrasil.kv import KVStorage
from yggdrasil.layout import PAGE_LEN
from yggdrasil.loading import load_bundle, load_draft, load_draft_weights, load_target, paged_storage
from yggdrasil.pair import load_measurements
from yggdrasil.policy.gamma.prior import predicted_goodput
from yggdrasil.policy.gamma.registry import PolicyParts, gamma_policy, policy_builder
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.busy import BusyWatch
from yggdrasil.serve.draft_memory import DraftRoom, room_bytes
from yggdrasil.serve.elastic import ElasticMemory, scarce_below
from yggdrasil.serve.pages import PagePool, pages_for
from yggdrasil.serve.request import Observer
from yggdrasil.serve.service import Service
from yggdrasil.tokenizer import Tokenizer

__all__ = ["OpenedService", "open_batcher", "open_service", "policy_parts"]

TYPICAL_CONTEXT = 256  # at which the policies' prior predicts a step
FREE_MEMORY_SHARE = 0.5


class OpenedService(NamedTuple):
    """A service that is not started yet.

    Args:
        service: Takes requests.
        tokenizer: Of the pair.
        bundle: What was compiled.
        latency: Its profile.
    """

    service: Service
    tokenizer: Tokenizer
    bundle: Bundle
    latency: LatencyModel


def open_service(name: str, config: ServeConfig, observer: Observer) -> OpenedService:
    """Load a compiled pair for serving; compiles nothing.

    Args:
        name: Of the pair.
        config: How to batch.
        observer: Called after steps and finished requests.

    Raises:
        ArtifactError: unknown, corrupt or stale.
        ConfigError: a policy that is not there, or memory for less than one page.
    """
    bundle = load_bundle(name)
    batcher = open_batcher(bundle, config)
    latency = load_measurements(bundle, bundle.dataset).latency
    watch = BusyWatch(observer, latency)
    service = Service(batcher, max_queue=config.max_queue, policy_name=config.policy, observer=watch)
    return OpenedService(service, batcher.tokenizer, bundle, latency)


def open_batcher(bundle: Bundle, config: ServeConfig) -> Batcher:
    """A batcher over the graphs of a bundle; raises as `open_service` does."""
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.command)
    check_fits(config, bundle.config)
    # As many pages a row as a single request's cache has: graphs on CUDA know this width.
    pool = PagePool(
        _num_pages(bundle, config),
        num_rows=config.max_batch,
        max_indices=bundle.kv_target.capacity,
        device=bundle.config.device,
    )
    target, draft, elastic = _load_models(bundle, pool, config)
    return Batcher(
        target,
        draft,
        pool,
        gamma_policy(config.policy, policy_parts(bundle, config)),
        tokenizer=tokenizer,
        max_context=bundle.max_context,
        gamma_max=config.gamma_max,
        eos_tokens=bundle.eos_tokens,
        vocab=bundle.vocab,
        elastic=elastic,
        acceptance=load_measurements(bundle, bundle.dataset).acceptance.nearest,
    )


def check_fits(config: ServeConfig, compiled: CompileConfig) -> None:
    """Raises ConfigError for what a pair compiled this way cannot serve; it need not be compiled yet."""
    policy_builder(config.policy, config.gamma_max)
    most = compiled.prefill_chunk // 2
    if config.max_batch > most:
        raise ConfigError(
            "max_batch",
            config.max_batch,
            f"at most {most}, half of the pair's largest graph",
            f"ygg serve --max-batch {most}",
        )
    most = compiled.max_nodes - 1
    if config.gamma_max > most:
        allowed = f"at most {most}, the room that the pair was compiled with for drafts"
        raise ConfigError("gamma_max", config.gamma_max, allowed, f"ygg serve --gamma-max {most}")


def _load_models(
    bundle: Bundle, pool: PagePool, config: ServeConfig
) -> tuple[CompiledModel[KVStorage], CompiledModel[KVStorage], ElasticMemory | None]:
    """Both models over one pool; where memory is elastic, the target's storage reaches over the room of the
    draft's weights.
    """
    device = bundle.config.device
    host_weights = load_draft_weights(bundle, "cpu")
    page_bytes = PAGE_LEN * bundle.kv_target.token_bytes(bundle.dtype)
    room_pages = -(-room_bytes(host_weights) // page_bytes) if config.elastic else 0
    target = paged_storage(bundle, bundle.kv_target, pool.table_BP, pool.num_pages + room_pages)
    draft = paged_storage(bundle, bundle.kv_draft, pool.table_BP, pool.num_pages)
    if not config.elastic:
        return (
            load_target(bundle, target),
            load_draft(bundle, draft, load_draft_weights(bundle, device)),
            None,
        )
    room = DraftRoom(host_weights, target.bytes_from(pool.num_pages))
    low_pages = scarce_below(config.tau_low, pool.num_pages)
    elastic = ElasticMemory(pool, target, room, low_pages=low_pages, persist_steps=config.persist_steps)
    return load_target(bundle, target), load_draft(bundle, draft, room.weights), elastic


def policy_parts(bundle: Bundle, config: ServeConfig) -> PolicyParts:
    """What the policies know of a pair before the first step: greedy acceptance and latencies as they were
    measured.
    """
    measured = load_measurements(bundle, bundle.dataset)
    prior = predicted_goodput(
        measured.latency, measured.acceptance.nearest(0.0), min(TYPICAL_CONTEXT, bundle.max_context)
    )
    return PolicyParts(max(1, config.gamma_max), config.max_batch, prior, measured.switching)


def _num_pages(bundle: Bundle, config: ServeConfig) -> int:
    """Pages that the memory for KV holds, or that a full batch of the longest rows takes where that is less
    than half of what is free.
    """
    most = config.max_batch * pages_for(bundle.max_context + config.gamma_max + 1)
    if config.kv_memory_bytes is None:
        return max(
            1, min(most, int(_free_bytes(bundle.config.device) * FREE_MEMORY_SHARE) // bundle.page_bytes)
        )
    num_pages = config.kv_memory_bytes // bundle.page_bytes
    if num_pages < 1:
        raise ConfigError(
            "kv_memory",
            config.kv_memory_bytes,
            f"at least one page of {bundle.page_bytes} bytes",
            f"ygg serve --kv-memory {bundle.page_bytes}",
        )
    return min(most, num_pages)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
