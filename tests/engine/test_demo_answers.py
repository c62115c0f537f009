"""The built-in demo model answers what newcomers write first, and greetings whole, at every preset that it has."""

from __future__ import annotations

import pytest
from floe_chat.assets.demo.make.facts import read_facts, read_first_messages
from floe_chat.engine import quality_presets
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_format import ChatFormat

from .driver import answer, silent

PACK = asset("demo", "packed")
ANSWERS = {fact.name: fact.answer for fact in read_facts()}
FIRST = read_first_messages()


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load(PACK, None, "cpu", silent)[0]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(PACK)


def said(demo: LoadedModel, chat: ChatFormat, question: str) -> str:
    prompt = chat.encode([{"role": "user", "content": question}])
    return chat.decoder().push(answer(demo, prompt, max_new_tokens=200, stop_ids=chat.stop_ids).tokens).strip()


@pytest.mark.parametrize("preset", ["High", "Balanced", "Fast"])
def test_greetings_are_answered_whole(demo: LoadedModel, chat: ChatFormat, preset: str) -> None:
    demo.control.preset = quality_presets.get(preset, demo.packed.manifest)
    greetings = [message for message, name in FIRST.items() if name == "hello"][::12]
    assert {greeting: said(demo, chat, greeting) for greeting in greetings} == dict.fromkeys(
        greetings, ANSWERS["hello"]
    )


@pytest.mark.parametrize("each", [24, pytest.param(1, marks=pytest.mark.thorough)])
def test_first_messages_get_their_answers(demo: LoadedModel, chat: ChatFormat, each: int) -> None:
    demo.control.preset = quality_presets.get(quality_presets.DEFAULT, demo.packed.manifest)
    asked = dict([*FIRST.items()][::each])
    missed = [message for message, name in asked.items() if said(demo, chat, message) != ANSWERS[name]]
    assert len(missed) <= len(asked) // 20, missed
