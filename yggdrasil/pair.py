"""A compiled pair in memory: an engine, and the measurements its policies use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from yggdrasil.bundle import BUNDLED, MALFORMED, Bundle, compile_command
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.loading import load_bundle, load_models
from yggdrasil.policy.acceptance import AcceptanceTable
from yggdrasil.policy.depth import PREDICTOR_FORMAT, DepthPredictor
from yggdrasil.policy.guard import Guard
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import (
    MOST_GRAFTED,
    REPEATS,
    BestShape,
    ContextShape,
    DepthRule,
    FixedShape,
    ShapePolicy,
    StoppingShape,
)
from yggdrasil.policy.switching import SwitchTable
from yggdrasil.schedule.choice import FORMAT, PlanChoice
from yggdrasil.state import PLAIN, Shape
from yggdrasil.step.plan import SEQUENTIAL
from yggdrasil.store import artifacts
from yggdrasil.text.tokenizer import Tokenizer

__all__ = ["LoadedPair", "Measurements", "TrainedDepth", "load_decisions", "load_measurements", "load_pair"]

POLICIES_KEPT = 64  # a server may be asked for many temperatures

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedDepth:
    """A depth predictor and its held-out results.

    Args:
        rules: The depth rule with the fewest milliseconds per token on held-out text, by temperature.
        report: Held-out figures, cost and reference width, as `ygg compile` stored them.
    """

    predictor: DepthPredictor
    rules: Mapping[float, DepthRule]
    report: Mapping[str, Any]

    def rule(self, temperature: float) -> DepthRule:
        """The best rule at the nearest measured temperature."""
        return self.rules[min(self.rules, key=lambda known: abs(known - temperature))]


class Measurements(NamedTuple):
    """Measurements of a pair.

    Args:
        latency: Latency of every graph, on this machine.
        switching: Cost of bringing the draft back in a batch, on this machine.
    """

    latency: LatencyModel
    acceptance: AcceptanceTable
    switching: SwitchTable


@dataclass(frozen=True, repr=False)
class LoadedPair:
    """Everything a generation needs.

    Args:
        tokenizer: Text to tokens and back.
        dataset: Name of the calibration text that acceptance and depth come from.
        plan: Execution plans of the engine, and the results of the search.
    """

    bundle: Bundle
    engine: Engine
    tokenizer: Tokenizer
    dataset: str
    acceptance: AcceptanceTable
    depth: TrainedDepth
    latency: LatencyModel
    plan: PlanChoice
    _policies: dict[tuple[Any, ...], ShapePolicy] = field(default_factory=dict, init=False, repr=False)

    def __repr__(self) -> str:
        target, draft = (Path(model).name for model in self.bundle.named_models)
        config = self.bundle.config
        size = f"{config.dtype} on {config.device}, context {self.bundle.max_context}"
        return f"{type(self).__name__}({self.bundle.name!r}: target {target}, draft {draft}, {size})"

    def policy(
        self,
        *,
        temperature: float = 0.0,
        shape: Shape | None = None,
        depth: DepthRule | None = None,
        guard: bool = True,
        graft: int = MOST_GRAFTED,
        draft: bool = True,
    ) -> ShapePolicy:
        """The policy that chooses the shape of every step.

        Args:
            temperature: Sampling temperature; selects calibration and predictor.
            shape: Use always this shape, without a guard; Eq. 3 chooses its K if it has none.
            depth: Rule that chooses D; None takes the best one on held-out text.
            guard: Stop speculating while it is measured to be slower.
            graft: Most nodes of a tree that repeat an earlier part of the text; a `shape` has its own.
            draft: Run the draft model; without it a tree has only these nodes.

        Raises:
            ConfigError: the shape is wider or deeper than the pair was compiled for, or needs the draft
                where there is none; there is no such rule.
        """
        if depth not in (None, *get_args(DepthRule)):
            raise ConfigError("depth", depth, f"one of {', '.join(get_args(DepthRule))}")
        if shape is not None:
            config = self.bundle.config
            shape.check_compiled(num_candidates=config.num_candidates, max_depth=config.max_depth)
            if shape.depth and not draft:
                raise ConfigError("shape", str(shape), "of depth 0 without a draft")
            acceptance = self.acceptance.nearest(temperature)
            return FixedShape(shape, acceptance, self.latency, config.verify_widths)
        rule = depth or self.depth.rule(temperature) if draft else None
        key = (temperature, rule, graft)
        inner = self._policies.get(key)
        if inner is None:
            if len(self._policies) >= POLICIES_KEPT:
                self._policies.clear()
            inner = self._policies[key] = self._policy(*key)
        return Guard(inner, self.latency) if guard else inner

    def _policy(self, temperature: float, rule: DepthRule | None, graft: int) -> ShapePolicy:
        """The policy of a depth rule; None is no draft. Requests share it, because it learns nothing."""
        config = self.bundle.config
        acceptance = self.acceptance.nearest(temperature)
        menu: dict[str, Any] = {
            "shape": PLAIN,
            "acceptance": acceptance,
            "latency": self.latency,
            "verify_widths": config.verify_widths,
            "widths": config.widths,
            "graft": graft,
        }
        match rule:
            case None:
                repeats = replace(REPEATS, graft=graft)
                return FixedShape(repeats, acceptance, self.latency, config.verify_widths)
            case "fixed":
                return BestShape(**menu)
            case "predicted":
                return ContextShape(**menu, predictor=self.depth.predictor, temperature=temperature)
            case "stopping":
                return StoppingShape(**menu)


def load_pair(name: str = BUNDLED, *, dataset: str | None = None) -> LoadedPair:
    """Load a compiled pair; compiles nothing.

    Args:
        dataset: Calibration text whose acceptance and depth predictor to use; by default the last one
            compiled.

    Raises:
        ArtifactError: the pair is unknown, corrupt or stale; names the field and the command that fixes it.

    Cost: imports, then milliseconds: weights are mapped, graphs are shared libraries.
    """
    bundle = load_bundle(name)
    dataset = bundle.dataset if dataset is None else dataset
    measured = load_measurements(bundle, dataset)
    depth, plan = load_decisions(bundle, dataset)
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.command)
    target, draft = load_models(bundle)
    greedy = plan.greedy.plan or SEQUENTIAL
    sampled = plan.sampled.plan or SEQUENTIAL
    limits: dict[str, Any] = {
        "max_context": bundle.max_context,
        "eos_tokens": bundle.eos_tokens,
        "vocab": bundle.vocab,
    }
    engine = Engine(target, draft, **limits, tokenizer=tokenizer, greedy_plan=greedy, sampled_plan=sampled)
    return LoadedPair(
        bundle, engine, tokenizer, dataset, measured.acceptance, depth, measured.latency, plan
    )


def load_measurements(bundle: Bundle, dataset: str) -> Measurements:
    """Measurements on this machine, and acceptance on one calibration text.

    Raises:
        ArtifactError: not calibrated on this text, or a file is missing, corrupt or stale.
    """
    folder = bundle.predictor_folder(dataset)
    if dataset not in bundle.datasets:
        known = ", ".join(bundle.datasets) or "none"
        problem = f"no predictor named {dataset!r} (known: {known})"
        raise ArtifactError(folder, problem, _calibration_command(bundle, dataset))
    latency, switching = _parse(
        bundle.profile_path,
        bundle,
        lambda payload: (LatencyModel.from_json(payload), SwitchTable.from_json(payload["switching"])),
    )
    return Measurements(
        latency, _parse(folder / "acceptance.json", bundle, AcceptanceTable.from_json), switching
    )


def load_decisions(bundle: Bundle, dataset: str) -> tuple[TrainedDepth, PlanChoice]:
    """Depth predictor of a calibration text, and the execution plan; raises like `load_measurements`."""
    folder = bundle.predictor_folder(dataset)
    depth = _parse(
        folder / "predictor.json",
        bundle,
        lambda payload: _trained_depth(folder, payload),
        written=PREDICTOR_FORMAT,
    )
    return depth, _parse(bundle.plan_path, bundle, PlanChoice.from_json, written=FORMAT)


def _calibration_command(bundle: Bundle, dataset: str) -> str:
    if dataset == bundle.dataset:
        return bundle.command
    return compile_command(bundle.name, bundle.models, bundle.config, f"{dataset or 'TEXT'}.txt")


def _trained_depth(folder: Path, payload: dict[str, Any]) -> TrainedDepth:
    path = folder / "predictor.safetensors"
    try:
        if artifacts.digest_file(path) != payload["weights_digest"]:
            raise ValueError(f"{path.name} was not written together with it")
        predictor = DepthPredictor.from_bytes(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name}: {error}") from None
    rules = {float(key): found["decisions"]["best"] for key, found in payload["held_out"].items()}
    if unknown := set(rules.values()) - set(get_args(DepthRule)):
        raise ValueError(f"unknown depth rule {unknown.pop()!r}")
    return TrainedDepth(predictor, rules, payload)


def _parse(path: Path, bundle: Bundle, parse: Callable[[dict[str, Any]], T], *, written: int = 1) -> T:
    """Read an artifact of this build; errors name the command for the text it was calibrated on."""
    payload = artifacts.load_json(path, bundle.command)
    calibration = str(payload.get("calibration", bundle.calibration))
    command = compile_command(bundle.name, bundle.models, bundle.config, calibration)
    if payload.get("fingerprint") != bundle.folder.name:
        measured_for = payload.get("fingerprint")
        problem = f"stale: measured for fingerprint {measured_for}, current is {bundle.folder.name}"
        raise ArtifactError(path, problem, command)
    if (found := payload.get("format", 1)) != written:
        raise ArtifactError(path, f"stale: written in format {found}, current is {written}", command)
    try:
        return parse(payload)
    except MALFORMED as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
