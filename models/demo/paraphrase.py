"""Makes one question look like many: other words, greetings, and the slips of people who type fast."""

import random
import re

SYNONYM_SHARE = 0.35
_SHARES = {"suffix": 0.1, "prefix": 0.2, "drop": 0.12, "lower": 0.25, "bare": 0.25, "slip": 0.06}


class Typist:
    """Writes questions the way different people would; the same `rng` state gives the same text."""

    def __init__(self, rng: random.Random, templates: dict[str, list[str]]) -> None:
        self._rng = rng
        self._prefixes, self._suffixes = templates["prefix"], templates["suffix"]
        self._droppable = {word.lower() for word in templates["droppable"]}
        self._synonyms = {
            word.lower(): [other for other in group.split("|") if other != word]
            for group in templates["synonyms"]
            for word in group.split("|")
        }
        words = sorted(self._synonyms, key=len, reverse=True)
        self._known = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(?![\w-])", re.IGNORECASE)

    def vary(self, question: str) -> str:
        """`question`, or a text that means the same."""
        question = self._known.sub(self._synonym, question)
        if self._often("drop"):
            question = self._without_a_word(question)
        question = question[0].upper() + question[1:]
        if self._often("suffix"):
            question += self._rng.choice(self._suffixes)
        if self._often("prefix"):
            question = self._rng.choice(self._prefixes) + question
        if self._often("lower"):
            question = question.lower()
        if self._often("bare"):
            question = question.rstrip("?.!") or question
        if self._often("slip") and len(question) > 12:
            question = self._slip(question)
        return question

    def _often(self, what: str) -> bool:
        return self._rng.random() < _SHARES[what]

    def _synonym(self, match: re.Match[str]) -> str:
        if self._rng.random() >= SYNONYM_SHARE:
            return match.group()
        other = self._rng.choice(self._synonyms[match.group().lower()])
        return other[0].upper() + other[1:] if match.group()[0].isupper() else other

    def _without_a_word(self, question: str) -> str:
        words = question.split(" ")
        places = [at for at, word in enumerate(words) if word.lower() in self._droppable]
        if len(words) > 3 and places:
            del words[self._rng.choice(places)]
        return " ".join(words)

    def _slip(self, question: str) -> str:
        """Two letters swapped, or one missing."""
        at = self._rng.randrange(3, len(question) - 3)
        if self._rng.random() < 0.5:
            return question[:at] + question[at + 1] + question[at] + question[at + 2 :]
        return question[:at] + question[at + 1 :]
