"""Which tokens an answer of a prescribed form may have next, by the llguidance library."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from .chat_process import unfollowed
from .tokens import contained

_MOST = 1 << 20  # characters of a form


class Constraint:
    """The form of one answer.

    Args:
        tokens: see `tokenizer`. form: a grammar, see `Grammars`.

    Raises:
        UsageError: a form that cannot be followed.
    """

    def __init__(self, tokens: LLTokenizer, form: str) -> None:
        wrong = "It has more than a million characters." if len(form) > _MOST else ""
        if not wrong:
            self._matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(form), log_level=0)
            wrong = self._matcher.get_error()
        if wrong:
            raise unfollowed(wrong.partition("\n")[0][:300])

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def reset(self) -> None:
        """Go back to the beginning."""
        self._matcher.reset()

    def allowed(self, drawn: int | None) -> bytes:
        """A bit for each token that may come next, after one more was drawn; the first token's is the lowest.

        Raises:
            UsageError: the form is too large to follow.
        """
        if drawn is not None:
            self._matcher.consume_token(drawn)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise unfollowed(self._matcher.get_error().partition("\n")[0][:300])
        return mask


def wrong_with(form: str) -> str:
    """Why a form without marks cannot be followed, or ""."""
    if len(form) > _MOST:
        return "It has more than a million characters."
    wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(form))
    return (wrong.partition("JSON schema: ")[2] or wrong).partition("\n")[0][:300]


class CallsWhenBegun:
    """Lets a model write freely, and holds its calls to a form from their first mark, `mark`, to their end.

    `spell`: a drawn token's text.
    """

    def __init__(self, calls: Constraint, spell: Callable[[int], str], mark: str) -> None:
        self._calls, self._spell, self._mark = calls, spell, mark
        self._in_call, self._tail = False, ""
        self._anything = bytes([255]) * len(calls.allowed(None))

    def allowed(self, drawn: int | None) -> bytes:
        """See `Constraint.allowed`."""
        if not self._in_call:
            self._tail += "" if drawn is None else self._spell(drawn)
            if self._mark not in self._tail:
                self._tail = self._tail[-len(self._mark) :]
                return self._anything
            self._in_call, self._tail, drawn = True, "", None
            self._calls.reset()
        mask = self._calls.allowed(drawn)
        if self._calls.complete:
            self._in_call = False
            return self._anything
        return mask


class CallsFirst:
    """Holds an answer to a call, and then to no more than `then` does: whether others follow is the model's choice."""

    def __init__(self, calls: Constraint, then: CallsWhenBegun | None) -> None:
        self._calls, self._then, self._called = calls, then, False
        self._anything = bytes([255]) * len(calls.allowed(None))

    def allowed(self, drawn: int | None) -> bytes:
        """See `Constraint.allowed`."""
        if not self._called:
            mask = self._calls.allowed(drawn)
            self._called = self._calls.complete
            return self._anything if self._called else mask
        return self._anything if self._then is None else self._then.allowed(drawn)


class ThinkingFirst:
    """Lets a model think freely before an answer of a form.

    Args:
        then: what the answer is held to. spell: a drawn token's text. begin: the token that begins the thinking, None
            if the prompt has begun it. end: the text that ends it. ends: tokens that end an answer, and no thinking.
    """

    def __init__(
        self,
        then: Constraint | CallsWhenBegun | CallsFirst,
        spell: Callable[[int], str],
        begin: int | None,
        end: str,
        ends: Collection[int],
    ) -> None:
        self._then, self._spell, self._begin, self._end = then, spell, begin, end
        self._state = "thinks" if begin is None else "begins"
        self._tail = ""
        self._anything = _changed(bytes([255]) * len(then.allowed(None)), ends, allow=False)

    def allowed(self, drawn: int | None) -> bytes:
        """See `Constraint.allowed`."""
        if self._state == "begins":
            return self._begins(drawn)
        if self._state == "thinks":
            self._tail += "" if drawn is None else self._spell(drawn)
            if self._end not in self._tail:
                self._tail = self._tail[-len(self._end) :]
                return self._anything
            self._state, drawn = "answers", None
        return self._then.allowed(drawn)

    def _begins(self, drawn: int | None) -> bytes:
        """The answer's form, or the thinking before it, also after blanks."""
        assert self._begin is not None, "else it has begun"
        if drawn == self._begin:
            self._state = "thinks"
            return self._anything
        mask = self._then.allowed(drawn)
        if drawn is not None and self._spell(drawn).strip():
            self._state = "answers"
            return mask
        return _changed(mask, [self._begin], allow=True)


def _changed(mask: bytes, tokens: Collection[int], *, allow: bool) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            bit = 1 << (token & 7)
            changed[token >> 3] = changed[token >> 3] | bit if allow else changed[token >> 3] & ~bit
    return bytes(changed)


def tokenizer(folder: Path, vocabulary: int, ends: Collection[int]) -> LLTokenizer:
    """The tokenizer in a folder, as the library uses it.

    Args:
        vocabulary: how many tokens the model has. ends: tokens that end an answer, allowed where a form is complete.

    Raises:
        PackError: it cannot be used.
    """
    with contained(f"The tokenizer at {folder} cannot be used for answers of a form", folder):
        return _tokenizer(folder, vocabulary, tuple(ends))


@lru_cache(maxsize=2)
def _tokenizer(folder: Path, vocabulary: int, ends: tuple[int, ...]) -> LLTokenizer:
    return LLTokenizer(str((folder / "tokenizer.json").resolve()), vocabulary, list(ends))
