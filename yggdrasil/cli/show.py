"""`ygg show`: what was compiled and measured, as text and as PNG."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from yggdrasil.cli.prompt import prompt_of
from yggdrasil.errors import ConfigError

__all__ = ["add_parser", "run"]

PROMPT = "Once upon a time"
NUM_TOKENS = 64  # of the generation that `show tree` begins, or draws as a whole

DECODED = ("step", "tree")
USERS = {
    "out": ("profile", "plan", "predictor", "step"),
    "html": ("tree",),
    "temperature": DECODED,
    "seed": DECODED,
}

DESCRIPTION = """\
pair       what was compiled, from what, and the shape that decoding will use
profile    latency and predicted speedup by verified width (plots as PNG)
plan       the plans of greedy and sampled requests, and why (Gantt charts of an iteration as PNG)
predictor  the depth predictor on held-out text: scores, decisions, whether it is used (and a plot)
step       the wall clock of one step after a prompt: every graph, and the time between graphs (PNG)
tree       the tree that one step drafts, verifies and accepts after a prompt; with --html FILE a page
           with the tree of every step, in one file
"""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "show",
        help="look at a compiled pair",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("pair", "profile", "plan", "predictor", "step", "tree"))
    parser.add_argument(
        "prompt",
        nargs="*",
        default=[],
        help=f"for step and tree: the text before the step (default: {PROMPT}); for the others: the "
        "compiled pair, as with --pair",
    )
    parser.add_argument("--pair", metavar="NAME", help="the compiled pair (default: the bundled one)")
    parser.add_argument(
        "--predictor",
        metavar="DATASET",
        help="calibration text whose depth predictor to use (default: the last one compiled)",
    )
    parser.add_argument("--out", type=Path, help="folder for PNG files (default: the working directory)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="for tree: write the trees of all steps to this page"
    )
    parser.add_argument("--temperature", type=float, help="for step and tree (default: 0)")
    parser.add_argument("--seed", type=int, help="for step and tree (default: 0)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Show one thing."""
    from yggdrasil.pair import load_pair

    _refuse_unused(options)
    options.out = options.out or Path(".")
    if not options.out.is_dir():
        raise ConfigError("out", str(options.out), "an existing folder")
    name = _pair_name(options)
    if options.what in DECODED:
        _sampling(options)  # refuses what cannot be sampled before the pair is loaded
        options.prompt = prompt_of(options.prompt or [PROMPT], f"show {options.what}")
    pair = load_pair(name, dataset=options.predictor)
    show = {
        "pair": _show_pair,
        "profile": _show_profile,
        "plan": _show_plan,
        "predictor": _show_predictor,
        "step": _show_step,
        "tree": _show_tree,
    }
    show[options.what](pair, options)


def _refuse_unused(options: argparse.Namespace) -> None:
    """Refuse an option that would change nothing."""
    for name, users in USERS.items():
        value = getattr(options, name)
        if value is not None and options.what not in users:
            allowed = f"left out except for {', '.join(users)}"
            raise ConfigError(name, str(value), allowed, f"ygg show {users[-1]} --{name} {value}")


def _pair_name(options: argparse.Namespace) -> str:
    """The pair of --pair, or of the word after what needs no prompt."""
    from yggdrasil.bundle import BUNDLED

    names = [] if options.what in DECODED else options.prompt
    if options.pair is not None:
        names = [options.pair, *names]
    if len(names) > 1:
        raise ConfigError("pair", " ".join(names), "one name", f"ygg show {options.what} {names[0]}")
    return names[0] if names else BUNDLED


def _show_pair(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.policy.shape import best_shape

    bundle = pair.bundle
    config = pair.bundle.config
    target, draft = bundle.named_models
    print(f"pair {bundle.name}: target {target}, draft {draft}")
    megabytes = [model.weight_bytes / 1e6 for model in (pair.engine.target, pair.engine.draft)]
    ranks = "" if config.ranks == 1 else f", the target in {config.ranks} shards like this one"
    weights = f"weights {megabytes[0]:.1f} + {megabytes[1]:.1f} MB{ranks}"
    print(f"  {config.dtype} on {config.device}, context {bundle.max_context}, {weights}")
    target_sizes, draft_sizes = (
        list(model.menu.sizes) for model in (pair.engine.target, pair.engine.draft)
    )
    print(f"  target graphs {target_sizes}, draft graphs {draft_sizes} tokens")
    print(f"  {bundle.exactness}")
    print(f"  {bundle.weights}")
    for line in bundle.own_draft.lines if bundle.own_draft else ():
        print(f"  {line}")
    for note in bundle.notes:
        print(f"  note: {note}")
    print(f"  calibrated on {pair.dataset} (--predictor chooses among: {', '.join(bundle.datasets)})")
    for temperature, acceptance in pair.acceptance.by_temperature.items():
        shape, gain = best_shape(
            acceptance,
            pair.latency,
            widths=config.widths,
            verify_widths=config.verify_widths,
            context_len=256,
        )
        print(f"  temperature {temperature}: {shape}, predicted speedup {gain:.2f}")
    print(f"  {bundle.folder}\n  {bundle.profile_path}\n  {bundle.predictor_folder(pair.dataset)}")


def _show_profile(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.report.plots import plot_acceptance, plot_latency

    latency = pair.latency
    print("context  tokens    draft ms   verify ms")
    for context in latency.verify.contexts:
        for size in latency.verify.sizes:
            drafting = (
                f"{latency.draft.at(size, context):10.3f}" if size in latency.draft.sizes else " " * 10
            )
            print(f"{context:7d} {size:7d}  {drafting}  {latency.verify.at(size, context):10.3f}")
    print(
        f"outside these times: {latency.growth_host_ms:.3f} ms per growth step, "
        f"{latency.step_host_ms:.3f} per step, {latency.plain_host_ms:.3f} per plain step; "
        f"the target without a draft in between takes {latency.plain_share:.2f} of these times"
    )
    for path in (plot_latency(pair, options.out), plot_acceptance(pair, options.out)):
        print(path)


def _show_plan(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.report.gantt import plot_plans
    from yggdrasil.report.plots import measured_on
    from yggdrasil.report.tables import plan_table

    print(plan_table(pair))
    charts = {}
    for search in (pair.plan.greedy, pair.plan.sampled):
        for timeline in search.timelines:
            mark = " (runs)" if timeline.plan == search.plan else ""
            charts[f"temperature {search.temperature}, {timeline.plan.name}{mark}"] = timeline
    if charts:
        title = f"one iteration, simulated from measured stages: {measured_on(pair)}"
        print(plot_plans(charts, options.out / f"{pair.bundle.name}-plan.png", title=title))
    else:
        print("no chart, because the search measured no stage; see above why")


def _show_predictor(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.report.plots import plot_predictor
    from yggdrasil.report.tables import depth_table

    print(depth_table(pair))
    print(plot_predictor(pair, options.out))


def _show_step(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.report.recording import record_timeline
    from yggdrasil.report.timeline import plot_timeline, timeline_table

    timeline = record_timeline(pair, pair.tokenizer.encode(options.prompt), sampling=_sampling(options))
    print(timeline_table(timeline))
    step = timeline.representative
    from yggdrasil.report.plots import measured_on

    title = f"{step.shape}, {step.ms:.2f} ms; measured now, with the profile of\n{measured_on(pair)}"
    print(plot_timeline(step, options.out / f"{pair.bundle.name}-step.png", title=title))


def _show_tree(pair: Any, options: argparse.Namespace) -> None:
    from yggdrasil.config import GenerateConfig
    from yggdrasil.report.trees import step_line, trees_page, write_page

    sampling = _sampling(options)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, inspect=options.html is not None, sampling=sampling)
    prompt = pair.tokenizer.encode(options.prompt)
    policy = pair.policy(temperature=sampling.temperature, guard=False)
    steps = pair.engine.generate(prompt, policy, config)
    results = [next(steps)]
    if results[0].caught_up:  # the end of the prompt, without a draft
        results += islice(steps, 1)
    shown = results[-1]
    labels = [pair.tokenizer.token_text(token) for token in shown.tree.token_N.tolist()]
    print(step_line(shown, pair.tokenizer))
    print(shown.tree.render(labels, shown.path))
    if options.html is not None:
        print(write_page(trees_page(pair, prompt, sampling, [*results, *steps]), options.html))


def _sampling(options: argparse.Namespace) -> Any:
    from yggdrasil.config import SamplingConfig

    return SamplingConfig(temperature=options.temperature or 0.0, seed=options.seed or 0)
