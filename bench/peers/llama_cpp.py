"""llama.cpp as a peer: GGUF files made by its own tools, one `llama-server` per draft length, asked with
token ids.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.harness import Arm, Generation
from bench.peers.processes import Peer, PeerError, run_logged
from yggdrasil.store import artifacts

__all__ = ["LlamaCpp", "converted", "llama_cpp_peer", "without_end", "write_generation"]

CONTEXT = 1024  # tokens
START_S = 300  # to load the models
UNSEEN = "ÿ"  # byte 0xFF in byte-level BPE: no valid text has it, so no model writes it
END = "<|endoftext|>"  # llama.cpp knows it by name, whatever the configuration has
CONVERT = """
import importlib, runpy, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent))
try:
    base = importlib.import_module("conversion.base")
except ModuleNotFoundError:  # one file until 2026
    base = importlib.import_module("convert_hf_to_gguf")
# It knows tokenizers by digest, and ours is unknown; we send token ids.
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2  # tried first for a Llama
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Log = Callable[[str], None]


@dataclass(frozen=True)
class LlamaCpp:
    """The parts of llama.cpp that are used.

    Args:
        server: `llama-server`.
        converter: `convert_hf_to_gguf.py`.
    """

    server: Path
    converter: Path

    @classmethod
    def find(cls, folder: Path) -> LlamaCpp:
        """The server in this folder, its `bin` or its `build/bin`; the converter there or up to three
        folders above.

        Raises:
            PeerError: one of them is missing.
        """
        folder = folder.resolve()
        servers = [
            path
            for inner in (".", "bin", "build/bin")
            if (path := folder / inner / "llama-server").is_file()
        ]
        converters = [
            path
            for outer in (folder, *folder.parents[:3])
            if (path := outer / "convert_hf_to_gguf.py").is_file()
        ]
        if not servers or not converters:
            missing = (
                "llama-server (cmake --build build --target llama-server)"
                if not servers
                else "convert_hf_to_gguf.py (of llama.cpp's source)"
            )
            raise PeerError(f"--llama-cpp {folder}: no {missing} there")
        return cls(servers[0].resolve(), converters[0])

    def output_of(self, option: str) -> str:
        """What the server prints for `--help` or `--version`."""
        done = subprocess.run([self.server, option], capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def quantizer(self) -> Path:
        """`llama-quantize` next to the server.

        Raises:
            PeerError: there is none.
        """
        program = self.server.with_name("llama-quantize")
        if not program.is_file():
            missing = "llama-quantize (cmake --build build --target llama-quantize)"
            raise PeerError(f"--llama-cpp {program.parent}: no {missing} there")
        return program

    def rounded(self, source: Path, file_type: str, log: Log) -> Path:
        """A GGUF file of another type next to a bf16 one, made once by `llama-quantize`.

        Raises:
            PeerError: there is no such program next to the server, or it failed.
        """
        out = source.with_name(f"model-{file_type}.gguf")
        program = self.quantizer()
        if not out.exists():
            log(f"llama.cpp: rounding {source.parent.name} to {file_type}")
            written = out.with_suffix(".part")
            run_logged(
                [program, source, written, file_type], out.with_suffix(".log"), what="llama-quantize"
            )
            written.rename(out)
        return out

    def draft_options(self, draft: Path, count: int) -> list[str | Path]:
        """Speculative decoding with `count` drafted tokens, in the words of this version."""
        if "--spec-draft-n-max" in self.output_of("--help"):
            return ["--model-draft", draft, "--spec-type", "draft-simple", "--spec-draft-n-max", str(count)]
        return ["--model-draft", draft, "--draft-max", str(count), "--draft-min", "0", "--draft-p-min", "0"]


@contextmanager
def llama_cpp_peer(
    folder: Path,
    target: Path,
    draft: Path,
    *,
    num_tokens: int,
    assistant_tokens: Sequence[int],
    num_threads: int,
    log: Log,
    temperature: float = 0.0,
    file_type: str = "BF16",
) -> Iterator[Peer]:
    """llama.cpp, converted on first use, served by child processes that end with the block.

    Args:
        folder: With llama.cpp's binaries.
        num_tokens: New tokens per prompt.
        assistant_tokens: Draft lengths; every one has a server of its own, for a request cannot choose it.
            They map one file: the weights are there once.
        num_threads: As in `torch.set_num_threads`.
        log: Called before what takes long.
        temperature: Samples above 0, from all tokens, with a seed of the prompt's.
        file_type: Of the target, in llama.cpp's words; the draft stays in bf16.

    Raises:
        PeerError: something is missing or failed.
    """
    found = LlamaCpp.find(folder)
    target_file, draft_file = (converted(found, source, log) for source in (target, draft))
    title = "llama.cpp"
    if file_type != "BF16":
        target_file = found.rounded(target_file, file_type, log)
        title = f"{title} {file_type}"
    counts: dict[str, int | None] = {
        f"{title} plain": None,
        **{f"{title} draft, k={count}": count for count in assistant_tokens},
    }
    log("llama.cpp: loading")
    with ExitStack() as stack:
        arms = []
        for name, count in counts.items():
            drafting = [] if count is None else found.draft_options(draft_file, count)
            url = stack.enter_context(
                _served([found.server, "--model", target_file, *drafting, *_options(num_threads)])
            )
            arms.append(_arm(name, url, num_tokens, temperature))
        record = {"version": found.output_of("--version").splitlines(), "options": _options(num_threads)}
        yield Peer(name=title, plain=arms[:1], speculative=arms[1:], record=record)


def _options(num_threads: int) -> list[str]:
    """One prompt at a time, and none is cached: the arms share prompts, and each has its own prefill."""
    threads = str(num_threads)
    return [
        "--threads",
        threads,
        "--threads-batch",
        threads,
        "--ctx-size",
        str(CONTEXT),
        "--parallel",
        "1",
        "--cache-ram",
        "0",
    ]


@contextmanager
def _served(command: Sequence[str | Path]) -> Iterator[str]:
    """A server's address, for as long as the block lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            if not _is_healthy(url, child):
                log.seek(0)
                raise PeerError(
                    f"llama-server did not start: {' | '.join(log.read().strip().splitlines()[-3:])}"
                )
            yield url
        finally:
            child.terminate()
            child.wait()


def _is_healthy(url: str, child: subprocess.Popen[bytes]) -> bool:
    """Whether the server answers before it ends or START_S are over."""
    deadline = time.perf_counter() + START_S
    while child.poll() is None and time.perf_counter() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return True
        except OSError:  # not listening yet, or still loading: 503
            time.sleep(0.05)
    return False


def _arm(name: str, url: str, num_tokens: int, temperature: float) -> Arm:
    def generate(prompt: Sequence[int]) -> Generation:
        greedy = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
        sampled = {"temperature": temperature, "samplers": ["temperature"], "seed": sum(prompt)}
        request = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            **(sampled if temperature > 0 else greedy),
            "cache_prompt": False,
            "return_tokens": True,
        }
        return write_generation(name, _post(f"{url}/completion", request), num_tokens)

    return Arm(name=name, generate=generate, exact=False)


def _post(url: str, request: dict[str, Any]) -> dict[str, Any]:
    message = urllib.request.Request(
        url, json.dumps(request).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(message) as reply:
            return dict(json.load(reply))
    except OSError as error:
        raise PeerError(f"llama-server: {error}") from error


def write_generation(name: str, reply: dict[str, Any], num_tokens: int) -> Generation:
    """An answer of `/completion` as a generation.

    Times are the server's own, prompt and tokens together: they leave out HTTP. A forward of the target,
    prefill among them, emits the drafted tokens that it accepts and one more."""
    tokens = reply["tokens"]
    timings = reply["timings"]
    if len(tokens) != num_tokens:
        raise PeerError(f"{name}: {len(tokens)} tokens came instead of {num_tokens}")
    return Generation(
        token_ids=tokens,
        total_ms=timings["prompt_ms"] + timings["predicted_ms"],
        first_ms=timings["prompt_ms"],
        first_tokens=1,
        target_passes=num_tokens - timings.get("draft_n_accepted", 0),
    )


def converted(llama_cpp: LlamaCpp, source: Path, log: Log) -> Path:
    """The model as a bf16 GGUF file, made once under the artifact root.

    Raises:
        PeerError: the converter failed.
    """
    digests = [
        artifacts.digest_file(path)
        for path in (source / "model.safetensors", source / "tokenizer.json", llama_cpp.converter)
    ]
    out = artifacts.root() / "bench_peers" / f"gguf-{artifacts.digest(*digests, CONVERT)}"
    if not out.exists():
        log(f"llama.cpp: converting {source.name}")
        with tempfile.TemporaryDirectory() as copy, artifacts.atomic_directory(out) as folder:
            without_end(source, Path(copy))
            command: list[str | Path] = [
                sys.executable,
                "-c",
                CONVERT,
                llama_cpp.converter,
                copy,
                "--outtype",
                "bf16",
                "--outfile",
                folder / "model.gguf",
            ]
            run_logged(command, out.with_suffix(".log"), what=f"convert_hf_to_gguf.py of {source}")
    return out / "model.gguf"


def without_end(source: Path, out: Path) -> None:
    """Copy a checkpoint, its weights by link, so that no token which the model writes ends a text.

    The other arms go on past the end; llama.cpp could only forbid it (`ignore_eos`), and would write
    another text from there on."""
    for path in source.iterdir():
        (out / path.name).symlink_to(path.resolve())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    unseen = tokenizer["model"]["vocab"][UNSEEN]
    _rewrite(out / "tokenizer.json", json.dumps(tokenizer).replace(END, "<past the end>"))
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            _rewrite(
                out / name, json.dumps({**json.loads((source / name).read_text()), "eos_token_id": unseen})
            )
    settings = json.loads((source / "tokenizer_config.json").read_text())
    _rewrite(
        out / "tokenizer_config.json",
        json.dumps({key: value for key, value in settings.items() if key != "eos_token"}),
    )


def _rewrite(link: Path, text: str) -> None:
    """A file in the place of a link."""
    link.unlink()
    link.write_text(text)
