"""Chat templates in the dialect of transformers, read from the files in which models store them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import stored
from transformers.utils.chat_template_utils import _compile_jinja_template

from yggdrasil.errors import ConfigError
from yggdrasil.serve.chat import ChatTemplate, load_chat_template
from yggdrasil.serve.messages import Message, Tool

MESSAGES = [{"role": "user", "content": "café <b> & 'x'"}, {"role": "assistant", "content": "ja"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(indent=2, ensure_ascii=False, sort_keys=True) }}",
        "{{ messages[0] | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}\n-{% endfor %}",
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "{%- generation -%} x {%- endgeneration -%} y",
        "{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% continue %}!{% endfor %}",
        "{{ strftime_now('%Y') | length }}",
        "{{ dict(a=1) | tojson }}{{ add_generation_prompt }}{{ tools is none }}{{ documents is none }}",
    ],
)
def test_a_template_renders_as_in_transformers(source: str) -> None:
    theirs = _compile_jinja_template(source).render(
        messages=MESSAGES, add_generation_prompt=True, tools=None, documents=None
    )
    assert ChatTemplate(source).render(MESSAGES) == theirs


TOOLS = [
    {"type": "function", "function": {"name": "sum", "description": "+", "parameters": {"type": "object"}}}
]
CALLING = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "sum", "arguments": {"a": [1]}}}
        ],
    },
    {"role": "tool", "content": "4", "tool_call_id": "a"},
]


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }}{{ messages | tojson }}",
        "{% for m in messages %}{% if m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% elif m.role == 'tool' %}{{ m.tool_call_id }}{{ m.content }}"
        "{% elif m.content is none %}-{% endif %}{% endfor %}{{ tools[0].function.name }}",
    ],
)
def test_tools_and_their_calls_render_as_in_transformers(source: str) -> None:
    theirs = _compile_jinja_template(source).render(
        messages=CALLING, add_generation_prompt=True, tools=TOOLS, documents=None
    )
    assert ChatTemplate(source).render(CALLING, TOOLS) == theirs


def test_a_message_and_a_tool_of_the_wire_have_the_form_of_a_template() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "sum", "arguments": '{"a": [1]}'}}
    wire = [*CALLING[:2], {"role": "assistant", "content": None, "tool_calls": [call]}, CALLING[3]]
    assert [Message.model_validate(message).rendered() for message in wire] == CALLING
    assert [Tool.model_validate(tool).rendered() for tool in TOOLS] == TOOLS


def test_the_default_template_writes_calls_and_results_and_shows_no_tools() -> None:
    expected = 'assistant: {"name": "sum", "arguments": {"a": [1]}}\ntool: 4\nassistant:'
    assert ChatTemplate().render(CALLING).endswith(expected)
    for template in (ChatTemplate(), ChatTemplate("{{ messages }}")):
        with pytest.raises(ConfigError, match=r"tools: \['sum'\] .* shows no tools"):
            template.render(CALLING, TOOLS)


def test_a_template_for_tools_is_used_if_there_are_tools(tmp_path: Path) -> None:
    named = {"default": "simple", "tool_use": "{{ tools | length }} tools"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "files" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "files" / "chat_template.jinja").write_text(named["default"])
    path = tmp_path / "files" / "additional_chat_templates" / "tool_use.jinja"
    path.write_text(named["tool_use"])
    for folder in (tmp_path, tmp_path / "files"):
        template = load_chat_template(str(folder))
        assert template.render(MESSAGES) == "simple"
        assert template.render(MESSAGES, TOOLS) == "1 tools"


def test_an_error_that_a_template_raises_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(MESSAGES)


@pytest.mark.parametrize(
    "value",
    ("<s>", {"content": "<s>", "lstrip": False}, {"__type": "AddedToken", "content": "<s>"}),
    ids=("text", "dict", "added token"),
)
@pytest.mark.parametrize("name", ("special_tokens_map.json", "tokenizer_config.json"))
def test_special_tokens_are_read_from_either_file(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ image_token }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": None, "extra_special_tokens": {"image_token": "<image>"}})
    )
    settings = {"bos_token": value, "eos_token": "</s>", "extra_special_tokens": {"image_token": "<image>"}}
    (tmp_path / name).write_text(json.dumps(settings))
    assert load_chat_template(str(tmp_path)).render([]) == "<s>|</s>|<image>"


HAS_GGUF = all(importlib.util.find_spec(package) for package in ("gguf", "accelerate"))


@pytest.mark.skipif(not HAS_GGUF, reason="the extra `gguf` is not installed")
def test_a_gguf_file_has_a_template_of_its_own(llama_folders: tuple[str, str], tmp_path: Path) -> None:
    source = Path(llama_folders[0])
    keys = {
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}",
        "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
        "tokenizer.ggml.bos_token_id": 5,
    }
    stored.save_gguf(source, tmp_path / "with.gguf", "Q8_0", **keys)
    template = load_chat_template(str(tmp_path / "with.gguf"))
    vocab = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    texts = {token: text for text, token in vocab.items()}
    assert template.is_own
    assert template.render(MESSAGES) == f"{texts[5]}|{texts[0]}|False"
    assert template.render(MESSAGES, TOOLS) == "1 tools"
    stored.save_gguf(source, tmp_path / "without.gguf", "Q8_0")
    assert not load_chat_template(str(tmp_path / "without.gguf")).is_own


def test_settings_of_the_tokenizer_override_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<new>", "chat_template": "{{ bos_token }}{{ eos_token }}"})
    )
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<old>", "eos_token": "<end>"})
    )
    assert load_chat_template(str(tmp_path)).render([]) == "<new><end>"


def test_a_special_token_without_a_text_is_none(tmp_path: Path) -> None:
    settings = {"bos_token": {"id": 1}, "eos_token": 2, "chat_template": "{{ bos_token is defined }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat_template(str(tmp_path)).render([]) == "False"


def test_several_templates_need_a_default_one(tmp_path: Path) -> None:
    for named in (
        {"default": "simple", "tool_use": "tools"},
        [{"name": "rag", "template": "rag"}, {"name": "default", "template": "simple"}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert load_chat_template(str(tmp_path)).render([]) == "simple"
    for other in ({"tool_use": "tools"}, {"default": 5}, ["a"], [{"name": "default"}], 5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": other}))
        with pytest.raises(ConfigError, match="chat_template: .* one is named default"):
            load_chat_template(str(tmp_path))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("of its own")
    assert load_chat_template(str(tmp_path)).render([]) == "of its own"


@pytest.mark.parametrize(
    "content", (b"{", b"[1]", b"[" * 100_000, b'{"a": "\xff"}'), ids=("cut", "a list", "deep", "bytes")
)
@pytest.mark.parametrize("name", ("special_tokens_map.json", "tokenizer_config.json"))
def test_an_error_of_a_broken_file_contains_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        load_chat_template(str(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_chat_template(str(tmp_path))
