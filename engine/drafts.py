"""Further tokens of an answer, guessed from what its text repeats or by the model's own drafting head, and how many of
them it pays to compute at once.

The model computes guesses in the pass of the token before them. They count up to the first that is not what it draws
there, by the same random numbers: tokens stay the same, and a pass of several costs less than as many passes. What a
guess would have been worth is known a token later, whether it was computed or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from .events import MOST_TOGETHER
from .pace import Pace
from .quality_presets import Preset

_LEAST, _FAR = 3, 32  # tokens that come again, at least, and of how many it makes a difference
_PLACES = 8  # where they came before: the newest, of which the one that is alike for longest is taken
_PROMPT = 1 << 14  # tokens of a prompt that are looked at, the last ones: some milliseconds
_LENGTHS = (4, 8, 16)  # tokens that come again: chances are counted by these classes
_CHANCES = (0.3, 0.5, 0.7, 0.9)  # at first, that the next token comes again too
_LIKELY = (0.3, 0.5, 0.7, 0.85, 0.95)  # that a head gives its guess: chances are counted by these classes, too
_HEADS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)  # at first, that such a guess is right
_STEP = 1 / 8  # weight of a new observation
_SLOWLY = 1 / 32  # of whether a head's guess was right: a few wrong ones in a row say little of what it gains
_UNTRIED = 0.3  # of a token's time, for another one in the same pass, before it was measured
_GUESSING = 0.1  # of a token's time, for a head's guess, before it was measured
_RIGHT = 0.75  # at first, of a head's guesses
_WORTH = 1.1  # times as many tokens a second, as measured, which is never exact
_PAYS = 1.03  # times as many, for a head to be asked
_PAUSE, _TRIALS = 256, 4  # tokens after which a head that does not pay is tried again, so many times
# Another model reads a text of which it has not followed the end: at least so many tokens, more where that takes less
# than a share of what its guesses gain in an answer of a usual length; and at once what takes as long as some tokens.
_READ, _INVESTED, _ANSWER, _AT_ONCE = 32, 1 / 4, 256, 4
_READING = 1 / 4  # of the time of its token, for one that it reads together with others, before it was measured


class Guess(NamedTuple):
    """What may follow. kinds: of each token, the class of guesses by which its chance is known."""

    tokens: list[int]
    kinds: list[int]


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
        return Guess(tokens, [sum(matched >= length for length in _LENGTHS)] * len(tokens))

    def _matched(self, place: int) -> int:
        text, length = self._text, _LEAST
        while length < min(place, _FAR) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        return length


class Depth:
    """What is known of a model's passes and guesses, from answer to answer.

    Args:
        guessing: what a head's guess, or another model's, takes of a token's time, before it was measured.
    """

    def __init__(self, guessing: float = _GUESSING) -> None:
        self._pace, self._chances = Pace(), [*_CHANCES, *_HEADS]
        self._right, self._guessing = _RIGHT, guessing  # of a head: guesses that are right, and what one takes
        self._reading = _READING * guessing
        self._preset: Preset | None = None
        self._begun = set[int]()  # guesses of passes at this preset
        self._paused = self._trials = 0

    def took(self, preset: Preset, guessed: int, drawn: int, seconds: float) -> None:
        """How long a pass of a token and some guesses took, or, without those, that of each token that was drawn."""
        self._paused += drawn
        if preset is not self._preset:
            self._preset, self._begun = preset, set()
        if guessed and guessed not in self._begun:  # a card captures its graph first
            self._begun.add(guessed)
        else:
            self._pace.observed(preset, 1 + guessed, seconds, 1 + guessed if guessed else drawn)

    def alone(self, preset: Preset, tokens: int) -> float | None:
        """Seconds of some tokens that are computed one by one, if that is known."""
        one = self._pace.seconds(preset, 1)
        return None if one is None else tokens * one

    def compare(self, guess: Guess, drawn: Sequence[int]) -> None:
        """What was drawn where a guess was made."""
        for guessed, kind, token in zip(*guess, drawn, strict=False):
            self._chances[kind] += _STEP * ((guessed == token) - self._chances[kind])
            if kind >= len(_CHANCES):
                self._right += _SLOWLY * ((guessed == token) - self._right)
            if guessed != token:
                break

    def worth(self, guess: Guess, preset: Preset) -> list[int]:
        """As many tokens of it as make an answer fastest."""
        best, most = 0, _WORTH
        if self._pace.seconds(preset, 1) is not None:
            for count, tokens in enumerate(self._tokens(guess.kinds), 1):
                if (each := tokens / self._passes(preset, count)) > most:
                    best, most = count, each
        return guess.tokens[:best]

    def asks(self, preset: Preset, other: Guess | None) -> bool:
        """Whether to ask a head, if there is another guess already."""
        if self._pace.seconds(preset, 1) is None or (other and self._chances[other.kinds[0]] >= self._right):
            return False
        if self._gains(preset) > _PAYS:
            return True
        if self._paused >= _PAUSE:
            self._paused, self._trials = 0, _TRIALS
        self._trials -= self._trials > 0
        return self._trials > 0

    def more(self, preset: Preset, likely: Sequence[float]) -> bool:
        """Whether another guess of a head pays, after some that it finds so likely; the first is asked for."""
        if not (count := len(likely)):
            return True
        before, after = self._tokens([*map(self.of_head, likely), None])[-2:]
        now, then = (self._passes(preset, n) + n * self._guessing for n in (count, count + 1))
        return after / then > before / now

    def asked(self, preset: Preset, guesses: int, seconds: float) -> None:
        """A head took so long for some guesses."""
        if (one := self._pace.seconds(preset, 1)) is not None:
            each = min(seconds / guesses / one, 2 * self._guessing)  # the first ones read memory for the first time
            self._guessing += _STEP * (each - self._guessing)

    def reach(self, preset: Preset, left: int) -> tuple[int, int]:
        """From how many tokens before a text's end it pays that another model reads it, to guess in the `left` ones to
        come, and how many of them at once.
        """
        gained = min(left, _ANSWER) * (1 - 1 / max(1.0, self._gains(preset)))
        return max(_READ, int(_INVESTED * gained / self._reading)), max(_READ, int(_AT_ONCE / self._reading))

    def read(self, preset: Preset, tokens: int, seconds: float) -> None:
        """Another model took so long to read some tokens."""
        if tokens >= _READ // 2 and (one := self._pace.seconds(preset, 1)) is not None:
            each = min(seconds / tokens / one, 2 * self._reading)  # as for guesses
            self._reading += 2 * _STEP * (each - self._reading)

    @staticmethod
    def of_head(likely: float) -> int:
        """The class of a head's guess that it finds so likely."""
        return len(_CHANCES) + sum(likely >= least for least in _LIKELY)

    def _tokens(self, kinds: Sequence[int | None]) -> list[float]:
        """How many tokens a pass gives with one guess of these, with two, ...; None: one that is not made yet."""
        chances = (self._right if kind is None else self._chances[kind] for kind in kinds)
        return [1 + given for given in accumulate(accumulate(chances, mul))]

    def _gains(self, preset: Preset) -> float:
        """How many tokens a head's guesses give in the time of one, at best."""
        tokens = self._tokens([None] * (MOST_TOGETHER - 1))
        return max(
            given / (self._passes(preset, count) + count * self._guessing) for count, given in enumerate(tokens, 1)
        )

    def _passes(self, preset: Preset, guesses: int) -> float:
        """How many passes of one token a pass with some guesses takes."""
        one, took = (self._pace.seconds(preset, count) for count in (1, 1 + guesses))
        return 1 + _UNTRIED * guesses if one is None or took is None else (1 + guesses) * took / one
