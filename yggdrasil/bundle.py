"""A compiled pair on disk: what was compiled, its files, and when it is stale.

```
compile_cache/<pair>/current.json                       the current fingerprint, and the pair's command
compile_cache/<pair>/<fingerprint>/bundle.json     what was compiled, from what, for which machine; digests
                                  /verified.json   size and time of every file at its last check
                                  /tokenizer.json
                                  /target/tokens_*.pt2, weights.safetensors
                                         quality.json     of rounded weights: what rounding changes
                                  /target-0-of-2/weights.safetensors, ...   the same for several ranks
                                  /draft/ ...
profiles/<pair>/<machine>.json                          measured latencies
                <machine>-plan.json                     measured stages, searched plans, the one to run
predictors/<pair>/<dataset>/acceptance.json             calibrated acceptance
                           /predictor.json, .safetensors   depth predictor and its held-out figures
```

Shapes: P = pages of a row.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.compiler.model import graph_path
from yggdrasil.compiler.weights import FILE_NAME
from yggdrasil.config import AUTO, CompileConfig, from_dict
from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.kv import KVShape
from yggdrasil.layout import PAGE_LEN
from yggdrasil.policy.own_draft import DraftCandidate, OwnDraft
from yggdrasil.store import artifacts
from yggdrasil.store.digests import KnownFile, Ledger
from yggdrasil.store.trust import check_trusted

__all__ = [
    "BUNDLED",
    "FORMAT",
    "MALFORMED",
    "NOT_IN_GRAPHS",
    "Bundle",
    "bundled_models",
    "check_current",
    "compile_command",
    "first_command",
    "graph_sources",
    "is_compiled",
    "known_pairs",
    "machine_fields",
    "read_bundle",
    "torchrun_command",
]

FORMAT = 11
BUNDLED = "tinystories"
NOT_IN_GRAPHS = ("commit_triton.py", "migrate.py", "migrate_triton.py")  # kernels that no graph calls
# what parsing JSON of an unexpected form raises
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    ConfigError,
)


def bundled_models() -> tuple[Path, Path]:
    """Folders of the target and the draft that ship with the package."""
    folder = Path(__file__).parent / "pairs" / BUNDLED
    return folder / "target", folder / "draft"


def machine_fields() -> dict[str, Any]:
    """What compiled code depends on, apart from models and configuration."""
    gpu = "none"
    if torch.cuda.is_available():
        gpu = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "format": FORMAT,
        "code": _code_digest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cpu_flags": artifacts.cpu_flags(),
        "compute_capability": gpu,
    }


def graph_sources() -> list[Path]:
    """Sources that decide what a graph computes and how fast."""
    package = Path(__file__).parent
    sources = [package / name for name in ("layout.py", "page_order.py", "kv.py")]
    for folder in ("compiler", "models", "kernels"):
        sources += [
            path
            for path in sorted((package / folder).iterdir())
            if path.suffix in (".py", ".cpp", ".h") and path.name not in NOT_IN_GRAPHS
        ]
    return sources


@cache
def _code_digest() -> str:
    """Another version of the package must not use old graphs or measurements."""
    return artifacts.digest([path.read_text() for path in graph_sources()])


@dataclass(frozen=True)
class Bundle:
    """What was compiled.

    Args:
        folder: Folder of this build; its name is the fingerprint.
        config: How the pair was compiled; max_context is set.
        dataset: Name of the calibration text.
        calibration: Path of the calibration text; empty for the bundled one.
        kv_target: Shape of the target's KV cache; with several ranks, of one rank's heads.
        kv_draft: Shape of the draft's KV cache.
        vocab: V: both models have the token ids below it.
        sources: Files of local models.
        models: Target and draft: absolute folders or hub ids. The target alone if the draft is made from
            it.
        machine: `machine_fields` at compilation.
        digests: Digest of every file of the build, by its path in the folder.
        notes: What a user should know about these models, a sentence each.
        defaults: Options of requests that the target's generation_config.json sets, for
            `SamplingConfig.of`.
        inexact_widths: Target graphs whose logits were measured to differ in some bit from those of plain
            decoding; text may then differ where two tokens are almost equally likely.
        quality: Of rounded weights: the target's "perplexity" on the first "tokens" of the calibration
            text, and its "ratio" to that of the weights as they were; else empty.
        own_draft: How the draft was made from the target; None if it was not.
    """

    name: str
    folder: Path
    config: CompileConfig
    dataset: str
    calibration: str
    kv_target: KVShape
    kv_draft: KVShape
    eos_tokens: tuple[int, ...]
    vocab: int
    sources: tuple[KnownFile, ...]
    models: tuple[str, ...]
    machine: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inexact_widths: tuple[int, ...] = ()
    quality: Mapping[str, float] = field(default_factory=dict)
    own_draft: OwnDraft | None = None

    @property
    def named_models(self) -> tuple[str, str]:
        """Target and draft, for a person."""
        return self.models[0], self.models[1] if len(self.models) > 1 else "made from it"

    @property
    def draft_layers(self) -> tuple[int, ...] | None:
        """Numbers of the target's layers that a draft made from it keeps; None for all of any draft."""
        own = self.own_draft
        return None if own is None or len(own.chosen.layers) == own.num_layers else own.chosen.layers

    @property
    def weights(self) -> str:
        """Formats of the weights, and what rounding the target's changes, as a sentence."""
        target, draft = (
            self.config.dtype if weights == "bf16" else weights
            for weights in (self.config.weights, self.config.draft_weights)
        )
        formats = f"weights of the target {target}, of the draft {draft}"
        if not self.quality:
            return formats
        found = self.quality
        change = f"{100 * (found['ratio'] - 1):+.2f} %"
        return f"{formats}: perplexity {found['perplexity']:.3f}, {change} ({found['tokens']} tokens)"

    @property
    def exactness(self) -> str:
        """Result of the exactness check, as a sentence."""
        if not self.inexact_widths:
            return "bit-exact: speculation writes what plain decoding writes"
        widths = ", ".join(map(str, self.inexact_widths))
        return (
            f"NOT bit-exact: the graphs of {widths} tokens round differently, so text may differ from "
            "plain decoding's where two tokens are almost equally likely"
        )

    @property
    def command(self) -> str:
        """Command that compiles this pair again."""
        return compile_command(self.name, self.models, self.config, self.calibration)

    @property
    def profile_path(self) -> Path:
        gpu = torch.cuda.get_device_name() if self.config.device == "cuda" else ""
        return artifacts.profiles() / self.name / f"{artifacts.machine_name(gpu)}.json"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def quality_path(self) -> Path:
        """What rounding the target's weights changes; written with the weights."""
        return self.target_weights(0) / "quality.json"

    @property
    def plan_path(self) -> Path:
        return self.profile_path.with_name(f"{self.profile_path.stem}-plan.json")

    @property
    def datasets(self) -> list[str]:
        """Names of all texts that this pair has been calibrated on, sorted."""
        folder = artifacts.predictors() / self.name
        return [path.parent.name for path in artifacts.entries(folder, "*/acceptance.json")]

    def predictor_folder(self, dataset: str) -> Path:
        """Folder of the acceptance and the depth predictor from one calibration text."""
        return artifacts.predictors() / self.name / dataset

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and KV."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page in both models together."""
        return PAGE_LEN * (self.kv_target.token_bytes(self.dtype) + self.kv_draft.token_bytes(self.dtype))

    @property
    def max_context(self) -> int:
        assert self.config.max_context is not None
        return self.config.max_context

    def save(self) -> None:
        """Write bundle.json and make this build the current one; the last step of a compilation."""
        payload = asdict(self)
        del payload["folder"]
        artifacts.save_json(self.folder / "bundle.json", payload)
        artifacts.save_json(
            self.folder.parent / "current.json", {"fingerprint": self.folder.name, "command": self.command}
        )

    @property
    def files(self) -> list[str]:
        """Paths in the folder of all files that have a digest."""
        folders = [self.target_weights(rank) for rank in range(self.config.ranks)]
        folders.append(self.folder / "draft")
        paths = [self.tokenizer_path, *(folder / FILE_NAME for folder in folders)]
        if self.config.weights != "bf16":
            paths.append(self.quality_path)
        paths += [graph_path(self.folder / "target", size) for size in target_menu(self.config).sizes]
        paths += [graph_path(self.folder / "draft", size) for size in draft_menu(self.config).sizes]
        return [str(path.relative_to(self.folder)) for path in paths]

    def check_files(self, rank: int) -> None:
        """Check the files that a rank loads; shards of other ranks are left out.

        Raises:
            ArtifactError: a file is missing or damaged, or other users can write it.

        Cost: see `Ledger.check`.
        """
        others = [each for each in range(self.config.ranks) if each != rank]
        shards = [self.target_weights(other) / FILE_NAME for other in others]
        names = [name for name in self.files if self.folder / name not in shards]
        check_trusted([self.folder / name for name in names], f"YGG_HOME=FOLDER {self.command}")
        Ledger(self.folder).check({name: self.digests.get(name, "none") for name in names}, self.command)

    def target_weights(self, rank: int) -> Path:
        """Folder of the target's weights; with several ranks, of one rank's shard."""
        ranks = self.config.ranks
        return self.folder / ("target" if ranks == 1 else f"target-{rank}-of-{ranks}")


def compile_command(name: str, models: tuple[str, ...], config: CompileConfig, calibration: str) -> str:
    """Command that compiles a pair, with the options that differ from the defaults."""
    words = ["ygg"] if config.ranks == 1 else torchrun_command(config.ranks)
    words += ["compile"] if name == BUNDLED else ["compile", *models, "--name", name]
    defaults = CompileConfig()
    if config.dtype != defaults.dtype:
        words += ["--dtype", config.dtype]
    if config.device != defaults.device:
        words += ["--device", config.device]
    if not config.exact:
        words.append("--no-exact")
    if config.compress is not None:
        words.append("--compress" if config.compress else "--no-compress")
    if config.weights != defaults.weights:
        words += ["--weights", config.weights]
    if config.draft_weights != (AUTO if len(models) == 1 else defaults.draft_weights):
        words += ["--draft-weights", config.draft_weights]
    if config.draft_layers is not None:
        words += ["--draft-layers", str(config.draft_layers)]
    if calibration:
        words += ["--calibration", calibration]
    if config.calibration_budget_s != defaults.calibration_budget_s:
        words += ["--calibration-budget", f"{config.calibration_budget_s:g}"]
    if name != BUNDLED:
        words += ["--max-context", str(config.max_context)]
    return shlex.join(words)


def torchrun_command(ranks: int) -> list[str]:
    """Words that start `ygg` on several ranks."""
    return ["torchrun", "--nproc-per-node", str(ranks), "-m", "yggdrasil"]


def first_command(name: str) -> str:
    """Command that compiles a pair of which only the name is known."""
    return "ygg compile" if name == BUNDLED else f"ygg compile TARGET DRAFT --name {name or 'NAME'}"


def known_pairs() -> Sequence[str]:
    """Names of the pairs that were compiled to the end, sorted."""
    return [path.parent.name for path in artifacts.entries(artifacts.compile_cache(), "*/current.json")]


def is_compiled(name: str) -> bool:
    """Whether a pair of this name was compiled to the end."""
    current = artifacts.compile_cache() / name / "current.json"
    try:
        os.stat(current)
    except PermissionError:
        return True  # reading it will give the reason
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    return True


def read_bundle(name: str) -> Bundle:
    """The bundle that was compiled last under a name, even a stale one.

    Raises:
        ArtifactError: the pair is unknown, or its bundle.json is corrupt or of another format.
    """
    current = artifacts.compile_cache() / name / "current.json"
    hint = first_command(name)
    if not is_compiled(name):
        known = ", ".join(known_pairs()) or "none yet"
        raise ArtifactError(current.parent, f"no compiled pair named {name!r} (known: {known})", hint)
    pointer = artifacts.load_json(current, hint)
    hint = str(pointer.get("command", hint))
    folder = current.parent / str(pointer.get("fingerprint"))
    payload = artifacts.load_json(folder / "bundle.json", hint)
    stored = payload.get("machine")
    # a bundle of another version lacks fields: it is stale, not corrupt
    if isinstance(stored, dict):
        artifacts.check_fingerprint(folder / "bundle.json", stored, {"format": FORMAT}, hint)
    try:
        return _from_json(folder, payload)
    except MALFORMED as error:
        raise ArtifactError(folder / "bundle.json", f"corrupt ({error})", hint) from None


def check_current(bundle: Bundle) -> None:
    """Raise ArtifactError if the machine, the package or a model file has changed since compilation."""
    path = bundle.folder / "bundle.json"
    artifacts.check_fingerprint(path, bundle.machine, machine_fields(), bundle.command)
    for source in bundle.sources:
        if source.changed():
            problem = f"stale: {source.path} has changed since it was compiled"
            raise ArtifactError(bundle.folder, problem, bundle.command)


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
        vocab=int(payload["vocab"]),
        sources=tuple(KnownFile(**source) for source in payload["sources"]),
        models=tuple(payload["models"]),
        machine=dict(payload["machine"]),
        digests=dict(payload["digests"]),
        notes=tuple(payload["notes"]),
        defaults=dict(payload["defaults"]),
        inexact_widths=tuple(payload["inexact_widths"]),
        quality=dict(payload["quality"]),
        own_draft=_own_draft(payload["own_draft"]),
    )


def _own_draft(payload: dict[str, Any] | None) -> OwnDraft | None:
    if payload is None:
        return None
    candidates = [{**each, "layers": tuple(each["layers"])} for each in payload["candidates"]]
    return OwnDraft(tuple(DraftCandidate(**each) for each in candidates), payload["num_layers"])
