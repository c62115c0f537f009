"""Which tokens an answer of a prescribed form may have next, by the llguidance library."""

from __future__ import annotations

from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from ..errors import UsageError
from .tokens import contained

_BLANK = r"[ \n]{0,16}"  # between JSON's parts: a weak model would write nothing else
_MOST = 1 << 20  # characters of a schema


class Constraint:
    """The form of one answer: JSON by a schema.

    Args:
        folder: with the tokenizer. schema: as JSON. vocabulary: how many tokens the model has. ends: tokens that end an
            answer, allowed where the form is complete.

    Raises:
        UsageError: no schema, or one that cannot be followed. PackError: the tokenizer cannot be used.
    """

    def __init__(self, folder: Path, schema: str, vocabulary: int, ends: list[int]) -> None:
        with contained(f"The tokenizer at {folder} cannot be used for answers of a form", folder):
            tokenizer = LLTokenizer(str((folder / "tokenizer.json").resolve()), vocabulary, ends)
        wrong = "It has more than a million characters." if len(schema) > _MOST else ""
        if not wrong:
            try:
                form = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _BLANK})
                self._matcher = LLMatcher(tokenizer, form, log_level=0)
                wrong = self._matcher.get_error()
            except ValueError as error:
                wrong = str(error)
        if wrong:
            raise UsageError("The schema cannot be followed", wrong[:300], "Simplify it.")

    def allowed(self, drawn: int | None) -> bytes:
        """A bit for each token that may come next, after one more was drawn; the first token's is the lowest.

        Raises:
            UsageError: the form is too large to follow.
        """
        if drawn is not None:
            self._matcher.consume_token(drawn)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise UsageError("The form of the answer cannot be followed", self._matcher.get_error()[:300], "")
        return mask
