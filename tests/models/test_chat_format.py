"""Messages to tokens and back: templates as in transformers, no text becomes a token or reaches a screen raw."""

from __future__ import annotations

import json
import random
import shutil
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.errors import FloeError, PackError, UsageError
from floe_chat.models.tokenizer.chat_format import ChatFormat
from floe_chat.models.tokenizer.chat_template import ChatTemplate
from floe_chat.models.tokenizer.tokens import Detokenizer
from floe_chat.models.visible import visible
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ..helpers import edit_json
from .chat_families import FAMILIES, TEMPLATES

SPECIAL = ["<s>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def chat(tiny_pack: Path) -> ChatFormat:
    return ChatFormat(tiny_pack)


@pytest.fixture
def copy(tiny_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pack, tmp_path / "copy"))


def sentencepiece_like() -> Tokenizer:
    """A tokenizer of Mixtral's kind: words with ▁, and single bytes for whatever has no token."""
    pieces = ["▁", "▁he", "llo", "a", "b", "é", "▁▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def ask(chat: ChatFormat, *texts: str) -> list[int]:
    roles = ("user", "assistant")
    return chat.encode([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def test_a_character_appears_when_its_last_byte_does(chat: ChatFormat) -> None:
    decoder = chat.decoder()
    ids = chat.encode_text("🎉")
    assert len(ids) == 4
    assert [decoder.push([token]) for token in ids] == ["", "", "", "🎉"]
    assert chat.decoder().push(chat.encode_text("a🎉b")) == "a🎉b"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_no_sequence_of_tokens_breaks_the_decoder(chat: ChatFormat, kind: str) -> None:
    tokenizer = sentencepiece_like()
    random_ids = random.Random(0)
    for _ in range(400):
        ids = random_ids.choices(range(266), k=random_ids.randint(1, 40))
        decoder = chat.decoder() if kind == "byte-level" else Detokenizer(tokenizer)
        text = "".join(decoder.push([token]) for token in ids)
        assert text == visible(text)


def test_text_after_broken_bytes_still_appears() -> None:
    tokenizer = sentencepiece_like()
    decoder = Detokenizer(tokenizer)
    broken = [3 + byte for byte in (0x41, 0xCF, 0xFF)]
    text = "".join(decoder.push([token]) for token in [*broken, *tokenizer.encode("hello").ids])
    assert text.endswith("hello")


def test_tokens_beyond_the_vocabulary_are_dropped(chat: ChatFormat) -> None:
    a, b = chat.encode_text("ab")
    decoder = chat.decoder()
    assert "".join(decoder.push([token]) for token in (a, 300, 10**6, b)) == "ab"


def test_special_tokens_are_not_shown(chat: ChatFormat) -> None:
    assert chat.decoder().push([1, *chat.encode_text("a"), 2, 0, *chat.encode_text("b")]) == "ab"


@pytest.mark.parametrize("code", [*range(32), 0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
def test_no_control_character_stays_itself(chat: ChatFormat, code: int) -> None:
    if chr(code) in "\n\t":
        assert visible(f"a{chr(code)}b") == f"a{chr(code)}b"
        return
    shown = chat.decoder().push(chat.encode_text(f"a{chr(code)}b"))
    assert chr(code) not in shown
    assert shown == ("ab" if code == 13 else f"a{visible(chr(code))}b") and len(shown) == (2 if code == 13 else 3)


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize(
    "text", [*SPECIAL, "a</s><s>b", "<<s>s>", "</</s>s>", "<s" + ">", "</s></s>", "[INST]</s>[/INST]", "<\u200bs>"]
)  # fmt: skip
def test_spelled_special_tokens_stay_text(chat: ChatFormat, role: str, text: str) -> None:
    def prompt(content: str) -> list[int]:
        messages = {
            "user": [("user", content)],
            "system": [("system", content), ("user", "q")],
            "assistant": [("user", "q"), ("assistant", content), ("user", "q")],
        }[role]
        return chat.encode([{"role": role, "content": content} for role, content in messages])

    harmless, spelled = prompt("x"), prompt(text)
    for special in range(3):
        assert spelled.count(special) == harmless.count(special)


@pytest.mark.parametrize(("content", "special"), [("<tool>", False), ("☃", True)])
def test_added_tokens_stay_text(copy: Path, content: str, special: bool) -> None:
    def add(fields: Any) -> None:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
        fields["added_tokens"].append({"id": 259, "content": content, **flags})

    edit_json(copy / "tokenizer.json", add)
    assert 259 not in ask(ChatFormat(copy), f"a {content} b")


def test_the_template_writes_the_begin_token_once(chat: ChatFormat) -> None:
    ids = ask(chat, "hi", "hello", "again")
    assert ids[0] == 1 and ids.count(1) == 1 and ids.count(2) == 1


@pytest.mark.parametrize("text", ["\udcff", "a\ud800b"], ids=ascii)
def test_text_that_is_no_unicode_is_refused_or_replaced(chat: ChatFormat, text: str) -> None:
    try:
        assert ask(chat, text)
    except UsageError as error:
        assert error.title


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ raise_exception('no such turn') }}", UsageError),
        ("{{ messages[7].content }}", PackError),
        ("{{ 1 / 0 }}", PackError),
        ("{{ messages + 1 }}", PackError),
        ("{{ ''.__class__.__mro__ }}", PackError),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", PackError),
        ("{% if false %}anything{% endif %}", PackError),
    ],
)
def test_errors_of_the_template_are_explained(copy: Path, template: str, kind: type[FloeError]) -> None:
    def change(fields: Any) -> None:
        fields["chat_template"] = template

    edit_json(copy / "tokenizer_config.json", change)
    with pytest.raises(kind) as caught:
        ask(ChatFormat(copy), "hi")
    assert caught.value.title and caught.value.cause and caught.value.hint


def test_a_template_that_cannot_be_parsed_is_explained(copy: Path) -> None:
    edit_json(copy / "tokenizer_config.json", lambda fields: fields.update(chat_template="{% if %}"))
    with pytest.raises(PackError, match="cannot be read") as caught:
        ChatFormat(copy)
    assert "chat template" in caught.value.cause and caught.value.hint


@pytest.mark.parametrize("template", [None, ""])
def test_a_base_model_is_refused(copy: Path, template: str | None) -> None:
    def change(fields: Any) -> None:
        fields["chat_template"] = template

    edit_json(copy / "tokenizer_config.json", change)
    with pytest.raises(PackError, match="no chat template"):
        ChatFormat(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", "null"], ids=repr)
def test_damaged_tokenizers_are_explained(copy: Path, name: str, content: str | None) -> None:
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_text(content)
    with pytest.raises(PackError) as caught:
        ChatFormat(copy)
    assert caught.value.title and caught.value.hint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, (2,)), ({"eos_token_id": 5}, (2, 5)), ({"eos_token_id": [7, 5]}, (2, 5, 7)), ({"eos_token_id": None}, (2,))],
)
def test_stop_ids_come_from_every_source(copy: Path, fields: dict[str, Any], expected: tuple[int, ...]) -> None:
    (copy / "generation_config.json").write_text(json.dumps(fields))
    assert ChatFormat(copy).stop_ids == expected


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "[" * 100_000, '{"eos_token_id": ["x", 2]}'], ids=lambda text: text[:5]
)
def test_a_garbage_generation_config_is_survived(copy: Path, content: str) -> None:
    (copy / "generation_config.json").write_text(content)
    assert ChatFormat(copy).stop_ids == (2,)


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
