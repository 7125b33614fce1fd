"""Artifacts: where they are, how they are written atomically, and when they are stale.

```
<root>/compile_cache/<pair>/<fingerprint>/   graphs, packed weights, tokenizer, bundle.json
<root>/compile_cache/kernels/<fingerprint>/  our operators, one shared library
<root>/profiles/<pair>/<machine>.json        measured latencies
<root>/profiles/<machine>.json               how long the last compilation took, see offline/forecast.py
<root>/predictors/<pair>/<dataset>/          acceptance calibration, depth predictor
```
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from yggdrasil.errors import ArtifactError, ConfigError
from yggdrasil.store import storage

__all__ = [
    "LOCK_NAME",
    "OPERATORS",
    "atomic_directory",
    "check_fingerprint",
    "compile_cache",
    "cpu_flags",
    "digest",
    "digest_file",
    "entries",
    "load_json",
    "machine_name",
    "one_at_a_time",
    "pair_folders",
    "pair_names",
    "predictors",
    "profiles",
    "root",
    "save_bytes",
    "save_json",
    "unreadable",
]


OPERATORS = "kernels"  # folder of the compile cache that all pairs share
LOCK_NAME = "compiling.lock"  # in the folder of a pair
CPUINFO = Path("/proc/cpuinfo")
# a source checkout, if it contains compile_cache/
CHECKOUT = Path(__file__).resolve().parents[2]
SEAL = "digest"  # key of the digest over all other keys of a JSON artifact


def root() -> Path:
    """The artifact root: `YGG_HOME`, else the source checkout, else `~/.cache/yggdrasil`.

    It does not depend on the working folder.

    Raises:
        ConfigError: `YGG_HOME` is not a folder, or it is not set and the user has no home folder.
    """
    if home := os.environ.get("YGG_HOME"):
        return _given_root(home)
    if (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "compile_cache").is_dir():
        return CHECKOUT
    return _home_folder() / ".cache" / "yggdrasil"


def _given_root(home: str) -> Path:
    folder = _home_folder() / home[2:] if home.startswith("~/") else Path(home)
    problem = _problem_of(folder)
    if problem:
        allowed = f"a folder, or a path where one can be made ({problem})"
        raise ConfigError("YGG_HOME", home, allowed, "YGG_HOME=FOLDER ygg ...")
    return folder.resolve()


def _problem_of(folder: Path) -> str:
    """Why a path is no folder and none can be made there; empty if it is one or nothing is there."""
    try:
        return "" if stat.S_ISDIR(os.stat(folder).st_mode) else "it is a file"
    except FileNotFoundError:
        return "it is a link to nothing" if folder.is_symlink() else ""
    except OSError as error:  # longer than a path can be, a circle of links, below a file
        return os.strerror(error.errno or 0).lower()


def _home_folder() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            "HOME",
            os.environ.get("HOME"),
            "your home folder, or YGG_HOME a folder for compiled pairs",
            "YGG_HOME=FOLDER ygg ...",
        ) from None


def compile_cache() -> Path:
    """Graphs and weights by pair and fingerprint."""
    return root() / "compile_cache"


def profiles() -> Path:
    """Latencies by pair and machine."""
    return root() / "profiles"


def predictors() -> Path:
    """Calibrations by pair and data set."""
    return root() / "predictors"


def pair_folders(name: str) -> list[Path]:
    """The folders of a pair: builds, latencies, calibrations."""
    return [store / name for store in (compile_cache(), profiles(), predictors())]


def entries(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder of the store that match a pattern, sorted; none if the folder is missing.

    Raises:
        ArtifactError: the folder cannot be read.
    """
    try:
        os.listdir(folder)  # `glob` itself raises or finds nothing, as the version of Python is
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error, "ygg doctor") from None
    return sorted(folder.glob(pattern))


def pair_names() -> list[str]:
    """Names of all pairs in the store, also of those not compiled to the end.

    Raises:
        ArtifactError: a folder of the store cannot be read.
    """
    stores = (compile_cache(), profiles(), predictors())
    folders = [path for store in stores for path in entries(store, "[!.]*") if os.path.isdir(path)]
    return sorted({path.name for path in folders} - {OPERATORS})


@cache
def cpu_flags() -> str:
    """Identifies this processor: compiled code must not be loaded on another.

    Returns:
        Model, the most important instruction sets, and a digest of all flags.
    """
    important = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
    fields = _first_processor()
    flags = sorted(fields.get("flags", fields.get("Features", "")).split())  # on x86, on ARM
    known = [
        platform.machine(),
        fields.get("model name", ""),
        *(flag for flag in important if flag in flags),
    ]
    return " ".join([*filter(None, known), f"({len(flags)} flags, {digest(flags)})"])


def _first_processor() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty if there is no such file."""
    try:
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def machine_name(gpu: str = "") -> str:
    """A file name for measurements on this machine, from processor, core count and GPU.

    Args:
        gpu: Name from `torch.cuda.get_device_name`; empty if models run on the CPU.
    """
    name = f"{platform.machine()}-{os.cpu_count()}cpu-{digest(cpu_flags())}"
    return f"{name}-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}" if gpu else name


def digest(*parts: object) -> str:
    """Twelve hexadecimal digits over the parts, in order."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(json.dumps(part, sort_keys=True, default=str).encode())
    return sha.hexdigest()[:12]


def digest_file(path: Path) -> str:
    """Twelve hexadecimal digits over a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def save_json(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a JSON artifact atomically, with a digest that `load_json` checks."""
    content = json.loads(json.dumps(payload))  # keys and tuples as they are read back
    save_bytes(path, (json.dumps({**content, SEAL: digest(content)}, indent=1) + "\n").encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary name, then rename: a reader sees the old file or the new one."""
    with storage.temporary_folder(path.parent, path.name) as temporary:
        (temporary / path.name).write_bytes(content)
        storage.put(temporary / path.name, path)


def load_json(path: Path, command: str) -> dict[str, Any]:
    """Read what `save_json` wrote.

    Raises:
        ArtifactError: the file is missing, unreadable, not an object or changed; names the path and the
            command that rebuilds it.
    """
    try:
        payload = json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error, command) from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    if not isinstance(payload, dict):
        raise ArtifactError(path, "corrupt (not a JSON object)", command)
    if payload.pop(SEAL, None) != digest(payload):
        raise ArtifactError(
            path, "corrupt, or written by another version (its digest does not fit)", command
        )
    return payload


def unreadable(path: Path, error: OSError, command: str) -> ArtifactError:
    """The error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return ArtifactError(path, "missing", command)
    if isinstance(error, PermissionError):
        closed = (each for each in reversed(path.parents) if each.is_dir() and not os.access(each, os.X_OK))
        command = f"chmod a+rX {shlex.quote(str(next(closed, path)))}"
        return ArtifactError(path, "cannot be read (permission denied)", command)
    if isinstance(error, (IsADirectoryError, NotADirectoryError)):
        return ArtifactError(path, "corrupt (it is not a file)", command)
    return ArtifactError(path, f"cannot be read ({os.strerror(error.errno or 0).lower()})", command)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that gets its name if the block succeeds and no other writer was first."""
    with storage.temporary_folder(path.parent, path.name) as temporary:
        whole = temporary / path.name
        whole.mkdir()
        yield whole
        if not path.is_dir():
            storage.put(whole, path)


@contextmanager
def one_at_a_time(lock: Path, waiting: AbstractContextManager[Any]) -> Iterator[bool]:
    """A block that one process runs and others wait for.

    Args:
        lock: Lock file; it is never removed, since two processes could then lock different files.
        waiting: Entered while another process is in the block.

    Yields whether it had to wait: then the other process may have done the work.
    """
    storage.make_folder(lock.parent)
    # the lock ends when the file is closed or the process ends
    with os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT, 0o644), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waited = False
        except BlockingIOError:
            with waiting:
                fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        yield waited


def check_fingerprint(
    path: Path, stored: Mapping[str, Any], current: Mapping[str, Any], command: str
) -> None:
    """Compare field by field.

    Raises:
        ArtifactError: names the first field that differs, both values, and the command that rebuilds the
            artifact.
    """
    for field, value in current.items():
        if stored.get(field) != value:
            raise ArtifactError(
                path, f"stale: {field} was {stored.get(field)!r} and is now {value!r}", command
            )
