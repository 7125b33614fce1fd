"""Compile a pair when it is first asked for: what `ygg generate` and `load_pair` do before they load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from yggdrasil.bundle import BUNDLED, bundled_models, is_compiled
from yggdrasil.config import CompileConfig
from yggdrasil.ranks.launch import num_ranks
from yggdrasil.store.artifacts import digest

__all__ = ["compiled_name"]

FIRST_RUN = "first run: compiling the bundled pair for this machine (a few minutes, once)"


def compiled_name(
    name: str,
    models: tuple[str, str] | None = None,
    *,
    check: Callable[[str, str], None] = lambda target, draft: None,
    num_workers: int | None = None,
) -> str:
    """The name of a pair that is compiled, or of one that must be compiled by hand.

    The bundled pair, and a pair given by its models, are compiled if they are not yet.

    Args:
        name: A pair's name; not used with `models`.
        models: Folders or hub ids of target and draft.
        check: Called with both before they are compiled, to refuse what cannot work later.
        num_workers: Most processes that compile graphs; None for one per core.

    Cost: a look into the store, or minutes, with progress on standard error.
    """
    if models is None and name != BUNDLED:
        return name
    if models is not None:
        target, draft = models
        name = _name_of(target, draft)
    else:
        target, draft = map(str, bundled_models())
    if is_compiled(name):
        return name
    check(target, draft)
    _compile(target, draft, name, num_workers)
    return name


def _compile(target: str, draft: str, name: str, num_workers: int | None) -> None:
    from yggdrasil.offline import pipeline  # with progress bars half a second, which later starts save
    from yggdrasil.report.progress import RichProgress

    progress = RichProgress()
    if name == BUNDLED:
        progress.note(FIRST_RUN)
    bundle = pipeline.compile_pair(
        target,
        draft,
        name=name,
        config=CompileConfig(ranks=num_ranks()),
        num_workers=num_workers,
        progress=progress,
    )
    for note in bundle.notes:
        progress.note(f"ygg compile: note: {note}")


def _name_of(target: str, draft: str) -> str:
    """A name that `ygg compile --name` accepts, since error messages suggest that command."""
    from yggdrasil.offline.inputs import resolved

    name = f"{Path(target).resolve().name}-{digest(resolved(target), resolved(draft))}"
    return re.sub(r"[^\w.-]", "-", name).lstrip("._-")
