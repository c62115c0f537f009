"""`floe-chat pack` and `transform`: from a checkpoint to a model that answers, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from floe_chat.models import catalog
from floe_chat.models.pack.manifest import DRAFT, Manifest
from floe_chat.models.pack.packed_model import PackedModel

from .. import families
from ..helpers import edit_json, explained, make_checkpoint, run_cli


@pytest.mark.thorough
def test_pack_then_ask(tiny_checkpoint: Path, tmp_path: Path) -> None:
    packed = tmp_path / "mine"
    ran = run_cli("pack", str(tiny_checkpoint), str(packed), "--up", "3", "--rows", "8", "--gate", "3", "--dense", "4")
    assert (ran.code, ran.out) == (0, "") and "up 3, gate 3, down 8, attention 4 bits" in ran.err
    manifest = PackedModel.open(packed, recheck=True).manifest
    assert manifest.name == "mine" and manifest.source.name == tiny_checkpoint.name
    asked = run_cli("ask", "hi", "-m", str(packed), "--max-tokens", "3", "--json")
    assert asked.code == 0 and json.loads(asked.out)["model"] == "mine"
    told = explained(run_cli("ask", "hi", "-m", str(packed), "-p", "exact"), 2)
    assert "attention 4 bits" in told and "--dense 16" in told


def test_what_is_too_little_to_calibrate_on_is_rounded_by_hqq(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, experts=2)
    text = tmp_path / "short.txt"
    text.write_text("A short text.")
    arguments = ("pack", str(source), str(tmp_path / "p"), "--text", str(text), "--dense", "16")
    told = explained(run_cli(*arguments, "--rounding", "calibrated"), 2)
    assert "too short to calibrate" in told and not (tmp_path / "p").exists()
    ran = run_cli(*arguments, "--signal", "up", "--up", "2", "--rows", "16")
    assert ran.code == 0 and "13 tokens" in ran.err and "rounded by HQQ" in ran.err and "16 bits by HQQ" in ran.err
    asked_for = ("pack", str(source), str(tmp_path / "q"), "--dense", "16", "--rounding", "hqq")
    assert run_cli(*asked_for, "--signal", "up", "--up", "2", "--rows", "16", "--name", "p").code == 0
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()} for name in "pq"
    )
    assert one == other


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda source: [path.unlink() for path in source.iterdir()],
    "dense model": lambda source: edit_json(source / "config.json", lambda fields: fields.update(model_type="llama")),
    "pickle": lambda source: [path.rename(path.with_suffix(".bin")) for path in source.glob("*.safetensors")],
    "damaged shard": lambda source: os.truncate(min(source.glob("*.safetensors")), 100),
    "no tokenizer": lambda source: (source / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_checkpoints_that_cannot_be_packed_are_explained(tiny_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    DAMAGES[kind](source)
    # Nothing is there: a wrong name.
    explained(run_cli("pack", str(source), str(tmp_path / "out")), 2 if kind == "empty" else 1)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bad_options_of_pack_are_usage_errors(tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path) -> None:
    for options in ("--rounding gptq", "--up 5", "--rows 1", "--dense 3"):
        explained(run_cli("pack", str(tiny_checkpoint), str(tmp_path / "out"), *options.split()), 2)
    for name in ("\x1b[31m", " ", "a\nb"):
        arguments = ("pack", str(tiny_checkpoint), str(tmp_path / "out"), "--name", name)
        assert "cannot be called" in explained(run_cli(*arguments), 2)
    explained(run_cli("pack", str(tiny_pack), str(tmp_path / "out")), 1)
    explained(run_cli("pack", str(tmp_path / "missing"), str(tmp_path / "out")), 2)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_elses_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "thesis.txt" in explained(run_cli("pack", str(tiny_checkpoint), str(tmp_path)), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_interrupted_pack_can_be_repeated_and_runs_exact_under_its_own_name(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = ("--up", "16", "--rows", "16", "--name", "Own Name")
    arguments = ("pack", str(tiny_checkpoint), str(tmp_path / "out"), *widths)

    def interrupt(_manifest: Manifest, _folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", interrupt)
        ran = run_cli(*arguments)
    assert ran.code == 130 and "interrupted" in ran.err and "Traceback" not in ran.err
    assert "incomplete" in explained(run_cli("ask", "hi", "-m", str(tmp_path / "out")), 1)
    assert run_cli(*arguments).code == 0
    asked = ("ask", "hi", "-m", str(tmp_path / "out"), "-p", "exact", "--max-tokens", "3", "--seed", "1", "--json")
    fields = json.loads(run_cli(*asked).out)
    assert (fields["model"], fields["preset"], fields["active_neurons"]) == ("Own Name", "Exact", 1.0)


# `floe-chat transform`: a checkpoint of finer experts that packs and answers, and what it says when it cannot


def test_transform_then_pack_then_ask(tiny_checkpoint: Path, tmp_path: Path) -> None:
    finer, packed = tmp_path / "finer", tmp_path / "packed"
    ran = run_cli("transform", str(tiny_checkpoint), str(finer), "--parts", "2", "--order", "importance")
    assert (ran.code, ran.out) == (0, ""), ran
    assert "4 of 8 experts of 48 neurons per token" in ran.err and f"floe-chat pack {finer}" in ran.err
    assert run_cli("pack", str(finer), str(packed), "--up", "16", "--rows", "16").code == 0
    asked = run_cli("ask", "hi", "-m", str(packed), "-p", "exact", "--max-tokens", "3", "--json")
    assert asked.code == 0 and json.loads(asked.out)["model"] == "packed"


def test_what_cannot_be_transformed_is_explained(tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for source, code in ((tmp_path / "missing", 2), (tmp_path / "model.gguf", 2), (tiny_pack, 1)):
        for order in ("none", "importance"):
            command = ("transform", str(source), str(tmp_path / "out"), "--parts", "2", "--order", order)
            explained(run_cli(*command), code)
    same = str(tiny_checkpoint)
    for options in ("", "--parts 3", "--parts 2 --order size", "--parts 2 --text x.txt"):
        explained(run_cli("transform", same, str(tmp_path / "out"), *options.split()), 2)
    assert "into its source" in explained(run_cli("transform", same, same, "--parts", "2"), 2)
    assert not (tmp_path / "out").exists()


def test_setup_adds_a_drafting_head_to_a_model_that_is_set_up(tmp_path: Path) -> None:
    source = families.make("ernie4_5_moe", tmp_path / "source")
    families.add_head(source)
    made = run_cli("setup", str(source), "--name", "tiny", "--yes", "--no-draft", "--no-tune")
    assert made.code == 0, made.err
    folder = catalog.find("tiny")
    assert not (folder / DRAFT).exists()
    added = run_cli("setup", str(source), "--name", "tiny", "--yes")
    assert added.code == 0 and "without the head" in added.err and "has its drafting head now" in added.err
    assert run_cli("verify", "tiny").code == 0 and DRAFT in Manifest.read(folder).beside
    assert "drafting  a head of" in run_cli("plan", "tiny").out
    (folder / DRAFT).write_bytes(b"")
    repaired = run_cli("verify", "tiny", "--repair", "--source", str(source))
    assert repaired.code == 0 and f"repaired  {DRAFT}" in repaired.out
    again = run_cli("setup", str(source), "--name", "tiny", "--yes")
    assert again.code != 0 and "already a model called tiny" in again.err
    assert "already a model called tiny" in explained(run_cli("setup", "tiny", "--yes"), 2)
