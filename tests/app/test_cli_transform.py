"""`floe-chat transform`: a checkpoint of finer experts that packs and answers, and what it says when it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..helpers import explained, run_cli


def test_transform_then_pack_then_ask(tiny_checkpoint: Path, tmp_path: Path) -> None:
    finer, packed = tmp_path / "finer", tmp_path / "packed"
    ran = run_cli("transform", str(tiny_checkpoint), str(finer), "--parts", "2", "--order", "importance")
    assert (ran.code, ran.out) == (0, ""), ran
    assert "4 of 8 experts of 48 neurons per token" in ran.err and f"floe-chat pack {finer}" in ran.err
    assert run_cli("pack", str(finer), str(packed), "--up", "16", "--rows", "16").code == 0
    asked = run_cli("ask", "hi", "-m", str(packed), "-p", "exact", "--max-tokens", "3", "--json")
    assert asked.code == 0 and json.loads(asked.out)["model"] == "packed"


@pytest.mark.parametrize(
    "options",
    [[], ["--parts", "3"], ["--parts", "2", "--order", "size"], ["--parts", "2", "--text", "x.txt"]],
    ids=" ".join,
)
def test_bad_options_are_usage_errors(tiny_checkpoint: Path, tmp_path: Path, options: list[str]) -> None:
    explained(run_cli("transform", str(tiny_checkpoint), str(tmp_path / "out"), *options), 2)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_transformed_is_explained(tiny_checkpoint: Path, tiny_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for source, code in ((tmp_path / "missing", 2), (tmp_path / "model.gguf", 2), (tiny_pack, 1)):
        for order in ("none", "importance"):
            command = ("transform", str(source), str(tmp_path / "out"), "--parts", "2", "--order", order)
            explained(run_cli(*command), code)
    same = str(tiny_checkpoint)
    assert "into its source" in explained(run_cli("transform", same, same, "--parts", "2"), 2)
    assert not (tmp_path / "out").exists()
