"""What the paper's figures are measured on: a pair at real size, the small pair that computes the same function, both calibrated per kind of text."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.pair import BenchTarget, bench_target, compiled_pair
from bench.workloads import STORIES, Workload
from yggdrasil.build import BUNDLED_TEXT, compile_pair
from yggdrasil.bundle import BUNDLED, LoadedPair, bundled_models, load_bundle, load_pair
from yggdrasil.cli.progress import RichProgress
from yggdrasil.errors import ArtifactError

__all__ = ["DRAFTS", "MIN_PARAMETERS", "PAIR_NAME", "Subject", "subject"]

PAIR_NAME = "tinystories-scaled"
MIN_PARAMETERS = 300_000_000
DRAFTS = {"bundled": bundled_models()[1], **{name: Path(__file__).parent / "data" / f"draft_{name}" for name in ("small", "early")}}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A target of real size with one draft.

    Args:
        target: What runs.
        source: The checkpoint whose function it computes; the target itself where nothing was inflated.
        draft: Folder.
        draft_name: In `DRAFTS`.
        remeasure: Profile and calibrate again, once.
    """

    target: BenchTarget
    source: Path
    draft: Path
    draft_name: str
    remeasure: bool = False

    def pair(self, workload: Workload = STORIES) -> LoadedPair:
        """The pair, calibrated on this kind of text."""
        scaled = self.target.folder != self.source
        return _calibrated(self.target.folder, self.draft, PAIR_NAME if scaled else BUNDLED, self.draft_name, workload, self.remeasure)

    def twin(self, workload: Workload = STORIES) -> LoadedPair:
        """The same function without the inflation, to count accepted tokens quickly; latencies are never read from it."""
        assert self.target.folder in (self.source, bench_target(self.source, self.target.parameters).folder), "an inflation of another checkpoint"
        return _calibrated(self.source, self.draft, BUNDLED, self.draft_name, workload, remeasure=False)


def subject(options: argparse.Namespace, draft_name: str = "bundled") -> Subject:
    """The bundled target, inflated to `options.target_parameters`, with one of the drafts."""
    source = bundled_models()[0].resolve()
    target = bench_target(source, options.target_parameters)
    return Subject(target=target, source=source, draft=DRAFTS[draft_name].resolve(), draft_name=draft_name, remeasure=options.remeasure)


def _calibrated(target: Path, draft: Path, name: str, draft_name: str, workload: Workload, remeasure: bool) -> LoadedPair:
    """The compiled pair with the acceptance and the depth predictor of one kind of text; stories stay the pair's default."""
    name = name if draft_name == "bundled" else f"{name}-{draft_name}"
    compiled_pair(target, draft, name=name, remeasure=remeasure and workload is STORIES)
    if workload is STORIES:
        return load_pair(name, dataset=BUNDLED_TEXT)
    dataset = workload.calibration_path.stem
    try:
        return load_pair(name, dataset=dataset)
    except ArtifactError:
        pass  # not calibrated on this text yet, or before the pair was compiled anew
    default = load_bundle(name)
    compile_pair(*default.models, name=name, config=default.config, calibration=workload.calibration_path, progress=RichProgress())
    default.save()
    return load_pair(name, dataset=dataset)
