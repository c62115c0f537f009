"""Makes one question look like many: other words, greetings, and the slips of people who type fast."""

import random
import re
from enum import Enum

SYNONYM_SHARE = 0.35
DROP_SHARE = 0.08
PREFIX_SHARE = 0.2
SUFFIX_SHARE = 0.08
_LONG_WORD = re.compile(r"(?<![\w`<+.-])[A-Za-z]{4,}(?![\w`>+.-])")
_MARKS = re.compile(r"[?.!,:]+(?= |$)")


class Dress(Enum):
    """What may stand around a sentence: anything polite, an interjection, or nothing."""

    QUESTION = "question"
    FOLLOW_UP = "follow-up"
    SMALL_TALK = "small talk"


class Typist:
    """Writes questions the way different people would; the same `rng` state gives the same text.

    Half of them write carelessly: no capitals, no punctuation, "whats" and "u", and more slips.
    """

    def __init__(self, rng: random.Random, templates: dict[str, list[str]]) -> None:
        self._rng = rng
        self._greetings, self._leads, self._follow_leads, self._suffixes, self._openers = (
            templates[kind] for kind in ("greeting", "lead", "follow_lead", "suffix", "openers")
        )
        self._droppable = {word.lower() for word in templates["droppable"]}
        self._synonyms = _Swaps(
            {
                word: [other for other in group.split("|") if other != word]
                for group in templates["synonyms"]
                for word in group.split("|")
            },
            fixed=templates["fixed"],
        )
        self._contractions = _Swaps(_first_to_others(templates["contractions"]), after=r"(?= \w)")
        self._slang = _Swaps(_first_to_others(templates["slang"]))

    def vary(self, question: str, dress: Dress = Dress.QUESTION) -> str:
        """`question`, or a text that means the same."""
        rng = self._rng
        careless = rng.random() < (0.45 if dress is Dress.QUESTION else 0.6)
        if dress is Dress.QUESTION:
            question = self._synonyms.apply(question, SYNONYM_SHARE, rng)
            if rng.random() < DROP_SHARE:
                question = self._without_a_word(question)
        question = question[0].upper() + question[1:]
        question = self._contractions.apply(question, 0.4 if careless else 0.15, rng)
        question = self._dressed(question, dress)
        if careless:
            question = self._careless(question)
        elif rng.random() < 0.12:
            question = question.rstrip("?.!") or question
        if rng.random() < (0.13 if careless else 0.05):
            question = self._slip(question)
        return question

    def _dressed(self, question: str, dress: Dress) -> str:
        rng = self._rng
        if dress is Dress.QUESTION and rng.random() < SUFFIX_SHARE:
            question += rng.choice(self._suffixes)
        if dress is Dress.SMALL_TALK or rng.random() >= PREFIX_SHARE:
            return question
        if dress is Dress.FOLLOW_UP:
            prefix = rng.choice(self._follow_leads)
        else:
            prefix = rng.choice([*self._greetings, *self._leads] if "?" in question else self._greetings)
        if prefix.rstrip()[-1] not in ".!" and question.split(" ")[0].rstrip("?.,") in self._openers:
            question = question[0].lower() + question[1:]
        return prefix + question

    def _careless(self, question: str) -> str:
        rng = self._rng
        question = self._slang.apply(question, 0.15, rng)
        if rng.random() < 0.92:
            question = question.lower()
        if rng.random() < 0.5:
            question = question.replace("'", "")
        if rng.random() < 0.75:
            question = _MARKS.sub("", question).strip() or question
        return question

    def _without_a_word(self, question: str) -> str:
        words = question.split(" ")
        places = [at for at, word in enumerate(words) if word.lower() in self._droppable]
        if len(words) > 3 and places:
            del words[self._rng.choice(places)]
        return " ".join(words)

    def _slip(self, question: str) -> str:
        """One word of letters with two of them swapped, one missing or one twice; names of keys stay as they are."""
        words = list(_LONG_WORD.finditer(question))
        if not words:
            return question
        word = self._rng.choice(words)
        at = self._rng.randrange(word.start() + 1, word.end() - 1)
        before, letters, after = question[:at], question[at : at + 2], question[at + 2 :]
        return before + self._rng.choice([letters[::-1], letters[1], letters[0] + letters]) + after


class _Swaps:
    """Words and phrases with their replacements; what is `fixed` is never touched, nor are parts of words."""

    def __init__(self, swaps: dict[str, list[str]], *, fixed: list[str] | None = None, after: str = "") -> None:
        self._swaps = {phrase.lower(): others for phrase, others in swaps.items()}
        phrases: list[str] = [*self._swaps, *(fixed or [])]
        phrases.sort(key=len, reverse=True)
        known = "|".join(map(re.escape, phrases))
        self._known = re.compile(rf"(?<![\w`'-])({known})(?![\w`'-]){after}", re.IGNORECASE)

    def apply(self, text: str, share: float, rng: random.Random) -> str:
        """`text` with about `share` of the known phrases replaced."""

        def swapped(match: re.Match[str]) -> str:
            others = self._swaps.get(match.group().lower())
            if others is None or rng.random() >= share:
                return match.group()
            other = rng.choice(others)
            return other[0].upper() + other[1:] if match.group()[0].isupper() else other

        return self._known.sub(swapped, text)


def _first_to_others(groups: list[str]) -> dict[str, list[str]]:
    return {group.split("|")[0]: group.split("|")[1:] for group in groups}
