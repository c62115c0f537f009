"""Lines that fold go on below their own beginning."""

from __future__ import annotations

import pytest
from floe_chat.app.widgets.common.hanging_list import Hanging
from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

LINES = Content.styled("● ", "green"), Content("one name"), Content.styled("found among 日本語 words", "bold")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ["● one name", "  found among 日本語 words"]),
        (15, ["● one name", "  found among", "  日本語 words"]),
        (8, ["● one", "  name", "  found", "  among", "  日本語", "  words"]),
    ],
)
async def test_folded_lines_hang(width: int, shown: list[str]) -> None:
    class Shows(App[None]):
        CSS = "OptionList { border: none; padding: 0; scrollbar-size: 0 0; } .option-list--option { padding: 0; }"

        def compose(self) -> ComposeResult:
            yield OptionList(Option(Hanging(*LINES)), Option(Hanging(LINES[0], Content())))

    async with Shows().run_test(size=(width, 12)) as pilot:
        found = pilot.app.query_one(OptionList)
        lines = [found.render_line(y).text.rstrip() for y in range(len(shown) + 2)]
        assert lines == [*shown, "●", ""]
        assert Hanging(*LINES).get_optimal_width({}, width) == len("● found among 日本語 words") + 3
