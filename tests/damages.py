"""Damage every artifact of a pair in turn, load the pair, print the result.

tests/cli/test_damage.py runs this in another process, since damaged compiled code could end it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PROMPT = "Once upon a time"
NUM_TOKENS = 8
STORES = ("compile_cache", "profiles", "predictors")


def artifact_files(home: Path) -> list[Path]:
    """All files of the store; ledgers last, since they are written again."""
    files = [
        path
        for store in STORES
        for path in sorted((home / store).rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    ]
    return sorted(
        files, key=lambda path: path.name == "verified.json" and path.parent.parent.name != "kernels"
    )


def truncated(path: Path) -> Iterator[None]:
    for share in (0.5, 0.999):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
        yield


def flipped(path: Path) -> Iterator[None]:
    whole = path.read_bytes()
    rng = random.Random(path.name)
    for _ in range(3):
        content = bytearray(whole)
        place = rng.randrange(len(whole))
        content[place] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        yield


def replaced(content: bytes) -> Callable[[Path], Iterator[None]]:
    def replace(path: Path) -> Iterator[None]:
        path.write_bytes(content)
        yield

    return replace


def folder(path: Path) -> Iterator[None]:
    path.unlink()
    path.mkdir()
    yield


def missing(path: Path) -> Iterator[None]:
    path.unlink()
    yield


DAMAGES: dict[str, Callable[[Path], Iterator[None]]] = {
    "truncated": truncated,
    "flipped": flipped,
    "folder": folder,
    "missing": missing,
    "empty": replaced(b""),
    "zeros": replaced(bytes(4096)),
    "garbage": replaced(b'{"fingerprint": ["a"], "config": 7, "digest": {}, "files": [[]]}'),
    "nested": replaced(b'{"a": ' + b"[" * 100_000),
}


def outcome() -> str:
    """The error message, or the tokens that were written."""
    from yggdrasil.config import GenerateConfig
    from yggdrasil.errors import YggError
    from yggdrasil.pair import load_pair

    try:
        pair = load_pair("tiny")
    except YggError as error:
        return str(error)
    config = GenerateConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    steps = pair.engine.generate(pair.tokenizer.encode(PROMPT), pair.policy(), config)
    return json.dumps([token for result in steps for token in result.tokens])


def main(home: Path, damage: str) -> None:
    for path in artifact_files(home):
        kept = home / "kept"
        shutil.copy2(path, kept)
        for _ in DAMAGES[damage](path):
            print(json.dumps([str(path.relative_to(home)), outcome()]), flush=True)
        if path.is_dir():
            shutil.rmtree(path)
        shutil.copy2(kept, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
