"""A model's chat template, run as in transformers: the same sandbox, functions and tags, without importing it.

A template is a program from the hub. It runs in Jinja's sandbox, sees only plain strings, and cannot reach Python's
internals or files. What is allowed beyond Jinja's own is listed here, after transformers/utils/chat_template_utils.py.
The sandbox limits neither time nor memory: chat_process.py does.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class TooMuchError(Exception):
    """A template wrote more text than it may."""

    def __init__(self, most: int) -> None:
        super().__init__(f"more than {most:,} characters")


class ChatTemplate:
    """One model's template.

    Attributes:
        names: variables that it reads and does not set itself. fields: the names of attributes and all strings in it.

    Raises:
        ValueError: the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _environment()
        try:
            parsed = environment.parse(source)
            self.names = frozenset(meta.find_undeclared_variables(parsed))
            self.fields = frozenset(_fields(parsed))
            self._template = environment.from_string(parsed)
        except TemplateSyntaxError as error:
            raise ValueError(f"Line {error.lineno} of its chat template is wrong: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        most: int | None = None,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a prompt that asks for the next answer.

        Args:
            tokens: special tokens by their names. most: characters that the text may have; None for any number.
            options: values of the template's own variables. tools: functions, as OpenAI's protocol declares them.

        Raises:
            TooMuchError: the template writes more. Exception: of any kind, since a template is a program.
        """
        given = [dict(message) for message in messages]
        pieces: list[str] = []
        left = most
        usual = {"messages": given, "tools": tools or None, "documents": None, "add_generation_prompt": True}
        for piece in self._template.generate(**{**tokens, **(options or {}), **usual}):
            pieces.append(piece)
            if left is not None and most is not None and (left := left - len(piece)) < 0:
                raise TooMuchError(most)
        return "".join(pieces)


def _fields(parsed: nodes.Template) -> Generator[str]:
    for node in parsed.find_all((nodes.Getattr, nodes.Const)):
        name = node.attr if isinstance(node, nodes.Getattr) else getattr(node, "value", None)
        if isinstance(name, str):
            yield name


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # constants are computed when they are rendered, where what they take is limited
        extensions=[_Generation, loopcontrols],
    )
    made.filters["tojson"] = _tojson
    own: Any = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    made.globals.update(own)
    return made


class _Generation(Extension):
    """`{% generation %}`, which marks the model's own words for training. Here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` for templates: creates dictionaries and exposes nothing else of the type."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore: through those a template could leave the sandbox."""

    def __init__(*args: Any, **named: Any) -> None:  # `namespace(self=...)` is allowed, as in Jinja
        self, values = args[0], dict(*args[1:], **named)
        for name in values:
            _check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape HTML characters."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
