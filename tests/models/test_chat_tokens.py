"""A chat's prompts, ends and text are those of transformers' own tokenizer, whichever file says what."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.errors import PackError
from floe_chat.models.tokenizer.chat_format import ChatFormat
from floe_chat.models.tokenizer.chat_process import ChatProcess, Fitted
from floe_chat.models.tokenizer.tokens import Tokens
from tokenizers import Tokenizer, processors

from ..helpers import TEMPLATE, edit_json, write_tokenizer
from .test_chat_format import sentencepiece_like

Fields = dict[str, Any]
ALL_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ image_token }}" + TEMPLATE
TALK = [
    {"role": "system", "content": "Sei höflich.\n"},
    {"role": "user", "content": " Was ist ein Experte?  🎉\t"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "日本語 e\u0301 [X]"},
]
TEXTS = [
    *("", " ", "\n\n", "plain", " two  words ,  and . a comma !", "don 't", "Grüße, naïve café", "日本語とкириллица"),
    *(
        "a🎉b👩‍👩‍👧‍👦c🇪🇺",
        "tab\tnewline\r\nend",
        "e\u0301\u200bzero",
        "\x00\x1b",
        "<s>",
        "</s></s>",
        "a<unk>b",
        "< s>",
        "x" * 3000,
    ),
]
NAMED: dict[str, Fields] = {
    "plain": {},
    "a class that assumes tokens": {"tokenizer_class": "LlamaTokenizer"},
    "a class that takes tokenizer.json apart": {"tokenizer_class": "GPTNeoXTokenizerFast"},
    "no class": {"tokenizer_class": None},
    "with their properties": {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False}},
    "none": {"bos_token": None, "unk_token": None},
    "one more": {"image_token": "<img>"},
    "one more by name": {"extra_special_tokens": {"image_token": "<img>"}},
    "some more": {"additional_special_tokens": ["<img>", "<end>"]},
    "adds tokens": {"add_bos_token": True, "add_eos_token": True},
    "cleans up": {"clean_up_tokenization_spaces": True},
    "another end": {"eos_token": "<unk>"},
    "an end that is no token": {"eos_token": "<nowhere>"},
    "a list of templates": {
        "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "x", "template": "-"}]
    },
    "unknown properties": {"legacy": True, "sp_model_kwargs": {}, "model_max_length": 10**30},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, template=TEMPLATE)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    return tmp_path


def same(folder: Path) -> ChatFormat:
    """Ours, after a comparison with theirs; what theirs adds to the vocabulary is nothing that the model knows."""

    from transformers import AutoTokenizer

    own, theirs, tokens = ChatFormat(folder), AutoTokenizer.from_pretrained(folder), vocabulary(folder)
    prompt = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    tokens.no_padding()
    tokens.no_truncation()
    assert own.encode(TALK) == tokens.encode(prompt, add_special_tokens=False).ids
    end = theirs.eos_token_id
    assert own.stop_ids == ((end,) if end is not None and end < tokens.get_vocab_size() else ())
    return own


def vocabulary(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
@pytest.mark.parametrize("name", NAMED)
def test_prompts_and_ends_are_the_same(name: str, family: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(NAMED[name]))
    with caplog.at_level(logging.INFO, "floe_chat.models"):
        same(folder)
        if "chat_template" not in NAMED[name]:  # every token by its name too
            edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(chat_template=ALL_TOKENS))
            same(folder)
    assert "transformers reads" not in caplog.text


def test_the_templates_own_file_goes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'Ω' }}" + TEMPLATE, encoding="utf-8")
    own = same(folder)
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.pop("chat_template"))
    assert same(folder).encode(TALK) == own.encode(TALK)


def test_tokens_may_be_named_in_a_file_of_their_own(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(bos_token="<unk>", eos_token="<unk>"))
    own = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(own))
    assert same(folder).stop_ids == (2,)
    added = {"2": {"content": "</s>", "special": True}}  # with these, the other file says nothing
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(added_tokens_decoder=added))
    assert same(folder).stop_ids == (0,)


@pytest.mark.parametrize(
    ("family", "kind", "unnamed"),
    [
        ("mixtral", "PreTrainedTokenizerFast", "bos_token"),
        pytest.param("olmoe", "GPTNeoXTokenizer", "bos_token", marks=pytest.mark.thorough),
        pytest.param("olmoe", "GPTNeoXTokenizer", "eos_token", marks=pytest.mark.thorough),
    ],
)
def test_a_token_that_no_file_names_is_asked_of_transformers(
    family: str, kind: str, unnamed: str, folder: Path, caplog: pytest.LogCaptureFixture, every_case: bool
) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))

    def change(fields: Fields) -> None:
        del fields[unnamed]
        fields["tokenizer_class"] = kind

    edit_json(folder / "tokenizer_config.json", change)
    own = same(folder)
    assert own.reason == f"no file names its {unnamed}"
    if not every_case:  # a process would import transformers again
        return
    with caplog.at_level(logging.INFO, "floe_chat.models"):
        chat = ChatProcess(folder)  # where transformers has to do with less memory
    fitted = chat.fit(TALK, 500)
    chat.close()
    assert isinstance(fitted, Fitted) and fitted.ids == own.encode(TALK) and chat.stop_ids == own.stop_ids
    assert f"transformers reads the tokenizer at {folder}: no file names its {unnamed}" in caplog.text


def test_code_beside_a_tokenizer_is_not_run(folder: Path) -> None:
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")

    def change(fields: Fields) -> None:
        fields.update(auto_map={"AutoTokenizer": ["code.Own", "code.Own"]}, tokenizer_class="Own")

    edit_json(folder / "tokenizer_config.json", change)
    try:
        same(folder)
    except PackError as error:
        assert "code" in error.cause
    assert not (folder / "ran").exists()


def decoded(chat: ChatFormat, ids: list[int]) -> str:
    decoder = chat.decoder()
    return "".join(decoder.push([token]) for token in ids)


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_text_is_the_same_both_ways(kind: str, clean: bool, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = vocabulary(folder) if kind == "byte-level" else sentencepiece_like()
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.enable_truncation(max_length=7)
    tokenizer.enable_padding(length=40, pad_id=2, pad_token="</s>")
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(clean_up_tokenization_spaces=clean))
    own, theirs = same(folder), AutoTokenizer.from_pretrained(folder)
    drawn = random.Random(0)
    texts = [*TEXTS, *("".join(drawn.choices("ab <s>/ \n☃é🎉'.,", k=drawn.randint(1, 60))) for _ in range(200))]
    for text in texts:
        ids: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
        assert own.encode_text(text) == ids
        if text.isprintable():  # others are made visible, see test_chat_format.py
            assert decoded(own, ids) == theirs.decode(ids, skip_special_tokens=True)


def test_the_demos_prompts_and_ends_are_the_same() -> None:
    assert same(Path("assets/demo/packed")).stop_ids == (1,)


@pytest.mark.parametrize("of_bytes", [True, False])
def test_what_tokens_write_adds_up(tmp_path: Path, of_bytes: bool) -> None:
    """To the text, byte by byte; Mixtral's kind begins it with a space."""
    if of_bytes:
        write_tokenizer(tmp_path)
    else:
        sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    tokens = Tokens(tmp_path)
    for text in ("plain words", " two  words", "Grüße, 日本語 🎉", "tab\tnewline\r\nend", "\x00\x1b", "hello é"):
        written = b"".join(map(tokens.spelled, tokens.encode(text)))
        assert written.decode() == (text if of_bytes else f" {text}")
    assert tokens.spelled(10_000_000) == b"" and tokens.spelled(1) == b"<s>"
