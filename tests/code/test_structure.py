"""The package keeps its order: which module may import which, what is public, and nothing of the machine it
was written on.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import yggdrasil

PACKAGE = Path(yggdrasil.__file__).parent
ROOT = PACKAGE.parent
GROUPS = (  # a module imports from its own group and from those before it
    ("errors", "store", "config", "layout", "page_order", "staging", "text"),
    ("picture", "tree", "kv", "state", "trace"),
    ("kernels",),
    ("models",),
    ("step",),
    ("policy",),
    ("compiler",),
    ("engine",),
    ("schedule",),
    ("ranks", "bundle", "inventory", "loading", "pair"),
    ("report",),
    ("offline",),
    ("serve",),
    ("api", "bridge"),
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
    found = []
    for node in ast.walk(source(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in found if name in MODULES]


def source(module: str) -> ast.Module:
    """The syntax tree of a module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


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
    defined = [
        node.name for node in source(module).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    if names is None:
        assert [name for name in defined if not name.startswith("_")] == [], (
            f"{module} has public names but no __all__"
        )
        return
    assert list(names) == sorted(names, key=reading_order)
    assert [name for name in names if not hasattr(loaded, name)] == []
    assert len(set(names)) == len(names)


GLOBAL_SHAPES = frozenset("BNKWVCAEDM")  # the legend in yggdrasil/__init__.py
SHAPE_SUFFIX = re.compile(r"(?=.*[a-z])\w*[a-z0-9]_([A-Z][A-Z0-9]*)_?")


def names(tree: ast.Module) -> set[str]:
    """Every variable, argument and attribute that a module names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def shape_letters(tree: ast.Module) -> set[str]:
    """The letters of every shape suffix: of `key_PGSF` P, G, S and F."""
    suffixes = [match[1] for name in names(tree) if (match := SHAPE_SUFFIX.fullmatch(name))]
    return {letter for suffix in suffixes for letter in suffix if letter.isalpha()}


def listed_shapes(docstring: str) -> set[str]:
    """The letters that a module docstring lists: `Shapes: G = KV heads, S = slots of a page.`"""
    paragraph = re.search(r"^Shapes: (.*?)(?:\n\s*\n|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\b([A-Z]) = ", paragraph[1])) if paragraph else set()


def test_shapes_are_read_from_names_and_docstrings() -> None:
    assert shape_letters(ast.parse("key_PGSF, MAX_LEN, BF16_PAD, _root_N = x.logits_NV")) == set("PGSFNV")
    assert listed_shapes("Keys.\n\nShapes: G = KV heads, S = slots of\na page, 16.\n\nT = 3") == {"G", "S"}


def unlisted_shapes(tree: ast.Module) -> list[str]:
    """The letters that are neither global nor in the docstring of their module."""
    return sorted(shape_letters(tree) - GLOBAL_SHAPES - listed_shapes(ast.get_docstring(tree) or ""))


@pytest.mark.parametrize("module", ["yggdrasil", *MODULES])
def test_every_shape_letter_is_global_or_listed_in_its_module(module: str) -> None:
    assert unlisted_shapes(source(module)) == []


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


@pytest.mark.parametrize("folder", ("bench", "examples", "tests"))
def test_every_shape_letter_outside_the_package_is_global_or_listed_in_its_module(folder: str) -> None:
    sources = [path for path in tracked_files() if path.suffix == ".py" and ROOT / folder in path.parents]
    assert sources
    found = {str(path.relative_to(ROOT)): unlisted_shapes(ast.parse(path.read_text())) for path in sources}
    assert {name: letters for name, letters in found.items() if letters} == {}


@pytest.mark.parametrize("suffix", (".cpp", ".h", ".py", ".md", ".sh", ".js", ".html", ".css"))
def test_lines_fit_108_columns(suffix: str) -> None:
    """Ruff does not count the comments that it reads itself. Tables of Markdown have long rows.

    The bundled pair's model card came with the pair.
    """
    sources = [path for path in tracked_files() if path.suffix == suffix and "pairs" not in path.parts]
    assert sources
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 108 and not (suffix == ".md" and line.startswith("|"))
    ]
    assert wide == []


def test_every_assignment_has_a_line_of_its_own() -> None:
    """`a, b = f()` unpacks one value; `a, b = x, y` is two assignments."""
    doubled = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in tracked_files()
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(node.targets[0].elts) == len(node.value.elts)
    ]
    assert doubled == []


def words_to_avoid() -> list[str]:
    """The right column of CONTRIBUTING's table of words, without names in code."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| write | not |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [row.split("|")[2] for row in table.splitlines()]
    return [word.strip() for cell in cells for word in cell.split(",") if "`" not in cell]


def avoided(text: str) -> list[str]:
    """Words to avoid in a text, or in its names; "at least" and "least squares" are the field's own."""
    prose = re.sub(r"\n\s*(?://|#)?\s*|_", " ", text)
    words = "|".join(words_to_avoid())
    return re.findall(rf"\b(?<!at )(?:{words})(?:s|d|ed)?\b(?! squares)", prose, re.IGNORECASE)


def test_words_to_avoid_are_found_in_texts_and_names() -> None:
    text = "# The least cost, at\n# least 1, by least squares, beside\nPRICES and LEAST_OF_IDLE"
    assert avoided(text) == ["least", "beside", "PRICES", "LEAST"]


@pytest.mark.parametrize("suffix", (".cpp", ".h", ".py", ".md", ".sh", ".js", ".html", ".css"))
def test_texts_and_names_have_no_words_to_avoid(suffix: str) -> None:
    """The table itself has them, and this file; the bundled pair's model card came with the pair."""
    exempt = {ROOT / "CONTRIBUTING.md", Path(__file__)}
    found = {
        str(path.relative_to(ROOT)): words
        for path in tracked_files()
        if path.suffix == suffix and "pairs" not in path.parts and path not in exempt
        if (words := avoided(path.read_text()))
    }
    assert found == {}


def test_tracked_files_have_no_path_of_a_developer_s_machine() -> None:
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


def test_every_file_of_the_package_is_in_a_wheel() -> None:
    """Modules always are; others match a pattern of the project's file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["yggdrasil"]
    others = [path for path in tracked_files() if PACKAGE in path.parents and path.suffix != ".py"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert sorted(set(others) - packed) == []
    assert PACKAGE / "serve" / "page" / "app.js" in packed


def test_test_modules_have_names_of_their_own() -> None:
    """Pytest imports them by their names alone, and refuses a second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
