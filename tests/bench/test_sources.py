"""Which code belongs to which digest of a result."""

from __future__ import annotations

import subprocess
import sys

from bench.lib import sources

MODULES = "yggdrasil.cli.generate, yggdrasil.engine, yggdrasil.pair"
GENERATE = f"import sys, {MODULES}; print(*sorted(sys.modules))"


def test_generation_imports_no_policy_of_the_server() -> None:
    loaded = subprocess.run([sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True)
    modules = {name.replace(".", "/") for name in loaded.stdout.split()}
    for name in sources.SERVER_ONLY:
        part = f"yggdrasil/{name.removesuffix('.py')}"
        assert (sources.PACKAGE / name).exists()
        assert not [module for module in modules if module == part or module.startswith(f"{part}/")]


def test_every_policy_belongs_to_one_part() -> None:
    files = {
        part: [file for name in names for file in sources.sources_of(name, names)]
        for part, names in sources.PARTS.items()
    }
    policies = sources.PACKAGE / "policy"
    everywhere = [file for found in files.values() for file in found if file.is_relative_to(policies)]
    assert sorted(everywhere) == sorted(policies.rglob("*.py"))
    assert policies / "trees.py" in files["serve"]
    assert policies / "shape.py" in files["decode"]
