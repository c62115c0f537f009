"""Combines the authored texts into an endless, seeded stream of training dialogues and plain text."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data import topics as python_docs
from typing import Literal

from .facts import (
    DEMO,
    FOLLOW_UPS,
    Fact,
    read_facts,
    read_first_messages,
    read_heldout,
    read_scope,
    read_templates,
)
from .paraphrase import Dress, Typist

# Kept out of training: half of them measure the held-out loss, all of them may appear in other texts.
HELD_OUT_DOCS = (
    "assert",
    "break",
    "continue",
    "conversions",
    "lambda",
    "pass",
    "slicings",
    "try",
    "unary",
    "with",
    "yield",
)

SMALL_TALK = "smalltalk"
NO_SUBJECT = "follow-up without a subject"

FIRST_SHARE = 0.10  # of dialogues begin with what newcomers write first
SMALL_TALK_SHARE = 0.10
DECLINED_SHARE = 0.14
FOLLOW_UP_SHARE = 0.4  # while the subject still has something to tell
VAIN_FOLLOW_UP_SHARE = 0.09  # when it has not
MANUAL_SHARE = 0.15
SYSTEM_SHARE = 0.15
TURNS = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4)


@dataclass(frozen=True)
class DemoMessage:
    role: Literal["system", "user", "assistant"]
    content: str


class DialogueMaker:
    """Writes dialogues by combining records and question patterns; the same `rng` state gives the same dialogue."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        facts = read_facts()
        self._facts = [fact for fact in facts if fact.topic != SMALL_TALK]
        self._small_talk = [fact for fact in facts if fact.topic == SMALL_TALK]
        self._templates = read_templates()
        self._typist = Typist(rng, self._templates)
        self._scope = read_scope()
        self._held_out = HeldOut()
        by_name = {fact.name: fact for fact in facts}
        self._first = [(message, by_name[name]) for message, name in read_first_messages().items()]
        # Records that can be asked in many ways are asked somewhat more often.
        self._weights = [2.0 + sum(map(len, fact.forms.values())) ** 0.5 for fact in self._facts]
        self._small_talk_weights = [sum(map(len, fact.forms.values())) for fact in self._small_talk]
        self._scope_weights = [len(topic["x"]) ** 0.5 for topic in self._scope]

    def dialogue(self) -> list[DemoMessage]:
        """One to four turns, with a system text in front of some, ending with an answer."""
        rng = self._rng
        messages: list[DemoMessage] = []
        if rng.random() < SYSTEM_SHARE:
            messages.append(DemoMessage("system", rng.choice(self._templates["system"])))
        subject: Fact | None = None
        told: set[str] = set()  # the follow-ups already given
        declined = False
        for turn in range(rng.choice(TURNS)):
            left = subject is not None and set(subject.follow_ups) - told
            if turn == 0 and rng.random() < FIRST_SHARE:
                message, subject = rng.choice(self._first)
                question, answer = self._allowed("q", [message], Dress.SMALL_TALK), subject.answer
            elif subject is not None and rng.random() < (FOLLOW_UP_SHARE if left else VAIN_FOLLOW_UP_SHARE):
                question, answer = self._follow_up(subject, told, messages[-1].content)
            elif declined and rng.random() < VAIN_FOLLOW_UP_SHARE:
                question = self._allowed(f"follow_{rng.choice(FOLLOW_UPS)}", [""], Dress.FOLLOW_UP)
                answer = self._templates["after_declining"][0]
            elif rng.random() < SMALL_TALK_SHARE:
                question, answer, subject = self._some_small_talk()
                told, declined = set(), False
            elif rng.random() < DECLINED_SHARE:
                question, answer = self._declined(first=turn == 0)
                subject, declined = None, True
            else:
                question, answer, subject = self._fact()
                told, declined = {kind for kind, text in subject.follow_ups.items() if text == answer}, False
            messages += [DemoMessage("user", question), DemoMessage("assistant", answer)]
        return messages

    def _fact(self) -> tuple[str, str, Fact]:
        rng = self._rng
        fact = rng.choices(self._facts, self._weights)[0]
        wanted = rng.random()
        if "what" in fact.forms and "why" in fact.follow_ups and wanted < 0.06:
            return self._allowed("why", fact.forms["what"]), fact.follow_ups["why"], fact
        if "what" in fact.forms and "example" in fact.follow_ups and wanted > 0.94:
            return self._allowed("example", fact.forms["what"]), fact.follow_ups["example"], fact
        # A form counts by the root of its phrases, so that one phrase of a rare form is not drowned.
        kinds = list(fact.forms)
        kind = rng.choices(kinds, [len(fact.forms[k]) ** 0.5 for k in kinds])[0]
        pattern = "key_do" if kind == "do" and "key" in fact.forms and rng.random() < 0.4 else kind
        return self._allowed(pattern, fact.forms[kind]), fact.answer, fact

    def _some_small_talk(self) -> tuple[str, str, Fact | None]:
        """Short forms come most often, as they do in chats. Only what has follow-ups becomes a subject."""
        fact = self._rng.choices(self._small_talk, self._small_talk_weights)[0]
        phrases = [phrase for phrase in fact.forms["q"] for _ in range(6 if " " not in phrase else 2)]
        return self._allowed("q", phrases, Dress.SMALL_TALK), fact.answer, fact if fact.follow_ups else None

    def _follow_up(self, subject: Fact, told: set[str], last_answer: str) -> tuple[str, str]:
        """Marks what it tells in `told`; the same thing is not told twice unless a repetition is asked for."""
        if self._rng.random() < 0.06:
            return self._typist.vary(self._rng.choice(self._templates["follow_repeat"]), Dress.FOLLOW_UP), last_answer
        left = [kind for kind in subject.follow_ups if kind not in told]
        kind = self._rng.choice([*FOLLOW_UPS, *left * 9])
        if kind not in left:
            return self._allowed(f"follow_{kind}", [""], Dress.FOLLOW_UP), self._templates[f"no_{kind}"][0]
        told.add(kind)
        if "what" in subject.forms and self._rng.random() < 0.12:
            return self._allowed(kind, subject.forms["what"]), subject.follow_ups[kind]
        return self._allowed(f"follow_{kind}", [""], Dress.FOLLOW_UP), subject.follow_ups[kind]

    def _declined(self, *, first: bool) -> tuple[str, str]:
        topic = self._rng.choices(self._scope, self._scope_weights)[0]
        while topic["name"] == NO_SUBJECT and not first:
            topic = self._rng.choices(self._scope, self._scope_weights)[0]
        dress = Dress.SMALL_TALK if topic["name"] in (NO_SUBJECT, "gibberish") else Dress.QUESTION
        return self._written(topic["templates"], topic["x"], dress), topic["answers"][0]

    def _allowed(self, pattern: str, phrases: list[str], dress: Dress = Dress.QUESTION) -> str:
        """Pattern `q` takes the phrase as it is."""
        return self._written(["{x}"] if pattern == "q" else self._templates[pattern], phrases, dress)

    def _written(self, templates: list[str], phrases: list[str], dress: Dress) -> str:
        """A varied question that is not among the held-out ones, neither as such nor with words around it."""
        while True:
            question = self._rng.choice(templates).replace("{x}", self._rng.choice(phrases))
            varied = self._typist.vary(question, dress)
            if question not in self._held_out and varied not in self._held_out:
                return varied


class HeldOut:
    """The held-out questions, to keep them out of training; longer ones also with other words around them."""

    def __init__(self) -> None:
        self._questions = {plain(check.get("question", "")) for check in read_heldout()}
        self._long = [f" {question} " for question in self._questions if question.count(" ") > 1]

    def __contains__(self, question: str) -> bool:
        text = plain(question)
        return text in self._questions or any(part in f" {text} " for part in self._long)


def plain(text: str) -> str:
    """A question stripped of case, punctuation and spacing, to compare questions by."""
    return " ".join(re.findall(r"\w+", text.lower()))


def manual_sections() -> list[str]:
    """The sections of the manual, each with its heading."""
    manual = (DEMO / "manual.md").read_text(encoding="utf-8")
    return [f"## {section}".strip() for section in manual.split("\n## ")[1:]]


def python_texts(*, held_out: bool) -> list[str]:
    """Python's own documentation topics (PSF licence) as the running Python ships them."""
    return [text for name, text in sorted(python_docs.topics.items()) if (name in HELD_OUT_DOCS) == held_out]


def plain_documents(rng: random.Random) -> Iterator[str]:
    """Endless plain text: the Python topics in ever new order, with sections of the manual in between."""
    manual, docs = manual_sections(), python_texts(held_out=False)
    while True:
        for text in rng.sample(docs, len(docs)):
            if rng.random() < MANUAL_SHARE * 4:
                yield rng.choice(manual)
            yield text


def tokenizer_texts() -> list[str]:
    """What the vocabulary is made for: the answers count several times, since they are what the model writes."""
    facts, scope = read_facts(), read_scope()
    answers = [text for fact in facts for text in (fact.answer, *fact.follow_ups.values())]
    questions = [phrase for fact in facts for phrases in fact.forms.values() for phrase in phrases]
    declined = [topic["answers"][0] for topic in scope] + [x for topic in scope for x in topic["x"]]
    return [*(answers + manual_sections()) * 6, *(questions + declined) * 3, *python_texts(held_out=False)]
