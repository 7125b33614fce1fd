"""Compiled code is loaded only from files that no other user can change.

A file is trusted if it and every folder above it belong to this user or to root, and no other user can
write them. A sticky folder such as /tmp is trusted: only the owner of an entry can remove it. A group that
can write counts as another user, except root's group and this user's own group without other members, which
Debian and Fedora create.
"""

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
    """Check files that will be loaded as code, and every folder above them; links are followed.

    Args:
        paths: Files; missing or unreachable ones are skipped.
        command: Command that builds them elsewhere, for files of another user.

    Raises:
        ArtifactError: names the first path that another user owns or can write, and the command to fix it.

    Cost: a system call per file and folder.
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
