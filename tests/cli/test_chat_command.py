"""`ygg chat`: history, commands and interruptions, in a pipe and in a pseudo terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudo_terminal import terminal

from yggdrasil import engine as engine_module
from yggdrasil.api import Pair
from yggdrasil.bundle import Bundle
from yggdrasil.cli import chat as chat_command
from yggdrasil.cli import main
from yggdrasil.cli.chat import Chat
from yggdrasil.config import GenerateConfig
from yggdrasil.errors import ConfigError, UsageError
from yggdrasil.report.run import Run
from yggdrasil.serve.chat import ChatTemplate
from yggdrasil.step.growth import prefill

WORDS = ("chat", "--pair", "tiny", "-n", "12")
FIRST = "Tell me about a fox."
SECOND = "What did the owl say?"
SLOW = """
import time
from yggdrasil.engine import Engine
step = Engine.step
Engine.step = lambda *arguments: (time.sleep(0.5), step(*arguments))[1]
"""

pytestmark = pytest.mark.usefixtures("tiny_bundle")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def chat(pair: Pair) -> Chat:
    return Chat(pair, GenerateConfig(max_new_tokens=12), is_live=True)


def expected_answers(pair: Pair, *questions: str, system: str | None = None) -> list[str]:
    """The answers of a pair that begins anew for every turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        tokens = pair.chat_tokens(messages)
        config = pair.config(max_new_tokens=12, stop=pair.template.stops)
        answers.append(Run(pair, tokens, config).complete().text.strip())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_lines_of_a_pipe_are_answered_with_the_history(
    pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{FIRST}\n\n{SECOND}\n"))
    assert main([*WORDS, "--system", "Be kind."]) == 0
    out, err = capsys.readouterr()
    answers = expected_answers(pair, FIRST, SECOND, system="Be kind.")
    assert out.strip() == "\n".join(answers).strip()
    assert err == f"ygg chat: {chat_command.NO_TEMPLATE}\n"


def test_a_second_turn_computes_only_what_is_new(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    chat.take(" ".join(8 * [FIRST]))
    assert chat.last is not None
    first = len(chat.last.prompt) + chat.last.num_tokens
    counted = 0

    def counting(model: object, tokens: list[int]) -> object:
        nonlocal counted
        counted += max(0, len(tokens) - model.cache.len) if model is chat.pair.engine.draft else 0
        return prefill(model, tokens)

    monkeypatch.setattr(engine_module, "prefill", counting)
    chat.take(SECOND)
    new = len(chat.last.prompt) - first
    assert chat.last.kept_tokens > len(chat.last.prompt) - new - 12
    # answers are spelled again, and the last tokens of a text are in no KV
    assert 0 < counted <= new + 12 < len(chat.last.prompt) / 2


def test_a_template_of_the_model_renders_and_is_not_noted(
    chat: Chat, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    source = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"
    template = ChatTemplate(source)
    monkeypatch.setattr(Pair, "template", template)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{FIRST}\n"))
    assert main([*WORDS]) == 0
    out, err = capsys.readouterr()
    assert chat_command.NO_TEMPLATE not in err
    prompt = chat.pair.tokenizer.encode(f"<user> {FIRST} <assistant>")
    assert out.strip() == chat.pair.generate(prompt, max_new_tokens=12).text.strip()


def test_plain_changes_the_passes_and_not_the_text(chat: Chat, capsys: Capture) -> None:
    chat.take(FIRST)
    first = capsys.readouterr().out
    chat.take("/reset")
    chat.take("/plain")
    assert capsys.readouterr().out == "speculation is off; the text does not change\n"
    chat.take(FIRST)
    assert capsys.readouterr().out == first
    assert chat.last is not None
    assert chat.last.aal == 1
    chat.take("/plain")
    assert not chat.config.plain


def test_tree_and_stats_are_those_of_the_last_answer(chat: Chat, capsys: Capture) -> None:
    chat.take(FIRST)
    capsys.readouterr()
    chat.take("/tree")
    out = capsys.readouterr().out
    assert chat.last is not None
    most = max(result.accepted for result in chat.last.results)
    assert out.count(" *\n") + out.endswith(" *") >= most
    assert f"{most} accepted (*), then " in out
    chat.take("/stats")
    out = capsys.readouterr().out
    assert "tokens per pass" in out
    assert re.search(r"prompt: \d+ tokens, \d+ of them kept", out)


def test_save_writes_the_conversation_that_reset_forgets(
    chat: Chat, tmp_path: Path, capsys: Capture
) -> None:
    chat.take(FIRST)
    path = tmp_path / "chat.json"
    chat.take(f"/save {path}")
    assert capsys.readouterr().out.endswith(f"2 messages in {path}\n")
    saved = json.loads(path.read_text())
    assert saved == chat.messages
    assert [message["role"] for message in saved] == ["user", "assistant"]
    chat.take("/reset")
    assert chat.messages == []


def test_help_lists_every_command(chat: Chat, capsys: Capture) -> None:
    chat.take("/help")
    out = capsys.readouterr().out
    assert all(f"/{name}" in out for name in ("plain", "tree", "stats", "reset", "save FILE", "help"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/sav x", "there is no command /sav; did you mean: /save"),
        ("/", "there is no command /; did you mean: /help"),
        ("/save", "/save takes a file: /save FILE"),
        ("/save /nowhere/at/all", "cannot be written (No such file or directory)"),
        ("/save ~nobody-here/a", "~nobody-here/a cannot be written (Could not determine home directory.)"),
        ("/save a\0b", "cannot be written (embedded null byte)"),
        ("/reset now", "/reset takes nothing: /reset"),
        ("/tree", "there is no answer yet"),
        ("x " * 400, "and the context holds 256; begin a new one: /reset"),
        ("\udc80", "text in UTF-8"),
    ],
)
def test_a_mistake_is_one_line_and_the_conversation_goes_on(
    chat: Chat, pair: Pair, line: str, complaint: str, capsys: Capture
) -> None:
    chat.take(line)
    err = capsys.readouterr().err
    assert complaint in err
    assert len(err.splitlines()) == 1
    assert chat.messages == []
    chat.take(FIRST)
    assert capsys.readouterr().out.startswith(expected_answers(pair, FIRST)[0])


def test_a_mistake_in_a_pipe_ends_with_code_2(
    pair: Pair, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError):
        Chat(pair, GenerateConfig()).take("/sav")
    monkeypatch.setattr("sys.stdin", io.StringIO("/sav x\n"))
    assert main([*WORDS]) == 2
    assert "there is no command /sav" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert main([*WORDS]) == 2
    assert "message: b'\\xe9' is not allowed; it must be text in UTF-8" in capsys.readouterr().err
    assert main([*WORDS, "--temperature", "-1"]) == 2
    assert "--temperature: -1.0" in capsys.readouterr().err


def test_an_interrupted_answer_stays_as_far_as_it_came(
    chat: Chat, pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    whole = expected_answers(pair, FIRST)[0]
    steps = Run.__iter__

    def interrupted(run: Run) -> Iterator[str]:
        yield next(steps(run))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "__iter__", interrupted)
        chat.take(FIRST)
    kept = chat.messages[-1]["content"]
    assert whole.startswith(kept)
    assert len(kept) < len(whole)
    assert "(stopped)" in capsys.readouterr().out
    chat.take("/reset")
    chat.take(FIRST)
    assert chat.messages[-1]["content"] == whole
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Run, "__iter__", interrupted)
        Chat(pair, GenerateConfig()).take(FIRST)


def test_a_person_stops_answers_and_ends_the_program(pair: Pair, tmp_path: Path) -> None:
    answer = expected_answers(pair, FIRST)[0]
    with terminal(*WORDS, "--ignore-eos", first=SLOW) as shown:
        shown.wait_for(">>> ")
        shown.type(f"{FIRST}\r")
        shown.wait_for(answer.split()[0])
        shown.type("\x03")
        shown.wait_for("(stopped)")
        shown.wait_for(">>> ")
        shown.type("y")
        shown.wait_for("y")
        shown.type_until("\x03", "Ctrl-D ends")
        shown.type(f"/save {tmp_path}/chat.json\r")
        shown.wait_for("2 messages in ")
        shown.wait_for(">>> ")
        shown.type("\x04")
        assert shown.wait_for_end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved[0] == {"role": "user", "content": FIRST}
    assert answer.startswith(saved[1]["content"][: len(answer)])


def test_the_request_of_an_answer_is_cut_to_the_context(pair: Pair) -> None:
    chat = Chat(pair, GenerateConfig(max_new_tokens=250, ignore_eos=True))
    chat.take(FIRST)
    assert chat.last is not None
    assert chat.last.num_tokens == pair.engine.max_context - len(chat.last.prompt)


def test_the_advice_after_an_answer_that_was_cut_fits_its_cause(pair: Pair, capsys: Capture) -> None:
    for limit, advice in ((8, "-n allows more"), (250, "the context is full, /reset begins a new")):
        chat = Chat(pair, GenerateConfig(max_new_tokens=limit, ignore_eos=True), is_live=True)
        chat.take(FIRST)
        assert chat.last is not None
        last = capsys.readouterr().out.splitlines()[-1]
        assert f"(stopped after {chat.last.num_tokens} tokens; {advice}" in last


def test_a_run_that_was_closed_is_not_half_open(pair: Pair) -> None:
    run = pair.stream(FIRST, max_new_tokens=12)
    next(iter(run))
    run.close()
    assert list(run) == []
    with pytest.raises(ConfigError):
        pair.stream(FIRST, max_new_tokens=0)
