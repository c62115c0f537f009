"""The model card of a pack: what a hub reads, and figures that the pack has."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from floe_chat.kernels.rule import Rule
from floe_chat.models import catalog
from floe_chat.models.checking.verify import damages
from floe_chat.models.hub.model_card import card
from floe_chat.models.pack.manifest import Manifest, PackSource, TunedPreset

from ..helpers import explained, run_cli


def front_matter(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    ("source", "licence", "base"),
    [
        (PackSource("mistralai/Mixtral-8x7B-Instruct-v0.1", "0" * 40, True), "apache-2.0", True),
        (PackSource("deepseek-ai/DeepSeek-V2-Lite-Chat", "0" * 40, True), "other", True),
        (PackSource("someone/else", "0" * 40, True), "other", True),
        (PackSource("someone/else", None, True), "other", False),
        (PackSource('x"\n---\nlicense: mit', None, True), "other", False),
        (PackSource("](javascript:alert(1)) <script>|`", "0" * 40, True), "other", False),
    ],
    ids=range(6),
)
def test_what_a_hub_reads(tiny_pack: Path, tmp_path: Path, source: PackSource, licence: str, base: bool) -> None:
    dataclasses.replace(Manifest.read(tiny_pack), source=source).write(tmp_path)
    manifest = Manifest.read(tmp_path)
    text = card(manifest, "tiny")
    fields = front_matter(text)
    assert fields["license"] == licence and fields["library_name"] == "floe-chat"
    assert fields["pipeline_tag"] == "text-generation" and "mixtral" in fields["tags"]
    assert (fields.get("base_model"), fields.get("base_model_relation")) == (
        (source.name, "quantized") if base else (None, None)
    )
    assert ("fill in: that of the base model" in text) == (licence == "other")
    body = text.split("---\n", 2)[2]
    assert "<script>" not in body and "](javascript" not in body


def test_figures_are_those_of_the_pack(tiny_pack: Path) -> None:
    manifest = Manifest.read(tiny_pack)
    text = card(manifest, "tiny")
    assert "up 3, gate and down 4, attention 4 bits" in text and "2 layers with 4 experts, 2 for each token" in text
    assert f"{manifest.calibration.tokens:,} tokens" in text and "version 7" in text
    assert "were not measured on this model" in text
    rule = TunedPreset("Balanced", Rule(0.4), 0.0123, 250_000, "a text", 4096, "pack")
    tuned = card(dataclasses.replace(manifest, tuned=(rule,)), "tiny")
    assert "| Balanced | 0.012 | the pack with nothing left out | 250 kB | a text, 4,096 tokens |" in tuned


def test_the_command(tiny_pack: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_pack, catalog.models_folder() / "tiny"))
    shown = run_cli("models", "card", "tiny")
    assert shown.code == 0 and front_matter(shown.out)["license"] == "other"
    assert f"hf upload OWNER/NAME {folder} ." in shown.err and "fill in" in shown.err
    saved = run_cli("models", "card", "tiny", "--save")
    assert saved.code == 0 and (folder / "README.md").read_text() == shown.out and saved.out == ""

    def silent(_step: str, _share: float) -> None:
        """Nobody looks on."""

    assert damages(folder, Manifest.read(folder), silent) == []
    (folder / "README.md").write_text("mine")
    assert "is there already" in explained(run_cli("models", "card", "tiny", "--save"), 2)
    assert (folder / "README.md").read_text() == "mine"
    assert run_cli("models", "card", "tiny", "--save", "--force").code == 0
    assert run_cli("models", "card", "tiny", "--output", str(tmp_path / "card.md")).code == 0
    assert (tmp_path / "card.md").read_text() == shown.out == (folder / "README.md").read_text()
    for output in (str(tmp_path), str(tmp_path / "absent" / "card.md")):
        explained(run_cli("models", "card", "tiny", "--output", output), 2)
    explained(run_cli("models", "card", "absent"), 2)
    assert run_cli("models", "remove", "tiny", "--yes").code == 0 and not folder.exists()
