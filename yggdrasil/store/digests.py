"""Digests of files, without reading a file again while its size and time are the same."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from yggdrasil.errors import ArtifactError
from yggdrasil.store import artifacts

__all__ = ["KnownFile", "Ledger", "read_files"]

LEDGER_NAME = "verified.json"


@dataclass(frozen=True)
class KnownFile:
    """A file at the time it was read.

    Args:
        size: Bytes.
    """

    path: str
    size: int
    mtime_ns: int
    digest: str

    def changed(self) -> bool:
        """Whether the file exists with other bytes; a missing file has not changed."""
        try:
            [now] = read_files([Path(self.path)], known=[self])
        except OSError:
            return False
        return now.digest != self.digest


def read_files(
    paths: Sequence[Path], *, known: Iterable[KnownFile] = (), tick: Callable[[], None] = lambda: None
) -> list[KnownFile]:
    """The digests of files, in order.

    Args:
        known: Files that were read before; they are not read again if size and time are the same.
        tick: Called for every file.

    Raises:
        OSError: one of them cannot be read.

    Cost: about a second per gigabyte; one thread per core.
    """
    before = {(file.path, file.size, file.mtime_ns): file for file in known}
    keys = [_size_and_time(path) for path in paths]
    unread = [key for key in keys if key not in before]
    for _ in range(len(keys) - len(unread)):
        tick()
    if unread:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
            digests = threads.map(lambda key: artifacts.digest_file(Path(key[0])), unread)
            for key, digest in zip(unread, digests, strict=True):
                before[key] = KnownFile(*key, digest)
                tick()
    return [before[key] for key in keys]


def _size_and_time(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return str(path), status.st_size, status.st_mtime_ns


class Ledger:
    """Digests of the files of one build, in a `verified.json` next to them.

    It also keeps size and time of each file at its last check: a file is read again only if they changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER_NAME
        self._lock = Lock()
        self._known = {name: KnownFile(str(folder / name), *entry) for name, entry in self._load().items()}

    def _load(self) -> dict[str, tuple[int, int, str]]:
        """Entries of the ledger; empty if it is missing or damaged: then files are read or built again."""
        try:
            entries = artifacts.load_json(self.path, "")["files"]
            return {
                name: (entry["size"], entry["mtime_ns"], entry["digest"]) for name, entry in entries.items()
            }
        except (ArtifactError, AttributeError, KeyError, TypeError):
            return {}

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Digests of those files that are known."""
        return {name: self._known[name].digest for name in names if name in self._known}

    def record(self, *names: str) -> None:
        """Record files that were just written."""
        self._remember(dict(zip(names, read_files([self.folder / name for name in names]), strict=True)))

    def whole(self, names: Sequence[str]) -> set[str]:
        """Those files whose bytes are unchanged since they were written. Cost: reads them all."""
        there = [name for name in names if name in self._known and (self.folder / name).is_file()]
        found = read_files([self.folder / name for name in there])
        return {
            name for name, file in zip(there, found, strict=True) if file.digest == self._known[name].digest
        }

    def check(self, expected: Mapping[str, str], command: str, *, full: bool = False) -> None:
        """Compare files with the digests that they should have.

        Args:
            expected: Digest by name.
            command: Command that rebuilds them, for the error.
            full: Read every file, even if its size and time are the same.

        Raises:
            ArtifactError: names the first file that is missing, unreadable or changed.

        Cost: reads files that changed since the last check; always reads them if the user cannot write the
        ledger.
        """
        try:
            files = read_files(
                [self.folder / name for name in expected], known=() if full else self._known.values()
            )
        except OSError as error:
            raise artifacts.unreadable(Path(error.filename or self.folder), error, command) from None
        found = dict(zip(expected, files, strict=True))
        for name, digest in expected.items():
            if found[name].digest != digest:
                raise ArtifactError(
                    self.folder / name, "corrupt (its bytes are not those that were written)", command
                )
        if any(self._known.get(name) != file for name, file in found.items()):
            with suppress(OSError):  # another user's store: files are read again next time
                self._remember(found)

    def _remember(self, files: Mapping[str, KnownFile]) -> None:
        with self._lock:
            self._known.update(files)
            entries = {}
            for name, file in self._known.items():
                entries[name] = {key: value for key, value in asdict(file).items() if key != "path"}
            artifacts.save_json(self.path, {"files": entries})
