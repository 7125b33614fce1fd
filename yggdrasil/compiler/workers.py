"""Build the graphs of a menu in worker processes: `python -m yggdrasil.compiler.workers` is one worker.

A worker reads jobs from standard input, one per line, and answers each with a line. It keeps the model
between jobs, without weights, so imports and the model's construction take time only once. The parent gives
a worker its next job when the last one is done, so the workers finish at about the same time.

Shapes: P = pages of a row.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from yggdrasil.compiler.graphs import compile_graph
from yggdrasil.compiler.weights import load_weights
from yggdrasil.kernels import load_cuda_kernels, load_kernels
from yggdrasil.kernels.compilations import count_compilation
from yggdrasil.kv import KVShape, KVStorage
from yggdrasil.models.forward import DraftForward, TargetForward
from yggdrasil.models.load import order_linears_, outline_model
from yggdrasil.models.packing import empty_meta
from yggdrasil.store import storage

__all__ = ["GraphJob", "compile_graphs", "is_deep", "run_job"]

# From this number of layers on, a graph is built sooner by region. A call takes 4 us, so the weights of a
# layer must be large, too.
DEEP = 20
LARGE_LAYER = 16 * 2**20  # bytes


@dataclass(frozen=True)
class GraphJob:
    """One graph to build.

    Args:
        model: Folder or hub id.
        weights: Folder of the model's packed weights.
        num_candidates: C of a draft; 0 for a target.
        dtype: "bfloat16" or "float32".
        exact: On CUDA, linear layers have one order of summation; on a CPU they always have.
        ranks: Number of shards of the model; the graph is the same for all of them.
        layers: Numbers of the layers that were kept; None for all.
    """

    model: str
    weights: str
    num_candidates: int
    vocab: int
    dtype: str
    device: str
    kv: KVShape
    max_depth: int
    num_tokens: int
    path: str
    exact: bool = True
    ranks: int = 1
    layers: tuple[int, ...] | None = None


def is_deep(num_layers: int, num_bytes: float, device: str) -> bool:
    """Whether the graphs of a model with weights of this size are built by region."""
    return device == "cpu" and num_layers >= DEEP and num_bytes >= num_layers * LARGE_LAYER


@lru_cache(maxsize=2)
def _module(job: GraphJob) -> nn.Module:
    """The module of a job without shape and path, to export at any shape."""
    load_kernels()
    weights = load_weights(Path(job.weights), job.device, command="")
    stored = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    dtype = getattr(torch, job.dtype)
    model = outline_model(job.model, stored, dtype=dtype, ranks=job.ranks, layers=job.layers)
    if job.device == "cuda":
        load_cuda_kernels()
        if job.exact:
            order_linears_(model)
    # A graph depends on the strides of a page and on the pages of a row, not on the pages in all: two
    # are enough.
    pages_BP = torch.zeros(1, job.kv.num_pages, dtype=torch.int32, device=job.device)
    cache = KVStorage(job.kv, num_pages=2, pages_BP=pages_BP, dtype=dtype, device=job.device)
    module: nn.Module
    if job.num_candidates:
        module = DraftForward(model, cache, job.vocab, job.num_candidates)
    else:
        module = TargetForward(model, cache, job.vocab)
    return module.to(job.device).eval()


def run_job(job: GraphJob) -> None:
    """Build one graph in this process; the package appears whole or not at all."""
    module = _module(replace(job, num_tokens=0, path=""))
    path = Path(job.path)
    with storage.temporary_folder(path.parent, path.name) as folder:
        temporary = folder / path.name
        meta_NM = empty_meta(job.num_tokens, job.max_depth, device=job.device)
        num_bytes = sum(tensor.nbytes for tensor in module.state_dict().values())
        by_region = is_deep(job.kv.num_layers, num_bytes, job.device)
        compile_graph(module, meta_NM, temporary, exact=job.exact, by_region=by_region)
        storage.put(temporary, path)


def compile_graphs(
    jobs: Sequence[GraphJob], *, num_workers: int, on_done: Callable[[GraphJob], None]
) -> None:
    """Build every job, `num_workers` at a time.

    Args:
        jobs: All of them are built, even where a package exists.
        on_done: Called after each job, from a thread.

    Raises:
        RuntimeError: a worker failed; the message has its traceback. Finished packages stay.
    """
    for _ in jobs:
        count_compilation()
    workers = [_Worker() for _ in range(min(num_workers, len(jobs)))]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def build(job: GraphJob) -> None:
        worker = idle.get()
        try:
            worker.build(job)
        finally:
            idle.put(worker)
        on_done(job)

    threads = ThreadPoolExecutor(max_workers=max(1, len(workers)))
    try:
        for future in as_completed([threads.submit(build, job) for job in jobs]):
            future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        # after Ctrl-C or a failure this ends the running builds
        for worker in workers:
            worker.kill()
        threads.shutdown()
        for worker in workers:
            worker.close()
        # a killed worker cannot clean up after itself
        storage.sweep({Path(job.path).parent for job in jobs}, older_than_s=0)


class _Worker:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "yggdrasil.compiler.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def build(self, job: GraphJob) -> None:
        """Build in the worker; raises RuntimeError with the worker's standard error if that fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer.startswith("done"):
            graph = f"the graph of {job.num_tokens} tokens of {job.model}"
            raise RuntimeError(f"{graph} could not be built:\n{self._stderr()}")

    def _stderr(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def kill(self) -> None:
        """End the process; a thread that waits for its answer then reads an empty line."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the streams, after all threads have ended."""
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _serve() -> None:
    """Build each job of standard input and answer `done` on standard output."""
    # other output goes to standard error
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Inductor generates its loops for the current number of threads. One is enough, because they are short
    # compared with our operators. It also keeps bits equal: with more, Inductor would split a reduction
    # over threads in the graphs of some token counts only.
    torch.set_num_threads(1)
    for line in sys.stdin:
        payload = json.loads(line)
        layers = None if payload["layers"] is None else tuple(payload["layers"])
        run_job(GraphJob(**{**payload, "kv": KVShape(**payload["kv"]), "layers": layers}))
        answers.write("done\n")


if __name__ == "__main__":
    _serve()
