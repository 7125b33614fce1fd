"""A compiled pair in memory: an engine, and what its decisions rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from yggdrasil.bundle import BUNDLED, MALFORMED, Bundle, compile_command
from yggdrasil.config import CompileConfig
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.loading import load_bundle, load_models
from yggdrasil.policy.acceptance import AcceptanceTable
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.gamma.switching import SwitchTable
from yggdrasil.policy.guard import Guard
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import (
    Arms,
    BestShape,
    ContextShape,
    DepthRule,
    FixedShape,
    ShapePolicy,
    StoppingShape,
)
from yggdrasil.schedule.choice import FORMAT, PlanChoice
from yggdrasil.state import PLAIN, Shape
from yggdrasil.store import artifacts
from yggdrasil.tokenizer import Tokenizer

__all__ = ["LoadedPair", "Measurements", "TrainedDepth", "load_decisions", "load_measurements", "load_pair"]

T = TypeVar("T")


@dataclass(frozen=True)
class TrainedDepth:
    """A depth predictor and its quality on held-out text.

    Args:
        predictor: The network.
        rules: By temperature of the held-out text, what took the fewest milliseconds per token there: the
            predictor, a fixed depth, or growth that stops.
        report: Held-out figures, cost and reference width, as `ygg compile` stored them.
    """

    predictor: DepthPredictor
    rules: Mapping[float, DepthRule]
    report: Mapping[str, Any]

    def rule(self, temperature: float) -> DepthRule:
        """What was best at the nearest temperature that was measured."""
        return self.rules[min(self.rules, key=lambda known: abs(known - temperature))]


class Measurements(NamedTuple):
    """What was measured of a pair.

    Args:
        latency: Of every graph, on this machine.
        acceptance: Calibrations by temperature.
        switching: What it costs to bring the draft back in a batch, on this machine.
    """

    latency: LatencyModel
    acceptance: AcceptanceTable
    switching: SwitchTable


@dataclass(frozen=True)
class LoadedPair:
    """Everything a generation needs.

    Args:
        bundle: What was compiled.
        engine: Both models.
        tokenizer: Text to tokens and back.
        dataset: The calibration text that acceptance and depth come from.
        acceptance: Calibrations by temperature.
        depth: The depth predictor.
        latency: Profile of this machine.
        plan: The execution plans of the engine, and what the search found.
    """

    bundle: Bundle
    engine: Engine
    tokenizer: Tokenizer
    dataset: str
    acceptance: AcceptanceTable
    depth: TrainedDepth
    latency: LatencyModel
    plan: PlanChoice
    _arms: dict[float, dict[int, Arms]] = field(default_factory=dict, init=False, repr=False)

    def policy(
        self,
        *,
        temperature: float = 0.0,
        shape: Shape | None = None,
        depth: DepthRule | None = None,
        guard: bool = True,
    ) -> ShapePolicy:
        """How the shape of every step is chosen.

        Args:
            temperature: Of the sampling; calibration and predictor follow it.
            shape: Always this one, unguarded; its K is still chosen by Eq. 3 when unset.
            depth: Where D comes from; None takes what was best on held-out text.
            guard: Stop speculating while it is measured to lose.

        Raises:
            ConfigError: a shape that was not compiled for: wider than the candidates of a node, or deeper
                than a path.
        """
        acceptance = self.acceptance.nearest(temperature)
        config = self.bundle.config
        if shape is not None:
            _check_shape(shape, config)
            return FixedShape(shape, acceptance, self.latency, config.verify_widths)
        menu: dict[str, Any] = {
            "shape": PLAIN,
            "acceptance": acceptance,
            "latency": self.latency,
            "verify_widths": config.verify_widths,
            "widths": config.widths,
            "arms_by_context": self._arms.setdefault(self.acceptance.nearest_temperature(temperature), {}),
        }
        inner: ShapePolicy
        match depth or self.depth.rule(temperature):
            case "fixed":
                inner = BestShape(**menu)
            case "predicted":
                inner = ContextShape(**menu, predictor=self.depth.predictor, temperature=temperature)
            case "stopping":
                inner = StoppingShape(**menu)
        return Guard(inner, self.latency) if guard else inner


def _check_shape(shape: Shape, config: CompileConfig) -> None:
    """Raises ConfigError where growing a tree of this shape would ask for what was not compiled."""
    num_ranks = (
        shape.width
        if shape.levels is None
        else 1 + max((rank for level in shape.levels for _, rank in level), default=0)
    )
    if not 1 <= num_ranks <= config.num_candidates:
        raise ConfigError(
            "width",
            num_ranks,
            f"from 1 to {config.num_candidates}, the children that a node of this pair can have",
        )
    if not 0 <= shape.depth <= config.max_depth:
        raise ConfigError(
            "depth",
            shape.depth,
            f"from 0 to {config.max_depth}, the growth steps that this pair was compiled for",
        )


def load_pair(name: str = BUNDLED, *, dataset: str | None = None) -> LoadedPair:
    """Load a compiled pair; compiles nothing.

    Args:
        name: Of the pair.
        dataset: Calibration text whose acceptance and depth predictor to use; the last one compiled when
            not given.

    Raises:
        ArtifactError: unknown, corrupt or stale; names the field and the command that fixes it.

    Cost: imports, then milliseconds: weights are mapped, graphs are shared libraries.
    """
    bundle = load_bundle(name)
    dataset = dataset or bundle.dataset
    measured = load_measurements(bundle, dataset)
    depth, plan = load_decisions(bundle, dataset)
    tokenizer = Tokenizer(bundle.tokenizer_path, bundle.command)
    target, draft = load_models(bundle)
    greedy = plan.greedy.plan
    sampled = plan.sampled.plan
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
    """The measurements of a pair on this machine and with the acceptance of one calibration text.

    Raises:
        ArtifactError: not calibrated on this text, or a file is missing, corrupt or stale.
    """
    folder = bundle.predictor_folder(dataset)
    if dataset not in bundle.datasets:
        raise ArtifactError(
            folder,
            f"no predictor named {dataset!r} (there are: {', '.join(bundle.datasets) or 'none'})",
            _other_text(bundle, dataset),
        )
    latency, switching = _parse(
        bundle.profile_path,
        bundle,
        lambda payload: (LatencyModel.from_json(payload), SwitchTable.from_json(payload["switching"])),
    )
    return Measurements(
        latency, _parse(folder / "acceptance.json", bundle, AcceptanceTable.from_json), switching
    )


def load_decisions(bundle: Bundle, dataset: str) -> tuple[TrainedDepth, PlanChoice]:
    """The depth predictor of a calibration text, and the execution plan; raises as `load_measurements`
    does.
    """
    folder = bundle.predictor_folder(dataset)
    depth = _parse(folder / "predictor.json", bundle, lambda payload: _trained_depth(folder, payload))
    return depth, _parse(bundle.plan_path, bundle, PlanChoice.from_json, written=FORMAT)


def _other_text(bundle: Bundle, dataset: str) -> str:
    return (
        bundle.command
        if dataset == bundle.dataset
        else compile_command(bundle.name, bundle.models, bundle.config, f"{dataset}.txt")
    )


def _trained_depth(folder: Path, payload: dict[str, Any]) -> TrainedDepth:
    path = folder / "predictor.safetensors"
    try:
        if artifacts.digest_file(path) != payload["weights_digest"]:
            raise ValueError(f"{path.name} is not the file that was written with it")
        predictor = DepthPredictor.from_bytes(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name}: {error}") from None
    rules = {float(key): found["decisions"]["best"] for key, found in payload["held_out"].items()}
    if unknown := set(rules.values()) - set(get_args(DepthRule)):
        raise ValueError(f"a depth rule named {unknown.pop()!r}")
    return TrainedDepth(predictor, rules, payload)


def _parse(path: Path, bundle: Bundle, parse: Callable[[dict[str, Any]], T], *, written: int = 1) -> T:
    """Read an artifact of this fingerprint, in the format that is written today.

    The command that fixes it names the text it was calibrated on.
    """
    payload = artifacts.load_json(path, bundle.command)
    calibration = str(payload.get("calibration", bundle.calibration))
    command = compile_command(bundle.name, bundle.models, bundle.config, calibration)
    if payload.get("fingerprint") != bundle.folder.name:
        raise ArtifactError(
            path,
            f"stale: measured for fingerprint {payload.get('fingerprint')}, current is "
            f"{bundle.folder.name}",
            command,
        )
    if (found := payload.get("format", 1)) != written:
        raise ArtifactError(path, f"stale: written in format {found}, current is {written}", command)
    try:
        return parse(payload)
    except MALFORMED as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
