"""A compiled pair on disk, and how it becomes an engine.

```
compile_cache/<pair>/current.json                       which fingerprint is current
compile_cache/<pair>/<fingerprint>/bundle.json          what was compiled, from what, for which machine
                                  /tokenizer.json
                                  /target/tokens_*.pt2, weights.safetensors
                                  /target-0-of-2/weights.safetensors, ...        instead, where several ranks share the target
                                  /draft/ ...
profiles/<pair>/<machine>.json                          measured latencies
                <machine>-plan.json                     measured stages, searched plans, the one to run
predictors/<pair>/<dataset>/acceptance.json             calibrated acceptance
                           /predictor.json, .safetensors  depth predictor, its held-out figures and whether they justify it
```
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from yggdrasil import artifacts
from yggdrasil.compiler.buckets import Menu, draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel
from yggdrasil.compiler.weights import load_weights
from yggdrasil.config import CompileConfig, from_dict
from yggdrasil.engine import Engine
from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.kernels import load_cuda_kernels, load_kernels
from yggdrasil.kv import KVCache, KVShape, KVStorage
from yggdrasil.launch import num_ranks
from yggdrasil.layout import PAGE_LEN
from yggdrasil.policy.acceptance import AcceptanceTable
from yggdrasil.policy.depth import DepthPredictor
from yggdrasil.policy.gamma.switching import SwitchTable
from yggdrasil.policy.guard import Guard
from yggdrasil.policy.latency import LatencyModel
from yggdrasil.policy.shape import Arms, BestShape, ContextShape, FixedShape, ShapePolicy
from yggdrasil.schedule.choice import PlanChoice
from yggdrasil.state import PLAIN, Shape
from yggdrasil.tokenizer import Tokenizer

__all__ = [
    "BESIDE_GRAPHS",
    "BUNDLED",
    "FORMAT",
    "Bundle",
    "LoadedPair",
    "Measurements",
    "SourceFile",
    "TrainedDepth",
    "bundled_models",
    "compile_command",
    "graph_sources",
    "is_compiled",
    "known_pairs",
    "load_bundle",
    "load_measurements",
    "load_pair",
    "machine_fields",
]

FORMAT = 5
BUNDLED = "tinystories"
BESIDE_GRAPHS = ("commit_triton.py", "migrate.py", "migrate_triton.py")  # kernels that no graph calls
S = TypeVar("S", bound=KVStorage)
T = TypeVar("T")


def bundled_models() -> tuple[Path, Path]:
    """Folders of the target and the draft that ship with the package."""
    folder = Path(__file__).parent / "pairs" / BUNDLED
    return folder / "target", folder / "draft"


@dataclass(frozen=True)
class SourceFile:
    """A model file as it was compiled; size and time spare hashing it at every start.

    Args:
        path: Absolute.
        size: Bytes.
        mtime_ns: Modification time.
        digest: Of its bytes.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        stat = path.stat()
        return cls(str(path.resolve()), stat.st_size, stat.st_mtime_ns, artifacts.digest_file(path))

    def changed(self) -> bool:
        """Whether the file is there with other bytes; a bundle does not need files that are gone."""
        try:
            stat = Path(self.path).stat()
        except OSError:
            return False
        if (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns):
            return False
        return artifacts.digest_file(Path(self.path)) != self.digest


def machine_fields() -> dict[str, Any]:
    """What compiled code depends on besides its inputs."""
    gpu = ".".join(str(part) for part in torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"
    return {
        "format": FORMAT,
        "code": _code_digest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cpu_flags": artifacts.cpu_flags(),
        "compute_capability": gpu,
    }


def graph_sources() -> list[Path]:
    """The sources that decide what a graph computes and how fast: the layout of its memory, the compiler, the models and the operators."""
    package = Path(__file__).parent
    folders = [path for name in ("compiler", "models", "kernels") for path in sorted((package / name).iterdir())]
    sources = [path for path in folders if path.suffix in (".py", ".cpp", ".h") and path.name not in BESIDE_GRAPHS]
    return [package / "layout.py", package / "kv.py", *sources]


@cache
def _code_digest() -> str:
    """An upgrade of this package must not run graphs of the old one, nor decide by its measurements."""
    return artifacts.digest([path.read_text() for path in graph_sources()])


@dataclass(frozen=True)
class Bundle:
    """What was compiled.

    Args:
        name: Of the pair.
        folder: Of this fingerprint.
        config: How it was compiled; max_context is settled.
        dataset: Name of the calibration text.
        calibration: Its path when it is not the bundled one, else empty.
        kv_target: Cache of the target, of one rank's heads where several share it.
        kv_draft: Cache of the draft.
        eos_tokens: End-of-text ids.
        sources: Model files.
        models: Target and draft as they were named.
        machine: `machine_fields` at compilation.
        inexact_widths: Target graphs whose logits differ in some bit from plain decoding's, measured; text may then part where two tokens are nearly as likely.
    """

    name: str
    folder: Path
    config: CompileConfig
    dataset: str
    calibration: str
    kv_target: KVShape
    kv_draft: KVShape
    eos_tokens: tuple[int, ...]
    sources: tuple[SourceFile, ...]
    models: tuple[str, str]
    machine: dict[str, Any]
    inexact_widths: tuple[int, ...] = ()

    @property
    def exactness(self) -> str:
        """What was measured, in words."""
        if not self.inexact_widths:
            return "every token has the same bits in all graphs: speculation writes what plain decoding writes"
        widths = ", ".join(map(str, self.inexact_widths))
        return f"NOT bit-exact: the graphs of {widths} tokens round differently, so text may differ from plain decoding's where two tokens are nearly as likely"

    @property
    def command(self) -> str:
        """What compiles this pair again, with the options that were not the defaults."""
        return compile_command(self.name, self.models, self.config, self.calibration)

    @property
    def profile_path(self) -> Path:
        gpu = torch.cuda.get_device_name() if self.config.device == "cuda" else ""
        return artifacts.profiles() / self.name / f"{artifacts.machine_name(gpu)}.json"

    @property
    def plan_path(self) -> Path:
        return self.profile_path.with_name(f"{self.profile_path.stem}-plan.json")

    @property
    def datasets(self) -> list[str]:
        """Names of the calibration texts that this pair has been calibrated on; the last one compiled is the default."""
        return sorted(path.parent.name for path in (artifacts.predictors() / self.name).glob("*/acceptance.json"))

    def predictor_folder(self, dataset: str) -> Path:
        """Of the acceptance calibration and the depth predictor of one calibration text."""
        return artifacts.predictors() / self.name / dataset

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def page_bytes(self) -> int:
        """What a KV page takes in both models together."""
        return PAGE_LEN * (self.kv_target.token_bytes(self.dtype) + self.kv_draft.token_bytes(self.dtype))

    @property
    def max_context(self) -> int:
        assert self.config.max_context is not None
        return self.config.max_context

    def save(self) -> None:
        """Write bundle.json and make this fingerprint the current one: the last act of a compilation."""
        payload = asdict(self)
        del payload["folder"]
        artifacts.save_json(self.folder / "bundle.json", payload)
        artifacts.save_json(self.folder.parent / "current.json", {"fingerprint": self.folder.name})

    def load_models(self) -> tuple[CompiledModel[KVCache], CompiledModel[KVCache]]:
        """Target and draft for one request at a time, every graph of the menus loaded and bound to one copy of the weights."""
        target = self.load_target(self._cache(self.kv_target)) if self.config.ranks == 1 else self._lead_target()
        return target, self.load_draft(self._cache(self.kv_draft), self.load_draft_weights(self.config.device))

    def _cache(self, shape: KVShape) -> KVCache:
        return KVCache(shape, dtype=self.dtype, device=self.config.device)

    def _lead_target(self) -> CompiledModel[KVCache]:
        """The shard of rank 0, with the others at its heels."""
        from yggdrasil.ranks.lead import LeadingCache, LeadingModel, leader  # torch.distributed: only where there are ranks

        leader().load(self, self.config.device)
        cache = LeadingCache(leader(), self.kv_target, dtype=self.dtype, device=self.config.device)
        return LeadingModel(leader(), **self.target_arguments(rank=0), cache=cache)

    def paged_storage(self, kv: KVShape, pages_BP: Tensor, num_pages: int) -> KVStorage:
        """Storage of a model for many rows.

        Args:
            kv: Of the target or the draft.
            pages_BP: (B, P) int32, as many pages a row as `kv` has; see serve/pages.py.
            num_pages: Pages that ids in it may name.
        """
        return KVStorage(kv, num_pages=num_pages, pages_BP=pages_BP, dtype=self.dtype, device=self.config.device)

    def load_target(self, cache: S) -> CompiledModel[S]:
        """The target's graphs over any cache: one row's, or paged storage for many."""
        assert self.config.ranks == 1, "a batch has no leader"
        return CompiledModel(**self.target_arguments(rank=0), cache=cache)

    def load_draft(self, cache: S, weights: dict[str, Tensor]) -> CompiledModel[S]:
        """The draft's graphs over any cache, and weights wherever on the device they lie."""
        return CompiledModel(**self._arguments("draft", draft_menu(self.config), weights, self.config.num_candidates), cache=cache)

    def load_draft_weights(self, device: str) -> dict[str, Tensor]:
        """The draft's weights by name; on the CPU the file is mapped, not read."""
        return load_weights(self.folder / "draft", device, self.command)

    def target_arguments(self, rank: int) -> dict[str, Any]:
        """What `CompiledModel` takes to load the target, or the shard of one rank, all but its cache."""
        weights = load_weights(self.target_weights(rank), self.config.device, self.command)
        return self._arguments("target", target_menu(self.config), weights, 0)

    def target_weights(self, rank: int) -> Path:
        """Folder of the target's weights, or of the shard of one rank."""
        ranks = self.config.ranks
        return self.folder / ("target" if ranks == 1 else f"target-{rank}-of-{ranks}")

    def _arguments(self, kind: str, menu: Menu, weights: dict[str, Tensor], num_candidates: int) -> dict[str, Any]:
        load_kernels()
        if self.config.device == "cuda":
            load_cuda_kernels()
        return {
            "folder": self.folder / kind,
            "menu": menu,
            "weights": weights,
            "device": self.config.device,
            "max_depth": self.config.path_depth,
            "num_candidates": num_candidates,
            "command": self.command,
        }


@dataclass(frozen=True)
class TrainedDepth:
    """A depth predictor and what it is worth.

    Args:
        predictor: The network.
        useful: By temperature of the held-out text, whether its decisions beat the best fixed depth there.
        report: Held-out figures, cost and reference width, as `ygg compile` stored them.
    """

    predictor: DepthPredictor
    useful: Mapping[float, bool]
    report: Mapping[str, Any]

    def is_useful(self, temperature: float) -> bool:
        """What was found at the nearest temperature that was measured."""
        return self.useful[min(self.useful, key=lambda known: abs(known - temperature))]


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
        plan: The execution plan of the engine, and what the search found.
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

    def policy(self, *, temperature: float = 0.0, shape: Shape | None = None, predictor: bool | None = None, guard: bool = True) -> ShapePolicy:
        """How the shape of every step is chosen.

        Args:
            temperature: Of the sampling; calibration and predictor follow it.
            shape: Always this one, unguarded; its K is still chosen by Eq. 3 when unset.
            predictor: Use the depth predictor; None uses it where it was found useful on held-out text.
            guard: Stop speculating while it is measured to lose.
        """
        acceptance, config = self.acceptance.nearest(temperature), self.bundle.config
        if shape is not None:
            return FixedShape(shape, acceptance, self.latency, config.verify_widths)
        menu: dict[str, Any] = {
            "shape": PLAIN,
            "acceptance": acceptance,
            "latency": self.latency,
            "verify_widths": config.verify_widths,
            "widths": config.widths,
            "arms_by_context": self._arms.setdefault(self.acceptance.nearest_temperature(temperature), {}),
        }
        inner: ShapePolicy = BestShape(**menu)
        if self.depth.is_useful(temperature) if predictor is None else predictor:
            inner = ContextShape(**menu, predictor=self.depth.predictor, temperature=temperature)
        return Guard(inner, self.latency) if guard else inner


def compile_command(name: str, models: tuple[str, str], config: CompileConfig, calibration: str) -> str:
    """The command line of a compilation."""
    words = ["ygg"] if config.ranks == 1 else [*_torchrun(config.ranks), "-m", "yggdrasil"]
    words += ["compile"] if name == BUNDLED else ["compile", *models, "--name", name]
    defaults = CompileConfig()
    words += [word for field in ("dtype", "device") if (value := getattr(config, field)) != getattr(defaults, field) for word in (f"--{field}", value)]
    words += [] if config.exact else ["--no-exact"]
    words += ["--calibration", calibration] if calibration else []
    words += ["--max-context", str(config.max_context)] if name != BUNDLED else []
    return shlex.join(words)


def _torchrun(ranks: int) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(ranks)]


def known_pairs() -> Sequence[str]:
    """Names with a finished bundle."""
    return sorted(path.parent.name for path in artifacts.compile_cache().glob("*/current.json"))


def is_compiled(name: str) -> bool:
    """Whether a pair of this name was compiled to the end."""
    return (artifacts.compile_cache() / name / "current.json").exists()


def load_bundle(name: str) -> Bundle:
    """The current bundle of a pair, checked against this machine and the model files.

    Raises:
        ArtifactError: unknown, corrupt or stale; names the field and the command.
    """
    current = artifacts.compile_cache() / name / "current.json"
    hint = f"ygg compile TARGET DRAFT --name {name}" if name != BUNDLED else "ygg compile"
    if not is_compiled(name):
        known = ", ".join(known_pairs()) or "none yet"
        raise ArtifactError(current.parent, f"no compiled pair named {name!r} (there are: {known})", hint)
    folder = current.parent / str(artifacts.load_json(current, hint).get("fingerprint"))
    payload = artifacts.load_json(folder / "bundle.json", hint)
    try:
        bundle = _from_json(folder, payload)
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(folder / "bundle.json", f"corrupt ({error})", hint) from None
    artifacts.check_fingerprint(folder / "bundle.json", bundle.machine, machine_fields(), bundle.command)
    for source in bundle.sources:
        if source.changed():
            raise ArtifactError(folder, f"stale: {source.path} has changed since it was compiled", bundle.command)
    _check_ranks(bundle)
    return bundle


def _check_ranks(bundle: Bundle) -> None:
    ranks = bundle.config.ranks
    if ranks != num_ranks():
        how = f"`{shlex.join(_torchrun(ranks))} -m yggdrasil generate ...` decodes with it" if ranks > 1 else "without torchrun it decodes"
        config = replace(bundle.config, ranks=num_ranks())
        problem = f"compiled for {ranks} {'ranks' if ranks > 1 else 'process'}, this run has {num_ranks()}; {how}, or compile it for {num_ranks()}"
        raise ArtifactError(bundle.folder, problem, compile_command(bundle.name, bundle.models, config, bundle.calibration))


def _from_json(folder: Path, payload: dict[str, Any]) -> Bundle:
    return Bundle(
        name=payload["name"],
        folder=folder,
        config=from_dict(CompileConfig, payload["config"]),
        dataset=payload["dataset"],
        calibration=payload["calibration"],
        kv_target=KVShape(**payload["kv_target"]),
        kv_draft=KVShape(**payload["kv_draft"]),
        eos_tokens=tuple(payload["eos_tokens"]),
        sources=tuple(SourceFile(**source) for source in payload["sources"]),
        models=(payload["models"][0], payload["models"][1]),
        machine=payload["machine"],
        inexact_widths=tuple(payload["inexact_widths"]),
    )


def load_pair(name: str = BUNDLED, *, dataset: str | None = None) -> LoadedPair:
    """Load a compiled pair; compiles nothing.

    Args:
        name: Of the pair.
        dataset: Calibration text whose acceptance and depth predictor to use; the last one compiled when not given.

    Raises:
        ArtifactError: unknown, corrupt or stale; names the field and the command that mends it.

    Cost: imports, then milliseconds: weights are mapped, graphs are shared libraries.
    """
    bundle = load_bundle(name)
    dataset = dataset or bundle.dataset
    folder = bundle.predictor_folder(dataset)
    measured = load_measurements(bundle, dataset)
    depth = _parse(folder / "predictor.json", bundle, lambda payload: _trained_depth(folder, payload))
    plan = _parse(bundle.plan_path, bundle, PlanChoice.from_json)
    tokenizer = Tokenizer(bundle.folder / "tokenizer.json", bundle.command)
    target, draft = bundle.load_models()
    engine = Engine(target, draft, max_context=bundle.max_context, eos_tokens=bundle.eos_tokens, plan=plan.plan)
    return LoadedPair(bundle, engine, tokenizer, dataset, measured.acceptance, depth, measured.latency, plan)


def load_measurements(bundle: Bundle, dataset: str) -> Measurements:
    """The measurements of a pair on this machine and with the acceptance of one calibration text.

    Raises:
        ArtifactError: not calibrated on this text, or a file is missing, corrupt or stale.
    """
    folder = bundle.predictor_folder(dataset)
    if dataset not in bundle.datasets:
        raise ArtifactError(folder, f"no predictor named {dataset!r} (there are: {', '.join(bundle.datasets) or 'none'})", _other_text(bundle, dataset))
    latency, switching = _parse(bundle.profile_path, bundle, lambda payload: (LatencyModel.from_json(payload), SwitchTable.from_json(payload["switching"])))
    return Measurements(latency, _parse(folder / "acceptance.json", bundle, AcceptanceTable.from_json), switching)


def _other_text(bundle: Bundle, dataset: str) -> str:
    return bundle.command if dataset == bundle.dataset else compile_command(bundle.name, bundle.models, bundle.config, f"{dataset}.txt")


def _trained_depth(folder: Path, payload: dict[str, Any]) -> TrainedDepth:
    path = folder / "predictor.safetensors"
    try:
        if artifacts.digest_file(path) != payload["weights_digest"]:
            raise ValueError(f"{path.name} is not the file that was written with it")
        predictor = DepthPredictor.from_bytes(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path.name}: {error}") from None
    useful = {float(key): bool(found["decisions"]["useful"]) for key, found in payload["held_out"].items()}
    return TrainedDepth(predictor, useful, payload)


def _parse(path: Path, bundle: Bundle, parse: Callable[[dict[str, Any]], T]) -> T:
    """Read an artifact of this fingerprint; the command that mends it names the text it was calibrated on."""
    payload = artifacts.load_json(path, bundle.command)
    calibration = str(payload.get("calibration", bundle.calibration))
    command = compile_command(bundle.name, bundle.models, bundle.config, calibration)
    if payload.get("fingerprint") != bundle.folder.name:
        raise ArtifactError(path, f"stale: measured for fingerprint {payload.get('fingerprint')}, current is {bundle.folder.name}", command)
    try:
        return parse(payload)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
