"""What the demo model is taught: one answer to a question, and an answer to what newcomers write first."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator

from floe_chat.assets.demo.make.corpus import DialogueMaker, HeldOut
from floe_chat.assets.demo.make.facts import read_facts, read_first_messages, read_heldout, read_scope, read_templates


def same(question: str) -> str:
    """A question without what people leave out."""
    return question.lower().rstrip("?.! ")


def questions() -> Iterator[tuple[str, str]]:
    """Every question that is taught, with its answer."""
    patterns = read_templates()
    for fact in read_facts():
        for form, phrases in fact.forms.items():
            templates = ["{x}"] if form == "q" else patterns[form]
            if form == "do" and "key" in fact.forms:
                templates = [*templates, *patterns["key_do"]]
            yield from ((template.replace("{x}", x), fact.answer) for template in templates for x in phrases)
    for topic in read_scope():
        for template in topic["templates"]:
            yield from ((template.replace("{x}", x), topic["answers"][0]) for x in topic["x"])


def test_a_question_has_one_answer() -> None:
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for question, answer in questions():
        answers[same(question)].add(answer)
    assert {question: given for question, given in answers.items() if len(given) > 1} == {}
    by_name = {fact.name: fact.answer for fact in read_facts()}
    for message, name in read_first_messages().items():
        assert answers[same(message)] <= {by_name[name]}, message


def test_first_messages_are_taught() -> None:
    messages = read_first_messages()
    held_out = HeldOut()
    assert len(messages) >= 100 and [message for message in messages if message in held_out] == []
    maker = DialogueMaker(random.Random(3))
    seen = {maker.dialogue()[0].content for _ in range(3_000)}
    assert len(seen & set(messages)) > len(messages) / 4


def test_expected_words_can_come() -> None:
    taught = {answer.lower() for _, answer in questions()}
    taught |= {text.lower() for fact in read_facts() for text in fact.follow_ups.values()}
    patterns = read_templates()
    taught |= {patterns[kind][0].lower() for kind in ("after_declining", "no_more", "no_why", "no_example")}
    for check in read_heldout():
        wanted = [expected.lower().split("|") for expected in check.get("expect", [])]
        assert wanted
        assert any(all(any(a in text for a in either) for either in wanted) for text in taught), check
