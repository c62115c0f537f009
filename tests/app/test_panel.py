"""The panel and the page of experts: on a screen, and what they draw of figures of every kind."""

from __future__ import annotations

import dataclasses
import random

import pytest
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import AnswerStats
from floe_chat.app.history.exporting import footer
from floe_chat.app.screens.experts import ExpertsScreen, HeatMap
from floe_chat.app.text import units
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.panel import dashboard
from floe_chat.app.widgets.panel import figures as draw
from floe_chat.app.widgets.panel.dashboard import PerformancePanel
from floe_chat.app.widgets.panel.figures import Draw, PanelFigures
from floe_chat.app.widgets.panel.heat import stack
from floe_chat.engine.events import CardRows, LayerRows, Rows
from textual.pilot import Pilot
from textual.widgets import Digits

from .scripted import (
    LOADED,
    ROWS,
    UNCOUNTED,
    ScriptedClient,
    ask,
    chatting,
    composer,
    finish,
    ready,
    screen_text,
    stats,
    until,
    write,
)
from .wizardry import shown

VIRTUAL = dataclasses.replace(ROWS, virtual=True)


def panel(pilot: Pilot[int]) -> PerformancePanel:
    return pilot.app.screen_stack[0].query_one(PerformancePanel)


def is_shown(pilot: Pilot[int], name: str) -> bool:
    widget = panel(pilot).query_one(f"#{name}")
    return widget.display and widget.size.height > 0


async def show(pilot: Pilot[int], client: ScriptedClient, rows: Rows | None, request: int, words: str) -> None:
    client.say(stats(request, rows=rows, reused_tokens=15))
    await until(pilot, lambda: words in screen_text(pilot))


async def test_rows_come_and_go_with_the_model() -> None:
    async with chatting(size=(120, 60)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "15 of 20")
        await until(pilot, lambda: "no GPU" in screen_text(pilot))
        assert not is_shown(pilot, "origins") and not is_shown(pilot, "link")
        await show(pilot, client, UNCOUNTED, request, "Link")
        assert "hit rate 62 %" not in screen_text(pilot)
        await show(pilot, client, VIRTUAL, request, "hit rate 62 %")
        for figure in ("virtual time", "· left out  2 %", "0.420 ms", "2.79 of 12.1 GB/s", "3.20 of 4.00 GB", "Why: "):
            await until(pilot, lambda figure=figure: figure in screen_text(pilot))
        assert "no GPU" not in screen_text(pilot)
        await show(pilot, client, None, request, "no GPU")
        await until(pilot, lambda: not is_shown(pilot, "origins") and not is_shown(pilot, "link"))
        await until(pilot, lambda: "virtual" not in screen_text(pilot))


@pytest.mark.thorough
async def test_an_answer_has_one_speed() -> None:
    async with chatting(size=(120, 50)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), dataclasses.replace(stats(request), decode_tps=99.7))
        await finish(pilot, client, request)
        await until(pilot, lambda: "58.9 tokens/s" in screen_text(pilot))
        assert str(panel(pilot).query_one(Digits).value) == "58.9" and "99.7" not in screen_text(pilot)
        await pilot.press("f4")
        await until(pilot, lambda: "Now  58.9 tokens/s" in screen_text(pilot))
        await pilot.press("escape")
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: screen_text(pilot).count("58.9 tokens/s") == 2)


async def test_keys_reach_the_end_of_the_column() -> None:
    async with chatting(size=(100, 24)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, ROWS, request, "hit rate 62 %")
        assert panel(pilot).max_scroll_y > 0 and "Why: " not in screen_text(pilot)
        await pilot.press("tab", "end")
        await until(pilot, lambda: "Why: " in screen_text(pilot))
        await pilot.press("escape")
        await write(pilot, "on")
        assert composer(pilot).text == "on"


@pytest.mark.thorough
async def test_a_hidden_panel_gives_the_keys_back() -> None:
    async with ready(ScriptedClient(), size=(120, 36)) as pilot:
        await pilot.press("tab")
        assert pilot.app.focused is panel(pilot)
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(pilot.app.focused, Composer))
        await pilot.press("f2", "f2", "tab")
        assert pilot.app.focused is panel(pilot)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: isinstance(pilot.app.focused, Composer))
        await pilot.click(Composer)
        await pilot.resize_terminal(120, 36)
        await until(pilot, lambda: panel(pilot).display)
        await pilot.click(PerformancePanel)
        assert isinstance(pilot.app.focused, Composer)


@pytest.mark.thorough
async def test_the_map_of_experts_follows_the_terminal() -> None:
    async with chatting(size=(80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "58.9")
        await pilot.resize_terminal(120, 50)  # no newer figures come
        await until(pilot, lambda: screen_text(pilot).count("▀" * 16) == 4)
        await pilot.press("tab", "down", "down")
        await until(pilot, lambda: "Which experts the router called" in screen_text(pilot))


# The page of experts: their calls layer by layer, and how well neurons and experts were predicted


def drawn(pilot: Pilot[int]) -> list[str]:
    """The lines of the map, as wide as the page lets them be."""
    heat = pilot.app.screen.query_one(HeatMap)
    return [line.plain for line in heat.render().split("\n")]


@pytest.mark.thorough
async def test_experts_are_predicted_beside_their_neurons() -> None:
    async with chatting(size=(60, 20)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request, rows=dataclasses.replace(ROWS, evicted=1234), experts=64))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(pilot.app.screen, ExpertsScreen) and "88 %" in shown(pilot))
        table = drawn(pilot)
        heading, names, *layers, over_all = table[: table.index("")]
        assert heading.split()[-2:] == ["neurons", "experts"] and names.split().count("recall") == 2
        # A line each, none of them folded: the figures stand under their names.
        assert layers[0].endswith("—") and layers[0].count("—") == 4
        assert " ".join(layers[1].split()[2:]) == "30 % 74 % 50 % 90 % 86 %"
        assert " ".join(over_all.split()) == "all 38 % 81 % 57 % 92 % 88 %"
        width = pilot.app.screen.query_one(HeatMap).content_size.width
        assert {len(line) for line in (heading, names, *layers, over_all)} == {len(names)} and len(names) <= width
        assert "Recall: the share of active" in shown(pilot)
        by_layer = table[next(at for at, line in enumerate(table) if "in pool" in line) + 1 :]
        assert [line.split()[1:] for line in by_layer[:2]] == [["not", "used", "yet"], ["whole", "on", "the", "GPU"]]
        assert " ".join(by_layer[2].split()) == "3 31 % 62 % 20 % 12 % 6 % 83 %" and len(by_layer[2]) <= width
        assert any("1,234 rows left the pool" in line for line in table)
        client.say(stats(request, rows=UNCOUNTED))  # which is no zero
        await until(pilot, lambda: "all 38 % — — — —" in [" ".join(line.split()) for line in drawn(pilot)])


@pytest.mark.thorough
async def test_of_a_split_the_page_says_where_each_layer_is() -> None:
    async with chatting(size=(100, 30)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request, rows=STATIC))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(pilot.app.screen, ExpertsScreen) and "where" in shown(pilot))
        table = drawn(pilot)
        assert [line.split()[-1] for line in table[1 : table.index("")]] == ["GPU", "CPU", "CPU", "CPU"]
        assert "/mix pool makes a pool" in shown(pilot) and "in pool" not in shown(pilot)


# What the panel draws of rows, link and memory, for every width and for figures of every kind


WIDTHS = (30, 32, 33, 48)  # the panel has 32 columns beside its scroll bar, 33 without
ZERO = dataclasses.replace(
    ROWS,
    **dict.fromkeys(
        ("ready", "hits", "coming", "expert_hits", "recall", "precision", "substituted", "dropped", "left_out"), 0.0
    ),
    **dict.fromkeys(("moved_per_token", "waited_per_token", "link_bytes_s", "link_busy", "link_peak"), 0.0),
    **dict.fromkeys(("pool", "pool_used", "up", "dense"), 0),
    copied=0.0,
    on_cpu=1.0,
)
LONG = dataclasses.replace(
    ROWS,
    **dict.fromkeys(("ready", "hits", "expert_hits", "recall", "precision", "substituted", "dropped"), 1.0),
    **dict.fromkeys(("coming", "copied", "on_cpu"), 0.0),
    **dict.fromkeys(("pool", "pool_used", "up", "dense"), 999_400_000_000),
    moved_per_token=999.4e12,
    waited_per_token=12345.678,
    link_bytes_s=999.4e6,
    link_peak=999.4e9,
    link_busy=1.004,
    virtual=True,
)
CARDS = dataclasses.replace(
    ROWS,
    cards=(
        CardRows("cuda:0", 9, 1.0, pool=3 << 30, pool_used=1 << 30, up=1 << 30, dense=1 << 29, whole=1 << 30),
        CardRows("cuda:1", 0, 0.0, pool=0, pool_used=0, up=1 << 30, dense=0, whole=4 << 30, moved_per_token=0.0),
    ),
)
STATIC = dataclasses.replace(
    UNCOUNTED,
    in_place=0.27,
    on_cpu=0.73,
    layers=(LayerRows(None, 1.0, 0.0, 0.0, 0.0), *3 * (LayerRows(None, 0.0, 0.0, 0.0, 1.0),)),
)
ANY = {"static": STATIC, "some": ROWS, "cards": CARDS, "uncounted": UNCOUNTED, "zero": ZERO, "long": LONG, "none": None}
DRAWINGS = (
    *(dashboard.origins, dashboard.link, dashboard.memory),
    *(draw.speed_heading, draw.speed_course, draw.neurons, draw.strip),
)


def figures(rows: Rows | None, *, vram_bytes: int | None = None, reused_tokens: int = 0) -> PanelFigures:
    made = dataclasses.replace(stats(rows=rows, reused_tokens=reused_tokens), vram_bytes=vram_bytes)
    return PanelFigures(LOADED, made)


def test_what_became_of_guesses_fits_the_column() -> None:
    for accepted, gained, wanted in (
        (25, 1.44, "drafts accepted"),
        (2500, 1.44, "drafts"),
        (25, 0.86, "drafts accepted"),
    ):
        shown = figures(None)
        assert shown.stats is not None
        shown.stats = dataclasses.replace(shown.stats, drafted=accepted + 1, accepted=accepted, draft_speedup=gained)
        assert value(draw.speed_course, shown, wanted) == f"{accepted} of {accepted + 1}, {gained:.1f}x"
        assert all(len(line) <= 32 for line in rows_of(draw.speed_course, shown))
        shown.stats = dataclasses.replace(shown.stats, draft_speedup=None)
        assert value(draw.speed_course, shown, "drafts accepted") == f"{accepted} of {accepted + 1}"


def rows_of(drawing: Draw, shown: PanelFigures, width: int = 32) -> list[str]:
    return drawing(shown, width).plain.split("\n")


def value(drawing: Draw, shown: PanelFigures, label: str) -> str:
    """What stands at the right end of the line that begins with `label`."""
    (line,) = (line for line in rows_of(drawing, shown) if line.startswith(label))
    return line.removeprefix(label).strip(" ━─")


@pytest.mark.parametrize("width", [1, 2, 5, 31, 32, 33, 120])
def test_a_stack_fills_its_width_and_hides_no_part(width: int) -> None:
    for _ in range(300):
        parts = [random.choice((0.0, 1e-9, random.random(), 1000 * random.random())) for _ in range(5)]
        cells = stack(parts, width)
        if not any(parts):
            assert cells == [0] * 5
            continue
        assert sum(cells) == width
        assert all(count == 0 for part, count in zip(parts, cells, strict=True) if part == 0)
        if width >= 5:
            assert all(count > 0 for part, count in zip(parts, cells, strict=True) if part > 0)
        exact = [part / sum(parts) * width for part in parts]
        assert all(abs(count - share) < 5 for share, count in zip(exact, cells, strict=True))


@pytest.mark.parametrize("rows", ANY.values(), ids=ANY.keys())
@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.__name__)
def test_every_line_fits(drawing: Draw, rows: Rows | None) -> None:
    shown = figures(rows, reused_tokens=131_072)
    shown.stats = dataclasses.replace(shown.stats, prompt_tokens=131_073) if shown.stats else None
    for width in WIDTHS:
        content = drawing(shown, width)
        assert all(line.cell_length <= width for line in content.split("\n")), content.plain
    for width in (0, 1, 9):
        drawing(shown, width)


def test_a_split_has_no_hits() -> None:
    assert rows_of(dashboard.origins, figures(STATIC)) == [
        "Split       1 of 4 layers on GPU",
        "█" * 9 + "░" * 23,
        "█ on GPU   27 %  ░ on CPU   73 %",
        "F4 or /mix pool makes a pool",
    ]
    nowhere = dataclasses.replace(figures(STATIC), loaded=dataclasses.replace(LOADED, pools=None))
    assert len(rows_of(dashboard.origins, nowhere)) == 3 and "pool" not in dashboard.memory(figures(STATIC), 32).plain
    assert rows_of(dashboard.link, figures(STATIC)) == ["Link" + " " * 28, "a split moves no rows"]
    strip = rows_of(draw.strip, figures(STATIC), 76)[0]
    assert "on GPU 27 %" in strip and "hits" not in strip


def test_what_was_not_counted_is_no_zero() -> None:
    shown = figures(UNCOUNTED)
    origins, link = rows_of(dashboard.origins, shown), rows_of(dashboard.link, shown)
    assert origins[:2] == ["Rows            not measured yet", "┄" * 32] and origins[2].count("—") == 2
    assert "rate              — of 12.1 GB/s" in link  # the peak is known before
    assert all("—" in line for line in (*origins[2:-1], *link[1:]))
    assert "hits —" in rows_of(draw.strip, shown, 76)[0]


def test_zeros_that_were_counted_are_shown() -> None:
    shown = figures(ZERO)
    assert rows_of(dashboard.origins, shown)[:4] == [
        "Rows                hit rate 0 %",
        "░" * 32,
        "█ ready     0 %  ▓ coming    0 %",
        "▒ copied    0 %  ░ on CPU  100 %",
    ]
    assert value(dashboard.origins, shown, "predictor recall") == "0 %"
    assert not any(word in dashboard.origins(shown, 32).plain for word in ("substituted", "dropped", "left out"))
    assert value(dashboard.link, shown, "wait per token") == "0 ms"
    assert value(dashboard.link, shown, "of its peak") == "— not yet"
    assert set(rows_of(dashboard.memory, shown)[4]) == set("▚·")


def test_nothing_comes_where_nothing_is_fetched_ahead() -> None:
    none = dataclasses.replace(ZERO, recall=None, precision=None)
    drawn = rows_of(dashboard.origins, figures(none))
    assert (
        drawn[2:4] == ["█ ready     0 %  ▒ copied    0 %", "░ on CPU  100 %"]
        and "coming" in rows_of(dashboard.origins, figures(dataclasses.replace(none, coming=0.1, on_cpu=0.9)))[2]
    )
    assert any(line.startswith("predictor") and line.endswith("not used") for line in drawn)


def test_left_out_is_what_the_engine_counted() -> None:
    thirds = dataclasses.replace(ROWS, ready=1 / 3, coming=1 / 3, copied=0.1, on_cpu=1 / 6, left_out=0.0)
    assert "left out" not in dashboard.origins(figures(thirds), 32).plain
    assert "left out" not in rows_of(draw.strip, figures(thirds), 100)[0]
    assert "left out 2 %" in rows_of(draw.strip, figures(ROWS), 110)[0]
    few = dataclasses.replace(ROWS, ready=0.998, coming=0.001, copied=0.0, on_cpu=0.0, left_out=0.001)
    drawn = rows_of(dashboard.origins, figures(few))
    assert drawn[1] == "█" * 30 + "▓·" and drawn[2] == "█ ready   100 %  ▓ coming   <1 %"
    assert drawn[4] == "· left out <1 %  ! answers vary"


def test_a_budget_is_full_or_not_known() -> None:
    shown = figures(ROWS, vram_bytes=7_400_000_000)
    assert shown.stats
    shown.stats = dataclasses.replace(shown.stats, vram_budget=7_400_000_000)
    assert value(dashboard.memory, shown, "VRAM") == "7.40 of 7.40 GB"
    assert "rest" not in dashboard.memory(shown, 32).plain and "·" not in rows_of(dashboard.memory, shown)[4]
    shown.stats = dataclasses.replace(shown.stats, vram_budget=None)
    assert value(dashboard.memory, shown, "VRAM") == "7.40 GB" and "rest" not in dashboard.memory(shown, 32).plain
    whole = figures(None, vram_bytes=5_100_000_000)
    assert whole.stats and "budget" not in dashboard.memory(whole, 32).plain
    whole.stats = dataclasses.replace(whole.stats, vram_budget=7_400_000_000)
    assert value(dashboard.memory, whole, "VRAM") == "5.10 of 7.40 GB"
    assert value(dashboard.memory, whole, "of its budget") == "69 %"
    assert "VRAM 5.10 of 7.40 GB" in draw.strip(whole, 76).plain


def test_without_a_pool_nothing_is_made_up() -> None:
    shown = figures(None)
    assert dashboard.origins(shown, 32).plain == "" and dashboard.link(shown, 32).plain == ""
    assert rows_of(dashboard.memory, shown)[0] == "Memory                    no GPU"
    assert value(dashboard.memory, shown, "resident weights") == "23.4 MB"
    assert value(dashboard.memory, figures(None, vram_bytes=5_000_000_000), "VRAM") == "5.00 GB"
    assert "VRAM" not in dashboard.memory(PanelFigures(), 32).plain
    assert "hits" not in draw.strip(shown, 76).plain


def test_virtual_time_is_never_taken_for_this_machines() -> None:
    real, virtual = figures(ROWS), figures(dataclasses.replace(ROWS, virtual=True))
    assert (
        "virtual time" in draw.speed_heading(virtual, 32).plain
        and "last answer" in rows_of(draw.speed_heading, real)[0]
    )
    assert "virtual time" in draw.speed_heading(dataclasses.replace(virtual, running=True), 32).plain
    assert "virtual time" in dashboard.link(virtual, 32).plain
    for width in (56, 76):
        assert "virtual 58.9 tokens/s" in rows_of(draw.strip, virtual, width)[0]
    assert virtual.stats and real.stats
    assert "virtual time" in footer(AnswerStats.of(virtual.stats, "stop"))
    for text in (draw.speed_heading(real, 32).plain, dashboard.link(real, 32).plain, draw.strip(real, 76).plain):
        assert "virtual" not in text
    assert "virtual" not in footer(AnswerStats.of(real.stats, "stop"))


def test_small_figures_do_not_look_like_none() -> None:
    assert [units.share(part) for part in (0.0, 0.004, 0.006, 1.0)] == ["0 %", "<1 %", "1 %", "100 %"]
    assert [units.seconds(time) for time in (0.0, 0.0042, 0.01)] == ["0 s", "4.20 ms", "10.0 ms"]
    times = (None, 0.0, 2.063e-6, 0.00042, 0.0123, 12.3456)
    assert [units.milliseconds(time) for time in times] == ["—", "0 ms", "2.06 µs", "0.420 ms", "12.3 ms", "12,300 ms"]
    assert units.size_of(3.2e9, 4e9) == "3.20 of 4.00 GB" and units.size_of(5, 40) == "5 of 40 B"


def test_each_of_several_cards_has_its_memory_and_its_link() -> None:
    shown = figures(CARDS)
    assert value(dashboard.memory, shown, "card 1, weights") == units.size(5.5 * 2**30)
    assert value(dashboard.memory, shown, "card 2, weights") == units.size(5 << 30)
    assert "not yet" in value(dashboard.link, shown, "by card 1") and value(
        dashboard.link, shown, "by card 2"
    ) == units.size(0)
    assert not [line for line in rows_of(dashboard.memory, figures(ROWS)) if line.startswith("card")]
