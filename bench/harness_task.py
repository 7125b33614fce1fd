"""Does lm-evaluation-harness score this server alike with and without speculation?

Its `local-completions` runs two small tasks against `ygg serve`: which of two sentences continues a story
(the log-probabilities of the prompt), and how a story goes on (generated text, greedy; its first word
counts). Speculation is switched off for the second run. The harness is no dependency of the project:
install it in an environment of its own and pass its program.

Refuted by one score or one answer that differs: the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.lib.workloads import STORIES
from yggdrasil.bundle import BUNDLED, bundled_models

CHOICE = "story_ending"
WORDS = "story_words"
NUM_BEFORE = 3  # sentences that a task shows
FIRST_WORD = {"function": "regex", "regex_pattern": "([A-Za-z]+)"}
TASKS: dict[str, dict[str, Any]] = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{shown}}",
        "doc_to_choice": "{{[' ' + right, ' ' + wrong]}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    WORDS: {
        "output_type": "generate_until",
        "doc_to_text": "{{shown}}",
        "doc_to_target": "{{right.split()[0]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 24, "temperature": 0},
        "filter_list": [{"name": "first", "filter": [FIRST_WORD, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match"}],
    },
}


def documents(count: int) -> list[dict[str, str]]:
    """Beginnings of stories, their next sentences, and the next sentences of other stories."""
    stories = [text.replace("\n", " ").split(". ") for text in STORIES.test_texts]
    stories = [sentences for sentences in stories if len(sentences) > NUM_BEFORE + 1][:count]
    nexts = [sentences[NUM_BEFORE].strip() for sentences in stories]
    return [
        {"shown": ". ".join(sentences[:NUM_BEFORE]) + ".", "right": right, "wrong": wrong}
        for sentences, right, wrong in zip(stories, nexts, nexts[1:] + nexts[:1], strict=True)
    ]


def write_tasks(folder: Path, count: int) -> None:
    """The tasks as the harness reads them; JSON is YAML, too."""
    data = folder / "stories.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents(count)))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    for name, task in TASKS.items():
        whole = {"task": name, "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))


@contextmanager
def server(pair: str) -> Iterator[str]:
    """The address of a server, which ends with the context."""
    command = [sys.executable, "-m", "yggdrasil", "serve", "--pair", pair, "--max-batch", "16"]
    command += ["--port", "0", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            while not (line := process.stderr.readline()).startswith("serving "):
                lines.append(line)
                if not line:
                    raise SystemExit("".join(lines))
            yield line.split()[-1]
        finally:
            process.terminate()
            process.communicate()


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of a route; a body is posted."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def run(program: str, url: str, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Scores and answers of both tasks."""
    model = asked(f"{url}/v1/models")["data"][0]["id"]
    settings = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": tokenizer,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    with tempfile.TemporaryDirectory(dir=folder) as results:
        command = [program, "run", "--model", "local-completions", "--include_path", str(folder)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
        command += ["--tasks", ",".join(TASKS), "--output_path", results, "--log_samples"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        [scores] = Path(results).rglob("results_*.json")
        samples = {name: _lines(next(Path(results).rglob(f"samples_{name}_*.jsonl"))) for name in TASKS}
        found = json.loads(scores.read_text())["results"]
    answers = {
        name: [sample["resps"] for sample in sorted(each, key=lambda sample: sample["doc_id"])]
        for name, each in samples.items()
    }
    return {"scores": {name: found[name] for name in TASKS}, "answers": answers}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Both runs, their scores as JSON, and the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("program", help="lm-eval in its own environment")
    parser.add_argument("--tokenizer", default=str(bundled_models()[0]), help="the model's folder")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--pair", default=BUNDLED, help="name of a compiled pair")
    options = parser.parse_args()
    if shutil.which(options.program) is None:
        parser.error(
            f"{options.program} is no program; pip install 'lm-eval[api]' transformers gives lm-eval"
        )
    with tempfile.TemporaryDirectory() as folder, server(options.pair) as url:
        write_tasks(Path(folder), options.documents)
        found = {}
        for name, enabled in (("speculative", True), ("plain", False)):
            asked(f"{url}/admin/speculation", {"enabled": enabled})
            found[name] = run(options.program, url, Path(folder), options.tokenizer)
    is_equal = found["speculative"] == found["plain"]
    print(json.dumps({"equal": is_equal, **{name: each["scores"] for name, each in found.items()}}))
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
