"""What a compilation will take, before it begins: graphs, bytes, seconds.

The seconds are those of two cores of an AMD EPYC, which compiled pairs of 12 and 316 million parameters.
The last whole compilation on this machine corrects them.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from yggdrasil.bundle import Bundle
from yggdrasil.compiler.buckets import draft_menu, target_menu
from yggdrasil.compiler.model import graph_path
from yggdrasil.compiler.weights import FILE_NAME
from yggdrasil.compiler.workers import is_deep
from yggdrasil.errors import ArtifactError, StoreError
from yggdrasil.kernels import library_path
from yggdrasil.models.layers import keep_in_config_
from yggdrasil.models.load import load_config
from yggdrasil.offline.build import compresses
from yggdrasil.offline.own_draft import COMPRESSED
from yggdrasil.store import artifacts

__all__ = ["Forecast", "forecast", "free_memory_bytes", "last_path"]

MEMINFO = Path("/proc/meminfo")
GRAPH_BYTES = 5 << 19
BUILT_OF_DEEP = 12  # layers that take as long as the regions of a deep model
ROUNDED_SHARE: Final = {"bf16": 1.0, "int8": 17 / 32, "int4": 9 / 32}  # of two bytes; groups have a scale
SECONDS: Final = {
    "operators": 60.0,  # of one core
    "graph": 6.0,  # of one core, and `layer` for each layer
    "layer": 1.0,
    "tuning": 10.0,
    "calibration": 15.0,  # and `written` for each gigabyte of weights, up to the budget
    "written": 20.0,
    "weights": 40.0,  # for each gigabyte: to load, prove, pack, store and time it
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What will be built, and how long it will take.

    Args:
        root: The store.
        num_graphs: Graphs that are missing.
        written_bytes: Of missing weights and graphs, about.
        memory_bytes: Of the larger model as it is loaded and as it is packed.
        budget_s: Budget of the calibration.
        cores: Processes that build graphs.
        estimated_s: Seconds without a correction.
        correction: Measured over estimated seconds of the last whole compilation here; None without one.
        is_whole: Whether all graphs are missing, so that the next estimate can learn from this compilation.
        is_known: Whether the constants hold for this device at all.
    """

    root: Path
    num_graphs: int
    written_bytes: float
    memory_bytes: float
    budget_s: float
    cores: int
    estimated_s: float
    correction: float | None
    is_whole: bool
    is_known: bool

    def lines(self) -> list[str]:
        """One to three lines for a person."""
        free = free_disk_bytes(self.root)
        many = "graphs" if self.num_graphs > 1 else "graph"
        graphs = f"{self.num_graphs or 'no'} {many} to compile"
        room = f"about {_size(self.written_bytes)} to write ({_size(free)} free)"
        lines = [f"{graphs}, {room}, calibration with a budget of {self.budget_s:g} s"]
        if self.is_known and self.correction is not None:
            lines.append(f"{self._time(self.correction)}, judging by the last compilation on this machine")
        elif self.is_known:
            lines.append(f"{self._time(1.0)}, roughly estimated from the sizes of the models")
        return [*lines, *self.warnings()]

    def warnings(self) -> list[str]:
        """A line if memory may not suffice."""
        memory = free_memory_bytes()
        if memory is None or memory >= self.memory_bytes:
            return []
        needed = f"packing may take {_size(self.memory_bytes)} of memory"
        return [f"note: {needed}, of which {_size(memory)} are free: it may be slow or be ended"]

    def _time(self, correction: float) -> str:
        minutes = max(1, round(correction * self.estimated_s / 60))
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"about {minutes} minute{'' if minutes == 1 else 's'} on {cores}"

    def check_room(self) -> None:
        """Raise StoreError if the disk of the store has less room than the files need."""
        free = free_disk_bytes(self.root)
        if free < self.written_bytes:
            problem = f"about {_size(self.written_bytes)} are needed, {_size(free)} are free"
            raise StoreError(self.root, problem, "make room there, or set YGG_HOME to a folder that has it")

    def learn(self, seconds: float, num_compiled: int) -> None:
        """Record a finished compilation for the next estimate, if it built all graphs."""
        if self.is_whole and self.is_known and num_compiled >= self.num_graphs:
            payload = {"estimated_s": self.estimated_s, "seconds": seconds}
            artifacts.save_json(last_path(), payload)


def forecast(bundle: Bundle, num_workers: int | None = None, *, has_draft: bool = True) -> Forecast:
    """What building this bundle takes.

    Args:
        num_workers: Most processes that compile graphs; None for one per core.
        has_draft: Whether the draft is known; without it, what the target takes.

    Cost: both models without weights, a fraction of a second each.
    """
    config = bundle.config
    cores = num_workers or os.cpu_count() or 1
    target = load_config(bundle.models[0])
    draft = load_config(bundle.models[-1])
    if bundle.draft_layers is not None:
        keep_in_config_(draft, bundle.draft_layers)
    parts = (
        (target, "target", bundle.target_weights(0), target_menu(config), config.weights),
        (draft, "draft", bundle.folder / "draft", draft_menu(config), config.draft_weights),
    )
    estimated_s = SECONDS["tuning"] + (0.0 if library_path().exists() else SECONDS["operators"] / cores)
    num_graphs = 0
    num_missing = 0
    written_bytes = 0.0
    sizes = []
    for model, kind, weights, menu, weight_format in parts if has_draft else parts[:1]:
        is_lent = kind == "draft" and bundle.own_draft is not None and config.can_round
        loaded_bytes, packed_bytes = _sizes(model, bundle, weight_format, is_lent=is_lent)
        num_layers = model.num_hidden_layers
        if is_deep(num_layers, packed_bytes, config.device):
            num_layers = BUILT_OF_DEEP
        sizes.append(loaded_bytes + packed_bytes)
        missing = sum(not graph_path(bundle.folder / kind, size).exists() for size in menu.sizes)
        num_graphs += len(menu.sizes)
        num_missing += missing
        estimated_s += missing * (SECONDS["graph"] + num_layers * SECONDS["layer"]) / cores
        estimated_s += SECONDS["weights"] * packed_bytes / 1e9
        is_stored = (weights / FILE_NAME).exists()
        written_bytes += missing * GRAPH_BYTES + (0.0 if is_stored else packed_bytes)
        if kind == "target":
            writing_s = SECONDS["calibration"] + SECONDS["written"] * packed_bytes / 1e9
            estimated_s += min(config.calibration_budget_s, writing_s)
    return Forecast(
        root=artifacts.root(),
        num_graphs=num_missing,
        written_bytes=written_bytes,
        memory_bytes=max(sizes),
        budget_s=config.calibration_budget_s,
        cores=cores,
        estimated_s=estimated_s,
        correction=_last_correction(),
        is_whole=num_missing == num_graphs,
        is_known=config.device == "cpu",
    )


def _sizes(model: Any, bundle: Bundle, weights: str, *, is_lent: bool) -> tuple[float, float]:
    """Bytes of a model as it is loaded, and as it is stored.

    Args:
        model: Its configuration.
        is_lent: Whether the target's file has all of its tensors that are the target's.
    """
    from transformers import AutoModelForCausalLM

    config = bundle.config
    with torch.device("meta"):
        outline: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model, dtype=bundle.dtype, trust_remote_code=False
        )
    loaded_bytes = sum(tensor.nbytes for tensor in outline.parameters())
    linears = {name: module for name, module in outline.named_modules() if type(module) is nn.Linear}
    names = {f"{name}.weight" for name in linears}
    linear_bytes = sum(module.weight.nbytes for module in linears.values())
    others = sum(tensor.nbytes for name, tensor in outline.state_dict().items() if name not in names)
    if config.device != "cpu":
        return loaded_bytes, loaded_bytes
    share = ROUNDED_SHARE[weights] * (1.0 if weights == "bf16" else 2 / bundle.dtype.itemsize)
    if weights == "bf16" and compresses(config, outline):
        share = COMPRESSED
    # an output embedding that is tied to the input's is packed as a copy
    stored_bytes = linear_bytes * share
    if is_lent:
        return loaded_bytes, 0.0 if weights == config.weights else stored_bytes
    return loaded_bytes, others + stored_bytes


def last_path() -> Path:
    """The record of the last whole compilation on this machine."""
    return artifacts.profiles() / f"{artifacts.machine_name()}.json"


def _last_correction() -> float | None:
    try:
        last = artifacts.load_json(last_path(), "ygg compile")
        return float(last["seconds"]) / float(last["estimated_s"])
    except (ArtifactError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None  # it only makes an estimate better


def free_disk_bytes(folder: Path) -> int:
    """Bytes that this user can write below a folder, which need not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free


def free_memory_bytes() -> int | None:
    """Memory that programs can have without others losing theirs; None if the system does not report it."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
