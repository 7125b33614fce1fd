"""`/tokenize` and `/detokenize`: texts, conversations, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_api import CONTEXT, VOCAB, Running, server

from yggdrasil.serve import texts
from yggdrasil.serve.chat import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with server() as running:
        yield running


def test_a_text_is_tokenized_as_a_prompt_is(shared: Running) -> None:
    shared.ask(prompt="Once upon a café ☕", max_tokens=1)
    tokens = list(shared.service.submitted[-1].prompt)
    answer = shared.post("/tokenize", prompt="Once upon a café ☕", model="tiny").json()
    expected = {"count": len(tokens), "max_model_len": CONTEXT, "tokens": tokens, "token_strs": None}
    assert answer == expected
    assert shared.post("/detokenize", tokens=tokens).json() == {"prompt": "Once upon a café ☕"}


def test_pieces_are_those_of_the_vocabulary(shared: Running) -> None:
    answer = shared.post("/tokenize", prompt="Once upon", return_token_strs=True).json()
    pieces = answer["token_strs"]
    assert len(pieces) == answer["count"]
    assert "".join(pieces).replace("Ġ", " ") == "Once upon"


@pytest.mark.parametrize("template", (ChatTemplate(), ChatTemplate("<{{ messages[0].content }}>")))
def test_a_conversation_is_tokenized_as_a_chat_renders_it(template: ChatTemplate) -> None:
    with server(template=template) as running:
        assert running.chat(messages=HI).status_code == 200
        tokens = list(running.service.submitted[-1].prompt)
        assert running.post("/tokenize", messages=HI).json()["tokens"] == tokens


def test_special_tokens_are_shown_and_can_be_left_out(
    shared: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def encode(text: str, *, special_tokens: bool = True) -> list[int]:
        asked.append(special_tokens)
        return [0]

    monkeypatch.setattr(shared.service.tokenizer, "encode", encode)
    for choice in (None, True, False):
        shared.post("/tokenize", prompt="a", add_special_tokens=choice)
    assert asked == [True, True, False]
    special = shared.service.tokenizer.pieces([0])[0]
    assert shared.post("/detokenize", tokens=[0]).json() == {"prompt": special}
    assert shared.service.tokenizer.decode([0]) == ""


def test_a_text_longer_than_the_context_is_tokenized(shared: Running) -> None:
    assert shared.post("/tokenize", prompt="fox " * CONTEXT).json()["count"] > CONTEXT
    answer = shared.post("/tokenize", prompt="a" * (texts.MAX_CHARS + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
    ids=str,
)
def test_a_wrong_field_is_a_400_that_names_it(
    shared: Running, path: str, fields: dict[str, Any], param: str
) -> None:
    response = shared.post(path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ("/tokenize", "/detokenize"))
def test_another_model_is_a_404(shared: Running, path: str) -> None:
    fields = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    assert shared.post(path, model="gpt-4", **fields).status_code == 404
