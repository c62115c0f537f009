"""Markdown as plain lines, while it streams: for a screen reader, stars and hashes are noise.

Headings, emphasis, code marks and links lose their marks; lists, quotes and tables keep theirs, which read well. Code
blocks keep every character, between a line that announces them and one that ends them.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)")
_START = re.compile(r"^(\s*)(#{1,6}\s+|[*+]\s+)")
_ONLY_MARKS = re.compile(r"^\s*[#*+~`_-]*\s*$")
_SPANS = (
    re.compile(r"(`+)(?!`)(?P<text>.+?)(?<!`)\1(?!`)"),
    re.compile(r"!?\[(?P<text>[^\]\n]*)\]\((?P<link>[^)\s]*)(?:\s+\"[^\"]*\")?\)"),
    re.compile(r"(?<!\*)(\*{2,3})(?=[^\s*])(?P<text>.*?[^\s])\1(?!\*)"),
    re.compile(r"(?<!\*)(\*)(?=[^\s*])(?P<text>[^*]*[^\s*])\1(?!\*)"),
    re.compile(r"(?<!\w)(_{1,3})(?=[^\s_])(?P<text>.*?[^\s_])\1(?!\w)"),
    re.compile(r"(~~)(?=\S)(?P<text>.*?\S)\1"),
)
_OPENS = re.compile(r"[`*~\[!]|(?<!\w)_")


class PlainMarkdown:
    """Takes text as it comes and returns what can be shown: all but the part that an open mark may still change."""

    def __init__(self) -> None:
        self._line = ""  # since the last newline, as it came
        self._shown = 0  # characters of it, as plain text, that were returned
        self._fence = ""  # the mark that ends the code block, or ""

    def feed(self, text: str) -> str:
        """Take more text; returns what can now be shown."""
        given: list[str] = []
        first, *rest = text.split("\n")
        self._line += first
        for line in rest:
            given.append(self._ended())
            self._line = line
        given.append(self._begun())
        return "".join(given)

    def end(self) -> str:
        """The text that was held back."""
        plain, shown = self._whole(), self._shown
        self._line, self._shown, self._fence = "", 0, ""
        return plain[shown:]

    def _begun(self) -> str:
        """The certain part of the line that is being written."""
        if self._fence:
            if self._fence.startswith(self._line.strip()[:1] or self._fence):
                return ""  # it may become the end of the block
            certain = self._line
        elif _ONLY_MARKS.match(self._line):
            return ""
        else:
            body = _START.match(self._line)
            at = self._certain(body.end() if body else 0)
            certain = plain_line(self._line[:at])
        new = certain[self._shown :]
        self._shown += len(new)
        return new

    def _certain(self, begin: int) -> int:
        """The position of the first mark that is not closed yet."""
        at = begin
        while (opened := _OPENS.search(self._line, at)) is not None:
            spans = (span.match(self._line, opened.start()) for span in _SPANS)
            closed = next((span for span in spans if span is not None), None)
            # A span at the end of the line may still grow: a second star, a link after its text.
            if closed is None or closed.end() == len(self._line):
                return opened.start()
            at = closed.end()
        return len(self._line)

    def _ended(self) -> str:
        """The rest of a line that is complete, with its newline."""
        plain, shown = self._whole(), self._shown
        self._shown = 0
        if (fence := _FENCE.match(self._line)) is not None and not (self._fence and fence[2]):
            self._fence = "" if self._fence and fence[1].startswith(self._fence) else self._fence or fence[1]
        return plain[shown:] + "\n"

    def _whole(self) -> str:
        fence = _FENCE.match(self._line)
        if self._fence:
            ends = fence is not None and fence[1].startswith(self._fence) and not fence[2]
            return "[end of code]" if ends else self._line
        if fence is not None:
            return f"[code, {fence[2]}]" if fence[2] else "[code]"
        return plain_line(self._line)


def plain_line(line: str) -> str:
    """One line without its marks; a list's star becomes a dash."""
    if (start := _START.match(line)) is not None:
        mark = "" if "#" in start[2] else "- "
        return start[1] + mark + plain_line(line[start.end() :])
    for span in _SPANS[:1]:
        if (code := span.search(line)) is not None:  # nothing in code is a mark
            return plain_line(line[: code.start()]) + code["text"] + plain_line(line[code.end() :])
    for span in _SPANS[1:]:
        line = span.sub(_without_marks, line)
    return line


def plain_text(text: str) -> str:
    """A whole text without its marks."""
    stream = PlainMarkdown()
    return stream.feed(text) + stream.end()


def _without_marks(span: re.Match[str]) -> str:
    link = span.groupdict().get("link")
    return plain_line(span["text"]) + (f" ({link})" if link and link != span["text"] else "")
