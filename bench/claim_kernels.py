"""How near do the CUDA kernels run to the rate at which the device copies memory?

Measured in turn, so that drift hits all alike, each as a CUDA graph and with events: a device-to-device
copy; migration of KV pages, by the kernel and by two torch operators; tree attention over all layers of one
model at three contexts and widths from 1 to 64, at the heads of Llama-2-7B and with four query heads a KV
head; commit of an accepted path. The layers' KV together exceeds the device's cache by far, so attention
reads memory as it does in a decoding step. A copy and a migration are charged for what they read and for
what they write; attention for the keys and values of the context alone.

Before anything is timed, the kernels must agree: migrated and committed bytes with torch's operators, and
a token's attention with itself, to the bit, alone and in the widest tree.

Refuted if a goal of the table is missed: migration below 0.85 of the copy's rate, attention below the share
of it that `MIN_ATTENTION_SHARE` states, or a commit above 10 us.

Without a CUDA device it exits with 2. `--tune` times the attention kernel's candidates too, for a person
who edits `CONFIGS` in yggdrasil/kernels/attention_triton.py.

Shapes: P = pages, L = layers, G = KV heads, S = slots of a page, F = head features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.claim_roofline import Sampler, at_least, at_most, in_turns
from bench.lib.claim import Claim, Log, Option
from bench.lib.harness import spread
from yggdrasil.errors import UsageError
from yggdrasil.kernels.migrate import move_pages_, move_pages_reference_
from yggdrasil.layout import PAGE_LEN
from yggdrasil.models.packing import empty_meta, pack_nodes_reference_
from yggdrasil.tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
QUICK_WIDTHS = (1, 16)
CONTEXTS = (512, 2048, 8192)
QUICK_CONTEXTS = (512,)
ROUNDS = 21
QUICK_ROUNDS = 2
MAX_DEPTH = 16  # of the default configuration: it sets the width of the metadata
LEVEL = 8  # nodes of a level of the trees
COPY_BYTES = 2**30
MOVED_SHARE = 0.3  # of the pool's pages
COMMITTED = (1, 3, 4, 9, 12)  # offsets of an accepted path after the root
MIN_MIGRATION_SHARE = 0.85
MIN_ATTENTION_SHARE = {2048: 0.5, 8192: 0.7}  # by context, at every width
MOST_COMMIT_US = 10.0


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The sizes of a model that the kernels see.

    Args:
        name: In tables and JSON.
        heads: Query heads.
        dim: Features of a head.
    """

    name: str
    heads: int
    kv_heads: int
    dim: int = 128
    layers: int = 32

    def kv_bytes(self, context: int) -> int:
        """Keys and values of `num_tokens` tokens in all layers, bf16."""
        return self.layers * 2 * self.kv_heads * self.dim * 2 * context


MODELS = (Heads(name="Llama-2-7B", heads=32, kv_heads=32), Heads(name="GQA 32/8", heads=32, kv_heads=8))


class Subject:
    """One model's KV on the device: a row of the longest context, pages in random order.

    Args:
        context: Longest context.
    """

    def __init__(self, model: Heads, context: int) -> None:
        self.model = model
        num_pages = (context + max(WIDTHS)) // PAGE_LEN + 1
        self.storage_PL2GSF = torch.randn(
            num_pages,
            model.layers,
            2,
            model.kv_heads,
            PAGE_LEN,
            model.dim,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self.pages_BP = torch.randperm(num_pages, device="cuda").to(torch.int32)[None]

    def arguments(self, width: int, context: int) -> list[list[Any]]:
        """Of `launch`, layer by layer, for a tree of `width` nodes after `context` tokens."""
        model = self.model
        query = torch.randn(1, model.heads, width, model.dim, dtype=torch.bfloat16, device="cuda")
        key, value = (
            torch.randn(1, model.kv_heads, width, model.dim, dtype=torch.bfloat16, device="cuda")
            for _ in range(2)
        )
        meta_NM = tree_meta(width, context).cuda()
        return [
            [
                query,
                key,
                value,
                self.storage_PL2GSF[:, layer, 0],
                self.storage_PL2GSF[:, layer, 1],
                meta_NM,
                self.pages_BP,
                model.dim**-0.5,
            ]
            for layer in range(model.layers)
        ]

    def sampler(self, width: int, context: int) -> Sampler:
        """Milliseconds of the attention of all layers."""
        from yggdrasil.kernels.attention_triton import launch

        calls = self.arguments(width, context)

        def run() -> None:
            for arguments in calls:
                launch(*arguments)

        return captured(run)


def tree_meta(width: int, context: int) -> Tensor:
    """Metadata of a tree with levels of `LEVEL` nodes, all of them children of the level above's first."""
    tree = TokenTree.root(0, width, max_depth=MAX_DEPTH)
    parent = 0
    while len(tree) < width:
        first = len(tree)
        count = min(LEVEL, width - len(tree))
        tree.grow(torch.full((count,), parent), torch.arange(count), torch.full((count,), -float(first)))
        parent = first
    meta_NM = empty_meta(width, MAX_DEPTH)
    pack_nodes_reference_(meta_NM, tree, 0, width, context)
    return meta_NM


def captured(run: Callable[[], None]) -> Sampler:
    """Milliseconds of a replay of what `run` launches: kernels alone, without the host's launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles; must not be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return sample


def moves(num_pages: int) -> tuple[Tensor, Tensor]:
    """The pages at the end to random others: what contraction of the pool does."""
    count = int(num_pages * MOVED_SHARE)
    return torch.arange(num_pages - count, num_pages, device="cuda"), torch.randperm(
        num_pages - count, device="cuda"
    )[:count]


def storage_samplers(storage_PL2GSF: Tensor) -> tuple[dict[Any, Sampler], int]:
    """Copy, migration and commit by name, and the bytes that a migration moves."""
    from yggdrasil.kernels.commit_triton import launch_ as commit_

    source_M, target_M = moves(len(storage_PL2GSF))
    copied = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(copied)
    committed = torch.tensor(COMMITTED, dtype=torch.int32, device="cuda") + 100
    samplers = {
        "copy": captured(lambda: other.copy_(copied)),
        "migration": captured(lambda: move_pages_(storage_PL2GSF, source_M, target_M)),
        "migration, torch": captured(lambda: move_pages_reference_(storage_PL2GSF, source_M, target_M)),
        "commit": captured(lambda: commit_(storage_PL2GSF, committed, 100)),
    }
    return samplers, len(source_M) * storage_PL2GSF[0].nbytes


def assert_exact(subject: Subject, context: int) -> None:
    """Raises AssertionError where a kernel does not compute what its reference computes: its speed is not
    reporting.
    """
    from yggdrasil.kernels.attention_triton import launch
    from yggdrasil.kernels.commit_triton import launch_ as commit_

    wide = subject.arguments(max(WIDTHS), context)[0]
    alone = subject.arguments(1, context)[0]
    for index in range(3):
        alone[index] = wide[index][:, :, :1].clone()
    assert torch.equal(launch(*wide)[:, :1], launch(*alone)), (
        "the root's attention depends on the tree after it"
    )
    storage = subject.storage_PL2GSF[:8].clone()
    expected = storage.clone()
    (source_M, target_M) = moves(len(storage))
    move_pages_(storage, source_M, target_M)
    move_pages_reference_(expected, source_M, target_M)
    assert torch.equal(storage, expected), "migration moved other bytes than torch's operators"
    sources = torch.tensor(COMMITTED, device="cuda") + 30
    commit_(storage, sources.to(torch.int32), 30)
    targets = torch.arange(30, 30 + len(sources), device="cuda")
    expected[targets // PAGE_LEN, :, :, :, targets % PAGE_LEN] = expected[
        sources // PAGE_LEN, :, :, :, sources % PAGE_LEN
    ]
    assert torch.equal(storage, expected), "commit moved other bytes than torch's operators"


def gb_per_s(num_bytes: int, samples_ms: Sequence[float]) -> dict[str, float]:
    """Rates, 10^9 bytes a second."""
    return spread([num_bytes / ms / 1e6 for ms in samples_ms])


def attention_json(
    model: Heads, context: int, width: int, samples_ms: Sequence[float], copy_gb_per_s: float
) -> dict[str, Any]:
    """One width at one context next to the rate of a copy."""
    rate = gb_per_s(model.kv_bytes(context), samples_ms)
    layer_us = {name: round(1e3 * ms / model.layers, 3) for name, ms in spread(samples_ms).items()}
    return {
        "heads": model.name,
        "context": context,
        "width": width,
        "layer_us": layer_us,
        "gb_per_s": rate,
        "share": round(rate["median"] / copy_gb_per_s, 4),
    }


def goals(
    migration_share: float, attention: Sequence[Mapping[str, Any]], commit_us: float
) -> list[dict[str, Any]]:
    """What the kernels shall attain; attention at its worst width."""
    found = [at_least("migration over copy", migration_share, MIN_MIGRATION_SHARE)]
    for context, limit in MIN_ATTENTION_SHARE.items():
        for name in dict.fromkeys(each["heads"] for each in attention):
            shares = [
                each["share"] for each in attention if (each["heads"], each["context"]) == (name, context)
            ]
            if shares:
                found.append(
                    at_least(f"attention over copy, {name}, context {context}", min(shares), limit)
                )
    return [*found, at_most("us of a commit", commit_us, MOST_COMMIT_US)]


def tuned(
    subjects: Sequence[Subject], contexts: Sequence[int], widths: Sequence[int]
) -> list[dict[str, Any]]:
    """Every candidate of the menu over one layer of all models, contexts and widths, the fastest first."""
    from yggdrasil.kernels.attention_triton import tune

    cases = [
        subject.arguments(width, context)[0]
        for subject in subjects
        for context in contexts
        for width in widths
    ]
    return [{**asdict(config), "ms": round(ms, 4)} for config, ms in tune(cases)]


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Exactness, rates, goals."""
    if not torch.cuda.is_available():
        raise UsageError(
            f"bench.claim_kernels needs a CUDA device, and torch {torch.__version__} sees none",
            "run it on a machine with one",
        )
    contexts, widths = (QUICK_CONTEXTS, QUICK_WIDTHS) if options.quick else (CONTEXTS, WIDTHS)
    subjects = [Subject(model, max(contexts)) for model in MODELS]
    for subject in subjects:
        assert_exact(subject, max(contexts))
    samplers, moved_bytes = storage_samplers(subjects[0].storage_PL2GSF)
    keys = [
        (subject.model, context, width) for subject in subjects for context in contexts for width in widths
    ]
    of = {subject.model: subject for subject in subjects}
    samplers |= {
        (model, context, width): of[model].sampler(width, context) for model, context, width in keys
    }
    samples = in_turns(samplers, QUICK_ROUNDS if options.quick else ROUNDS, log)
    copy = gb_per_s(2 * COPY_BYTES, samples["copy"])
    migration = {
        name: gb_per_s(2 * moved_bytes, samples[name]) for name in ("migration", "migration, torch")
    }
    attention = [attention_json(*key, samples[key], copy["median"]) for key in keys]
    commit_us = spread([1e3 * ms for ms in samples["commit"]])
    return {
        "copy_gb_per_s": copy,
        "migration_gb_per_s": migration,
        "migrated_bytes": moved_bytes,
        "attention": attention,
        "commit_us": commit_us,
        "goals": goals(migration["migration"]["median"] / copy["median"], attention, commit_us["median"]),
        "tune": tuned(subjects, contexts, widths) if options.tune else None,
    }


def table(result: Mapping[str, Any]) -> str:
    """Rates, attention by width, goals, candidates if they were timed."""
    lines = [f"copy {result['copy_gb_per_s']['median']:.0f} GB/s"]
    lines += [
        f"{name} {rate['median']:.0f} GB/s, {result['migrated_bytes'] / 1e6:.0f} MB"
        for name, rate in result["migration_gb_per_s"].items()
    ]
    lines.append(f"commit {result['commit_us']['median']:.1f} us")
    lines.append(
        f"{'attention':<12}{'context':>9}{'width':>7}{'us/layer':>10}{'p10':>9}{'p90':>9}"
        f"{'GB/s':>8}{'of copy':>9}"
    )
    lines += [_attention_line(each) for each in result["attention"]]
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {goal['goal']}: {goal['measured']:.3f}, wanted "
        f"{goal['wanted']}"
        for goal in result["goals"]
    ]
    lines += [
        f"{each['ms']:>10.3f} ms  "
        f"{', '.join(f'{name} {value}' for name, value in each.items() if name != 'ms')}"
        for each in result["tune"] or ()
    ]
    return "\n".join(lines)


def _attention_line(each: Mapping[str, Any]) -> str:
    times = "".join(
        f"{each['layer_us'][name]:>{width}.2f}" for name, width in (("median", 10), ("p10", 9), ("p90", 9))
    )
    rate = each["gb_per_s"]["median"]
    return (
        f"{each['heads']:<12}{each['context']:>9}{each['width']:>7}{times}{rate:>8.0f}{each['share']:>9.2f}"
    )


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Share of the copy's rate against the width, a line a context, a panel a model."""
    names = list(dict.fromkeys(each["heads"] for each in result["attention"]))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        of_model = [each for each in result["attention"] if each["heads"] == name]
        for context in dict.fromkeys(each["context"] for each in of_model):
            points = [(each["width"], each["share"]) for each in of_model if each["context"] == context]
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"context {context}")
        axes.axhline(1, color="k", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set(title=name, xlabel="width, tokens", ylabel="KV read over copied bytes", ylim=(0, None))
        axes.legend(fontsize=7)


CLAIM = Claim(
    name="kernels",
    doc=__doc__,
    options=(Option("--tune", "time the attention kernel's candidates too; minutes", action="store_true"),),
    measure=measure,
    table=table,
    draw=draw,
    devices=(),
    rehearsal="one context, two widths, two rounds",
)

if __name__ == "__main__":
    CLAIM.main()
