"""Compile a pair when it is first asked for: what `ygg generate` and `load_pair` do before they load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from yggdrasil.bundle import BUNDLED, bundled_models, is_compiled
from yggdrasil.config import AUTO, CompileConfig
from yggdrasil.ranks.launch import num_ranks
from yggdrasil.store.artifacts import digest

__all__ = ["compiled_name"]

FIRST_RUN = "first run: compiling the bundled pair for this machine (a few minutes, once)"


def compiled_name(
    name: str,
    models: Sequence[str] | None = None,
    *,
    check: Callable[[Sequence[str]], None] = lambda models: None,
    num_workers: int | None = None,
) -> str:
    """The name of a pair that is compiled, or of one that must be compiled by hand.

    The bundled pair, and a pair given by its models, are compiled if they are not yet.

    Args:
        name: A pair's name; not used with `models`.
        models: Folders or hub ids of target and draft; of the target alone if the draft is made from it.
        check: Called with them before they are compiled, to refuse what cannot work later.
        num_workers: Most processes that compile graphs; None for one per core.

    Cost: a look into the store, or minutes, with progress on standard error.
    """
    if models is None and name != BUNDLED:
        return name
    if models is not None:
        name = _name_of(models)
    else:
        models = tuple(map(str, bundled_models()))
    if is_compiled(name):
        return name
    check(models)
    _compile(models, name, num_workers)
    return name


def _compile(models: Sequence[str], name: str, num_workers: int | None) -> None:
    from yggdrasil.offline import pipeline  # with progress bars half a second, which later starts save
    from yggdrasil.report.progress import RichProgress

    progress = RichProgress()
    if name == BUNDLED:
        progress.note(FIRST_RUN)
    is_alone = len(models) == 1
    bundle = pipeline.compile_pair(
        *models,
        name=name,
        config=CompileConfig(ranks=num_ranks(), draft_weights=AUTO if is_alone else "bf16"),
        num_workers=num_workers,
        progress=progress,
    )
    for note in bundle.notes:
        progress.note(f"ygg compile: note: {note}")


def _name_of(models: Sequence[str]) -> str:
    """A name that `ygg compile --name` accepts, since error messages suggest that command."""
    from yggdrasil.offline.inputs import resolved

    paths = [resolved(model) for model in models]
    name = f"{Path(paths[0]).name}-{digest(*paths)}"
    return re.sub(r"[^\w.-]", "-", name).lstrip("._-")
