"""OpenVINO GenAI as a peer: an environment of its own, the models converted there, arms that speak to
`openvino_child.py` by lines of JSON.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file, save_file

from bench.lib.harness import Arm, Generation
from bench.peers.openvino_child import PAGED, SDPA, SPECULATIVE
from bench.peers.processes import JsonLines, Peer, PeerError, run_logged
from yggdrasil.store import artifacts

__all__ = ["converted", "distinct_zeros", "environment_python", "openvino_arms", "openvino_peer"]

PACKAGES = (
    "openvino-genai>=2026.4,<2027",
    "openvino-tokenizers>=2026.4,<2027",
    "optimum-intel>=2.2,<3",
    "nncf>=3.4,<4",
    "torch>=2.11,<2.14",
)
# required by name only; a build that does not match torch's keeps transformers from loading
UNWANTED = "torchvision"
CHILD = Path(__file__).parent / "openvino_child.py"
ROUNDING = {
    "bf16": (),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"),
}
"""Options of the exporter. Without a format it keeps the checkpoint's bf16; above a milliard parameters it
would choose 8 bits, which the size gives away."""

BITS = {"bf16": 16, "int8": 8, "int4": 4}
MARK = {"bf16": -0.0, "int8": 1e-4, "int4": 1e-4}  # a rounded -0.0 would be a zero like others
Log = Callable[[str], None]


@contextmanager
def openvino_peer(
    target: Path,
    draft: Path,
    *,
    num_tokens: int,
    assistant_tokens: Sequence[int],
    num_threads: int,
    log: Log,
    temperature: float = 0.0,
    weights: str = "bf16",
) -> Iterator[Peer]:
    """OpenVINO GenAI, installed and converted on first use, loaded in a child process that ends with the
    block.

    Args:
        num_tokens: New tokens per prompt.
        assistant_tokens: Draft lengths.
        num_threads: As in `torch.set_num_threads`.
        log: Called before what takes long.
        temperature: Samples above 0, from all tokens, with a seed of the prompt's.
        weights: A key of `ROUNDING`, for the target; the draft stays in bf16.

    Raises:
        PeerError: pip, the exporter or the pipeline failed.
    """
    python = environment_python(log)
    models = [converted(python, target, log, weights), converted(python, draft, log)]
    log("OpenVINO: loading")
    with JsonLines([python, "-I", CHILD, *models, str(num_threads)], name="OpenVINO") as child:
        plain, speculative = openvino_arms(child, num_tokens, assistant_tokens, temperature)
        yield Peer(
            name="OpenVINO GenAI",
            plain=plain,
            speculative=speculative,
            record={**child.greeting, "packages": PACKAGES, "export": ROUNDING[weights]},
        )


def openvino_arms(
    child: JsonLines, num_tokens: int, assistant_tokens: Sequence[int], temperature: float = 0.0
) -> tuple[list[Arm], list[Arm]]:
    """Plain with either attention backend; speculative with every draft length, on the paged one."""

    def arm(name: str, pipeline: str, count: int | None = None) -> Arm:
        def generate(prompt: Sequence[int]) -> Generation:
            reply = child.ask(
                {
                    "pipeline": pipeline,
                    "prompt": list(prompt),
                    "num_tokens": num_tokens,
                    "num_assistant_tokens": count,
                    "temperature": temperature,
                }
            )
            if len(reply["token_ids"]) != num_tokens:
                raise PeerError(f"{name}: {len(reply['token_ids'])} tokens came instead of {num_tokens}")
            return Generation(first_tokens=1, **reply)

        return Arm(name=name, generate=generate, exact=False)

    speculative = [
        arm(f"OpenVINO speculative, k={count}", SPECULATIVE, count) for count in assistant_tokens
    ]
    return [arm("OpenVINO plain", PAGED), arm("OpenVINO plain, SDPA", SDPA)], speculative


def environment_python(log: Log) -> Path:
    """The interpreter of a virtual environment that holds `PACKAGES`, made once under the artifact root.

    Raises:
        PeerError: pip failed.

    Cost: the first time minutes, and about 2 GB of disk.
    """
    folder = artifacts.root() / "bench_peers" / "openvino"
    python = folder / "bin" / "python"
    finished = folder / "packages.txt"
    output = folder.with_suffix(".log")
    if finished.exists() and finished.read_text() == "\n".join(PACKAGES):
        return python
    start = time.perf_counter()
    log(f"OpenVINO: making its environment, once ({', '.join(PACKAGES)})")
    venv.create(folder, with_pip=True, clear=True)
    run_logged([python, "-m", "pip", "install", *PACKAGES], output, what="pip install of OpenVINO")
    run_logged(
        [python, "-m", "pip", "uninstall", "-y", UNWANTED], output, what=f"pip uninstall of {UNWANTED}"
    )
    finished.write_text("\n".join(PACKAGES))
    log(f"OpenVINO: installed in {time.perf_counter() - start:.0f} s")
    return python


def converted(python: Path, source: Path, log: Log, weights: str = "bf16") -> Path:
    """The model in OpenVINO's format, no two weights of it shared; made once under the artifact root.

    Args:
        python: Of an environment with optimum-intel.
        log: Called when there is something to convert.
        weights: A key of `ROUNDING`.

    Raises:
        PeerError: the exporter failed, or its weights are smaller than that many numbers of the format, or
            as large as unrounded ones.
    """
    key = artifacts.digest(artifacts.digest_file(source / "model.safetensors"), PACKAGES, ROUNDING[weights])
    out = artifacts.root() / "bench_peers" / f"openvino-{key}"
    if out.exists():
        return out
    log(f"OpenVINO: converting {source.name} to {weights}")
    with tempfile.TemporaryDirectory() as copy, artifacts.atomic_directory(out) as folder:
        num_bytes = distinct_zeros(source, Path(copy), MARK[weights])
        export = [
            "-m",
            "optimum.commands.optimum_cli",
            "export",
            "openvino",
            "--task",
            "text-generation-with-past",
            "--model",
            copy,
            *ROUNDING[weights],
        ]
        run_logged(
            [python, *export, folder], out.with_suffix(".log"), what=f"optimum-cli export of {source}"
        )
        size = (folder / "openvino_model.bin").stat().st_size
        if size < num_bytes * BITS[weights] // BITS["bf16"] or (weights != "bf16" and size >= num_bytes):
            raise PeerError(
                f"the exporter wrote {size} bytes of {weights} weights for the {num_bytes} of {source}: "
                "not rounded, or shared, not what the others read"
            )
    return out


def distinct_zeros(source: Path, out: Path, mark: float = -0.0) -> int:
    """Copy a checkpoint so that no two of its all-zero matrices are equal bit for bit.

    The writer of OpenVINO's format stores equal constants once, so the zero matrices of an inflated
    checkpoint (`scale_pair.py`) would be read from the cache and not from memory.

    Args:
        mark: The n-th of them gets this number at place n. A negative zero changes no product.

    Returns:
        Bytes of all tensors.
    """
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    zeros = [tensor for tensor in tensors.values() if not tensor.any()]
    for place, tensor in enumerate(zeros):
        tensor.view(-1)[place] = mark
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return sum(math.prod(tensor.shape) * tensor.itemsize for tensor in tensors.values())
