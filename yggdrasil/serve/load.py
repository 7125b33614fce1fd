"""Load a compiled pair for serving: from its name to a batcher over its graphs.

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
from yggdrasil.policy.gamma.registry import PolicyParts, batch_policy, check_policy
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import MOST_GRAFTED
from yggdrasil.policy.trees import TreeParts
from yggdrasil.serve.batcher import Batcher
from yggdrasil.serve.busy import BusyWatch
from yggdrasil.serve.draft_memory import DraftMemory, weight_bytes
from yggdrasil.serve.elastic import ElasticMemory, scarce_below
from yggdrasil.serve.pages import PagePool, pages_for
from yggdrasil.serve.request import Observer
from yggdrasil.serve.service import Service
from yggdrasil.text.tokenizer import Tokenizer

__all__ = ["LoadedService", "load_batcher", "load_service", "most_rows", "policy_parts"]

TYPICAL_CONTEXT = 256  # context length for which the policies' prior predicts a step
FREE_MEMORY_SHARE = 0.5
GAMMA_MAX = 7  # longer chains were never chosen
MAX_BATCH = 32


class LoadedService(NamedTuple):
    """A service that is not started yet, and the parts of its pair."""

    service: Service
    tokenizer: Tokenizer
    bundle: Bundle
    latency: LatencyModel


def load_service(name: str, config: ServeConfig, observer: Observer) -> LoadedService:
    """Load a compiled pair for serving; compiles nothing.

    Args:
        observer: Receives the reports of steps and finished requests.

    Raises:
        ArtifactError: the pair is unknown, corrupt or stale.
        ConfigError: the policy is unknown, the memory holds less than one page, or the pair cannot serve
            this configuration.
    """
    bundle = load_bundle(name)
    batcher = load_batcher(bundle, config)
    latency = load_measurements(bundle, bundle.dataset).latency
    watch = BusyWatch(observer, latency)
    service = Service(
        batcher,
        max_queue=config.max_queue,
        policy_name=config.policy,
        observer=watch,
        shadow_rate=config.shadow,
    )
    return LoadedService(service, batcher.tokenizer, bundle, latency)


def load_batcher(bundle: Bundle, config: ServeConfig) -> Batcher:
    """Load a batcher over the graphs of a bundle; raises the errors of `load_service`."""
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.command)
    check_fits(config, bundle.config)
    # A row has as many pages as a single request's cache: graphs on CUDA depend on this width.
    pool = PagePool(
        _num_pages(bundle, config),
        num_rows=most_rows(config, bundle.config),
        max_indices=bundle.kv_target.capacity,
        device=bundle.config.device,
    )
    target, draft, elastic = _load_models(bundle, pool, config)
    return Batcher(
        target,
        draft,
        pool,
        batch_policy(config.policy, policy_parts(bundle, config)),
        tokenizer=tokenizer,
        max_context=bundle.max_context,
        gamma_max=longest_chain(config, bundle.config),
        eos_tokens=bundle.eos_tokens,
        vocab=bundle.vocab,
        elastic=elastic,
        acceptance=load_measurements(bundle, bundle.dataset).acceptance.nearest,
    )


def check_fits(config: ServeConfig, compiled: CompileConfig) -> None:
    """Raise ConfigError if a pair compiled this way cannot serve this; it need not be compiled yet."""
    check_policy(config.policy, longest_chain(config, compiled))
    most = compiled.prefill_chunk // 2
    if config.max_batch is not None and config.max_batch > most:
        allowed = f"at most {most}, half of the pair's largest graph"
        raise ConfigError("max_batch", config.max_batch, allowed, f"ygg serve --max-batch {most}")
    most = compiled.max_depth
    if config.gamma_max is not None and config.gamma_max > most:
        allowed = f"at most {most}, the depth of trees that the pair was compiled for"
        raise ConfigError("gamma_max", config.gamma_max, allowed, f"ygg serve --gamma-max {most}")


def most_rows(config: ServeConfig, compiled: CompileConfig) -> int:
    """Most requests that are decoded at once."""
    return min(MAX_BATCH, compiled.prefill_chunk // 2) if config.max_batch is None else config.max_batch


def longest_chain(config: ServeConfig, compiled: CompileConfig) -> int:
    """Most draft tokens of a chain."""
    return min(GAMMA_MAX, compiled.max_depth) if config.gamma_max is None else config.gamma_max


def _load_models(
    bundle: Bundle, pool: PagePool, config: ServeConfig
) -> tuple[CompiledModel[KVStorage], CompiledModel[KVStorage], ElasticMemory | None]:
    """Load both models over one pool; elastic storage of the target covers the draft's weights as well."""
    device = bundle.config.device
    host_weights = load_draft_weights(bundle, "cpu")
    page_bytes = PAGE_LEN * bundle.kv_target.token_bytes(bundle.dtype)
    draft_pages = -(-weight_bytes(host_weights) // page_bytes) if config.elastic else 0
    target = paged_storage(bundle, bundle.kv_target, pool.table_BP, pool.num_pages + draft_pages)
    draft = paged_storage(bundle, bundle.kv_draft, pool.table_BP, pool.num_pages)
    if not config.elastic:
        own_weights = load_draft_weights(bundle, device)
        return load_target(bundle, target), load_draft(bundle, draft, own_weights), None
    memory = DraftMemory(host_weights, target.bytes_from(pool.num_pages))
    low_pages = scarce_below(config.tau_low, pool.num_pages)
    elastic = ElasticMemory(pool, target, memory, low_pages=low_pages, persist_steps=config.persist_steps)
    return load_target(bundle, target), load_draft(bundle, draft, memory.weights), elastic


def policy_parts(bundle: Bundle, config: ServeConfig) -> PolicyParts:
    """What the policies know before the first step: measured latencies and greedy acceptance."""
    measured = load_measurements(bundle, bundle.dataset)
    context_len = min(TYPICAL_CONTEXT, bundle.max_context)
    prior = predicted_goodput(measured.latency, measured.acceptance.nearest(0.0), context_len)
    trees = TreeParts(
        measured.acceptance.nearest,
        measured.latency,
        bundle.config.widths,
        bundle.config.verify_widths,
        stops=bundle.config.device == "cpu",
        graft=MOST_GRAFTED,
    )
    gamma_max = max(1, longest_chain(config, bundle.config))
    return PolicyParts(gamma_max, most_rows(config, bundle.config), prior, measured.switching, trees)


def _num_pages(bundle: Bundle, config: ServeConfig) -> int:
    """Pages that fit in the memory for KV, at most those of a full batch of the longest rows.

    The default for this memory is half of what is free.
    """
    most = most_rows(config, bundle.config) * pages_for(bundle.kv_target.capacity)
    if config.kv_memory_bytes is None:
        kv_bytes = int(_free_bytes(bundle.config.device) * FREE_MEMORY_SHARE)
        return max(1, min(most, kv_bytes // bundle.page_bytes))
    num_pages = config.kv_memory_bytes // bundle.page_bytes
    if num_pages < 1:
        allowed = f"at least one page of {bundle.page_bytes} bytes"
        command = f"ygg serve --kv-memory {bundle.page_bytes}"
        raise ConfigError("kv_memory", config.kv_memory_bytes, allowed, command)
    return min(most, num_pages)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
