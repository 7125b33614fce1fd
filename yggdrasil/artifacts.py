"""Where compiled artifacts live, how they are written whole or not at all, and when they are stale.

```
<root>/compile_cache/<pair>/<fingerprint>/   graphs, packed weights, tokenizer, bundle.json
<root>/compile_cache/kernels/<fingerprint>/  our operators, one shared library
<root>/profiles/<pair>/<machine>.json        measured latencies
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
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from yggdrasil.errors import ArtifactError

__all__ = [
    "OPERATORS",
    "atomic_directory",
    "check_fingerprint",
    "compile_cache",
    "cpu_flags",
    "digest",
    "digest_file",
    "load_json",
    "machine_name",
    "one_at_a_time",
    "predictors",
    "profiles",
    "root",
    "save_bytes",
    "save_json",
]


OPERATORS = "kernels"  # the folder of the compile cache that belongs to no pair
CPUINFO = Path("/proc/cpuinfo")


def root() -> Path:
    """The artifact root: `YGG_HOME`, else the nearest parent with a `compile_cache/` folder, else `~/.cache/yggdrasil`."""
    if home := os.environ.get("YGG_HOME"):
        return Path(home).expanduser().resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "compile_cache").is_dir():
            return folder
    return Path.home() / ".cache" / "yggdrasil"


def compile_cache() -> Path:
    """Graphs and weights by pair and fingerprint."""
    return root() / "compile_cache"


def profiles() -> Path:
    """Latencies by pair and machine."""
    return root() / "profiles"


def predictors() -> Path:
    """Calibrations by pair and data set."""
    return root() / "predictors"


@cache
def cpu_flags() -> str:
    """The processor that native code was compiled for; a foreign one must not load it.

    Returns:
        Its model, the instruction sets that one asks about first, and a digest of all of them.
    """
    telling = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")
    fields = _first_processor()
    flags = sorted(fields.get("flags", fields.get("Features", "")).split())  # on x86, on ARM
    known = [platform.machine(), fields.get("model name", ""), *(flag for flag in telling if flag in flags)]
    return " ".join([*filter(None, known), f"({len(flags)} flags, {digest(flags)})"])


def _first_processor() -> dict[str, str]:
    """What the kernel says of it, by field; nothing on a system that has no such file."""
    try:
        lines = CPUINFO.read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def machine_name(gpu: str = "") -> str:
    """A file name for what is measured on this machine: processor and core count decide the latencies, and the GPU where models run on one.

    Args:
        gpu: Its name, as `torch.cuda.get_device_name` has it.
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
    """Write JSON whole or not at all."""
    save_bytes(path, (json.dumps(payload, indent=1) + "\n").encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary name, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp is private; an artifact is not
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_json(path: Path, command: str) -> dict[str, Any]:
    """Read a JSON artifact.

    Raises:
        ArtifactError: missing, truncated or not an object; names the path and the command that rebuilds it.
    """
    try:
        payload = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(path, "missing", command) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(path, f"corrupt ({error})", command) from None
    if not isinstance(payload, dict):
        raise ArtifactError(path, "corrupt (not a JSON object)", command)
    return payload


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a temporary directory that takes its name only when the block ends well; another writer's result wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            temporary.rename(path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def one_at_a_time(lock: Path, waiting: AbstractContextManager[Any]) -> Iterator[bool]:
    """A block that one process runs and others wait for.

    Args:
        lock: A file that stands for what the block writes; it stays, for a file that goes would be locked under two names.
        waiting: Entered while another process is in the block.

    Gives whether it had to wait: then another process may have done the work.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:  # closing it, or the end of this process, unlocks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            waited = False
        except BlockingIOError:
            with waiting:
                fcntl.flock(file, fcntl.LOCK_EX)
            waited = True
        yield waited


def check_fingerprint(path: Path, stored: Mapping[str, Any], current: Mapping[str, Any], command: str) -> None:
    """Compare field by field.

    Raises:
        ArtifactError: names the first field that differs, both values, and the command that rebuilds the artifact.
    """
    for field, value in current.items():
        if stored.get(field) != value:
            raise ArtifactError(path, f"stale: {field} was {stored.get(field)!r} and is now {value!r}", command)
