"""Compiled code is loaded only from files that no other user can write."""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from yggdrasil.errors import ArtifactError
from yggdrasil.store.trust import check_trusted


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file two folders below one that only this user can enter."""
    path = tmp_path / "store" / "kernels" / "lib.so"
    path.parent.mkdir(parents=True)
    path.touch()
    for each in (path.parent.parent, path.parent):
        each.chmod(0o755)
    path.chmod(0o644)
    return path


def test_own_files_that_no_other_user_can_write_are_trusted(library: Path) -> None:
    check_trusted([library, library.with_name("missing")], "c")


@pytest.mark.parametrize("level", (0, 1, 2))
def test_files_that_everybody_can_write_are_refused_with_a_chmod_command(library: Path, level: int) -> None:
    open_path = [library, *library.parents][level]
    open_path.chmod(open_path.stat().st_mode | 0o002)
    with pytest.raises(
        ArtifactError, match=re.escape(f"{open_path}: everybody can write it") + ".*run `chmod go-w "
    ):
        check_trusted([library], "c")
    open_path.chmod(open_path.stat().st_mode & ~0o022)
    check_trusted([library], "c")


def test_links_are_followed_to_where_the_file_lies(library: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(library.parent)
    library.parent.chmod(0o777)
    with pytest.raises(ArtifactError, match="kernels: everybody can write it"):
        check_trusted([link / library.name], "c")


def test_a_sticky_folder_above_is_closed(library: Path) -> None:
    library.parent.parent.chmod(0o1777)
    check_trusted([library], "c")


@pytest.mark.parametrize(
    ("group", "is_allowed"),
    [
        (("me", []), True),
        (("me", ["me"]), True),
        (("me", ["me", "other"]), False),
        (("users", []), False),
        (("root", []), True),
        (None, False),
    ],
)
def test_a_group_may_write_only_where_it_is_this_user_alone(
    library: Path, monkeypatch: pytest.MonkeyPatch, group: tuple[str, list[str]] | None, is_allowed: bool
) -> None:
    def look_up(gid: int) -> SimpleNamespace:
        if group is None:
            raise KeyError(gid)
        return SimpleNamespace(gr_name=group[0], gr_mem=group[1])

    monkeypatch.setattr(grp, "getgrgid", look_up)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    library.chmod(0o664)
    if is_allowed:
        check_trusted([library], "c")
    else:
        with pytest.raises(ArtifactError, match=r"lib\.so: its group can write it.*chmod go-w"):
            check_trusted([library], "c")


def test_what_belongs_to_somebody_else_is_refused(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat: Callable[[Path], os.stat_result] = Path.stat

    def foreign(path: Path) -> object:
        status = stat(path)
        return (
            SimpleNamespace(st_uid=54321, st_gid=status.st_gid, st_mode=status.st_mode)
            if path == library
            else status
        )

    monkeypatch.setattr(Path, "stat", foreign)
    with pytest.raises(
        ArtifactError, match=r"lib\.so: it belongs to user 54321.*run `YGG_HOME=FOLDER ygg compile`"
    ):
        check_trusted([library], "YGG_HOME=FOLDER ygg compile")
