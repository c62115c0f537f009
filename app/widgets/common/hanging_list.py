"""List lines with a hanging indent: a folded line continues below its own beginning, not at the edge."""

from __future__ import annotations

from collections.abc import Iterable

from textual.content import Content
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual


class Hanging(Visual):
    """Text in lines, with `before` in front of the first line and the same number of blanks in front of the others."""

    def __init__(self, before: Content, *lines: Content) -> None:
        self._before, self._lines = before, lines

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        return self.folded(width).render_strips(width, height, style, options)

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return self._indent + max(line.get_optimal_width(rules, container_width) for line in self._lines)

    def get_height(self, rules: RulesMap, width: int) -> int:
        return len(list(self._folded(width)))

    def folded(self, width: int) -> Content:
        """The lines in so many columns."""
        return Content("\n").join(self._folded(width))

    @property
    def _indent(self) -> int:
        return self._before.cell_length

    def _folded(self, width: int) -> Iterable[Content]:
        before = self._before
        for line in self._lines:
            for piece in line.wrap(max(1, width - self._indent)) or [Content()]:
                yield Content.assemble(before, piece)
                before = Content(" " * self._indent)
