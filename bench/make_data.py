"""Write the texts of the workloads `wiki` and `code`: prompts to test on, texts to calibrate on, texts to
tune baselines on, all disjoint.

```
python -m bench.make_data WIKITEXT2_VALID WIKITEXT2_TEST [--out FOLDER]
```

- wiki: paragraphs of WikiText-2. Test prompts come from its test file; its validation file gives
  calibration and validation texts, article by article, so that no article is on both sides.
- code: functions of the standard library of the running interpreter; whole top-level modules go to one
  side.

Sides are decided by the SHA-256 of the article's title or the module's name, and so is which texts are
taken: the same inputs give the same files."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SPLITS", "Text", "code_texts", "pick", "side", "wiki_texts"]

DATA = Path(__file__).parent / "data"
SPLITS = ("prompts", "calibration", "validation")
TEXTS_PER_SPLIT = 48
TEXTS_PER_SOURCE = 6
MAX_CHARS = 600
MIN_WORDS = 60
MIN_CODE_CHARS = 300
UNKNOWN = "<unk>"
HEADING = re.compile(r"^ = ([^=].*[^=]) = $")
NOT_LIBRARY = {"antigravity", "idlelib", "lib2to3", "site", "test", "this", "turtledemo"}
# WikiText stands words apart
SPACED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."), (" 's", "'s"), ("( ", "("), (" )", ")"))


@dataclass(frozen=True)
class Text:
    """A text and where it is from.

    Args:
        source: Article or module.
        text: At most `MAX_CHARS` characters.
    """

    source: str
    text: str


def side(source: str, sides: Sequence[str]) -> str:
    """The side that a source belongs to, whatever else there is."""
    return sides[int(_digest(source), 16) % len(sides)]


def pick(texts: Iterable[Text]) -> list[Text]:
    """As many texts as a split has, in the order of their digests, few of one source."""
    taken: dict[str, int] = {}
    picked = []
    for text in sorted(texts, key=lambda each: _digest(each.source + each.text)):
        taken[text.source] = taken.get(text.source, 0) + 1
        if taken[text.source] <= TEXTS_PER_SOURCE:
            picked.append(text)
    return picked[:TEXTS_PER_SPLIT]


def wiki_texts(lines: Iterable[str]) -> Iterator[Text]:
    """Paragraphs of some length, less their sentences with unknown words, detokenized and cut
    after a word.
    """
    title = ""
    for line in lines:
        heading = HEADING.match(line.rstrip("\n"))
        if heading:
            title = heading.group(1).strip()
        else:
            sentences = re.split(r"(?<= [.!?]) ", line.strip())
            text = _cut(
                _detokenized(" ".join(sentence for sentence in sentences if UNKNOWN not in sentence)), " "
            )
            if "=" not in text and len(text.split()) >= MIN_WORDS:
                yield Text(title, text)


def _detokenized(line: str) -> str:
    for spaced, joined in SPACED:
        line = line.replace(spaced, joined)
    return re.sub(r" ([,.;:!?])", r"\1", re.sub(r'" ([^"]*?) "', r'"\1"', line))


def code_texts(library: Path) -> Iterator[Text]:
    """The functions of the standard library's modules, cut after a line; the source is the top-level
    module.
    """
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library).parts[0].removesuffix(".py")
        if module in sys.stdlib_module_names and module not in NOT_LIBRARY and not module.startswith("_"):
            yield from (
                Text(module, _cut(text, "\n")) for text in _functions(path) if len(text) >= MIN_CODE_CHARS
            )


def _functions(path: Path) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # a file that shows how such files fail
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield ast.get_source_segment(source, node) or ""


def _cut(text: str, separator: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS + 1].rpartition(separator)[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _split(texts: Iterable[Text], sides: Sequence[str]) -> dict[str, list[Text]]:
    known = list(texts)
    return {name: pick(text for text in known if side(text.source, sides) == name) for name in sides}


def main() -> None:
    """Write six files."""
    parser = argparse.ArgumentParser(
        prog="bench.make_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wikitext_valid", type=Path, help="WikiText-2's validation tokens, as text")
    parser.add_argument("wikitext_test", type=Path, help="WikiText-2's test tokens, as text")
    parser.add_argument("--out", type=Path, default=DATA, help="folder (default: bench/data)")
    options = parser.parse_args()
    test, held_out = (
        wiki_texts(path.read_text(encoding="utf-8").splitlines())
        for path in (options.wikitext_test, options.wikitext_valid)
    )
    workloads = {
        "wiki": _split(test, SPLITS[:1]) | _split(held_out, SPLITS[1:]),
        "code": _split(code_texts(Path(sysconfig.get_paths()["stdlib"])), SPLITS),
    }
    for workload, splits in workloads.items():
        for split, texts in splits.items():
            path = options.out / f"{split}_{workload}.jsonl"
            path.write_text(
                "".join(
                    json.dumps({"source": each.source, "text": each.text}, ensure_ascii=False) + "\n"
                    for each in texts
                ),
                encoding="utf-8",
            )
            print(f"{path.name}: {len(texts)} texts of {len({each.source for each in texts})} sources")


if __name__ == "__main__":
    main()
