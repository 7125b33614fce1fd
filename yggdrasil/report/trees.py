"""A page with the tree of every step of a generation: one file, without scripts, to send to someone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from html import escape
from pathlib import Path

from yggdrasil.config import SamplingConfig
from yggdrasil.errors import ConfigError
from yggdrasil.pair import LoadedPair
from yggdrasil.picture import Picture
from yggdrasil.state import StepResult
from yggdrasil.store.storage import write_whole
from yggdrasil.text.tokenizer import TextStream, Tokenizer

__all__ = ["step_line", "trees_page", "write_page"]

STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}
.text{white-space:pre-wrap}
.prompt,.counts{opacity:.7}
.new{font-weight:600}
section{border-top:1px solid #8884;padding:.5em 0}
section div{overflow-x:auto}
h2{font-size:1em;margin:.5em 0}
"""
LEGEND = Picture(
    parents=(-1, 0, 1, 0, 0),
    labels=("root", "accepted", "the target's own", "rejected", "pruned before the target"),
    notes=("the last token of the text", "", "", "", ""),
    ranks=(0.0, 1.0, 2.0, 3.0, 4.0),
    accepted=(0, 1),
    pruned=(4,),
    bonus=2,
)


def step_line(result: StepResult, tokenizer: Tokenizer) -> str:
    """The shape of a step, its counts, and the token that the target emitted itself."""
    counts = f"{result.drafted} nodes drafted, {result.verified} verified, {result.accepted} accepted (*)"
    return f"{result.shape}: {counts}, then {tokenizer.token_text(result.tokens[-1])}"


def trees_page(
    pair: LoadedPair, prompt: Sequence[int], sampling: SamplingConfig, results: Sequence[StepResult]
) -> str:
    """The page in HTML.

    Args:
        prompt: Tokens before the first step.
        results: All steps, with their inspections if pruned nodes are to be drawn.
    """
    tokenizer = pair.tokenizer
    stream = TextStream(tokenizer, (), prompt)
    begin = tokenizer.decode(list(prompt))
    before = ""
    steps = []
    for number, result in enumerate(results, 1):
        text = stream.push(result.tokens)
        heading = f"{number}. {step_line(result, tokenizer)}".replace(" (*)", "")
        new = f'{escape(before[-60:])}<span class="new">{escape(text)}</span>'
        tree = result.to_svg(tokenizer)
        steps.append(
            f'<section><h2>{escape(heading)}</h2><p class="text">{new}</p><div>{tree}</div></section>'
        )
        before += text
    before += stream.finish()
    tokens = sum(len(result.tokens) for result in results)
    kind = (
        "greedy"
        if sampling.temperature == 0
        else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    )
    facts = f"pair {pair.bundle.name}, {kind}, without a guard, {date.today().isoformat()}"
    rate = f"{tokens} tokens in {len(results)} passes of the target, {tokens / len(results):.2f} a pass"
    title = "Yggdrasil: the tree of every step"
    story = f'<p class="text"><span class="prompt">{escape(begin)}</span>{escape(before)}</p>'
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    intro = f'<h1>{title}</h1><p class="counts">{escape(facts)}; {rate}</p>{LEGEND.svg()}{story}'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>{intro}{"".join(steps)}</body></html>\n'
    )


def write_page(page: str, path: Path) -> Path:
    """Write the page; raises ConfigError if the file cannot be written."""
    try:
        write_whole(path, page.encode())
    except OSError as error:
        raise ConfigError("html", str(path), f"a file that can be written ({error.strerror})") from None
    return path
