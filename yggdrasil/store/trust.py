"""Native code is loaded only from files that nobody else can change.

A file counts when it, and every folder above it, belongs to this user or to root, and no other user can
write it. Folders where only the owner of an entry can remove it (sticky, as /tmp is) count as closed.
Group-writable is open to others, except for a group of one: root's, or the one that has this user's name
and no other member, as Debian and Fedora give to every user."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

from yggdrasil.errors import ArtifactError

__all__ = ["check_trusted"]


def check_trusted(paths: Iterable[Path], command: str) -> None:
    """Look at files that will run, and at every folder that leads to them, links followed.

    Args:
        paths: Files; what is missing or cannot be reached is for their reader to report.
        command: What builds them elsewhere, for an owner who is somebody else.

    Raises:
        ArtifactError: names the first one that others own or can write, and the command that closes it.

    Cost: a system call a file and folder.
    """
    real = [Path(os.path.realpath(path)) for path in paths]
    for path in sorted({each for file in real for each in (file, *file.parents)}):
        try:
            status = path.stat()
        except OSError:
            continue
        _check(path, status, command)


def _check(path: Path, status: os.stat_result, command: str) -> None:
    root_uid = os.stat("/").st_uid  # in a container root may have another number
    if status.st_uid not in (0, root_uid, os.geteuid()):
        owner = _user_name(status.st_uid)
        problem = (
            f"it belongs to {owner}, and compiled code is loaded only from files of your own or of root"
        )
        raise ArtifactError(path, problem, command)
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return
    writers = [
        who
        for who, bit in (("everybody", stat.S_IWOTH), ("its group", stat.S_IWGRP))
        if status.st_mode & bit
    ]
    if writers and not (writers == ["its group"] and _is_group_of_one(status.st_gid)):
        problem = f"{writers[0]} can write it, and compiled code is loaded only from where others cannot"
        raise ArtifactError(path, problem, f"chmod go-w {shlex.quote(str(path))}")


def _is_group_of_one(gid: int) -> bool:
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    names = {"root", _user_name(os.geteuid())}
    return group.gr_name in names and names.issuperset(group.gr_mem)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
