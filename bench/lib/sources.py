"""Which code a result was measured with: digests that do not depend on comments and line breaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yggdrasil
from yggdrasil.store import artifacts

__all__ = ["code_digests", "normalised"]

PACKAGE = Path(yggdrasil.__file__).parent
PARTS = {
    "decode": (
        *("kernels", "compiler", "models", "step", "schedule", "policy"),
        *("engine.py", "state.py", "tree.py", "kv.py", "layout.py"),
    ),
    "serve": ("serve",),
}
SUFFIXES = (".py", ".cpp", ".h")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def code_digests() -> dict[str, str]:
    """A digest of each part of the package that claims measure."""
    return {
        part: artifacts.digest([normalised(path) for name in names for path in _sources(PACKAGE / name)])
        for part, names in PARTS.items()
    }


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    else:
        yield from sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)


def normalised(path: Path) -> str:
    """A source without comments, docstrings and layout."""
    text = path.read_text()
    if path.suffix != ".py":
        return " ".join(COMMENT.sub(" ", text).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [line for line in body if not _is_text(line)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(line: ast.stmt) -> bool:
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )
