"""How near do the compiled graphs run to what this machine's memory and arithmetic allow, and what does the
host add to them?

Measured in turn, so that drift hits all alike: the rate at which memory is read, the throughput of
`torch.mm` on large matrices (in the pair's dtype, or in float32 where the processor multiplies that
faster), and every graph of both menus at three contexts, the last as long as the pair's context, each
after four of the same graph; after the draft's forwards, verification takes a little longer. A pass reads
the weights, as many bytes as they take in memory (compressed ones three quarters), and the KV of the
context: its memory ceiling is those bytes at the measured rate, its compute ceiling two operations a
weight and token at the measured throughput. T(1) is the time of the narrowest graph, on which one token
runs: of one row for quantised weights, else of two. The host's share comes from the steps of the default
policy on one held-out prompt (`yggdrasil/report/recording.py`). The draft's weights fit the processor's
caches, where they may be read faster than memory.

Refuted if a goal of the table is missed: verification that grows faster with its width, or is farther from
the memory's ceiling, than the goals; a prefill chunk below 0.6 of the matrix throughput; a growth step
above 0.2 ms; a host above 0.4 ms per step. With `--weights int8` verification may grow faster; with int4
its growth has no goal.
`--prompts` and `--tokens` are of no consequence."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bench.lib.claim import Claim, Log, Option, prompts_option, tokens_option
from bench.lib.harness import SETTLE_SECONDS, MemoryStream, spread
from bench.lib.pair import bench_target
from bench.lib.subject import subject
from bench.lib.workloads import STORIES, beginnings
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.config import WEIGHTS
from yggdrasil.kv import KVShape
from yggdrasil.models.packing import pack_chain_
from yggdrasil.pair import LoadedPair
from yggdrasil.report.recording import record_timeline
from yggdrasil.report.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS = (64, 512)
ROUNDS = 21
QUICK_ROUNDS = 2
# after other samplers code, threads and caches are cold: the first forward takes 1.14 times as long, the
# second 1.05 times, the fourth 1.01 times (one token, int4, Zen 5)
FORWARDS_BEFORE = 4
# the first ones are slower
PROBE = (512, 512, 512)
PROBE_ROUNDS = 6
# rows, depth, columns
MATRICES = ((2048, 2048, 2048), (4096, 4096, 4096), (1024, 4096, 4096), (8192, 1024, 4096))
# T(W) over the narrowest graph's time, at most, by the format of the target's weights
GROWTH_OF_VERIFY: Mapping[str, Mapping[int, float]] = {
    "bf16": {8: 1.10, 16: 1.3, 32: 2.1},
    "int8": {8: 1.3, 16: 1.8},
    "int4": {},
}
MOST_OVER_MEMORY = 1.15  # T(1) over its memory ceiling
MIN_PREFILL_SHARE = 0.6  # of the matrix throughput
MOST_GROWTH_STEP_MS = 0.2
MOST_HOST_MS = 0.4

Sampler = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One graph at one context.

    Args:
        size: Its tokens.
        context: Tokens in its KV.
        ms: Median, tenth and ninetieth percentile of its time.
        read_bytes: Of weights and KV.
        memory_ms: What reading them takes at the measured rate.
        compute_ms: What its products take at the measured throughput.
    """

    size: int
    context: int
    ms: Mapping[str, float]
    read_bytes: int
    memory_ms: float
    compute_ms: float

    @property
    def memory_share(self) -> float:
        """Of the memory rate that the pass attains; above 1 where the caches hold what it reads."""
        return self.memory_ms / self.ms["median"]

    @property
    def compute_share(self) -> float:
        """Of the matrix throughput that the pass attains."""
        return self.compute_ms / self.ms["median"]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "memory_share": round(self.memory_share, 4),
            "compute_share": round(self.compute_share, 4),
        }


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a pass has to do at least.

    Args:
        size: Its tokens.
        num_weights: That it multiplies by.
        weight_bytes: That these take in memory.
        kv_bytes: Of the KV that it attends to.
    """

    size: int
    num_weights: int
    weight_bytes: int
    kv_bytes: int

    @property
    def read_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def flop(self) -> int:
        """A product and a sum for every weight and token; attention is not counted."""
        return 2 * self.size * self.num_weights


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Both ceilings.

    Args:
        gb_per_s: Memory read rate, 10^9 bytes a second.
        tflop_per_s: Matrix throughput, 10^12 operations a second.
    """

    gb_per_s: float
    tflop_per_s: float

    def pass_of(self, work: Work, context: int, samples_ms: Sequence[float]) -> Pass:
        """A measured graph next to its ceilings."""
        return Pass(
            size=work.size,
            context=context,
            ms=spread(samples_ms),
            read_bytes=work.read_bytes,
            memory_ms=round(work.read_bytes / self.gb_per_s / 1e6, 4),
            compute_ms=round(work.flop / self.tflop_per_s / 1e9, 4),
        )


def kv_bytes(kv: KVShape, context: int, bytes_each: int) -> int:
    """Keys and values of `context` tokens in every layer."""
    return 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * bytes_each * context


def weight_bytes(model: CompiledModel) -> int:
    """Of all weights that a pass reads, as they lie in memory: everything but the table of embeddings, of
    which it reads a row per token.
    """
    read = {
        tensor.data_ptr(): tensor.nbytes for name, tensor in model.weights.items() if "embed" not in name
    }
    return sum(read.values())


def contexts_of(pair: LoadedPair, quick: bool) -> list[int]:
    """Those of `CONTEXTS` that the pair holds, and the longest after which every graph has room; the
    shortest alone in a rehearsal.
    """
    room = min(
        kv.capacity - pair.bundle.config.prefill_chunk
        for kv in (pair.bundle.kv_target, pair.bundle.kv_draft)
    )
    longest = min(pair.bundle.max_context, room)
    return [*(context for context in CONTEXTS if context < longest), longest][: 1 if quick else None]


def forward_sampler(model: CompiledModel, size: int, context: int) -> Sampler:
    """Milliseconds of a forward that follows others of the same graph, as in decoding without a draft.
    Latency does not depend on the values in the KV.
    """

    def sample() -> float:
        meta_NM = model.meta(size)
        pack_chain_(meta_NM, [0] * size, context)
        for _ in range(FORWARDS_BEFORE):
            model.forward(meta_NM)
        start = time.perf_counter()
        model.forward(meta_NM)
        return (time.perf_counter() - start) * 1e3

    return sample


def matrix_sampler(rows: int, depth: int, columns: int, dtype: torch.dtype) -> Sampler:
    """TFLOP/s of one product of matrices of this size."""
    left = torch.randn(rows, depth, dtype=dtype)
    right = torch.randn(depth, columns, dtype=dtype)

    def sample() -> float:
        start = time.perf_counter()
        torch.mm(left, right)
        seconds = time.perf_counter() - start
        time.sleep(SETTLE_SECONDS)
        return 2 * rows * depth * columns / seconds / 1e12

    return sample


def matrix_dtype(dtype: torch.dtype) -> torch.dtype:
    """What `torch.mm` multiplies fastest here: the pair's dtype, or float32 where the processor has no
    products of that (300 times as long on Zen 3).
    """
    samplers = {candidate: matrix_sampler(*PROBE, candidate) for candidate in (dtype, torch.float32)}
    return max(samplers, key=lambda candidate: max(samplers[candidate]() for _ in range(PROBE_ROUNDS)))


def in_turns(
    samplers: Mapping[Any, Sampler], rounds: int, tick: Callable[[str], None]
) -> dict[Any, list[float]]:
    """`rounds` samples of each, one after another, after a round that is not counted."""
    samples: dict[Any, list[float]] = {name: [] for name in samplers}
    for index in range(rounds + 1):
        for name, sample in samplers.items():
            value = sample()
            if index:
                samples[name].append(value)
        tick(f"round {index} of {rounds}")
    return samples


def verify_goals(
    passes: Sequence[Pass], contexts: Sequence[int], weights: str = "bf16"
) -> list[dict[str, Any]]:
    """What the target's graphs shall attain at these contexts: ratios over the narrowest graph, and that
    graph over its memory ceiling.
    """
    goals = []
    for context in contexts:
        ms = {each.size: each.ms["median"] for each in passes if each.context == context}
        narrow = min((each for each in passes if each.context == context), key=lambda each: each.size)
        goals += [
            at_most(f"T({size})/T({narrow.size}) at context {context}", ms[size] / ms[narrow.size], limit)
            for size, limit in GROWTH_OF_VERIFY[weights].items()
        ]
        goals.append(
            at_most(
                f"T(1) over bytes / rate at context {context}", 1 / narrow.memory_share, MOST_OVER_MEMORY
            )
        )
    return goals


def step_goals(prefill: Mapping[str, Any], host: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Goals of the prompt's graph and of the host; plain decoding has no growth step."""
    goals = [at_least("prefill over torch.mm", prefill["share"], MIN_PREFILL_SHARE)]
    if host["growth_step_ms"] is not None:
        goals.append(at_most("ms of a growth step", host["growth_step_ms"], MOST_GROWTH_STEP_MS))
    return [*goals, at_most("ms of the host per step", host["host_ms"], MOST_HOST_MS)]


def at_most(name: str, measured: float, limit: float) -> dict[str, Any]:
    """A goal from above."""
    return {
        "goal": name,
        "wanted": f"<= {limit}",
        "measured": round(measured, 4),
        "reached": measured <= limit,
    }


def at_least(name: str, measured: float, limit: float) -> dict[str, Any]:
    """A goal from below."""
    return {
        "goal": name,
        "wanted": f">= {limit}",
        "measured": round(measured, 4),
        "reached": measured >= limit,
    }


def host_json(timeline: Timeline) -> dict[str, Any]:
    """Medians of the default policy's steps."""
    return {
        "shape": timeline.representative.shape,
        "steps": len(timeline.steps),
        "step_ms": round(timeline.total_ms, 4),
        "host_ms": round(timeline.host_ms, 4),
        "growth_step_ms": None if timeline.growth_step_ms is None else round(timeline.growth_step_ms, 4),
        "intervals": [
            {"name": name, "is_graph": is_graph, "ms": round(ms, 4)}
            for name, is_graph, ms in timeline.intervals_ms()
        ],
    }


def prefill_json(chunk: Pass, tflop_per_s: float) -> dict[str, float]:
    """The prompt's graph as a rate."""
    return {
        "tokens": chunk.size,
        "context": chunk.context,
        "ms": chunk.ms["median"],
        "tok_per_s": round(chunk.size / chunk.ms["median"] * 1e3, 1),
        "tflop_per_s": round(chunk.compute_share * tflop_per_s, 4),
        "share": round(chunk.compute_share, 4),
    }


def graph_samplers(models: Mapping[str, CompiledModel], contexts: Sequence[int]) -> dict[Any, Sampler]:
    """Every graph at every context, by (kind, context, size); those of one model together, as they run in a
    step.
    """
    return {
        (kind, context, size): forward_sampler(model, size, context)
        for kind, model in models.items()
        for context in contexts
        for size in model.menu.sizes
    }


def measure_passes(
    pair: LoadedPair, num_weights: Mapping[str, int], options: argparse.Namespace, log: Log
) -> tuple[dict[str, Any], dict[str, list[Pass]]]:
    """Both ceilings, and every graph of both models next to them."""
    models: dict[str, Any] = {"verify": pair.engine.target, "draft": pair.engine.draft}
    dtype = getattr(torch, pair.bundle.config.dtype)
    contexts = contexts_of(pair, options.quick)
    matrices = MATRICES[: 1 if options.quick else None]
    multiplied = matrix_dtype(dtype)
    ceilings: dict[Any, Sampler] = {
        "memory": MemoryStream().gb_per_s,
        **{shape: matrix_sampler(*shape, multiplied) for shape in matrices},
    }
    graphs = graph_samplers(models, contexts)
    samples = in_turns(ceilings | graphs, QUICK_ROUNDS if options.quick else ROUNDS, log)
    memory = spread(samples["memory"])
    throughput = {shape: spread(samples[shape]) for shape in matrices}
    machine = Machine(
        gb_per_s=memory["median"], tflop_per_s=max(each["median"] for each in throughput.values())
    )
    passes: dict[str, list[Pass]] = {kind: [] for kind in models}
    for kind, context, size in graphs:
        model = models[kind]
        kv = kv_bytes(model.cache.shape, context, dtype.itemsize)
        work = Work(size=size, num_weights=num_weights[kind], weight_bytes=weight_bytes(model), kv_bytes=kv)
        passes[kind].append(machine.pass_of(work, context, samples[kind, context, size]))
    names = {"x".join(map(str, shape)): found for shape, found in throughput.items()}
    rates = {
        "memory_gb_per_s": memory,
        "mm_dtype": str(multiplied),
        "mm_tflop_per_s": names,
        "tflop_per_s": machine.tflop_per_s,
    }
    return {**rates, "contexts": contexts}, passes


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Ceilings, graphs, host, goals."""
    under_test = subject(options)
    under_test = replace(under_test, config=replace(under_test.config, weights=options.weights))
    pair = under_test.pair()
    log(under_test.target.statement)
    itemsize = getattr(torch, pair.bundle.config.dtype).itemsize
    models = {"verify": under_test.target, "draft": bench_target(under_test.draft, 0)}
    [prompt] = beginnings(STORIES.test_texts, pair, 1)
    # first, in a process that has done nothing but load a pair, as a user's
    host = host_json(record_timeline(pair, prompt))
    found, passes = measure_passes(
        pair, {kind: model.weight_bytes // itemsize for kind, model in models.items()}, options, log
    )
    prefill = prefill_json(
        next(each for each in passes["verify"] if each.size == pair.engine.target.prefill_chunk),
        found["tflop_per_s"],
    )
    goals = [
        *verify_goals(passes["verify"], found["contexts"][1:] or found["contexts"], options.weights),
        *step_goals(prefill, host),
    ]
    return {
        "target": under_test.target.to_json(),
        **found,
        **{kind: [each.to_json() for each in of_kind] for kind, of_kind in passes.items()},
        "prefill": prefill,
        "host": host,
        "goals": goals,
    }


def table(result: Mapping[str, Any]) -> str:
    """Ceilings, graphs next to them, the host's intervals, goals."""
    lines = [
        f"memory {result['memory_gb_per_s']['median']:.1f} GB/s, torch.mm {result['tflop_per_s']:.3f} "
        f"TFLOP/s (best of {list(result['mm_tflop_per_s'])})"
    ]
    for kind in ("verify", "draft"):
        lines.append(
            f"{'T_' + kind + ', context':<18}{'tokens':>7}{'ms':>10}{'p10':>10}{'p90':>10}{'MB':>9}"
            f"{'memory':>9}{'of it':>7}{'compute':>9}{'of it':>7}"
        )
        lines += [_pass_line(each) for each in result[kind]]
    prefill = result["prefill"]
    host = result["host"]
    rates = (
        f"{prefill['tok_per_s']:.0f} tokens/s, {prefill['tflop_per_s']:.3f} TFLOP/s, "
        f"{prefill['share']:.2f} of torch.mm"
    )
    lines.append(f"prefill of {prefill['tokens']} tokens at context {prefill['context']}: {rates}")
    lines.append(
        f"step: {host['shape']}, {host['step_ms']:.3f} ms, host {host['host_ms']:.3f} ms, medians of "
        f"{host['steps']} steps:"
    )
    lines += [
        f"  {'[' + each['name'] + ']' if each['is_graph'] else each['name']:<18}{each['ms']:>9.3f}"
        for each in host["intervals"]
    ]
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {goal['goal']}: {goal['measured']:.3f}, wanted "
        f"{goal['wanted']}"
        for goal in result["goals"]
    ]
    return "\n".join(lines)


def _pass_line(each: Mapping[str, Any]) -> str:
    ms = f"{each['ms']['median']:>10.3f}{each['ms']['p10']:>10.3f}{each['ms']['p90']:>10.3f}"
    memory = f"{each['memory_ms']:>9.3f}{each['memory_share']:>7.2f}"
    ceilings = f"{memory}{each['compute_ms']:>9.3f}{each['compute_share']:>7.2f}"
    return f"{each['context']:>18}{each['size']:>7}{ms}{each['read_bytes'] / 1e6:>9.1f}{ceilings}"


def draw(figure: Figure, result: Mapping[str, Any]) -> None:
    """Milliseconds against tokens with both ceilings, the target's graphs and the draft's."""
    for axes, kind in zip(figure.subplots(1, 2), ("verify", "draft"), strict=True):
        for context in result["contexts"]:
            passes = [each for each in result[kind] if each["context"] == context]
            sizes = [each["size"] for each in passes]
            errors = [
                [abs(each["ms"]["median"] - each["ms"][edge]) for each in passes] for edge in ("p10", "p90")
            ]
            bars = axes.errorbar(
                sizes,
                [each["ms"]["median"] for each in passes],
                errors,
                fmt="o-",
                markersize=3,
                capsize=2,
                label=f"context {context}",
            )
            axes.plot(
                sizes,
                [each["memory_ms"] for each in passes],
                "--",
                linewidth=0.8,
                color=bars.lines[0].get_color(),
            )
        axes.plot(
            sizes,
            [each["compute_ms"] for each in passes],
            "k:",
            linewidth=1,
            label="products at the rate of torch.mm",
        )
        axes.plot([], [], "k--", linewidth=0.8, label="weights and KV at the memory's rate")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set(title=f"T_{kind} and its ceilings", xlabel="tokens", ylabel="ms", yscale="log")
        axes.legend(fontsize=7)


CLAIM = Claim(
    name="roofline",
    doc=__doc__,
    options=(
        prompts_option(1),
        tokens_option(0),
        Option("--weights", "format of the target's weights", default="bf16", choices=WEIGHTS),
    ),
    measure=measure,
    table=table,
    variant=lambda options: [] if options.weights == "bf16" else [options.weights],
    draw=draw,
    size=(11, 4.5),
)

if __name__ == "__main__":
    CLAIM.main()
