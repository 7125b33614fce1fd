"""What the paper's figures are measured on: a pair at real size, the small pair that computes the same
function, both calibrated per kind of text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.lib.pair import (
    DEFAULTS,
    LLAMA_2_7B,
    LLAMA_68M,
    BenchTarget,
    bench_target,
    compiled_pair,
    inflated_model,
)
from bench.lib.workloads import STORIES, Workload
from yggdrasil.bundle import BUNDLED, bundled_models
from yggdrasil.config import CompileConfig
from yggdrasil.errors import ArtifactError
from yggdrasil.loading import load_bundle
from yggdrasil.offline.pipeline import compile_pair
from yggdrasil.offline.traces import BUNDLED_TEXT
from yggdrasil.pair import LoadedPair, load_pair
from yggdrasil.report.progress import RichProgress

__all__ = ["DRAFTS", "MIN_PARAMETERS", "PAIR_NAME", "Subject", "add_options", "subject"]

PAIR_NAME = "tinystories-scaled"
MIN_PARAMETERS = 300_000_000
DRAFTS = {
    "bundled": bundled_models()[1],
    **{name: Path(__file__).parents[1] / "data" / f"draft_{name}" for name in ("small", "early")},
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A target of real size with one draft.

    Args:
        source: The checkpoint whose function it computes; the target itself where nothing was inflated.
        draft_name: In `DRAFTS`.
        remeasure: Profile and calibrate again, once.
        config: Menu and device.
        twin_draft: The draft without inflation, where `draft` is inflated too.
    """

    target: BenchTarget
    source: Path
    draft: Path
    draft_name: str
    remeasure: bool = False
    config: CompileConfig = DEFAULTS
    twin_draft: Path | None = None

    def pair(self, workload: Workload = STORIES) -> LoadedPair:
        """The pair, calibrated on this kind of text."""
        scaled = self.target.folder != self.source
        return self._calibrated(
            self.target.folder, self.draft, PAIR_NAME if scaled else BUNDLED, workload, self.remeasure
        )

    def twin(self, workload: Workload = STORIES) -> LoadedPair:
        """The same function without the inflation, to count accepted tokens quickly; latencies are never
        read from it.
        """
        if self.twin_draft is not None:
            return self._calibrated(self.source, self.twin_draft, BUNDLED, workload, remeasure=False)
        assert self.target.folder in (
            self.source,
            bench_target(self.source, self.target.parameters).folder,
        ), "an inflation of another checkpoint"
        return self._calibrated(self.source, self.draft, BUNDLED, workload, remeasure=False)

    def inexact(self) -> LoadedPair:
        """The pair on CUDA with cuBLAS's linear layers."""
        return replace(self, config=replace(self.config, exact=False)).pair()

    def _calibrated(
        self, target: Path, draft: Path, name: str, workload: Workload, remeasure: bool
    ) -> LoadedPair:
        """The compiled pair with the acceptance and the depth predictor of one kind of text; stories stay
        the pair's default.
        """
        draft_suffix = "" if self.draft_name == "bundled" else f"-{self.draft_name}"
        name = f"{name}{draft_suffix}{self._suffix(target)}"
        compiled_pair(
            target, draft, name=name, remeasure=remeasure and workload is STORIES, config=self.config
        )
        if workload is STORIES:
            return load_pair(name, dataset=BUNDLED_TEXT)
        dataset = workload.calibration_path.stem
        try:
            return load_pair(name, dataset=dataset)
        except ArtifactError:
            pass  # not calibrated on this text yet, or before the pair was compiled anew
        default = load_bundle(name)
        compile_pair(
            *default.models,
            name=name,
            config=default.config,
            calibration=workload.calibration_path,
            progress=RichProgress(),
        )
        default.save()
        return load_pair(name, dataset=dataset)

    def _suffix(self, target: Path) -> str:
        """What tells pairs of one name apart: real sizes, the device, cuBLAS, rounded weights."""
        is_sized = self.target.is_rounded and target == self.target.folder
        return (
            ("-7b" if is_sized else "")
            + ("" if self.config.device == "cpu" else f"-{self.config.device}")
            + ("" if self.config.exact else "-inexact")
            + self.config.rounded
        )


def subject(options: argparse.Namespace, draft_name: str = "bundled") -> Subject:
    """The bundled target, inflated as the options of `add_options` log, with one of the drafts; with
    `--llama-7b` that is inflated too.
    """
    source = bundled_models()[0].resolve()
    draft = DRAFTS[draft_name].resolve()
    twin_draft = None
    if options.llama_7b:
        target = inflated_model(source, LLAMA_2_7B, device=options.device)
        twin_draft = draft
        draft = inflated_model(draft, LLAMA_68M, device=options.device).folder
    else:
        target = bench_target(source, options.target_parameters)
    config = replace(DEFAULTS, device=options.device)
    return Subject(
        target=target,
        source=source,
        draft=draft,
        draft_name=draft_name,
        remeasure=options.remeasure,
        config=config,
        twin_draft=twin_draft,
    )


def add_options(parser: argparse.ArgumentParser, *, devices: Sequence[str] = ("cpu", "cuda")) -> None:
    """The options that `subject` reads."""
    parser.add_argument(
        "--target-parameters",
        type=int,
        default=MIN_PARAMETERS,
        metavar="N",
        help="parameters of the inflated target; 0 leaves it as it is (default: %(default)s)",
    )
    parser.add_argument(
        "--llama-7b",
        action="store_true",
        help="inflate target and draft to the sizes of Llama-2-7B and of a Llama of 68 M instead",
    )
    parser.add_argument(
        "--device", choices=devices, default="cpu", help="where everything runs (default: %(default)s)"
    )
    parser.add_argument(
        "--remeasure", action="store_true", help="profile and calibrate the compiled pair again"
    )
