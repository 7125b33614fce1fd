"""A conversation as one prompt: by the model's own chat template, or plainly where it has none.

A model without a template gets

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

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate", "load_chat_template"]


class ChatTemplate:
    """Renders messages.

    Args:
        source: A Jinja template in the dialect of Hugging Face; empty renders plainly.
        special_tokens: What the template calls them (`bos_token`, `eos_token`, ...) and their texts.
        origin: Where the source comes from, for messages.

    Raises:
        ConfigError: the source is no template.

    >>> print(ChatTemplate().render([{"role": "user", "content": "Who are you?"}]))
    user: Who are you?
    assistant:
    >>> ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").render([{"role": "user", "content": "Hi"}])
    '<user>Hi'
    """

    def __init__(self, source: str = "", special_tokens: Mapping[str, str] | None = None, origin: str = "chat template") -> None:
        self.is_own = bool(source)
        self._special_tokens = dict(special_tokens or {})
        self._template = _compiled(source, origin) if source else None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that the assistant's answer continues.

        Raises:
            ConfigError: the template refuses these messages, an order of roles for example.
        """
        if self._template is None:
            return "\n".join([*(f"{message['role']}: {message['content']}" for message in messages), "assistant:"])
        # templates test these against none, which an undefined name is not
        absent = {"tools": None, "documents": None}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **absent, **self._special_tokens)
        except Exception as error:  # a template can fail in every way a program can
            raise ConfigError("messages", [message["role"] for message in messages], f"what the model's chat template accepts ({error})") from None


def _compiled(source: str, origin: str) -> jinja2.Template:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError("chat template", f"{origin}, line {error.lineno}", f"a Jinja template ({error.message})") from None


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def load_chat_template(model: str) -> ChatTemplate:
    """The template of a model folder, or of a hub id whose files are in the local cache; the plain one where there is none."""
    settings = _settings(model)
    source, path = settings.get("chat_template") or "", _file(model, "chat_template.jinja")
    if path is not None:
        source = path.read_text(encoding="utf-8")
    elif not isinstance(source, str):  # several, by name
        source = next((entry["template"] for entry in source if entry["name"] == "default"), "")
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in settings.items() if name.endswith("_token")}
    return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)}, f"the template of {model}")


def _settings(model: str) -> dict[str, Any]:
    path = _file(model, "tokenizer_config.json")
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
    except ValueError as error:
        raise ConfigError("tokenizer_config.json", str(path), f"JSON ({error})") from None
    return dict(settings)


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
