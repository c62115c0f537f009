"""What is told of an answer while it comes: its text, up to a text that ends it, and the calls of tools in it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ..client.interface import CallDelta, TextDelta, Tools


class Stops:
    """Passes text on up to the first of `stops`, and holds back what may be the beginning of one.

    Attributes:
        met: whether one came; nothing passes after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.met = stops, "", False

    def feed(self, text: str) -> str:
        """The text that is certain after more of it."""
        if self.met or not self._stops:
            return "" if self.met else text
        self._held += text
        # The one that is complete first, so that it does not matter in which pieces the text comes.
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.met = True
            text, self._held = self._held[: min(found)[1]], ""
            return text
        kept = max(_overlap(self._held, stop) for stop in self._stops)
        text, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return text

    def rest(self) -> str:
        """What was held back, at the answer's end."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """More of a call.

    Attributes:
        index: of the call in its answer. number: by which what it returns is sent; "" after the first piece, as `name`.
        arguments: more of them. written: more of what the model wrote. broken: the arguments are no JSON object.
    """

    index: int
    number: str = ""
    name: str = ""
    arguments: str = ""
    written: str = ""
    broken: bool = False


class Spoken:
    """One answer.

    Attributes:
        calls: how many began. over: nothing more of the answer is wanted.
    """

    def __init__(self, stops: Sequence[str], tools: Tools) -> None:
        self._stops, self._several = Stops(stops), tools.parallel and tools.choice != "named"
        self._only_calls = tools.choice != "auto"  # text after those that had to be is not asked for
        self._blank = "" if tools.listed else None  # held until other text follows; None: there is other text
        self._inside = False
        self.calls, self.over = 0, False

    def take(self, update: TextDelta | CallDelta) -> Sequence[Text | Called]:
        """What can be told after more of the answer."""
        if self.over:
            return []
        return self._text(update.text) if isinstance(update, TextDelta) else self._call(update)

    def reason(self, reason: str) -> str:
        """Why the answer ended, for whom it is; `reason` is the engine's."""
        if self._stops.met or (reason == "stop" and not self.calls):
            return "stop"
        return "tool_calls" if self.calls and (self.over or reason == "stop") else "length"

    def _text(self, text: str) -> list[Text]:
        if self.calls and self._only_calls:
            self.over = bool(text.strip())
            return []
        told = self._told(self._stops.feed(text))
        self.over = self._stops.met
        return told

    def _call(self, delta: CallDelta) -> list[Text | Called]:
        told: list[Text | Called] = [*self._told(self._stops.rest())]
        if not self._inside:
            told.append(Called(self.calls, f"call_{secrets.token_hex(12)}", delta.name))
            self.calls += 1
        told.append(Called(self.calls - 1, "", "", delta.arguments, delta.text, broken=bool(delta.trouble)))
        self._inside = delta.more
        self.over = not (delta.more or delta.trouble or self._several)
        return told

    def end(self) -> list[Text]:
        """What was held back."""
        told = self._told(self._stops.rest())
        if self._blank and not self.calls:
            told.append(Text(self._blank))
        return told

    def _told(self, text: str) -> list[Text]:
        """Text that is not blank, and what was held before it."""
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip() else text
            text = "" if self._blank is not None else text
        return [Text(text)] if text else []
