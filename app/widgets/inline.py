"""The words of a Markdown block with their styles."""

from __future__ import annotations

import re
from collections.abc import Generator

from markdown_it.token import Token
from textual.content import Content, Span
from textual.style import Style

STYLES = frozenset({"em", "strong", "s", "code_inline"})
"""Component classes of every widget that shows such words."""
_SPACE = re.compile(r"\s+")
_IMAGE = "🖼  "


def words(inline: Token | None) -> Content:
    """An inline token's text as one line: in Markdown a line break is a space unless it is forced."""
    text = ""
    spans: list[Span] = []
    opened: list[tuple[Style | str, int]] = []
    for child in (inline.children or ()) if inline else ():
        if child.type.endswith("_open"):
            opened.append((_style(child), len(text)))
        elif child.type.endswith("_close"):
            style, start = opened.pop()
            spans.append(Span(start, len(text), style))
        else:
            start = len(text)
            text += "".join(_text(child))
            if child.type in ("code_inline", "image"):
                spans.append(Span(start, len(text), _style(child)))
    return Content(text, spans=spans)


def _text(token: Token) -> Generator[str]:
    match token.type:
        case "text":
            yield _SPACE.sub(" ", token.content)
        case "code_inline":
            yield token.content
        case "softbreak":
            yield " "
        case "hardbreak":
            yield "\n"
        case "image":
            yield _IMAGE + "".join(part.content for part in token.children or ())
        case _:
            pass


def _style(token: Token) -> Style | str:
    address = token.attrGet("src" if token.type == "image" else "href")
    if address is not None:
        return Style.from_meta({"@click": f"link({address!r})"})
    return "." + token.type.removesuffix("_open")
