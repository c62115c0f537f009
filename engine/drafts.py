"""Further tokens of an answer, guessed from what its text repeats, and how many of them it pays to compute at once.

The model computes guesses in the pass of the token before them. They count up to the first that is not what it draws
there, by the same random numbers: tokens stay the same, and a pass of several costs less than as many passes. What a
guess would have been worth is known a token later, whether it was computed or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .events import MOST_TOGETHER
from .pace import Pace
from .quality_presets import Preset

_LEAST, _FAR = 3, 32  # tokens that come again, at least, and of how many it makes a difference
_PLACES = 8  # where they came before: the newest, of which the one that is alike for longest is taken
_PROMPT = 1 << 14  # tokens of a prompt that are looked at, the last ones: some milliseconds
_LENGTHS = (4, 8, 16)  # tokens that come again: chances are counted by these classes
_CHANCES = (0.3, 0.5, 0.7, 0.9)  # at first, that the next token comes again too
_STEP = 1 / 8  # weight of a new observation
_UNTRIED = 0.3  # of a token's time, for another one in the same pass, before it was measured
_WORTH = 1.1  # times as many tokens a second, as measured, which is never exact


class Guess(NamedTuple):
    """What may follow, by a text's last `matched` tokens, which came before."""

    tokens: list[int]
    matched: int


class Repeats:
    """The tokens of a text that begins with a prompt, and what followed where its last ones came before."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text, self._after = list[int](), defaultdict[tuple[int, ...], list[int]](list)
        self.add(prompt[-_PROMPT:])

    def add(self, tokens: Sequence[int]) -> None:
        """They follow."""
        text = self._text
        for token in tokens:
            places = self._after[tuple(text[-_LEAST:])]
            places.append(len(text))
            del places[:-_PLACES]
            text.append(token)

    def guess(self) -> Guess | None:
        """As many tokens as can be computed with the last one, if it and those before came before."""
        text = self._text
        places = self._after.get(tuple(text[-_LEAST:]), ()) if len(text) >= _LEAST else ()
        best = max(((self._matched(place), place) for place in places), default=None)
        if best is None:
            return None
        matched, place = best
        tokens = list[int]()
        for at in range(place, place + MOST_TOGETHER - 1):  # what repeats itself goes on doing so
            tokens.append(text[at] if at < len(text) else tokens[at - len(text)])
        return Guess(tokens, matched)

    def _matched(self, place: int) -> int:
        text, length = self._text, _LEAST
        while length < min(place, _FAR) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


class Depth:
    """What is known of a model's passes and guesses, from answer to answer."""

    def __init__(self) -> None:
        self._pace, self._chances = Pace(), list(_CHANCES)

    def took(self, preset: Preset, guessed: int, drawn: int, seconds: float) -> None:
        """How long a pass of a token and some guesses took, or, without those, that of each token that was drawn."""
        self._pace.observed(preset, 1 + guessed, seconds, 1 + guessed if guessed else drawn)

    def compare(self, guess: Guess, drawn: Sequence[int]) -> None:
        """What was drawn where a guess was made."""
        kind = self._kind(guess)
        for guessed, token in zip(guess.tokens, drawn, strict=False):
            self._chances[kind] += _STEP * ((guessed == token) - self._chances[kind])
            if guessed != token:
                break

    def worth(self, guess: Guess, preset: Preset) -> list[int]:
        """As many tokens of it as make an answer fastest."""
        chance, one = self._chances[self._kind(guess)], self._pace.seconds(preset, 1)
        best, most = 0, _WORTH
        for count in range(1, len(guess.tokens) + 1):
            tokens, took = sum(chance**i for i in range(count + 1)), self._pace.seconds(preset, count + 1)
            if one is None:
                break
            passes = 1 + _UNTRIED * count if took is None else (count + 1) * took / one
            if tokens / passes > most:
                best, most = count, tokens / passes
        return guess.tokens[:best]

    @staticmethod
    def _kind(guess: Guess) -> int:
        return sum(guess.matched >= length for length in _LENGTHS)
