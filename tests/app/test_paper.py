"""`floe-chat paper`: the list, one table as a page and as JSON, and names that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from floe_chat.app.cli.paper import page, plot
from floe_chat.engine.paper.papers import Entry, Grid, Made, entries
from floe_chat.engine.paper.study import Study
from floe_chat.engine.quality import text_windows
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_process import encode

from ..helpers import explained, run_cli

WORDS = " ".join(f"word{number}" for number in range(100))


def test_the_list_has_a_line_for_each_and_reasons() -> None:
    found = run_cli("paper")
    assert found.code == 0
    assert all(f"  {name} " in found.out for name in entries())
    assert found.out.count("not made: ") == sum(bool(one.why_not) for one in entries().values())


def test_a_table_as_a_page_and_as_json(tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_windows, "WINDOW", 64)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    (tmp_path / "text.txt").write_text(WORDS)
    asked = ("paper", "floe-t7", str(tiny_pack), "--text", str(tmp_path / "text.txt"), "--tokens", "64")
    found = run_cli(*asked)
    assert found.code == 0, found.err
    assert "perplexity, DeepSeek-V2" in found.out and "9.808" in found.out, "as printed"
    assert "text.txt predicted" in found.out
    told = json.loads(run_cli(*asked, "--json").out)
    assert told["id"] == "floe-t7" and told["printed"][0]["rows"]["gate"] == [8.6434, 8.8331, 9.8083]
    assert set(told["made"]["grids"][0]["rows"]) == {"gate", "down", "up"}


def test_engines_are_asked_what_people_ask(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    studies: list[Study] = []

    def make(_name: str, study: Study) -> Made:
        studies.append(study)
        return Made("here", ())

    monkeypatch.setattr("floe_chat.engine.paper.tables.make", make)
    conversations = asset("conversations.txt").read_text(encoding="utf-8").split("\n---\n\n")
    assert len(conversations) == 24 and all(one.startswith("User: ") for one in conversations)
    for name in ("floe-f6", "fiddler-f2", "floe-f8"):
        assert run_cli("paper", name, str(tiny_pack)).code == 0
    assert [study.called for study in studies[:2]] == 2 * ["24 conversations of our own"]
    assert studies[0].ids == encode(tiny_pack, "\n---\n\n".join(conversations)) != studies[2].ids


def test_names_that_are_not_there() -> None:
    assert "floe-t8" in explained(run_cli("paper", "floe-t88"), 2)
    assert "dense model" in explained(run_cli("paper", "floe-t2"), 2)


def test_a_page_and_its_plots() -> None:
    grid = Grid("KL", ("50%", "90%"), {"up": (0.01, 0.1), "gate": (0.02, None)})
    printed = Grid("KL, printed", ("50%", "90%"), {"up": (1.0, 2.0)})
    wanted = Entry("floe-t6", "FloE", "shows", "a setup", "It says so.", (printed,))
    lines = page(wanted, Made("here", (grid,), heat={"e0": (0.0, 1.0)}, notes=("A note.",))).splitlines()
    assert lines[0].endswith("FloE table 6: shows") and "The paper: a setup." in lines[1]
    at = next(place for place, line in enumerate(lines) if line.startswith("KL"))
    assert lines[at + 1].split() == ["up", "0.01", "0.1"] and lines[at + 2].split() == ["gate", "0.02", "-"]
    assert lines[at + 4].startswith("printed: KL, printed") and "e0  @" in lines
    assert any("a up   b gate" in line for line in lines) and lines[-1] == "A note."
    bars = plot(Made("here", (Grid("", ("ms", "share"), {"one": (2.0, None), "two": (1.0, None)}),)))
    assert bars[0] == "ms" and bars[1].count("#") == 2 * bars[2].count("#") > 0
