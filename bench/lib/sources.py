"""Which code a result was measured with: digests that do not depend on comments and line breaks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import yggdrasil
from yggdrasil.store import artifacts

__all__ = ["SERVER_ONLY", "code_digests", "normalised", "sources_of"]

PACKAGE = Path(yggdrasil.__file__).parent
# Policies that `ygg generate` does not import, see tests/bench/test_sources.py.
SERVER_ONLY = ("policy/gamma", "policy/trees.py", "policy/measured.py", "policy/competing.py")
PARTS = {
    "decode": (
        *("kernels", "compiler", "models", "step", "schedule", "policy"),
        *("engine.py", "state.py", "tree.py", "kv.py", "layout.py", "page_order.py"),
    ),
    "serve": ("serve", *SERVER_ONLY),
}
SUFFIXES = (".py", ".cpp", ".h")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@cache
def code_digests() -> dict[str, str]:
    """A digest of each part of the package that claims measure."""
    return {
        part: artifacts.digest([normalised(path) for name in names for path in sources_of(name, names)])
        for part, names in PARTS.items()
    }


def sources_of(name: str, names: Sequence[str]) -> Iterator[Path]:
    """The files of a part's entry; those of the server only if the part names them."""
    left_out = [PACKAGE / other for other in SERVER_ONLY if other not in names]
    path = PACKAGE / name
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    for file in files:
        if file.suffix in SUFFIXES and not any(file.is_relative_to(other) for other in left_out):
            yield file


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
