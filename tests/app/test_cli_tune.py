"""`floe-chat tune`: what it prints, what it writes into the pack, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from floe_chat.app.cli.printing.scatter_plot import scatter
from floe_chat.engine import quality_presets
from floe_chat.engine.quality import evaluate, frontier, own_presets, text_windows
from floe_chat.kernels.activation import Projection
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.manifest import FRONTIER, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import PackSpec, pack

from ..helpers import Ran, explained, make_checkpoint, run_cli

LEVELS = ["High", "Balanced", "Fast"]


@pytest.fixture(autouse=True)
def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few settings and short windows, since the figures do not matter here."""
    monkeypatch.setattr(text_windows, "WINDOW", 64)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 4)
    monkeypatch.setattr(frontier, "SKIPS", ((0.5, 0.0), (0.5, 0.7)))
    monkeypatch.setattr(frontier, "DROPS", ((0.6, 0.6), (0.4, 0.8)))
    monkeypatch.setattr(frontier, "_TOGETHER", 3)


@pytest.fixture
def own_pack(tiny_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pack, tmp_path / "pack"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A crane stood with its arm raised against a grey sky. " * 5, encoding="utf-8")
    return path


def run_tune(pack: Path, source: Path, *options: str) -> Ran:
    return run_cli("tune", str(pack), "--source", str(source), "--device", "cpu", "--tokens", "64", *options)


def test_presets_are_measured_and_written_into_the_pack(own_pack: Path, tiny_checkpoint: Path, text: Path) -> None:
    before = Manifest.read(own_pack)
    ran = run_tune(own_pack, tiny_checkpoint, "--text", str(text), "--json")
    assert (ran.code, ran.err) == (0, "")
    fields: dict[str, Any] = json.loads(ran.out)
    after = Manifest.read(own_pack)
    assert [preset.name for preset in after.tuned] == LEVELS == [preset["name"] for preset in fields["presets"]]
    assert (after.files, after.widths, before.tuned) == (before.files, before.widths, ())
    for tuned, printed in zip(after.tuned, fields["presets"], strict=True):
        assert tuned.kl > 0 and tuned.bytes_per_token > 0
        assert tuned.kl == pytest.approx(printed["kl"], rel=1e-4)
        assert (tuned.text, tuned.tokens) == (text.name, fields["scored"])
        assert quality_presets.get(tuned.name, after).rule == tuned.rule
        assert [printed[share] for share in ("sparsity", "product", "drop", "major")] == pytest.approx(
            [tuned.rule.sparsity, tuned.rule.product, tuned.rule.drop, tuned.rule.major], rel=1e-4
        )
    kept = json.loads((own_pack / FRONTIER).read_text())["points"]
    assert len(kept) == len(fields["points"]) and any(entry["pareto"] for entry in kept)
    PackedModel.open(own_pack)  # still whole
    assert run_cli("ask", "--model", str(own_pack), "--max-tokens", "3", "hello").code == 0


@pytest.mark.parametrize("signal", ["up", "gate"])
def test_the_pack_measures_about_what_the_frontier_said(text: Path, tmp_path: Path, signal: Projection) -> None:
    # Calibrated on the same text, since rounding depends on it; one layer, since the next one's would differ.
    source = make_checkpoint(tmp_path / "source", layers=1)
    tokens = read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    pack(Checkpoint(source), tmp_path / "pack", PackSpec(up=2, dense=16, signal=signal), tokens, "tiny")
    ran = run_tune(tmp_path / "pack", source, "--text", str(text), "--json", "--no-widths")
    fields = json.loads(ran.out)
    own = next(entry for entry in fields["points"] if entry["setting"] == {"up": 2, "gate": 4, "down": 4})
    assert own["kl"] == pytest.approx(fields["unskipped_kl"], rel=0.3)
    assert not any("rank" in entry["setting"] for entry in fields["points"])


@pytest.mark.thorough
def test_its_table_is_text_of_100_columns(own_pack: Path, tiny_checkpoint: Path, text: Path) -> None:
    ran = run_tune(own_pack, tiny_checkpoint, "--text", str(text), "--no-widths")
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and max(map(len, lines)) <= 100 and "{" not in ran.out
    assert any(line.split()[:1] == ["3/4/4"] for line in lines)


def test_what_it_refuses(own_pack: Path, tiny_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.", encoding="utf-8")
    assert "too short" in explained(run_tune(own_pack, tiny_checkpoint, "--text", str(short)), 2)
    other = make_checkpoint(tmp_path / "other", seed=9)
    assert "not the source" in explained(run_tune(own_pack, other, "--text", str(text)), 2)
    assert "is itself packed" in explained(run_tune(own_pack, own_pack, "--text", str(text)), 2)
    assert Manifest.read(own_pack).tuned == ()


def test_a_pack_that_may_only_be_read_is_refused_at_once(
    own_pack: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so that the answer has to be made up.
    def refuse(_path: Path, _mode: int) -> bool:
        return False

    monkeypatch.setattr(own_presets, "os", SimpleNamespace(access=refuse, W_OK=os.W_OK))
    assert "is read-only" in explained(run_tune(own_pack, tiny_checkpoint), 1)
    assert "is read-only" in explained(run_cli("tune", str(own_pack)), 1)


def test_points_are_drawn_where_they_lie() -> None:
    lines = scatter([(2.0, 0.1, "a"), (4.0, 0.001, "b"), (3.0, 0.01, "."), (3.0, 0.01, "c")], 21, 11, "x", "y")
    rows = [line[11:] for line in lines[1:12]]
    assert rows[0] == "a" and rows[5] == " " * 10 + "c" and rows[10] == " " * 20 + "b"
    assert [line[:11].strip() for line in lines[1:12] if "+" in line] == ["0.1 +", "0.01 +", "0.001 +"]
    assert "2" in lines[13] and "4" in lines[13] and lines[14].strip() == "x"
    (alone,) = [line for line in scatter([(1.0, 0.5, "*")], 5, 3, "x", "y") if "*" in line]
    assert alone


def test_a_pack_needs_nothing_but_itself(own_pack: Path, text: Path) -> None:
    ran = run_cli("tune", str(own_pack), "--text", str(text), "--device", "cpu", "--tokens", "64", "--json")
    assert (ran.code, ran.err) == (0, "")
    fields: dict[str, Any] = json.loads(ran.out)
    tuned = Manifest.read(own_pack).tuned
    assert [preset.name for preset in tuned] == LEVELS == [preset["name"] for preset in fields["presets"]]
    for preset, printed in zip(tuned, fields["presets"], strict=True):
        assert preset.against == "pack" == printed["against"] and preset.text == text.name
        assert (preset.tokens, fields["text"]) == (fields["scored"], str(text))
        assert 0 <= printed["adds"] <= quality_presets.LEVELS[preset.name] and preset.bytes_per_token > 0
        assert printed["kl"] == pytest.approx(preset.kl, rel=1e-4)
    PackedModel.open(own_pack)  # still whole
    assert run_cli("ask", "--model", str(own_pack), "--max-tokens", "3", "hello").code == 0


def test_its_own_presets_are_text_of_100_columns(own_pack: Path, text: Path) -> None:
    ran = run_cli("tune", str(own_pack), "--text", str(text), "--device", "cpu", "--tokens", "64")
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and max(map(len, lines)) <= 100 and "{" not in ran.out
    assert [line.split()[0] for line in lines[5:8]] == LEVELS and "tuned on itself" in lines[0]
