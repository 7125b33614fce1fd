"""A compiled pair on disk, when it is stale, and the models that are loaded from it.

```
compile_cache/<pair>/current.json                       which fingerprint is current, and the pair's command
compile_cache/<pair>/<fingerprint>/bundle.json     what was compiled, from what, for which machine; digests
                                  /verified.json   size and time of every file when it last had its digest
                                  /tokenizer.json
                                  /target/tokens_*.pt2, weights.safetensors
                                  /target-0-of-2/weights.safetensors, ...  where ranks share the target
                                  /draft/ ...
profiles/<pair>/<machine>.json                          measured latencies
                <machine>-plan.json                     measured stages, searched plans, the one to run
predictors/<pair>/<dataset>/acceptance.json             calibrated acceptance
                           /predictor.json, .safetensors  depth predictor, its figures on held-out text
```

Shapes: P = pages of a row.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from yggdrasil.compiler.buckets import Menu, draft_menu, target_menu
from yggdrasil.compiler.model import CompiledModel, graph_path
from yggdrasil.compiler.weights import FILE_NAME, load_weights
from yggdrasil.config import CompileConfig, from_dict
from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.kernels import load_cuda_kernels, load_kernels
from yggdrasil.kv import KVCache, KVShape, KVStorage
from yggdrasil.layout import PAGE_LEN
from yggdrasil.ranks.launch import num_ranks
from yggdrasil.store import artifacts
from yggdrasil.store.digests import KnownFile, Ledger
from yggdrasil.store.trust import check_trusted

__all__ = [
    "BESIDE_GRAPHS",
    "BUNDLED",
    "FORMAT",
    "MALFORMED",
    "Bundle",
    "bundled_models",
    "check_current",
    "compile_command",
    "graph_sources",
    "is_compiled",
    "known_pairs",
    "load_bundle",
    "machine_fields",
    "read_bundle",
]

FORMAT = 7
BUNDLED = "tinystories"
BESIDE_GRAPHS = ("commit_triton.py", "migrate.py", "migrate_triton.py")  # kernels that no graph calls
# what reading other JSON than ours raises
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    ConfigError,
)
S = TypeVar("S", bound=KVStorage)


def bundled_models() -> tuple[Path, Path]:
    """Folders of the target and the draft that ship with the package."""
    folder = Path(__file__).parent / "pairs" / BUNDLED
    return folder / "target", folder / "draft"


def machine_fields() -> dict[str, Any]:
    """What compiled code depends on, apart from its inputs."""
    gpu = (
        ".".join(str(part) for part in torch.cuda.get_device_capability())
        if torch.cuda.is_available()
        else "none"
    )
    return {
        "format": FORMAT,
        "code": _code_digest(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cpu_flags": artifacts.cpu_flags(),
        "compute_capability": gpu,
    }


def graph_sources() -> list[Path]:
    """The sources that decide what a graph computes and how fast: the layout of its memory, the compiler,
    the models and the operators.
    """
    package = Path(__file__).parent
    folders = [
        path for name in ("compiler", "models", "kernels") for path in sorted((package / name).iterdir())
    ]
    sources = [
        path for path in folders if path.suffix in (".py", ".cpp", ".h") and path.name not in BESIDE_GRAPHS
    ]
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
        vocab: V: both models have the token ids from 0 up to this.
        sources: Model files.
        models: Target and draft as they were named.
        machine: `machine_fields` at compilation.
        digests: Of every file of the build, by its path in the folder.
        notes: What a user should know of these models, a sentence each.
        inexact_widths: Target graphs whose logits differ in some bit from plain decoding's, measured; text
            may then part where two tokens are nearly as likely.
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
    models: tuple[str, str]
    machine: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    inexact_widths: tuple[int, ...] = ()

    @property
    def exactness(self) -> str:
        """What was measured, in words."""
        if not self.inexact_widths:
            return (
                "every token has the same bits in all graphs: speculation writes what plain decoding writes"
            )
        widths = ", ".join(map(str, self.inexact_widths))
        return (
            f"NOT bit-exact: the graphs of {widths} tokens round differently, so text may differ from "
            "plain decoding's where two tokens are nearly as likely"
        )

    @property
    def command(self) -> str:
        """What compiles this pair again, with the options that were not the defaults."""
        return compile_command(self.name, self.models, self.config, self.calibration)

    @property
    def profile_path(self) -> Path:
        gpu = torch.cuda.get_device_name() if self.config.device == "cuda" else ""
        return artifacts.profiles() / self.name / f"{artifacts.machine_name(gpu)}.json"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def plan_path(self) -> Path:
        return self.profile_path.with_name(f"{self.profile_path.stem}-plan.json")

    @property
    def datasets(self) -> list[str]:
        """Names of the calibration texts that this pair has been calibrated on; the last one compiled is
        the default.
        """
        return sorted(
            path.parent.name for path in (artifacts.predictors() / self.name).glob("*/acceptance.json")
        )

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
        artifacts.save_json(
            self.folder.parent / "current.json", {"fingerprint": self.folder.name, "command": self.command}
        )

    @property
    def files(self) -> list[str]:
        """Everything in the folder that a digest is kept of."""
        shards = [self.target_weights(rank) for rank in range(self.config.ranks)]
        graphs = [graph_path(self.folder / "target", size) for size in target_menu(self.config).sizes]
        graphs += [graph_path(self.folder / "draft", size) for size in draft_menu(self.config).sizes]
        paths = [
            self.tokenizer_path,
            *(folder / FILE_NAME for folder in (*shards, self.folder / "draft")),
            *graphs,
        ]
        return [str(path.relative_to(self.folder)) for path in paths]

    def check_files(self, rank: int) -> None:
        """Look at what a process loads from the folder, before it does.

        Args:
            rank: Of the process: shards of the target for others it does not read.

        Raises:
            ArtifactError: a file is missing or damaged, or others can write it.

        Cost: `Ledger.check`.
        """
        shards = [
            self.target_weights(each) / FILE_NAME for each in range(self.config.ranks) if each != rank
        ]
        names = [name for name in self.files if self.folder / name not in shards]
        check_trusted([self.folder / name for name in names], f"YGG_HOME=FOLDER {self.command}")
        Ledger(self.folder).check({name: self.digests.get(name, "none") for name in names}, self.command)

    def load_models(self) -> tuple[CompiledModel[KVCache], CompiledModel[KVCache]]:
        """Target and draft for one request at a time, every graph of the menus loaded and bound to one copy
        of the weights.
        """
        target = (
            self.load_target(self._cache(self.kv_target)) if self.config.ranks == 1 else self._lead_target()
        )
        return target, self.load_draft(
            self._cache(self.kv_draft), self.load_draft_weights(self.config.device)
        )

    def _cache(self, shape: KVShape) -> KVCache:
        return KVCache(shape, dtype=self.dtype, device=self.config.device)

    def _lead_target(self) -> CompiledModel[KVCache]:
        """The shard of rank 0, with the others at its heels."""
        # torch.distributed: only where there are ranks
        from yggdrasil.ranks.lead import LeadingCache, LeadingModel, leader

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
        return KVStorage(
            kv, num_pages=num_pages, pages_BP=pages_BP, dtype=self.dtype, device=self.config.device
        )

    def load_target(self, cache: S) -> CompiledModel[S]:
        """The target's graphs over any cache: one row's, or paged storage for many."""
        assert self.config.ranks == 1, "a batch has no leader"
        return CompiledModel(**self.target_arguments(rank=0), cache=cache)

    def load_draft(self, cache: S, weights: dict[str, Tensor]) -> CompiledModel[S]:
        """The draft's graphs over any cache, and weights wherever on the device they lie."""
        return CompiledModel(
            **self._arguments("draft", draft_menu(self.config), weights, self.config.num_candidates),
            cache=cache,
        )

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

    def _arguments(
        self, kind: str, menu: Menu, weights: dict[str, Tensor], num_candidates: int
    ) -> dict[str, Any]:
        load_kernels(self.command)
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


def compile_command(name: str, models: tuple[str, str], config: CompileConfig, calibration: str) -> str:
    """The command line of a compilation."""
    words = ["ygg"] if config.ranks == 1 else [*_torchrun(config.ranks), "-m", "yggdrasil"]
    words += ["compile"] if name == BUNDLED else ["compile", *models, "--name", name]
    defaults = CompileConfig()
    words += [
        word
        for field in ("dtype", "device")
        if (value := getattr(config, field)) != getattr(defaults, field)
        for word in (f"--{field}", value)
    ]
    words += [] if config.exact else ["--no-exact"]
    words += ["--calibration", calibration] if calibration else []
    budget_s = config.calibration_budget_s
    words += ["--calibration-budget", f"{budget_s:g}"] if budget_s != defaults.calibration_budget_s else []
    words += ["--max-context", str(config.max_context)] if name != BUNDLED else []
    return shlex.join(words)


def _torchrun(ranks: int) -> list[str]:
    return ["torchrun", "--nproc-per-node", str(ranks)]


def known_pairs() -> Sequence[str]:
    """Names with a finished bundle."""
    return sorted(path.parent.name for path in artifacts.compile_cache().glob("*/current.json"))


def is_compiled(name: str) -> bool:
    """Whether a pair of this name was compiled to the end, or this user may not look: reading it gives the
    reason.
    """
    current = artifacts.compile_cache() / name / "current.json"
    try:
        os.stat(current)
    except PermissionError:
        return True
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return False
    return True


def load_bundle(name: str) -> Bundle:
    """The current bundle of a pair, checked against this machine, the model files and the digests of its
    own.

    Raises:
        ArtifactError: unknown, corrupt or stale; names the field and the command.

    Cost: files that changed since they were last read are read.
    """
    bundle = read_bundle(name)
    check_current(bundle)
    _check_ranks(bundle)
    bundle.check_files(rank=0)
    return bundle


def read_bundle(name: str) -> Bundle:
    """What was compiled last under a name, whether or not it can still be used.

    Raises:
        ArtifactError: unknown or corrupt.
    """
    current = artifacts.compile_cache() / name / "current.json"
    hint = f"ygg compile TARGET DRAFT --name {name}" if name != BUNDLED else "ygg compile"
    if not is_compiled(name):
        known = ", ".join(known_pairs()) or "none yet"
        raise ArtifactError(current.parent, f"no compiled pair named {name!r} (there are: {known})", hint)
    pointer = artifacts.load_json(current, hint)
    hint = str(pointer.get("command", hint))
    folder = current.parent / str(pointer.get("fingerprint"))
    payload = artifacts.load_json(folder / "bundle.json", hint)
    stored = payload.get("machine")
    # what another version wrote lacks fields, and is stale rather than corrupt
    if isinstance(stored, dict):
        artifacts.check_fingerprint(folder / "bundle.json", stored, {"format": FORMAT}, hint)
    try:
        return _from_json(folder, payload)
    except MALFORMED as error:
        raise ArtifactError(folder / "bundle.json", f"corrupt ({error})", hint) from None


def check_current(bundle: Bundle) -> None:
    """Raises ArtifactError where machine, package or model files are not those that the pair was compiled
    for.
    """
    artifacts.check_fingerprint(
        bundle.folder / "bundle.json", bundle.machine, machine_fields(), bundle.command
    )
    for source in bundle.sources:
        if source.changed():
            raise ArtifactError(
                bundle.folder, f"stale: {source.path} has changed since it was compiled", bundle.command
            )


def _check_ranks(bundle: Bundle) -> None:
    ranks = bundle.config.ranks
    if ranks != num_ranks():
        how = (
            f"`{shlex.join(_torchrun(ranks))} -m yggdrasil generate ...` decodes with it"
            if ranks > 1
            else "without torchrun it decodes"
        )
        config = replace(bundle.config, ranks=num_ranks())
        problem = (
            f"compiled for {ranks} {'ranks' if ranks > 1 else 'process'}, this run has {num_ranks()}; "
            f"{how}, or compile it for {num_ranks()}"
        )
        raise ArtifactError(
            bundle.folder, problem, compile_command(bundle.name, bundle.models, config, bundle.calibration)
        )


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
        models=(payload["models"][0], payload["models"][1]),
        machine=dict(payload["machine"]),
        digests=dict(payload["digests"]),
        notes=tuple(payload["notes"]),
        inexact_widths=tuple(payload["inexact_widths"]),
    )
