"""`floe-chat eval` and `tune`: figures on stdout, notes on stderr, what goes into the pack, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from floe_chat.app.cli.printing.scatter_plot import scatter
from floe_chat.app.cli.quality import evaluate as command
from floe_chat.app.cli.quality.comparison import text_ids
from floe_chat.app.cli.quality.evaluate import table
from floe_chat.engine import quality_presets
from floe_chat.engine.quality import evaluate, frontier, own_presets, text_windows
from floe_chat.engine.quality.divergence import Divergence
from floe_chat.engine.quality.evaluate import Evaluation, PresetLoss
from floe_chat.kernels.rule import NOTHING
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.manifest import FRONTIER, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import PackSpec, pack

from ..helpers import Ran, edit_json, explained, make_checkpoint, make_pack, run_cli

PUBLISHED_ROWS = ("FloE 80 %  ", "CORM  ", "1T-Drop  ", "2T-Drop  ", "Importance  ", "Fiddler  ")
FIELDS = {
    *("version", "text", "model", "source", "widths", "device", "backend", "window", "windows", "tokens"),
    *("scored", "continued", "presets", "lenient", "kv_bits", "notes", "placed"),
}
ROW_FIELDS = {
    *("preset", "rule", "first_divergence", "active_neurons", "bytes_per_token", "tokens", "perplexity"),
    *("source_perplexity", "kl_mean", "kl_99", "kl_max", "same_top", "dp_rms", "kv"),
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A crane stood with its arm raised against a grey sky. " * 5, encoding="utf-8")
    return path


def run_eval(pack: Path, source: Path, *options: str) -> Ran:
    return run_cli("eval", str(pack), "--source", str(source), "--device", "cpu", "--tokens", "128", *options)


def test_the_table_has_the_figures_of_the_json(tiny_pack: Path, tiny_checkpoint: Path, text: Path) -> None:
    ran, asked_for = (run_eval(tiny_pack, tiny_checkpoint, "--text", str(text), *more) for more in ((), ("--json",)))
    assert (ran.code, ran.err) == (asked_for.code, asked_for.err) == (0, "")
    lines, fields = ran.out.splitlines(), json.loads(asked_for.out)
    assert "{" not in ran.out and f"{text.name}: 128 tokens" in ran.out and max(map(len, lines)) <= 100
    assert set(fields) == FIELDS and (fields["text"], fields["windows"], fields["scored"]) == (str(text), 2, 64)
    assert [row["preset"] for row in fields["presets"]] == ["No sparsity", "High", "Balanced", "Fast"]
    for row in fields["presets"]:
        assert set(row) == ROW_FIELDS and row["kl_99"] <= row["kl_max"] and len(row["first_divergence"]) == 4
        assert row["kv"] is fields["kv_bits"] is None
        (line,) = (line for line in lines if line.startswith(f"{row['preset']} "))
        perplexity, kl = map(float, line.removeprefix(row["preset"]).replace(",", "").split()[:2])
        assert perplexity == pytest.approx(row["perplexity"], rel=5e-3)
        assert kl == pytest.approx(row["kl_mean"], rel=5e-3)


@pytest.mark.thorough
def test_where_experts_are_changes_no_figure(tiny_pack: Path, text: Path) -> None:
    def found(mix: str) -> dict[str, Any]:
        how = ("--device", "sim:rtx3060-12gb", "--mix", mix, "--json")
        return json.loads(run_cli("eval", str(tiny_pack), "--text", str(text), "--tokens", "128", *how).out)

    whole = found("auto")
    assert whole["placed"] == "2 layers all on the GPU" and [*whole["presets"][0]["first_divergence"]] == [None] * 4
    for mix, words in (("pool", "2 layers with a pool of rows on the GPU"), ("cpu", "2 layers by the CPU")):
        other = found(mix)
        assert other["placed"] == words
        for before, after in zip(whole["presets"], other["presets"], strict=True):
            assert after["first_divergence"] == before["first_divergence"]
            assert after["kl_mean"] == pytest.approx(before["kl_mean"], rel=1e-3, abs=1e-9)
    arguments = ("eval", str(tiny_pack), "--text", str(text), "--tokens", "128")
    assert "experts   2 layers by the CPU" in run_cli(*arguments, "--device", "sim:rtx3060-12gb", "--mix", "cpu").out
    assert "has no effect on cpu" in explained(run_cli(*arguments, "--device", "cpu", "--mix", "pool"), 2)


def test_published_rules_are_measured_and_say_what_is_not_the_papers(tiny_pack: Path, text: Path) -> None:
    names = ("floe80", "corm", "1t-drop", "2t-drop", "importance", "fiddler")
    options = [part for name in names for part in ("-p", name)]
    ran = run_cli("eval", str(tiny_pack), "--text", str(text), "--tokens", "128", "--device", "cpu", *options)
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 100
    rows = [line.split("  ")[0] for line in ran.out.splitlines() if line.startswith(PUBLISHED_ROWS)]
    assert rows == [row.strip() for row in PUBLISHED_ROWS]
    said = " ".join(ran.out.split())
    assert "FloE 80 %: the rule of FloE, section 3.2. Not as published: its weights are up 2" in said
    assert "1T-Drop: the rule of DualSparse-MoE, section 4.1. Not as published" in said
    refused = run_cli("eval", str(tiny_pack), "--text", str(text), "-p", "importance", "--kv-bits", "8")
    assert "cannot be measured together" in explained(refused, 2)
    asked = run_cli("ask", "hi", "-m", str(tiny_pack), "-p", "floe80", "--max-tokens", "2", "--json")
    assert json.loads(asked.out)["preset"] == "FloE 80 %" and "FloE 80 %: the rule of FloE" in asked.err


@pytest.mark.thorough
def test_keys_and_values_of_8_bits_are_compared_with_16(tiny_pack: Path, tiny_checkpoint: Path, text: Path) -> None:
    arguments = ("--text", str(text), "-p", "High")
    exact, coarse = (
        json.loads(run_eval(tiny_pack, tiny_checkpoint, *arguments, "--kv-bits", bits, "--json").out)
        for bits in ("16", "8")
    )
    assert (exact["kv_bits"], coarse["kv_bits"]) == (16, 8)
    (before,), (after,) = exact["presets"], coarse["presets"]
    loss = after["kv"]
    assert before["kv"] is None and loss["kl_mean"] > 0 and loss["tokens"] == 64
    assert (loss["source_perplexity"], loss["perplexity"]) == (before["perplexity"], after["perplexity"])
    ran = run_eval(tiny_pack, tiny_checkpoint, *arguments, "--kv-bits", "8")
    lines = ran.out.splitlines()
    assert ran.code == 0 and "stored with 8 bits" in ran.out and max(map(len, lines)) <= 100
    title = next(index for index, line in enumerate(lines) if line.startswith("Keys and values of 8 bits against 16"))
    assert lines[title + 2].startswith("High ")
    assert float(lines[title + 2].split()[2]) == pytest.approx(loss["kl_mean"], rel=5e-3)


def test_a_model_that_stores_no_codes_is_refused_8_bits(tmp_path: Path, text: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    edit_json(source / "config.json", lambda fields: fields.update(rope_parameters=rope, head_dim=16))
    make_pack(source, tmp_path / "pack", PackSpec())
    arguments = ("--text", str(text), "-p", "High", "--kv-bits")
    told = explained(run_eval(tmp_path / "pack", source, *arguments, "8"), 2)
    assert "cannot have 8 bits" in told and "because rope of the type dynamic" in told and "--kv-bits 16" in told
    assert run_eval(tmp_path / "pack", source, *arguments, "16").code == 0


def test_the_built_in_text_is_what_packing_did_not_see(tiny_pack: Path) -> None:
    whole = asset("calibration.txt").read_text(encoding="utf-8")
    ids = text_ids(tiny_pack, None)
    passages = read_tokens(tiny_pack, whole)
    assert len(ids) + passages.numel() == len(whole.encode())  # the test's tokenizer has a token per byte
    joined = " ".join(map(str, ids))
    assert not any(" ".join(map(str, passage)) in joined for passage in passages.tolist())


def test_a_held_out_text_beside_the_pack_is_taken(tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "packed"))
    (tmp_path / "heldout.md").write_text("The grey sky over the harbour. " * 9, encoding="utf-8")
    ran = run_eval(pack, tiny_checkpoint, "-p", "High", "--json")
    assert ran.code == 0 and json.loads(ran.out)["text"] == "heldout.md"
    assert text_ids(pack, None) == text_ids(pack, tmp_path / "heldout.md")


def test_the_source_beside_the_pack_is_found(
    tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path, text: Path
) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "packed"))
    arguments = ("eval", str(pack), "--text", str(text), "--tokens", "64", "-p", "High", "--device", "cpu")
    alone = run_cli(*arguments)
    assert alone.code == 0 and "against itself with nothing left out" in alone.out
    assert "without   the loss of rounding" in alone.out
    shutil.copytree(tiny_checkpoint, tmp_path / "tiny")
    beside = run_cli(*arguments)
    assert beside.code == 0 and "against its 16-bit source tiny" in beside.out
    assert "loss of rounding" not in beside.out


def test_a_quality_set_by_hand_is_measured(tiny_pack: Path, text: Path) -> None:
    arguments = ("eval", str(tiny_pack), "--text", str(text), "--tokens", "64", "--device", "cpu")
    ran = run_cli(*arguments, "--sparsity", "64%", "--drop", "0.4")
    assert ran.code == 0 and "Custom: sparsity 64 %, drop 40 %" in ran.out and "Balanced" not in ran.out
    both = json.loads(run_cli(*arguments, "--sparsity", "0.64", "--drop", "40%", "-p", "Balanced", "--json").out)
    assert [row["preset"] for row in both["presets"]] == ["Balanced", "Custom"] and both["source"] is None
    assert both["presets"][1]["rule"] | {"sparsity": 0.64, "drop": 0.4, "weighed": True} == both["presets"][1]["rule"]


@pytest.mark.thorough
def test_a_damaged_cache_is_said_so(tiny_pack: Path, tiny_checkpoint: Path, text: Path, own_folders: Path) -> None:
    arguments = ("--text", str(text), "-p", "High", "--json")
    first = run_eval(tiny_pack, tiny_checkpoint, *arguments)
    for path in own_folders.rglob("source-logits/*.json"):
        edit_json(path, lambda fields: fields.update(sha256="0"))
    again = run_eval(tiny_pack, tiny_checkpoint, *arguments)
    assert (again.code, again.out) == (0, first.out) and again.err.count("computed again") == 2


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--preset Best", "Balanced"),
        ("--preset Exact", "--dense 16"),
        ("--tokens 63", "64 or more"),
        ("--sparsity 1.1", "60%"),
        ("--alpha nan", "60%"),
        ("--alpha 0.2 --kv-bits 8", "one after the other"),
        ("--text nonesuch.txt", "nonesuch.txt"),
        ("--source nonesuch", "There is no checkpoint"),
        ("--device abacus", "--device cpu"),
        ("--kv-bits 4", "'16', '8'"),
    ],
)
def test_bad_options_are_explained(tiny_pack: Path, tiny_checkpoint: Path, options: str, part: str) -> None:
    assert part in explained(run_eval(tiny_pack, tiny_checkpoint, *options.split()), 2)


@pytest.mark.parametrize("content", [b"too short", b"\xff\xfe\x00"], ids=["short", "binary"])
def test_a_text_that_cannot_be_used(tiny_pack: Path, tiny_checkpoint: Path, text: Path, content: bytes) -> None:
    text.write_bytes(content)
    told = explained(run_eval(tiny_pack, tiny_checkpoint, "--text", str(text)), 2)
    assert "UTF-8" in told if b"\xff" in content else f"has {len(content)} tokens; a window takes 63" in told


def test_extreme_figures_fit_the_table_and_json() -> None:
    wild = Divergence(10**6, 123456.7, float("inf"), 1e-12, 12.3, 99.9, 1.0, 0.9999)
    row = PresetLoss("No sparsity", NOTHING, wild, (None, 31, 31, 31), None, None)
    found = Evaluation("m", "s", "up 2 bit", "cpu", "native", 512, 1, 512, 256, 32, (row,))
    lines = table(found, "a text").splitlines()
    assert max(map(len, lines)) <= 100 and any("- 31 31 31" in line and "—" in line for line in lines)
    fields = command._fields(found)  # pyright: ignore[reportPrivateUsage]
    assert fields["presets"][0]["source_perplexity"] is None and json.dumps(fields, allow_nan=False)


# `floe-chat tune`: what it prints, what it writes into the pack, and what it refuses


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


def run_tune(pack: Path, source: Path, *options: str) -> Ran:
    return run_cli("tune", str(pack), "--source", str(source), "--device", "cpu", "--tokens", "64", *options)


@pytest.mark.thorough
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


def test_the_pack_measures_about_what_the_frontier_said(text: Path, tmp_path: Path) -> None:
    # Calibrated on the same text, since rounding depends on it; one layer, since the next one's would differ.
    source = make_checkpoint(tmp_path / "source", layers=1)
    tokens = read_tokens(source, asset("calibration.txt").read_text(encoding="utf-8"))
    pack(Checkpoint(source), tmp_path / "pack", PackSpec(up=2, dense=16, signal="gate"), tokens, "tiny")
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
    arguments = ("tune", str(own_pack), "--text", str(text), "--device", "cpu", "--tokens", "64")
    ran = run_cli(*arguments, "--json")
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
    ran = run_cli(*arguments)
    lines = ran.out.splitlines()
    assert (ran.code, ran.err) == (0, "") and max(map(len, lines)) <= 100 and "{" not in ran.out
    assert [line.split()[0] for line in lines[5:8]] == LEVELS and "tuned on itself" in lines[0]
