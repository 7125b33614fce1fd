"""Write files of the store atomically, with the access rights of their folder.

A temporary is named `.<name>.<8 random characters>` until it is complete. Its writer holds a lock on it,
which ends with the process; temporaries of ended processes are removed.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from yggdrasil.errors import StoreError, YggError

__all__ = [
    "make_folder",
    "owned",
    "put",
    "remove",
    "scratch_for_graphs",
    "size_bytes",
    "store_errors",
    "sweep",
    "temporary_folder",
    "write_whole",
]

FOLDER_MODE = 0o755  # before umask: other users must not be able to write files that are loaded as code
TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")
YOUNG_S = 60.0  # a new temporary has no lock for a moment
FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
PRINTED = re.compile(r"\[Errno (\d+)\] [^:\n]+: '([^'\n]+)'")  # an OSError in a traceback
CHOOSE_ANOTHER = "set YGG_HOME to a folder that you can write: `YGG_HOME=FOLDER ygg compile ...`"
UNPACKING_FAILED = "write callback failed"  # torch's zip library on a full disk
BLOCKED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EIO)


def make_folder(path: Path) -> None:
    """Make a folder and its parents, by umask, never writable by other users.

    Raises:
        StoreError: the file system makes no folders.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.is_dir():
            try:
                folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            except FileNotFoundError:  # below /proc, or the folder above was just removed
                raise StoreError(folder, "no folder can be made there", CHOOSE_ANOTHER) from None


def _settle_mode_(path: Path, folder_mode: int) -> None:
    """Make a file or folder as readable as its parent, never writable by other users."""
    is_folder = path.is_dir()
    path.chmod(folder_mode & (FOLDER_MODE if is_folder else FOLDER_MODE & ~0o111))
    for child in sorted(path.iterdir()) if is_folder else ():
        _settle_mode_(child, folder_mode)


def put(temporary: Path, path: Path) -> None:
    """Move a complete file or folder to its path; replaces what is there."""
    _settle_mode_(temporary, path.parent.stat().st_mode)
    if path.is_dir() or (temporary.is_dir() and path.exists()):
        remove(path)
    os.replace(temporary, path)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that a user named: whole, or it stays as it was.

    What has no whole, such as a pipe or a device, is written to, and so is a file in a closed folder.

    Raises:
        OSError: it cannot be written; missing folders are not made.
    """
    path = Path(os.path.realpath(path))  # a link stays, and what it names is replaced
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    try:
        temporary.write_bytes(content)
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content. An error has the whole path."""
    if path.is_dir() and not path.is_symlink():
        try:
            shutil.rmtree(path)
        except OSError as error:  # about an entry, without its folder
            raise OSError(error.errno, error.strerror, str(path)) from None
    else:
        path.unlink()


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 if nothing is there."""
    files = path.rglob("*") if os.path.isdir(path) else [path]
    return sum(file.lstat().st_size for file in files if os.path.isfile(file))


@contextmanager
def temporary_folder(folder: Path, name: str) -> Iterator[Path]:
    """A temporary folder in `folder`, removed at the end; if the process is killed, `sweep` removes it."""
    make_folder(folder)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{name}."))
    try:
        with owned(temporary):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """A block with an exclusive lock on a file or folder; raises BlockingIOError if another has it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sweep(folders: Iterable[Path], *, older_than_s: float = YOUNG_S) -> None:
    """Remove temporaries in these folders whose writer has ended.

    Args:
        folders: Folders to search, without subfolders; they may be missing.
        older_than_s: Younger temporaries stay.
    """
    for folder in folders:
        with suppress(OSError):
            for entry in os.scandir(folder):
                if TEMPORARY.fullmatch(entry.name):
                    _remove_abandoned(Path(entry.path), older_than_s)


def _remove_abandoned(path: Path, older_than_s: float) -> None:
    """Remove a temporary, unless it is another user's or the file system has no locks."""
    with suppress(OSError):
        if time.time() - path.lstat().st_mtime >= older_than_s and not path.is_symlink():
            with owned(path):
                remove(path)


@contextmanager
def scratch_for_graphs() -> Iterator[None]:
    """A block in which torch unpacks graphs into a folder of this process.

    It is removed when the process ends; after a kill, the next process removes it.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(_scratch())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@cache
def _scratch() -> Path:
    parent = Path(tempfile.gettempdir())
    prefix = f".yggdrasil-{os.getuid()}."
    for abandoned in parent.glob(f"{prefix}*"):
        _remove_abandoned(abandoned, YOUNG_S)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    fcntl.flock(
        os.open(folder, os.O_RDONLY), fcntl.LOCK_EX
    )  # stays open and locked until this process ends
    atexit.register(_remove_scratch, folder, os.getpid())
    return folder


def _remove_scratch(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def store_errors(root: Path) -> Iterator[None]:
    """A block that turns failures to write into StoreError.

    Raises:
        StoreError: a disk is full, read-only or closed to this user, or a file is in a folder's place. The
            cause is found in the error, in its causes, or in the text of a compiler or a library.
    """
    try:
        yield
    except YggError:
        raise
    except Exception as error:
        if (problem := _storage_problem(error, root)) is None:
            raise
        path, code = problem
        raise StoreError(path, os.strerror(code).lower(), _remedy(code, root)) from error


def _storage_problem(error: BaseException | None, root: Path) -> tuple[Path, int] | None:
    """Path and error number, if the error is about a file that we write."""
    while error is not None:
        if isinstance(error, OSError):
            path = root if error.filename is None else Path(os.fsdecode(error.filename))
            if error.errno in (*FULL, *CLOSED, *BLOCKED) and _is_ours(path, root):
                return path, error.errno
        elif (problem := _reported_problem(str(error), root)) is not None:
            return problem
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _reported_problem(text: str, root: Path) -> tuple[Path, int] | None:
    """Path and error number from the text of a compiler, a library or another process."""
    for code in (*FULL, errno.EROFS):
        if os.strerror(code) in text:
            return root, code
    if UNPACKING_FAILED in text:
        return root, errno.ENOSPC
    for number, name in PRINTED.findall(text):
        if int(number) in (*CLOSED, *BLOCKED) and _is_ours(Path(name), root):
            return Path(name), int(number)
    return None


def _is_ours(path: Path, root: Path) -> bool:
    """Whether a path is in the store, above it, or in the folder for temporary files."""
    return (
        path.is_relative_to(root) or root.is_relative_to(path) or path.is_relative_to(tempfile.gettempdir())
    )


def _remedy(code: int, root: Path) -> str:
    if code in FULL:
        places = " and ".join(dict.fromkeys((str(root), tempfile.gettempdir())))
        return (
            f"make room in {places}, or set YGG_HOME and TMPDIR to folders that have it, "
            "and run the command again"
        )
    if code in CLOSED:
        return CHOOSE_ANOTHER
    return "move away what is there, or set YGG_HOME to another folder: `YGG_HOME=FOLDER ygg compile ...`"
