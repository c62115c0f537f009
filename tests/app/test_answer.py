"""An answer that came piece by piece looks like the same answer that is read from the history."""

from __future__ import annotations

import random
from typing import Any

import pytest
from floe_chat.app.history import AnswerStats, Message
from floe_chat.app.widgets.answer_markdown import AnswerMarkdown
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.markdown.folded import Folded
from floe_chat.app.widgets.markdown.growing import TextList
from floe_chat.app.widgets.markdown.table import Table
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Offset
from textual.screen import Screen
from textual.selection import SELECT_ALL, Selection
from textual.widget import Widget

from .scripted import until

TEXTS = {
    "prose": "One sentence.\nAnother one, **strong** and `code`.\n\nA second paragraph with a [link](https://a.example).\n",
    "headings": "# First\n\ntext\n\n## Second `x`\ntext\n\nA line\n===\n\nAnother\n---\n\nend",
    "lists": "- one\n- two\n  - inner\n  - inner too\n\n- three, apart\n\nText.\n\n1. a\n2. b\n\n   more of b\n3. c\n",
    "mixed lists": "- a\n- b\n\n  ```c\n  int x;\n  ```\n- c\n  1. in\n\n     > quote\n     > - deep\n\n"
    "9. nine\n10. ten\n\n    more\n\n        code\n",
    "levels": "- a\n  - b\n    - c\n\n      > - d\n\n# One\n### Three `x`\n###### Six\n> ## Quoted\n> words\n",
    "numbers": "1. one\n\n\n2. two\n\nText 3. no list\n\n7) seven\n8) eight",
    "stars": "* one\n* two\n\n**strong**\n\n*soft*\n\n***\n\n* again",
    "quotes": "> quoted\n> more\n\ntext\n\n> - a\n> - b\n\n> last",
    "code": "Look:\n\n```python\ndef f(x):\n    return x\n```\n\nand\n\n    indented\n\n```\nnever closed\n",
    "table": "Before.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | `4` |\n\nAfter.",
    "wide table": "| a | b |\n|:-:|--:|\n" + "| some words | 7 |\n" * 3 + f"| {'more words ' * 9}| 1234 |\n",
    "many columns": "| name " * 12 + "|\n" + "|---" * 12 + "|\n" + "| `value` " * 12 + "|\n\nAfter.",
    "references": "See [here] and [there][x].\n\n- item\n\n[here]: https://a.example\n[x]: https://b.example\n",
    "tags": "<b>no</b> tag\n\n<div>\nblock\n</div>\n\n& &amp; \\* done",
}


class Shown(App[int]):
    CSS = "AnswerTurn { height: auto; } AnswerMarkdown, .open-fence { padding: 0 2; }"

    def __init__(self, record: Message, *, live: bool) -> None:
        super().__init__()
        self.turn = AnswerTurn(record, live=live)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.turn


def record(text: str) -> Message:
    stats = AnswerStats(1, 1.0, 1.0, "stop")
    return Message(2, 0, 1, 1, "assistant", text, "complete", 0, "demo", "Fast", stats, (), 1, 1)


def seen(app: Shown) -> list[str]:
    return lines_of(app.query_one(AnswerMarkdown))


def lines_of(widget: Widget) -> list[str]:
    """What the screen shows in its rows."""
    strips = widget.screen._compositor.render_strips()  # pyright: ignore[reportPrivateUsage]
    return [strip.text.rstrip() for strip in strips[widget.region.y : widget.region.bottom]]


@pytest.mark.parametrize("name", TEXTS)
async def test_pieces_make_the_whole(name: str) -> None:
    text, drawn = TEXTS[name], random.Random(name)
    app = Shown(record(text), live=False)
    async with app.run_test(size=(60, 40)) as pilot:
        await pilot.pause()
        whole = seen(app)
    assert len("".join(whole).split()) > 4
    live = Shown(record(""), live=True)
    async with live.run_test(size=(60, 40)) as pilot:
        shown = live.query_one(AnswerMarkdown)
        left = text
        while left:
            piece, left = left[: (size := drawn.randint(1, 9))], left[size:]
            live.turn.feed(piece)
            if drawn.random() < 0.4:  # sooner than the turn itself would
                ready, live.turn._ready = live.turn._ready, ""  # pyright: ignore[reportPrivateUsage]
                await shown.grow(ready, going_on=True)
        live.turn.finish(record(text))
        await live.workers.wait_for_complete()
        assert shown.source == text
        await pilot.pause()
        assert seen(live) == whole


async def test_lines_of_a_list_that_fold_are_copied_unfolded() -> None:
    items = ["- " + "some words " * 12 + "end", "- second", "  1. inner " + "words " * 20 + "end"]
    app = Shown(record("\n".join(items)), live=False)
    async with app.run_test(size=(60, 40)) as pilot:
        await pilot.pause()
        found = app.query_one(TextList)
        assert found.size.height > len(items)
        selected = found.get_selection(SELECT_ALL)
        assert selected is not None
        wanted = [item.replace("- ", "• ") for item in items]
        assert [line.strip() for line in selected[0].split("\n")] == [line.strip() for line in wanted]


def table(*rows: str) -> str:
    return "\n".join((rows[0], "|---" * (rows[0].count("|") - 1) + "|", *rows[1:]))


@pytest.mark.parametrize("width", [40, 76, 116])
@pytest.mark.parametrize("columns", [1, 3, 8, 30])
async def test_no_word_of_a_table_is_hidden(columns: int, width: int) -> None:
    words = [[f"head{at}", f"value{at} and", f"日本{at}", f"{at}long" + "x" * (at % 9)] for at in range(columns)]
    text = table(*("|" + "|".join(row) + "|" for row in zip(*words, strict=True)))
    app = Shown(record(text), live=False)
    async with app.run_test(size=(width, 200)) as pilot:
        await pilot.pause()
        shown = seen(app)
        assert all(any(word in line for line in shown) for cells in words for cell in cells for word in cell.split())
        assert all(len(line) <= width for line in shown)


async def test_columns_share_the_width_and_keep_their_side() -> None:
    rows = (
        "| name | what it is | n |",
        "|---|:-:|--:|",
        f"| {'long' * 15} | {'some words ' * 4} | 1 |",
        "| b | c | 234 |",
    )
    app = Shown(record("\n".join(rows)), live=False)
    async with app.run_test(size=(64, 40)) as pilot:
        await pilot.pause()
        cells = [line.strip().strip("│").split("│") for line in seen(app) if "│" in line]
        assert [len(cell) for cell in cells[0]] == [26, 25, 5]
        assert "".join(row[0].strip() for row in cells[1:4]) == "long" * 15
        assert " ".join(row[1].strip() for row in cells[1:4]).split() == ["some", "words"] * 4
        assert cells[-1][1].strip() == "c" and cells[-1][1].startswith(" " * 9)
        assert (cells[1][2], cells[-1][2]) == ("   1 ", " 234 ")
        whole = app.query_one(Table).get_selection(SELECT_ALL)
        assert whole is not None and whole[0].endswith("\nb\tc\t234") and "long" * 15 in whole[0]


async def test_long_lines_of_code_fold_with_a_sign_and_are_copied_whole() -> None:
    code = "short = 1\nlong = (" + " + ".join(f"number{at}" for at in range(20)) + ")\n\twide = '" + "日本" * 30 + "'"
    app = Shown(record(""), live=True)
    async with app.run_test(size=(60, 40)) as pilot:
        app.turn.feed("```python\n" + code)
        await until(pilot, lambda: app.turn.query_one(".open-fence").display)
        await pilot.pause()
        open_fence = lines_of(app.turn.query_one(".open-fence"))
        app.turn.finish(record("```python\n" + code + "\n```"))
        await app.workers.wait_for_complete()
        await pilot.pause()
        found = app.query_one("CodeBlock > Folded", Folded)
        assert lines_of(found) == open_fence
        folded = [line.rstrip() for line in open_fence if line.strip()]
        assert [line.endswith("↵") for line in folded] == [False, *[True] * 3, False, *[True] * 2, False]
        unfolded = "".join(line[2:-1] if line.endswith("↵") else line[2:] + "\n" for line in folded)
        assert unfolded == code.expandtabs(4) + "\n"
        whole, part = found.get_selection(SELECT_ALL), found.get_selection(Selection(Offset(6, 0), Offset(3, 3)))
        assert whole is not None and whole[0] == code
        assert part is not None and part[0] in code and part[0].startswith("= 1\nlong")


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each that there was."""
    found: list[object] = []
    original = Screen._refresh_layout  # pyright: ignore[reportPrivateUsage]

    def counted(*given: Any, **named: Any) -> None:
        found.append(given)
        original(*given, **named)

    monkeypatch.setattr(Screen, "_refresh_layout", counted)
    return found


@pytest.mark.parametrize("text", ["\n", "# Heading", "- point", "```\ncode\n", "| a |\n|---|\n| b |\n"])
async def test_what_was_told_before_is_gone_whatever_comes_first(text: str) -> None:
    app = Shown(record(""), live=True)
    async with app.run_test(size=(60, 40)) as pilot:
        app.turn.feed(text)
        if text.strip():
            await until(pilot, lambda: "…" not in "".join(seen(app)))
        app.turn.feed("\n\nThe end.")
        app.turn.finish(record(text + "\n\nThe end."))
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert "…" not in "".join(seen(app)) and "end." in "".join(seen(app))


@pytest.mark.parametrize("begun", ["Some words", "- one\n- some words", "## Some words"])
async def test_more_words_are_painted_without_a_layout(begun: str, layouts: list[object]) -> None:
    app = Shown(record(""), live=True)
    async with app.run_test(size=(60, 40)) as pilot:
        shown = app.query_one(AnswerMarkdown)
        await shown.grow(begun, going_on=True)
        await pilot.pause()
        before = len(layouts)
        for number in range(15):  # more than a line of them; there is room for three
            await shown.grow(f" word{number}", going_on=True)
            await pilot.pause()
        assert "word14" in "\n".join(seen(app)) and len(layouts) == before
        await shown.grow(" and more" * 14, going_on=True)
        await pilot.pause()
        assert len(layouts) > before
        await shown.complete(shown.source)
        await pilot.pause()
        assert seen(app)[-1] == "" != seen(app)[-2]  # the line between blocks, and no room left
