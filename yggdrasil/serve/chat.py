"""A conversation as one prompt: by the model's own chat template, or by a default one.

The default template gives

```
system: Be brief.
user: Who are you?
assistant:
```
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yggdrasil.errors import ConfigError
from yggdrasil.models.gguf import tokenizer_settings
from yggdrasil.store.sources import is_gguf

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "load_chat_template"]

USER_TURN = "\nuser:"


class ChatTemplate:
    """Renders messages.

    Args:
        source: A Jinja template in the dialect of Hugging Face; empty for the default template.
        tool_source: The template of conversations that offer tools; empty if `source` is for them, too.
        special_tokens: Their names in the template (`bos_token`, `eos_token`, ...) and their texts.
        origin: Where the source comes from, for error messages.

    Raises:
        ConfigError: the source is not a template.

    >>> print(ChatTemplate().render([{"role": "user", "content": "Who are you?"}]))
    user: Who are you?
    assistant:
    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """

    def __init__(
        self,
        source: str = "",
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
        tool_source: str = "",
    ) -> None:
        self.is_own = bool(source)
        self.tool_source = tool_source or source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compiled(source, origin) if source else None
        self._tool_template = _compiled(tool_source, origin) if tool_source else self._template

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self.tool_source

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer: where the default template would begin a user's turn.

        A model with a template of its own ends its answer itself.
        """
        return () if self.is_own else (USER_TURN,)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt that the assistant's answer continues.

        Raises:
            ConfigError: the template refuses these messages, for example the order of roles, or shows no
                tools to the model.
        """
        if tools and not self.takes_tools:
            names = [tool["function"]["name"] for tool in tools]
            raise ConfigError("tools", names, "left out: the model's chat template shows no tools")
        template = self._tool_template if tools else self._template
        if template is None:
            return "\n".join([*map(_default_line, messages), "assistant:"])
        # templates compare these with none, and an undefined name is not none
        optional = {"tools": list(tools) or None, "documents": None}
        try:
            return template.render(
                messages=messages, add_generation_prompt=True, **optional, **self._special_tokens
            )
        except Exception as error:  # a template can fail in every way that a program can
            roles = [message["role"] for message in messages]
            allowed = f"what the model's chat template accepts ({error})"
            raise ConfigError("messages", roles, allowed) from None


def _default_line(message: Mapping[str, Any]) -> str:
    """A message in the default template; two participants of one role differ by name."""
    name = f" ({message['name']})" if "name" in message else ""
    content = message["content"] or ""
    calls = "".join(_tojson(call["function"]) for call in message.get("tool_calls") or ())
    return f"{message['role']}{name}: {content}{calls}"


def _compiled(source: str, origin: str) -> jinja2.Template:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    extensions = ["jinja2.ext.loopcontrols", _generation_block()]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(
            "chat template", f"{origin}, line {error.lineno}", f"a Jinja template ({error.message})"
        ) from None


def _generation_block() -> type[jinja2.ext.Extension]:
    """`{% generation %}` marks the assistant's text for training; here only its body is rendered."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: Any = False,
) -> str:
    """The `tojson` filter of transformers, with its arguments; Jinja's own would escape for HTML."""
    layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def load_chat_template(model: str) -> ChatTemplate:
    """The template of a folder, of a GGUF file, or of a hub id whose files are in the local cache; else the
    default one.

    Raises:
        ConfigError: a file is not JSON, a template is invalid, or there are several without a default.
        BrokenCheckpoint: the GGUF file is not whole.
    """
    settings = tokenizer_settings(model) if is_gguf(model) else _settings(model, "tokenizer_config.json")
    older = _settings(model, "special_tokens_map.json")
    sources = _sources(model, settings.get("chat_template"))
    special_tokens = {**_special_tokens(older), **_special_tokens(settings)}
    origin = f"the template of {model}"
    return ChatTemplate(sources["default"], special_tokens, origin, sources.get("tool_use", ""))


def _sources(model: str, configured: Any) -> dict[str, str]:
    """Templates by name, of which `default` and `tool_use` count; files come before the setting."""
    default = _file(model, "chat_template.jinja") or _file(model, "additional_chat_templates/default.jinja")
    if default is not None:
        tool_use = _file(model, "additional_chat_templates/tool_use.jinja")
        paths = {"default": default} | ({} if tool_use is None else {"tool_use": tool_use})
        return {name: _text(path) for name, path in paths.items()}
    sources = _by_name(configured)
    if "default" not in sources or not all(isinstance(text, str) for text in sources.values()):
        allowed = "one template, or several of which one is named default"
        raise ConfigError("chat_template", configured, allowed)
    return sources


def _by_name(configured: Any) -> dict[Any, Any]:
    """A setting, in any of its forms, as templates by name; empty if it has none of them."""
    if isinstance(configured, list):
        entries = [entry for entry in configured if isinstance(entry, dict)]
        return {entry.get("name"): entry.get("template") for entry in entries}
    return configured if isinstance(configured, dict) else {"default": configured or ""}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        allowed = f"UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError("chat template", str(path), allowed) from None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Texts of `bos_token` and other standard tokens, and of those that a model adds by name."""
    added = settings.get("extra_special_tokens")
    named = {**settings, **(added if isinstance(added, dict) else {})}
    tokens = {name: value for name, value in named.items() if name.endswith("_token")}
    texts = {
        name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _settings(model: str, name: str) -> dict[str, Any]:
    """The settings in a JSON file of a model; empty if there is no such file."""
    path = _file(model, name)
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(name, str(path), f"JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ConfigError(name, str(path), "a JSON object")
    return settings


def _file(model: str, name: str) -> Path | None:
    """A file of a model, without any download."""
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, name)
    except HFValidationError:  # a folder that is gone
        return None
    return Path(cached) if isinstance(cached, str) else None
