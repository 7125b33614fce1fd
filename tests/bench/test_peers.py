"""Peers answer line by line or fail in one line, are timed and counted as they log, and are held against
their own plain text.
"""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.claim_peers import (
    CHAIN_ARM,
    CLAIM,
    TREE_ARM,
    arms_summary,
    check_peers,
    goals,
    num_tuning_prompts,
    ratios,
)
from bench.lib.arms import PLAIN_ARM
from bench.lib.harness import Arm, Generation, Rounds, interleave
from bench.lib.headlines import CLAIMS
from bench.peers import openvino, openvino_child
from bench.peers.llama_cpp import LlamaCpp, llama_cpp_peer, without_end, write_generation
from bench.peers.processes import JsonLines, Peer, PeerError, run_logged
from yggdrasil.errors import UsageError

ANSWERS = (
    "import json, sys\nlog = lambda answer: print(json.dumps(answer), "
    "flush=True)\nlog({'versions': {'fake': '1'}})\n"
)
DECODES = """
for line in sys.stdin:
    asked = json.loads(line)
    length = asked["num_assistant_tokens"] or 1
    tokens = [asked["prompt"][0]] * asked["num_tokens"]
    passes = len(tokens) // length
    log({"token_ids": tokens, "total_ms": 8.0 / length, "first_ms": 2.0, "target_passes": passes})
"""


def child(script: str) -> JsonLines:
    return JsonLines([sys.executable, "-c", ANSWERS + script], name="fake")


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(0o755)
    return path


def test_a_child_greets_and_answers_every_line() -> None:
    with child("for line in sys.stdin: log({'got': json.loads(line)})") as fake:
        assert fake.greeting == {"versions": {"fake": "1"}}
        assert [fake.ask({"n": n}) for n in range(3)] == [{"got": {"n": n}} for n in range(3)]


def test_an_error_of_a_child_is_one_line() -> None:
    with (
        child("for line in sys.stdin: log({'error': 'no such pipeline'})") as fake,
        pytest.raises(PeerError, match=r"^fake: no such pipeline$"),
    ):
        fake.ask({})


def test_a_child_that_ends_leaves_its_last_words() -> None:
    with (
        child("sys.stdin.readline(); print('cause', file=sys.stderr); sys.exit(3)") as fake,
        pytest.raises(PeerError, match="status 3: cause"),
    ):
        fake.ask({})
    with pytest.raises(PeerError, match="status 1: ModuleNotFoundError"):
        JsonLines([sys.executable, "-c", "import nowhere"], name="fake")


def test_a_failed_command_quotes_its_last_line_and_names_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "pip.log"
    with pytest.raises(PeerError, match=rf"pip failed: ERROR: none found \(all of it: {log}\)"):
        run_logged(
            [sys.executable, "-c", "print('ERROR: none found\\n'); raise SystemExit(1)"], log, what="pip"
        )


def test_openvino_arms_ask_for_their_pipeline_and_draft_length() -> None:
    with child(DECODES) as fake:
        plain, speculative = openvino.openvino_arms(fake, 12, (3, 4))
        assert [arm.name for arm in (*plain, *speculative)] == [
            "OpenVINO plain",
            "OpenVINO plain, SDPA",
            "OpenVINO speculative, k=3",
            "OpenVINO speculative, k=4",
        ]
        done = [arm.generate([7, 8]) for arm in (*plain, *speculative)]
    assert all(each.token_ids == [7] * 12 and each.first_tokens == 1 for each in done)
    assert [each.aal for each in done] == [1, 1, 3, 4]
    assert [each.total_ms for each in done] == [8, 8, pytest.approx(8 / 3), 2]


def test_a_text_of_another_length_is_refused() -> None:
    with child(
        "for line in sys.stdin: log({'token_ids': [1], 'total_ms': 1, 'first_ms': 1, 'target_passes': 1})"
    ) as fake:
        plain, _ = openvino.openvino_arms(fake, 2, ())
        with pytest.raises(PeerError, match="1 tokens came instead of 2"):
            plain[0].generate([1])


def test_the_openvino_end_answers_exceptions_and_goes_on() -> None:
    answers = io.StringIO()
    openvino_child.serve(
        ['{"n": 1}', "{", '{"n": 2}'], answers, lambda request: {"twice": 2 * request["n"]}
    )
    first, wrong, last = (json.loads(line) for line in answers.getvalue().splitlines())
    assert (first, last) == ({"twice": 2}, {"twice": 4})
    assert wrong["error"].startswith("JSONDecodeError: ")


def test_the_openvino_end_counts_the_forwards_of_the_target() -> None:
    raw = SimpleNamespace(m_batch_sizes=[1, 4, 2])
    speculative = SimpleNamespace(
        extended_perf_metrics=SimpleNamespace(main_model_metrics=SimpleNamespace(raw_metrics=raw))
    )
    plain = SimpleNamespace(extended_perf_metrics=None)
    assert openvino_child._target_passes(speculative, [0] * 7, is_sampled=False) == 3
    assert openvino_child._target_passes(plain, [0] * 7, is_sampled=False) == 7
    with pytest.raises(AssertionError):
        openvino_child._target_passes(speculative, [0] * 8, is_sampled=False)
    assert openvino_child._target_passes(speculative, [0] * 6, is_sampled=True) == 3


def test_the_openvino_end_needs_nothing_of_this_project() -> None:
    tree = ast.parse(Path(openvino_child.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name.split(".")[0] for name in names} <= {
        *sys.stdlib_module_names,
        "numpy",
        "openvino",
        "openvino_genai",
    }


def test_zero_matrices_become_distinct_and_stay_zero(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {
        "a": torch.zeros(4, 8, dtype=torch.bfloat16),
        "b": torch.zeros(4, 8, dtype=torch.bfloat16),
        "c": torch.ones(4),
    }
    save_file(tensors, source / "model.safetensors")
    assert openvino.distinct_zeros(source, tmp_path / "copy") == 2 * 64 + 16
    copied = load_file(tmp_path / "copy" / "model.safetensors")
    assert not torch.equal(copied["a"].view(torch.int16), copied["b"].view(torch.int16))
    assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"


EXPORTER = "import pathlib, sys\npathlib.Path(sys.argv[-1], 'openvino_model.bin').write_bytes(bytes({}))\n"


def test_weights_that_shrank_in_conversion_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "home"))
    save_file({"a": torch.ones(16)}, tmp_path / "model.safetensors")
    logged: list[str] = []
    with pytest.raises(PeerError, match="63 bytes of bf16 weights for the 64"):
        openvino.converted(
            executable(tmp_path / "bin" / "shrinks", EXPORTER.format(63)), tmp_path, logged.append
        )
    whole = executable(tmp_path / "bin" / "keeps", EXPORTER.format(64))
    folders = {openvino.converted(whole, tmp_path, logged.append) for _ in range(2)}
    assert len(folders) == 1
    assert len(logged) == 2, "converted once, after the refusal"


@pytest.mark.parametrize(("num_bytes", "is_refused"), [(15, True), (16, False), (63, False), (64, True)])
def test_rounded_weights_are_as_large_as_their_numbers_and_smaller_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_refused: bool
) -> None:
    """64 bytes of bf16 are 16 of int4."""
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "home"))
    save_file({"a": torch.ones(32, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    script = f"assert sys.argv[-2] == '1.0', sys.argv\n{EXPORTER.format(num_bytes)}"
    python = executable(tmp_path / "bin" / "rounds", f"import sys\n{script}")
    arguments = (python, tmp_path, lambda line: None, "int4")
    if is_refused:
        with pytest.raises(PeerError, match=f"{num_bytes} bytes of int4 weights for the 64"):
            openvino.converted(*arguments)
    else:
        assert (openvino.converted(*arguments) / "openvino_model.bin").stat().st_size == num_bytes


def test_an_environment_is_made_once_and_a_failing_pip_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path))
    calls = tmp_path / "calls"

    def pip(status: int) -> Callable[..., object]:
        script = (
            f"import sys\nopen({str(calls)!r}, 'a').write(sys.argv[3] + ' ')\nprint('ERROR: "
            f"offline')\nsys.exit({status})"
        )
        return lambda folder, **_: executable(folder / "bin" / "python", script)

    monkeypatch.setattr(openvino.venv, "create", pip(1))
    with pytest.raises(PeerError, match="pip install of OpenVINO failed: ERROR: offline"):
        openvino.environment_python(lambda line: None)
    monkeypatch.setattr(openvino.venv, "create", pip(0))
    pythons = {openvino.environment_python(lambda line: None) for _ in range(2)}
    assert pythons == {tmp_path / "bench_peers" / "openvino" / "bin" / "python"}
    assert calls.read_text() == "install install uninstall "


def test_llama_cpp_timings_become_a_generation() -> None:
    timings = {"prompt_ms": 10.0, "predicted_ms": 40.0, "draft_n": 20, "draft_n_accepted": 8}
    done = write_generation("fake", {"tokens": list(range(12)), "timings": timings}, 12)
    assert (done.total_ms, done.first_ms, done.target_passes, done.aal) == (50, 10, 4, 3)
    plain = write_generation(
        "fake", {"tokens": [1, 2], "timings": {"prompt_ms": 1.0, "predicted_ms": 2.0}}, 2
    )
    assert plain.aal == 1
    with pytest.raises(PeerError, match="2 tokens came instead of 3"):
        write_generation("fake", {"tokens": [1, 2], "timings": timings}, 3)


SERVER = """
import http.server, json, sys
def option(name): return sys.argv[sys.argv.index(name) + 1]
if "--help" in sys.argv: sys.exit(print("--spec-draft-n-max N"))
if "--version" in sys.argv: sys.exit(print("version: 1", file=sys.stderr))
if "--spec-type" in sys.argv: assert option("--model-draft").endswith("model.gguf")
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, payload):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(payload).encode())
    def do_GET(self): self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert not asked["cache_prompt"]
        timings = {"prompt_ms": 1, "predicted_ms": 2}
        if "--spec-draft-n-max" in sys.argv: timings["draft_n_accepted"] = int(option("--spec-draft-n-max"))
        self.answer({"tokens": asked["prompt"][:1] * asked["n_predict"], "timings": timings})
    def log_message(self, *_): pass
http.server.HTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()
"""
CONVERTER = """
import json, pathlib, sys
source, out = pathlib.Path(sys.argv[1]), sys.argv[sys.argv.index("--outfile") + 1]
pathlib.Path(out).write_text((source / "config.json").read_text())
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"<|endoftext|>": 0, "a": 1, "ÿ": 2}}})
    )
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 8}')
    (folder / "config.json").write_text('{"eos_token_id": 0, "vocab_size": 3}')
    return folder


def test_no_token_that_is_written_ends_a_text(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    without_end(checkpoint, copy)
    assert json.loads((copy / "config.json").read_text()) == {"eos_token_id": 2, "vocab_size": 3}
    assert json.loads((copy / "tokenizer_config.json").read_text()) == {"model_max_length": 8}
    assert json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"] == {
        "<past the end>": 0,
        "a": 1,
        "ÿ": 2,
    }
    assert (copy / "model.safetensors").is_symlink()
    assert json.loads((checkpoint / "config.json").read_text())["eos_token_id"] == 0


def test_llama_cpp_is_converted_served_and_asked(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "home"))
    executable(tmp_path / "llama.cpp" / "build" / "bin" / "llama-server", SERVER)
    executable(tmp_path / "llama.cpp" / "convert_hf_to_gguf.py", CONVERTER)
    executable(
        tmp_path / "llama.cpp" / "conversion" / "base.py", "class TextModel:\n    _set_vocab_gpt2 = None\n"
    )
    logged: list[str] = []
    folders = {
        "folder": tmp_path / "llama.cpp" / "build" / "bin",
        "target": checkpoint,
        "draft": checkpoint,
    }
    with llama_cpp_peer(
        **folders, num_tokens=9, assistant_tokens=(6,), num_threads=2, log=logged.append
    ) as peer:
        done = {arm.name: arm.generate([4, 5]) for arm in peer.arms}
    assert logged == ["llama.cpp: converting checkpoint", "llama.cpp: loading"]
    assert {name: (each.token_ids, each.total_ms, each.aal) for name, each in done.items()} == {
        "llama.cpp plain": ([4] * 9, 3, 1),
        "llama.cpp draft, k=6": ([4] * 9, 3, 3),
    }
    assert peer.record["version"] == ["version: 1"]


def test_llama_cpp_rounds_a_file_once_and_names_a_missing_program(tmp_path: Path) -> None:
    server = executable(tmp_path / "bin" / "llama-server", "")
    (tmp_path / "model.gguf").write_text("bf16")
    logged: list[str] = []
    found = LlamaCpp(server, tmp_path)
    with pytest.raises(PeerError, match="cmake --build build --target llama-quantize"):
        found.rounded(tmp_path / "model.gguf", "Q4_0", logged.append)
    executable(
        tmp_path / "bin" / "llama-quantize",
        "import pathlib, sys\npathlib.Path(sys.argv[2]).write_text(sys.argv[3])\n",
    )
    files = {found.rounded(tmp_path / "model.gguf", "Q4_0", logged.append) for _ in range(2)}
    assert [path.read_text() for path in files] == ["Q4_0"]
    assert len(logged) == 1


def test_a_format_without_a_peer_is_refused_before_any_is_measured(tmp_path: Path) -> None:
    asked = SimpleNamespace(weights=["bf16", "int4"], no_openvino=True, llama_cpp=None)
    with pytest.raises(UsageError, match="no peer has int4 weights"):
        check_peers(asked)  # type: ignore[arg-type]
    asked.llama_cpp = tmp_path
    with pytest.raises(PeerError, match="no llama-server"):
        check_peers(asked)  # type: ignore[arg-type]
    executable(tmp_path / "llama-server", "")
    (tmp_path / "convert_hf_to_gguf.py").touch()
    with pytest.raises(PeerError, match="no llama-quantize .*--target llama-quantize"):
        check_peers(asked)  # type: ignore[arg-type]
    executable(tmp_path / "llama-quantize", "")
    check_peers(asked)  # type: ignore[arg-type]


def test_older_servers_are_spoken_to_in_their_words(tmp_path: Path) -> None:
    old = LlamaCpp(executable(tmp_path / "llama-server", "print('--draft-max N')"), tmp_path)
    assert old.draft_options(tmp_path / "draft", 5)[2:4] == ["--draft-max", "5"]


def test_a_folder_without_llama_cpp_is_an_error_that_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no llama-server"):
        LlamaCpp.find(tmp_path)
    executable(tmp_path / "llama-server", "")
    with pytest.raises(PeerError, match="no convert_hf_to_gguf.py"):
        LlamaCpp.find(tmp_path)


def test_a_server_that_does_not_start_reports_why(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YGG_HOME", str(tmp_path / "home"))
    executable(tmp_path / "llama-server", "raise SystemExit('no such file')")
    executable(
        tmp_path / "convert_hf_to_gguf.py",
        f"class TextModel:\n    _set_vocab_gpt2 = None\nif __name__ == '__main__':\n{_indented(CONVERTER)}",
    )
    peer = llama_cpp_peer(
        tmp_path,
        checkpoint,
        checkpoint,
        num_tokens=2,
        assistant_tokens=(),
        num_threads=1,
        log=lambda line: None,
    )
    with pytest.raises(PeerError, match="did not start: no such file"), peer:
        pass


def _indented(script: str) -> str:
    return "".join(f"    {line}\n" for line in script.splitlines())


def scripted(name: str, tpot_ms: float, texts: dict[int, list[int]] | None = None) -> Arm:
    """An arm that emits the prompt's first token twice, or what stands in `texts` for it."""

    def generate(prompt: Sequence[int]) -> Generation:
        tokens = (texts or {}).get(prompt[0], [prompt[0]] * 2)
        return Generation(
            token_ids=tokens, total_ms=2 * tpot_ms, first_ms=tpot_ms, first_tokens=1, target_passes=2
        )

    return Arm(name=name, generate=generate, exact=name in (PLAIN_ARM, CHAIN_ARM, TREE_ARM))


@pytest.fixture
def measured() -> tuple[Rounds, list[Peer]]:
    """Peer one writes another text than we do on prompt 2, with and without its draft; peer two's draft
    changes its text on prompt 3.
    """
    one = Peer(
        name="one",
        plain=[scripted("one plain", 40, {2: [9, 9]}), scripted("one other", 30)],
        speculative=[scripted("one k=3", 24, {2: [9, 9]})],
        record={},
    )
    two = Peer(
        name="llama.cpp",
        plain=[scripted("two plain", 19)],
        speculative=[scripted("two k=3", 25), scripted("two k=5", 16, {3: [3, 4]})],
        record={},
    )
    ours = [scripted(PLAIN_ARM, 20), scripted(CHAIN_ARM, 6), scripted(TREE_ARM, 5)]
    rounds = interleave([*ours, *one.arms, *two.arms], [[1], [2], [3]], reference=PLAIN_ARM)
    return Rounds(rounds.by_arm, [50.0, 50.0, 50.0]), [one, two]


def test_texts_are_held_against_the_runtimes_own_plain_text_and_against_ours(
    measured: tuple[Rounds, list[Peer]],
) -> None:
    summary = arms_summary(*measured, weight_bytes=500_000_000)
    equal = {
        name: (arm["same_text_as_own_plain"]["equal_prompts"], arm["same_text_as_plain"]["equal_prompts"])
        for name, arm in summary.items()
    }
    assert equal == {
        **dict.fromkeys((PLAIN_ARM, CHAIN_ARM, TREE_ARM, "two plain", "two k=3"), (3, 3)),
        "one plain": (3, 2),
        "one other": (2, 3),
        "one k=3": (3, 2),
        "two k=5": (2, 2),
    }
    assert {
        name: arm["share_of_roofline"]["median"]
        for name, arm in summary.items()
        if arm["share_of_roofline"]
    } == {PLAIN_ARM: 0.5, "one plain": 0.25, "one other": 0.3333, "two plain": 0.5263}


def test_ratios_take_the_fastest_arm_of_a_peer(measured: tuple[Rounds, list[Peer]]) -> None:
    found = ratios(*measured)
    best = found["speculative_over_best_peer_speculative"]
    assert (best["median"], best["fastest"]) == (3.2, "two k=5")
    assert {
        name: (over["median"], over["fastest"]) for name, over in found["plain_over_peer_plain"].items()
    } == {"one": (1.5, "one other"), "llama.cpp": (0.95, "two plain")}
    assert found["speculative_over_peer"]["one"]["fastest"] == "one k=3"
    assert found["speculative_over_plain"]["min"] == 4


def test_goals_compare_what_was_measured(measured: tuple[Rounds, list[Peer]]) -> None:
    rounds, peers = measured
    reached = {name: goal["reached"] for name, goal in goals(ratios(rounds, peers)).items()}
    assert len(reached) == 5
    assert all(reached.values())
    assert "plain_over_llama_cpp_plain" not in goals(ratios(rounds, peers[:1]))


def test_rounded_weights_have_goals_of_their_own(measured: tuple[Rounds, list[Peer]]) -> None:
    found = ratios(*measured)
    int4 = goals(found, weights="int4", tree_tok_per_s=349.0)
    assert (int4["tree_tok_per_s"]["wanted"], int4["tree_tok_per_s"]["reached"]) == (350, False)
    assert int4["plain_over_llama_cpp_plain"]["wanted"] == 1.1
    assert "speculative_over_plain" not in int4
    assert "tree_tok_per_s" not in goals(found, weights="int8")


def test_the_headline_is_the_closest_of_the_formats(measured: tuple[Rounds, list[Peer]]) -> None:
    rounds, peers = measured
    found = ratios(rounds, peers)
    block = {"ratios": found, "goals": goals(found)}
    name = "speculative_over_best_peer_speculative"
    close = {**found, name: {**found[name], "median": 1.2}}
    formats = {"int8": block, "int4": {"ratios": close, "goals": goals(close)}}
    headline = CLAIMS["peers"].read({"formats": formats})
    assert (headline.value, headline.held, headline.missed) == (1.2, False, (1, 10))
    assert CLAIMS["peers"].read(block).value == 3.2


def test_a_draft_is_a_known_one_or_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CLAIM.parse(["--draft", str(tmp_path)])
    assert "neither one of bundled, small, early nor the folder of a model" in capsys.readouterr().err
    options = CLAIM.parse(["--quick", "--draft", "small"])
    assert (options.prompts, options.tokens, num_tuning_prompts(options)) == (2, 16, 1)
