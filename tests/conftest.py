"""Shared fixtures: one artifact root per session, the operators in it, and one small compiled pair."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pair
import torch
from damages import STORES

from yggdrasil.api import Pair, load_pair
from yggdrasil.bundle import Bundle
from yggdrasil.config import CompileConfig
from yggdrasil.engine import Engine
from yggdrasil.kernels import library_path
from yggdrasil.offline.latencies import in_step_curves
from yggdrasil.pair import LoadedPair
from yggdrasil.policy.latency import Curve
from yggdrasil.policy.shape import FixedShape
from yggdrasil.store.artifacts import one_at_a_time

TINY = CompileConfig(
    dtype="float32",
    max_context=256,
    widths=(1, 4),
    max_depth=4,
    verify_widths=(4, 8, 16),
    prefill_chunk=32,
    num_candidates=4,
    calibration_texts=2,
    calibration_tokens=8,
)
SMALLEST = CompileConfig(
    max_context=128,
    widths=(2,),
    max_depth=3,
    verify_widths=(4,),
    prefill_chunk=16,
    num_candidates=2,
    calibration_texts=1,
    calibration_tokens=6,
)
COMPRESSED = replace(SMALLEST, compress=True)


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path | None:
    """What the workers of `pytest -n` copy: an artifact root with the operators and the pair `tiny`.

    The first worker fills it. None without workers.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    kept = os.environ.get("YGG_TEST_HOME")
    home = (Path(kept) if kept else tmp_path_factory.getbasetemp().parent) / "shared"
    with pytest.MonkeyPatch.context() as patch, one_at_a_time(home.with_suffix(".lock"), nullcontext()):
        patch.setenv("YGG_HOME", str(home))
        compiled(home, "tiny", llama_pair(home), TINY)
    return home


@pytest.fixture(scope="session", autouse=True)
def ygg_home(tmp_path_factory: pytest.TempPathFactory, shared_home: Path | None) -> Iterator[Path]:
    """The artifact root of this session or worker: a new folder, or `YGG_TEST_HOME`, kept between runs."""
    kept = os.environ.get("YGG_TEST_HOME")
    home = Path(kept) if kept else tmp_path_factory.mktemp("home")
    if shared_home is not None:
        home = home / os.environ["PYTEST_XDIST_WORKER"]
        for store in STORES:
            shutil.copytree(shared_home / store, home / store, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YGG_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run tiny models on one thread: waking a second thread takes longer than an operator.

    Other tests check that the number of threads changes no bit.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # our operators take this number
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")  # for processes that tests start
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def kernels(ygg_home: Path) -> None:
    """The operators under `torch.ops.ygg`."""
    from yggdrasil.kernels import load_kernels

    load_kernels()


@pytest.fixture(scope="session")
def llama_folders(ygg_home: Path, shared_home: Path | None) -> tuple[str, str]:
    """Folders of the Llama target and its draft, trained on a few stories."""
    return llama_pair(shared_home or ygg_home)


@pytest.fixture(scope="session")
def calibration(ygg_home: Path, shared_home: Path | None) -> Path:
    """The texts on which the pair `tiny` is calibrated."""
    return tiny_pair.save_calibration((shared_home or ygg_home) / "stories.txt")


def llama_pair(home: Path) -> tuple[str, str]:
    """The folders under an artifact root, which are written unless they exist."""
    folder = home / "models" / "llama"
    if not (folder / "draft" / "model.safetensors").exists():
        return tiny_pair.save_llama_pair(folder)
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="session")
def tiny_bundle(ygg_home: Path, llama_folders: tuple[str, str], kernels: None) -> Bundle:
    """The Llama pair compiled in float32 under the name `tiny`; tests must not change it."""
    return compiled(ygg_home, "tiny", llama_folders, TINY)


def compiled(home: Path, name: str, folders: tuple[str, ...], config: CompileConfig) -> Bundle:
    """Compile a pair, or a target alone, unless it is in a kept artifact root."""
    from yggdrasil.bundle import is_compiled
    from yggdrasil.errors import ArtifactError
    from yggdrasil.offline import tuning
    from yggdrasil.offline.pipeline import compile_pair
    from yggdrasil.pair import load_pair
    from yggdrasil.schedule import choice

    if is_compiled(name):
        try:
            return load_pair(name).bundle
        except ArtifactError:
            pass  # of another torch, or of models since rebuilt
    calibration = tiny_pair.save_calibration(home / "stories.txt")
    with pytest.MonkeyPatch.context() as patch:
        # next to other load, the usual time may not suffice to measure any plan
        patch.setitem(choice.BUDGET_S, "cpu", 60.0)
        patch.setattr(tuning, "in_step_curves", slow_target_curves)
        return compile_pair(
            *folders, name=name, config=config, calibration=calibration, progress=tiny_pair.SilentProgress()
        )


def slow_target_curves(
    engine: Engine, prompt: Sequence[int], policy: FixedShape, *, max_depth: int
) -> tuple[Curve, Curve]:
    """Curves of a target that takes far longer than its draft, so that policies draft trees.

    Both tiny models take as long as the host. By measured curves, a busy machine would choose plain steps.
    """
    curves = in_step_curves(engine, prompt, policy, max_depth=max_depth)
    draft, verify = (
        replace(curve, ms=tuple(tuple(ms + size / 1000 for size in curve.sizes) for _ in curve.contexts))
        for curve, ms in zip(curves, (0.05, 2.0), strict=True)
    )
    return draft, verify


@pytest.fixture(scope="session")
def tiny(tiny_bundle: Bundle) -> LoadedPair:
    """The compiled Llama pair, loaded once."""
    from yggdrasil.pair import load_pair

    return load_pair(tiny_bundle.name)


@pytest.fixture
def copied(ygg_home: Path, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact root of this test's own, to be broken: a copy of the compiled pair and the operators."""
    for store in STORES:
        shutil.copytree(ygg_home / store / "tiny", tmp_path / store / "tiny")
    operators = library_path().parent
    shutil.copytree(operators, tmp_path / operators.relative_to(ygg_home))
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pair(tiny_bundle: Bundle) -> Pair:
    """The same pair as a user has it in Python."""
    return load_pair(tiny_bundle.name)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
