"""Is our speculative decoding the fastest among the runtimes that decode on a CPU, and is our plain
decoding as fast as theirs?

Arms, interleaved prompt by prompt, greedy or (`--temperature`) sampled from all tokens, the same
checkpoints, prompts, threads and number of new tokens, bf16 weights or those of `--weights`:

- transformers: `generate`, eager; with a static cache, for which it compiles the forward of one token (as
  it does by itself, and with Inductor's freezing on top, which packs the weights); assisted, with its
  defaults and with constant draft lengths;
- OpenVINO GenAI: plain with its paged and with its stateful (SDPA) attention; with `draft_model`, which
  needs the paged one. Latency hint, one stream;
- llama.cpp, where `--llama-cpp` names its binaries: `llama-server`, plain and with `--model-draft`. Its
  keys and values are in f16, its default;
- ours: plain, the best chain as tuned on validation text, and the tree of the default policy, which is
  "speculative" in the ratios.

With `--weights` every engine rounds the target's weights in its own way, one format after another: ours,
OpenVINO's int8 and int4 (groups of 128), llama.cpp's Q8_0, and Q4_0 and Q4_K_M. Transformers has none. All
drafts stay in bf16.

Peers draft 3, 5, 8, 12 or 16 tokens; the best length on the very test prompts counts, which flatters them.
So does timing: our clock and transformers' run around the whole call, OpenVINO's in its own process,
llama.cpp's is what its server reports without HTTP. No runtime remembers a prompt it has seen.

Refuted if an arm of ours writes another text than our plain decoding (then no speed is reported), or if a
goal is missed: speculative 1.6 times the best speculative arm of any peer and 3.0 times our plain; faster
than the fastest arm of every peer, and on no prompt slower than our plain; our plain 0.95 times
llama.cpp's. With rounded weights our plain 1.1 times llama.cpp's, 350 tokens/s of the tree in int4, and
nothing over our own plain.

Peers sum in another order than we do, so their texts are compared and not asserted: a speculative arm's
with the same runtime's plain text, and all with ours. Sampled texts of peers differ from each other and
from ours, since every runtime draws its own numbers; sampled, 3.0 times our plain is not a goal. OpenVINO's
environment and models are made under the artifact root the first time, by pip and optimum-intel."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.claim_roofline import weight_bytes
from bench.claim_single_stream import (
    CHAIN_ARM,
    TREE_ARM,
    TUNING_TOKENS,
    num_tuning_prompts,
    our_arms,
    tune_chain,
)
from bench.lib.arms import PLAIN_ARM, arm_summary
from bench.lib.claim import Claim, Log, Option, prompts_option, tokens_option
from bench.lib.harness import MemoryStream, Rounds, interleave, ratio, spread
from bench.lib.subject import DRAFTS, Subject, subject
from bench.lib.workloads import WORKLOADS, beginnings
from bench.peers.llama_cpp import LlamaCpp, llama_cpp_peer
from bench.peers.openvino import openvino_peer
from bench.peers.processes import Peer, transformers_peer
from yggdrasil.config import WEIGHTS
from yggdrasil.errors import UsageError
from yggdrasil.store import artifacts

ASSISTANT_TOKENS = (3, 5, 8, 12, 16)
LLAMA_CPP = "llama.cpp"
FILE_TYPES = {"bf16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0", "Q4_K_M")}
INT4_TOK_PER_S = 350  # of the tree


def subject_of(options: argparse.Namespace) -> Subject:
    """The scaled target with the draft that was asked for, by name or by folder."""
    if options.draft in DRAFTS:
        return subject(options, options.draft)
    folder = Path(options.draft).resolve()
    known = subject(options)
    return Subject(
        target=known.target,
        source=known.source,
        draft=folder,
        draft_name=folder.name,
        remeasure=options.remeasure,
    )


def peers_of(
    options: argparse.Namespace, under_test: Subject, weights: str, stack: ExitStack, log: Log
) -> list[Peer]:
    """Every peer that was asked for and has weights of the format, ready to decode until the stack is
    closed.
    """
    models = under_test.target.folder, with_tokenizer(under_test.draft, under_test.target.folder)
    lengths: dict[str, Any] = {
        "num_tokens": options.tokens,
        "assistant_tokens": ASSISTANT_TOKENS,
        "temperature": options.temperature,
    }
    child: dict[str, Any] = {**lengths, "num_threads": torch.get_num_threads(), "log": log}
    peers = [transformers_peer(*models, **lengths)] if weights == "bf16" else []
    if not options.no_openvino:
        peers.append(stack.enter_context(openvino_peer(*models, weights=weights, **child)))
    if options.llama_cpp is not None:
        for file_type in FILE_TYPES[weights]:
            peer = llama_cpp_peer(options.llama_cpp, *models, file_type=file_type, **child)
            peers.append(stack.enter_context(peer))
    return peers


def check_peers(options: argparse.Namespace) -> None:
    """Check that every format of weights has a peer, before the first one is measured.

    Raises:
        UsageError: names the format.
        PeerError: llama.cpp, or its program that rounds, is missing.
    """
    for weights in options.weights:
        if weights != "bf16" and options.no_openvino and options.llama_cpp is None:
            command = "python -m bench.claim_peers --llama-cpp PATH"
            raise UsageError(f"no peer has {weights} weights", command)
    if options.llama_cpp is not None:
        found = LlamaCpp.find(options.llama_cpp)
        if options.weights != ["bf16"]:
            found.quantizer()


def with_tokenizer(draft: Path, target: Path) -> Path:
    """The draft's folder, or a copy of it with the target's tokenizer where it has none: OpenVINO and
    llama.cpp want one in every model.
    """
    if any(draft.glob("tokenizer*")):
        return draft
    folder = (
        artifacts.root()
        / "bench_models"
        / f"{draft.name}-{artifacts.digest(artifacts.digest_file(draft / 'model.safetensors'))}"
    )
    if not folder.exists():
        with artifacts.atomic_directory(folder) as temporary:
            for path in (*draft.iterdir(), *target.glob("tokenizer*")):
                shutil.copy(path, temporary)
    return folder


def ratios(rounds: Rounds, peers: Sequence[Peer]) -> dict[str, Any]:
    """How many times faster we are, prompt by prompt: against our own plain decoding, against the best of
    every peer, and against the best drafting of any.
    """
    plain = rounds.tpots(PLAIN_ARM)
    tree = rounds.tpots(TREE_ARM)

    def over_fastest(ours: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
        fastest = rounds.fastest(names)
        return {**ratio(rounds.tpots(fastest), ours), "fastest": fastest}

    plain_names = {peer.name: [arm.name for arm in peer.plain] for peer in peers}
    all_names = {peer.name: [arm.name for arm in peer.arms] for peer in peers}
    return {
        "speculative_over_plain": {
            **ratio(plain, tree),
            "min": round(min(one / other for one, other in zip(plain, tree, strict=True)), 4),
        },
        "chain_over_plain": ratio(plain, rounds.tpots(CHAIN_ARM)),
        "speculative_over_best_peer_speculative": over_fastest(
            tree, [arm.name for peer in peers for arm in peer.speculative]
        ),
        "speculative_over_peer": {name: over_fastest(tree, names) for name, names in all_names.items()},
        "plain_over_peer_plain": {name: over_fastest(plain, names) for name, names in plain_names.items()},
    }


def goals(
    found: Mapping[str, Any], temperature: float = 0.0, weights: str = "bf16", tree_tok_per_s: float = 0.0
) -> dict[str, Any]:
    """What the claim wants, what was measured, and whether it holds; llama.cpp only where it ran."""
    over_llama_cpp = [
        over["median"]
        for name, over in found["plain_over_peer_plain"].items()
        if name.startswith(LLAMA_CPP)
    ]
    is_rounded = weights != "bf16"
    wanted = {
        "speculative_over_best_peer_speculative": (
            1.6,
            found["speculative_over_best_peer_speculative"]["median"],
        ),
        "speculative_over_plain": (
            None if temperature > 0 or is_rounded else 3.0,
            found["speculative_over_plain"]["median"],
        ),
        "speculative_over_every_peer": (
            1.0,
            min(over["median"] for over in found["speculative_over_peer"].values()),
        ),
        "speculative_over_plain_on_every_prompt": (1.0, found["speculative_over_plain"]["min"]),
        "plain_over_llama_cpp_plain": (1.1 if is_rounded else 0.95, min(over_llama_cpp, default=None)),
        "tree_tok_per_s": (INT4_TOK_PER_S if weights == "int4" else None, tree_tok_per_s),
    }
    return {
        name: {"wanted": limit, "measured": value, "reached": value >= limit}
        for name, (limit, value) in wanted.items()
        if value is not None and limit is not None
    }


def arms_summary(rounds: Rounds, peers: Sequence[Peer], weight_bytes: int) -> dict[str, Any]:
    """Figures of every arm; a peer's with its text against its own plain arm's, a plain arm's with its
    share of the roofline.
    """
    own_plain = {arm.name: peer.plain[0].name for peer in peers for arm in peer.arms}
    plain = {PLAIN_ARM, *(arm.name for peer in peers for arm in peer.plain)}
    summary = {name: arm_summary(rounds, name) for name in rounds.by_arm}
    for name, arm in summary.items():
        arm["same_text_as_own_plain"] = rounds.agreement(name, own_plain.get(name, PLAIN_ARM))
        arm["share_of_roofline"] = share_of_roofline(rounds, name, weight_bytes) if name in plain else None
    return summary


def share_of_roofline(rounds: Rounds, name: str, weight_bytes: int) -> dict[str, float]:
    """The time in which the memory delivers the weights once, by the time per token after the first; rates
    are those of the same rounds.
    """
    ceilings_ms = (weight_bytes / rate / 1e6 for rate in rounds.stream_gb_per_s)
    return spread(
        [ceiling / tpot for ceiling, tpot in zip(ceilings_ms, rounds.later_tpots(name), strict=True)]
    )


def measure(options: argparse.Namespace, log: Log) -> dict[str, Any]:
    """Build what is missing, measure, and return the result document."""
    check_peers(options)
    under_test = subject_of(options)
    log(under_test.target.statement)
    shared = {
        "target": under_test.target.to_json(),
        "settings": {
            "tokens": options.tokens,
            "prompts": options.prompts,
            "text": options.text,
            "draft": under_test.draft_name,
            "temperature": options.temperature,
            "rehearsal": options.quick,
        },
    }
    blocks = {}
    for weights in options.weights:
        log(f"weights: {weights}")
        rounding = replace(under_test, config=replace(under_test.config, weights=weights))
        blocks[weights] = measure_format(options, rounding, log)
    if list(blocks) == ["bf16"]:
        return {**shared, **blocks["bf16"]}
    return {**shared, "formats": blocks}


def measure_format(options: argparse.Namespace, under_test: Subject, log: Log) -> dict[str, Any]:
    """All arms with the target's weights in one format."""
    workload = WORKLOADS[options.text]
    weights = under_test.config.weights
    with ExitStack() as stack:
        peers = peers_of(options, under_test, weights, stack, log)
        pair = under_test.pair(workload)
        stream = MemoryStream()
        tuning_prompts = beginnings(workload.validation_texts, pair, num_tuning_prompts(options))
        depth, tuning = tune_chain(
            pair, tuning_prompts, min(TUNING_TOKENS, options.tokens), options.temperature
        )
        log(f"best chain on validation text: D={depth} (ms per token: {tuning})")
        ours = our_arms(pair, options.tokens, options.temperature, depth)
        arms = [*ours, *(arm for peer in peers for arm in peer.arms)]
        prompts = beginnings(workload.test_texts, pair, options.prompts)
        rounds = interleave(arms, prompts, reference=PLAIN_ARM, stream=stream, tick=log)
    found = ratios(rounds, peers)
    target: Any = pair.engine.target
    num_bytes = under_test.target.weight_bytes if weights == "bf16" else weight_bytes(target)
    summary = arms_summary(rounds, peers, num_bytes)
    return {
        "models": {
            "pair": pair.bundle.name,
            "dtype": pair.bundle.config.dtype,
            "fingerprint": pair.bundle.folder.name,
        },
        "peers": {peer.name: peer.record for peer in peers},
        "chain_depth": depth,
        "chain_tuning_tpot_ms": tuning,
        "stream_gb_per_s": spread(rounds.stream_gb_per_s),
        "weight_bytes_per_pass": num_bytes,
        "arms": summary,
        "ratios": found,
        "goals": goals(found, options.temperature, weights, summary[TREE_ARM]["tok_per_s"]),
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for a person, a block for every format of weights."""
    blocks = result.get("formats", {"bf16": result})
    lines = [result["target"]["statement"]]
    for weights, block in blocks.items():
        lines += [f"weights: {weights}", *_block(block)]
    return "\n".join(lines)


def _block(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'arm':<30} {'ms/token':>9} {'p10':>7} {'p90':>7} {'decoding':>9} {'tok/s':>7} {'AAL':>5} "
        f"{'own plain':>10} {'our plain':>10} {'roofline':>9}"
    ]
    for name, arm in result["arms"].items():
        tpot = arm["tpot_ms"]
        texts = [
            f"{same['equal_prompts']} of {same['prompts']}"
            for same in (arm["same_text_as_own_plain"], arm["same_text_as_plain"])
        ]
        share = f"{arm['share_of_roofline']['median']:.0%}" if arm["share_of_roofline"] else ""
        figures = (
            f"{tpot['median']:>9.2f} {tpot['p10']:>7.2f} {tpot['p90']:>7.2f} "
            f"{arm['tpot_after_first_ms']['median']:>9.2f} {arm['tok_per_s']:>7.1f}"
        )
        lines.append(f"{name:<30} {figures} {arm['aal']:>5.2f} {texts[0]:>10} {texts[1]:>10} {share:>9}")
    lines.append(
        f"roofline: {result['weight_bytes_per_pass'] / 1e6:.0f} MB of weights at "
        f"{result['stream_gb_per_s']['median']:.1f} GB/s"
    )
    for name, found in result["ratios"].items():
        if "median" in found:
            lines.append(_ratio_line(name, found))
        else:
            lines += [_ratio_line(f"{name}, {peer}", over) for peer, over in found.items()]
    lines += [
        f"{'reached' if goal['reached'] else 'MISSED '} {name}: {goal['measured']:.2f} of {goal['wanted']}"
        for name, goal in result["goals"].items()
    ]
    return lines


def _ratio_line(name: str, found: Mapping[str, Any]) -> str:
    against = f" ({found['fastest']})" if "fastest" in found else ""
    return (
        f"{name}{against}: {found['median']:.2f} (p10 {found['p10']:.2f}, p90 {found['p90']:.2f}, 95 % "
        f"of the median {found['ci95']})"
    )


def draft_argument(text: str) -> str:
    """The type of `--draft`."""
    if text not in DRAFTS and not Path(text, "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text}: neither one of {', '.join(DRAFTS)} nor the folder of a model"
        )
    return text


def variant(options: argparse.Namespace) -> list[str]:
    """Another draft, another kind of text, a temperature or other weights have files of their own."""
    setting = [Path(options.draft).resolve().name, options.text]
    sampled = [f"temperature_{options.temperature:g}"] if options.temperature else []
    weights = [] if options.weights == ["bf16"] else options.weights
    return [*([] if setting == ["bundled", "stories"] else setting), *sampled, *weights]


CLAIM = Claim(
    name="peers",
    doc=__doc__,
    options=(
        prompts_option(20, minimum=1),
        tokens_option(128, minimum=2),
        Option(
            "--draft",
            f"{', '.join(DRAFTS)}, or the folder of one",
            default="bundled",
            type=draft_argument,
            metavar="NAME|PATH",
        ),
        Option("--temperature", "sample if above 0, into a result of its own", default=0.0),
        Option("--text", "kind of prompts", default="stories", choices=WORKLOADS),
        Option(
            "--weights",
            "formats of the target's weights, one after another",
            default=["bf16"],
            nargs="+",
            choices=WEIGHTS,
        ),
        Option(
            "--llama-cpp",
            "folder with llama-server; the source with convert_hf_to_gguf.py around it",
            type=Path,
            metavar="PATH",
        ),
        Option("--no-openvino", "leave OpenVINO out: nothing is installed", action="store_true"),
    ),
    measure=measure,
    table=table,
    variant=variant,
)

if __name__ == "__main__":
    CLAIM.main()
