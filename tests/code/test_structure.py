"""The package keeps its order: who may import whom, what is public, and nothing of the machine it was
written on.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest

import yggdrasil

PACKAGE = Path(yggdrasil.__file__).parent
ROOT = PACKAGE.parent
GROUPS = (  # a module imports from its own group and from those before it
    ("errors", "store", "config", "layout", "staging", "tokenizer"),
    ("tree", "kv", "state", "trace"),
    ("kernels",),
    ("models",),
    ("step",),
    ("policy",),
    ("compiler",),
    ("schedule",),
    ("engine",),
    ("ranks", "bundle", "inventory", "loading", "pair"),
    ("report",),
    ("offline",),
    ("serve",),
    ("cli",),
    ("__main__",),
)
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "yggdrasil."))
DEVELOPER_PATHS = re.compile(r"/(home|Users)/[a-z]\w+/|/roo[t]/|/wor[k]/(main|shared|venv)")


def group(module: str) -> int:
    """The rank of `yggdrasil.<name>...`."""
    name = module.split(".")[1]
    return next(rank for rank, names in enumerate(GROUPS) if name in names)


def imports(module: str) -> list[str]:
    """Every module of the package that `module` imports, at the top or inside a function."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found = []
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name in MODULES]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_group_or_earlier_ones(module: str) -> None:
    late = [name for name in imports(module) if group(name) > group(module)]
    assert late == [], f"{module} is in {GROUPS[group(module)]}"


def test_every_group_member_exists() -> None:
    names = {module.split(".")[1] for module in MODULES}
    assert {name for names in GROUPS for name in names} - names == set()


def test_the_order_would_notice_a_forbidden_import() -> None:
    assert group("yggdrasil.step.accept") < group("yggdrasil.engine") < group("yggdrasil.cli.main")
    assert "yggdrasil.store.artifacts" in imports(
        "yggdrasil.bundle"
    )  # `from yggdrasil.store import artifacts`
    assert "yggdrasil.report.run" in imports("yggdrasil.cli.generate")  # inside a function


def reading_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, each by name."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


@pytest.mark.parametrize("module", ["yggdrasil", *MODULES])
def test_all_is_sorted_and_every_name_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    defined = [
        node.name
        for node in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    if names is None:
        assert [name for name in defined if not name.startswith("_")] == [], (
            f"{module} has public names but no __all__"
        )
        return
    assert list(names) == sorted(names, key=reading_order)
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert len(set(names)) == len(names)


def tracked_files() -> list[Path]:
    """What git knows, or every file of the checkout's source folders where there is no git."""
    try:
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        listed = [
            str(path.relative_to(ROOT))
            for folder in ("yggdrasil", "tests", "bench", "examples")
            for path in (ROOT / folder).rglob("*.*")
        ]
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def test_no_path_of_a_developer_s_machine_in_tracked_files() -> None:
    offenders = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        offenders += [
            f"{path.relative_to(ROOT)}: {match.group()}" for match in DEVELOPER_PATHS.finditer(text)
        ]
    assert offenders == []
