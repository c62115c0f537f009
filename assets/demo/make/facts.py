"""Reads the authored texts: what the demo model is taught, and what it is asked afterwards.

A file under assets/demo/qa holds records of this form; every part but the heading and the answer is optional:

    ## router
    what: the router | a router          noun phrases for "What is {x}?" (`plural` for "What are {x}?")
    do: choose experts                   verb phrases for "How do I {x}?"
    key: F2                              names for "What does {x} do?"
    q: Who picks the experts?            questions written by hand
    The answer, in Markdown.
    ### more                             (or why, example) the answer to that follow-up
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

DEMO = Path(__file__).parents[1]
FORMS = ("what", "plural", "do", "key", "q")
FOLLOW_UPS = ("more", "why", "example")


@dataclass(frozen=True)
class Fact:
    """One record: its file, the ways to ask (form -> phrases), the answer, and the answers to follow-ups."""

    topic: str
    name: str
    forms: dict[str, list[str]]
    answer: str
    follow_ups: dict[str, str]


class Topic(TypedDict):
    """One kind of question the model declines: `templates` times `x`, answered by the first of `answers`."""

    name: str
    answers: list[str]
    templates: list[str]
    x: list[str]


class FactCheck(TypedDict, total=False):
    """One held-out question. Each string of `expect` must occur in the answer; `a|b` accepts either.

    `history` holds the user's earlier messages; the model itself answers them first.
    """

    question: str
    expect: list[str]
    history: list[str]


def read_facts() -> list[Fact]:
    """All records of assets/demo/qa, ordered by file name. Raises ValueError on a malformed record."""
    facts = [
        _parse(file.stem, section)
        for file in sorted((DEMO / "qa").glob("*.md"))
        for section in file.read_text(encoding="utf-8").split("\n## ")[1:]
    ]
    names = [fact.name for fact in facts]
    if len(set(names)) != len(names):
        raise ValueError(f"repeated names: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return facts


def read_templates() -> dict[str, list[str]]:
    """Question patterns and set phrases by kind; `{x}` stands for a phrase of the record."""
    return json.loads((DEMO / "templates.json").read_text(encoding="utf-8"))


def read_scope() -> list[Topic]:
    """What the model is taught to decline."""
    return json.loads((DEMO / "scope.json").read_text(encoding="utf-8"))


def read_first_messages() -> dict[str, str]:
    """What newcomers write first -> the name of the record that answers it."""
    return json.loads((DEMO / "first.json").read_text(encoding="utf-8"))


def read_heldout() -> list[FactCheck]:
    """Questions that no training text may contain."""
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _parse(topic: str, section: str) -> Fact:
    name, _, rest = section.partition("\n")
    lines = rest.split("\n")
    forms: dict[str, list[str]] = {}
    while lines and (form := lines[0].partition(":")[0]) in FORMS:
        forms[form] = [phrase.strip() for phrase in lines.pop(0).partition(":")[2].split(" | ")]
    answer, *extras = "\n".join(lines).strip().split("\n### ")
    follow_ups: dict[str, str] = {}
    for extra in extras:
        kind, _, text = extra.partition("\n")
        if kind not in FOLLOW_UPS:
            raise ValueError(f"{name}: unknown follow-up {kind!r}, expected one of {FOLLOW_UPS}")
        follow_ups[kind] = text.strip()
    if not forms or not answer:
        raise ValueError(f"{name}: needs at least one question form and an answer")
    return Fact(topic, name, forms, answer.strip(), follow_ups)
