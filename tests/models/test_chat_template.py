"""Chat templates give what transformers makes of them, to the letter and to the error, and get out of the sandbox as
little."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.tokenizer.chat_template import ChatTemplate

from .chat_families import FAMILIES, TEMPLATES

Messages = list[dict[str, str]]

DATED = "{{ 'Today is ' + strftime_now('%Y') }} {{ messages | length }}{{ ' ' ~ (bos_token is defined) }}"
BLOCKS = """\
    {% for message in messages %}
        {% if message.role == 'system' %}{% continue %}{% endif %}
        {% generation %}
  {{ message.content }}
        {% set inside = 1 %}
        {% endgeneration %}
        {{ inside is defined }}
        {% if loop.index > 2 %}{% break %}{% endif %}
    {% endfor %}
    {# a comment #}
  end {{ cls_token }}{{ documents is none }}

"""
JSON = (
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}"
    "{{ messages[0] | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ messages[0].content | tojson(ensure_ascii=true) }}"
)
MADE = (
    "{% set made = dict(a=1, b=messages | length) %}{{ made }}{{ dict.fromkeys(['x', 'y'], 0) }}"
    "{% set ns = namespace(self=3, other={'a': 1}) %}{% set ns.self = 4 %}{{ ns.self }}{{ ns.other.a }}"
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
    "{{ range(3) | list }}{{ messages[0].items() | list }}{{ messages | map(attribute='role') | join(',') }}"
)
GOOD = {
    **{name: family.template for name, family in FAMILIES.items()},
    **{f"{name}, tools": TEMPLATES[name] for name in ("qwen3_moe instruct", "mixtral")},
    "dated": DATED,
    "blocks": BLOCKS,
    "json": JSON,
    "made": MADE,
    "plain text": "no braces at all\n",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ messages.append.__globals__ }}",
    "subclasses": "{{ dict.__class__.__base__.__subclasses__() }}",
    "function": "{{ raise_exception.__globals__['json'] }}",
    "namespace, when made": "{{ namespace(__class__=1) }}",
    "namespace, later": "{% set ns = namespace() %}{% set ns.__init__ = 1 %}{{ ns }}",
    "namespace, by dict": "{% set ns = namespace({'_x': 1}) %}{{ ns._x }}",
    "changes its input": "{{ messages.append(1) }}{{ messages.clear() }}",
    "changes a turn": "{{ messages[0].update(content='') }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "endless": "{{ range(10**9) | list }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "attribute filter": "{{ messages | attr('__class__') }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
}
WRONG = {
    "raises": "{{ raise_exception('no such turn') }}",
    "no such turn": "{{ messages[70].content }}",
    "division": "{{ 1 / 0 }}",
    "sum": "{{ messages + 1 }}",
    "unknown function": "{{ nothing() }}",
    "unknown filter attribute": "{{ messages[0].nothing.more }}",
}
TALKS: dict[str, Messages] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be <brief> & 'kind'.\n"}, {"role": "user", "content": "Grüße 🎉\n\n"}],
    "several": [
        {"role": "user", "content": "a {{ b }} {% c %}"},
        {"role": "assistant", "content": "<think>\nx</think>\n\n日本"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "  "},
        {"role": "user", "content": 'say "\\n"'},
    ],
    "out of order": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}],
    "unknown role": [{"role": "user", "content": "x"}, {"role": "narrator", "content": "y"}],
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "[C]"}


def theirs(template: str, messages: Messages, tokens: dict[str, str]) -> str:
    """What transformers makes of it, or the error it ends in."""

    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        given: dict[str, Any] = {"chat_template": template, "add_generation_prompt": True, **tokens}
        rendered, _ = render_jinja_template([messages], **given)
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        return _told(error)
    return rendered[0]


def ours(template: str, messages: Messages, tokens: dict[str, str]) -> str:
    try:
        return ChatTemplate(template).render(messages, tokens)
    except Exception as error:  # noqa: BLE001
        return _told(error)


def _told(error: Exception) -> str:
    # Objects name their classes and addresses, which are each side's own.
    return type(error).__name__ if "object" in str(error) or "underscore" in str(error) else f"{type(error)}: {error}"


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", GOOD)
def test_templates_render_as_in_transformers(template: str, talk: str) -> None:
    for tokens in (TOKENS, {}):
        assert ours(GOOD[template], TALKS[talk], tokens) == theirs(GOOD[template], TALKS[talk], tokens)


def test_the_demos_template_renders_as_in_transformers() -> None:
    template = Path("assets/demo/packed/chat_template.jinja").read_text(encoding="utf-8")
    for messages in TALKS.values():
        assert ours(template, messages, TOKENS) == theirs(template, messages, TOKENS)
    assert ours(template, TALKS["one"], TOKENS) == "<s>[INST] Hi [/INST]"


@pytest.mark.parametrize("template", WRONG)
def test_errors_are_the_same(template: str) -> None:
    told = ours(WRONG[template], TALKS["one"], TOKENS)
    assert told == theirs(WRONG[template], TALKS["one"], TOKENS)
    assert "Error" in told


@pytest.mark.parametrize("template", ESCAPES)
def test_nothing_gets_out_of_the_sandbox(template: str) -> None:
    told = ours(ESCAPES[template], TALKS["one"], TOKENS)
    assert "Error" in told or told in ("", "{0.__class__}")
    assert "Error" in theirs(ESCAPES[template], TALKS["one"], TOKENS) or told == theirs(
        ESCAPES[template], TALKS["one"], TOKENS
    )


def test_a_template_may_ask_for_the_time() -> None:
    before, said, after = datetime.now(), ours("{{ strftime_now('%s.%f') }}", TALKS["one"], {}), datetime.now()
    assert all(a <= b for a, b in pairwise([f"{before:%s.%f}", said, f"{after:%s.%f}"]))


def test_special_tokens_do_not_hide_the_conversation() -> None:
    assert ours("{{ messages[0].content }}", TALKS["one"], {"messages": "x"}) == "Hi"


def test_it_tells_what_it_reads() -> None:
    assert {"bos_token", "eos_token", "messages"} <= ChatTemplate(FAMILIES["mixtral"].template).names
    assert not {name for name in ChatTemplate(FAMILIES["qwen2_moe"].template).names if name.endswith("_token")}


@pytest.mark.parametrize("template", ["{% if %}", "{{", "{% generation %}", "{% nothing %}"])
def test_what_is_no_template_is_told_with_its_line(template: str) -> None:
    with pytest.raises(ValueError, match="Line 2 of its chat template"):
        ChatTemplate("\n" + template)
