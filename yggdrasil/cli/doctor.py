"""`ygg doctor`: does this machine have what compiling and decoding need, and if not, what to do."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from yggdrasil.errors import ConfigError, YggError
from yggdrasil.store import artifacts
from yggdrasil.store.trust import check_trusted

__all__ = ["Finding", "add_parser", "findings", "run"]

DESCRIPTION = """\
Look at what compiling and decoding need: the C++ compiler, the processor's features, threads and load, free
memory and disk, the store and its pairs, optional packages. A line that begins with `fail` is followed by
what to do; then the exit code is 1. `note` is for what works, but not as well as it could.

  ygg doctor                       look
  ygg doctor && ygg generate ...   go on if nothing is in the way
"""
DISTRIBUTION = "yggdrasil-decoding"
EXTRAS = {  # what they are for, and a module of theirs
    "serve": ("ygg serve", "fastapi"),
    "grammar": ("JSON, regular expressions, grammars", "llguidance"),
    "gguf": ("models that are GGUF files", "gguf"),
    "plots": ("pictures of ygg show", "matplotlib"),
    "completion": ("ygg completion", "argcomplete"),
}
LITTLE_BYTES = 2 << 30  # the bundled pair needs less, a pair of some hundred million weights more

State = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """One thing that was looked at.

    Args:
        value: What it is like here.
        fix: What to do about it; empty if it is fine.
    """

    state: State
    name: str
    value: str
    fix: str = ""


def add_parser(verbs: Any) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "doctor",
        help="check what this machine lacks, and how to fix it",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print all findings; returns 1 if something is in the way."""
    num_failed = 0
    for finding in findings():
        print(f"{finding.state:<4}  {finding.name:<9}  {finding.value}")
        if finding.fix:
            print(f"{'':<17}{finding.fix}")
        num_failed += finding.state == "fail"
    print("nothing is in the way" if num_failed == 0 else f"to fix: {num_failed}")
    return 1 if num_failed else 0


def findings() -> Iterator[Finding]:
    """Everything that is looked at. Cost: imports torch, and starts the compiler to ask for its version."""
    yield _versions()
    yield _compiler()
    yield _processor()
    yield _threads()
    yield _memory()
    try:
        artifacts.root()
    except ConfigError as error:
        yield Finding("fail", "store", "there is none", str(error))
    else:
        yield _disk()
        yield _store()
        yield from _pairs()
    yield _packages()


def _versions() -> Finding:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return Finding("ok", "python", f"{platform.python_version()}, {packages}")


def _compiler() -> Finding:
    """The compiler that TorchInductor takes, which also builds our operators."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
        asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (InvalidCxxCompiler, OSError, subprocess.CalledProcessError):
        fix = "install one: apt install g++, or dnf install gcc-c++; or CXX=PATH ygg ..."
        return Finding("fail", "compiler", "no C++ compiler that works", fix)
    return Finding("ok", "compiler", f"{asked.stdout.splitlines()[0]} ({compiler})")


def _processor() -> Finding:
    flags = artifacts.cpu_flags().split()
    sets = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    found = [name for flag, name in sets.items() if flag in flags]
    if found:
        return Finding("ok", "processor", f"{platform.machine()}, kernels for {found[0]}")
    fix = "it works, but slowly: products run on portable loops"
    return Finding("note", "processor", f"{platform.machine()}, none of {', '.join(sets.values())}", fix)


def _threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    value = f"{torch.get_num_threads()} on {cores} cores, load {load:.1f}"
    if load > cores:
        return Finding("note", "threads", value, "other programs run: end them before you measure speed")
    return Finding("ok", "threads", value)


def _memory() -> Finding:
    from yggdrasil.offline.forecast import free_memory_bytes

    free = free_memory_bytes()
    if free is None:
        return Finding("note", "memory", "unknown: this system does not report its free memory")
    fix = "a pair needs about three times its weights to be compiled" if free < LITTLE_BYTES else ""
    return Finding("note" if fix else "ok", "memory", f"{free / 1e9:.1f} GB free", fix)


def _disk() -> Finding:
    from yggdrasil.offline.forecast import free_disk_bytes

    free = free_disk_bytes(artifacts.root())
    fix = "a pair needs its weights once more on disk; YGG_HOME=FOLDER chooses another disk"
    is_little = free < LITTLE_BYTES
    value = f"{free / 1e9:.1f} GB free for the store"
    return Finding("note" if is_little else "ok", "disk", value, fix if is_little else "")


def _store() -> Finding:
    """Whether compiled code can be written to the store, and is loaded from there."""
    root = artifacts.root()
    try:
        check_trusted([_existing(root)], "YGG_HOME=FOLDER ygg compile")
    except YggError as error:
        return Finding("fail", "store", str(root), str(error))
    try:
        with TemporaryDirectory(dir=_existing(root), prefix=".ygg-doctor-"):
            pass
    except OSError as error:
        problem = os.strerror(error.errno or 0).lower()
        fix = "YGG_HOME=FOLDER ygg ..."
        if isinstance(error, PermissionError):
            fix = f"chmod u+rwx {shlex.quote(str(_existing(root)))}, or {fix}"
        return Finding("fail", "store", f"{root} cannot be written ({problem})", fix)
    return Finding("ok", "store", str(root))


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (path, *path.parents) if each.is_dir())


def _pairs() -> Iterator[Finding]:
    from yggdrasil.inventory import stored_pairs

    try:
        pairs = list(stored_pairs())
    except YggError as error:
        yield Finding("fail", "pair", "they cannot be listed", str(error))
        return
    for pair in pairs:
        if pair.problem is None:
            yield Finding("ok", "pair", f"{pair.name}, {pair.num_bytes / 1e6:.0f} MB")
        else:
            yield Finding(
                "fail", "pair", f"{pair.name}: {pair.problem}", f"or remove it: ygg rm {pair.name}"
            )
    if not pairs:
        yield Finding("ok", "pair", "none yet; `ygg generate` compiles the bundled one in some minutes")


def _packages() -> Finding:
    """Packages of the extras."""
    missing = [extra for extra, (_, module) in EXTRAS.items() if find_spec(module) is None]
    if not missing:
        return Finding("ok", "packages", f"all optional ones: {', '.join(EXTRAS)}")
    purposes = ", ".join(f"{extra} ({EXTRAS[extra][0]})" for extra in missing)
    fix = f"pip install '{DISTRIBUTION}[{','.join(missing)}]'"
    return Finding("note", "packages", f"not installed: {purposes}", fix)
