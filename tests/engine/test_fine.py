"""A trained model of fine experts (tests/fine): packed, it stays near its source, and loses what it skips."""

from __future__ import annotations

from pathlib import Path

import pytest
from floe_chat.engine.quality.evaluate import Evaluation, run
from floe_chat.engine.quality.told import Told
from floe_chat.models.catalog import asset
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing import calibration
from floe_chat.models.packing.pack import PackSpec, pack
from floe_chat.models.tokenizer.chat_process import encode

SOURCE = Path(__file__).parents[1] / "fine" / "checkpoint"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At the usual widths, by the signals that packing chooses."""
    folder = tmp_path_factory.mktemp("fine") / "pack"
    passages = calibration.read_tokens(SOURCE, asset("calibration.txt").read_text(encoding="utf-8"))
    pack(Checkpoint(SOURCE), folder, PackSpec(3, 4, 4), passages[::4], "fine")  # enough text, in half the time
    return folder


@pytest.fixture(scope="module")
def found(packed: Path) -> Evaluation:
    """What it loses on a text that neither training nor packing has seen."""
    ids = encode(packed, asset("demo", "heldout.md").read_text(encoding="utf-8"))
    names = ("No sparsity", "High", "Fast")
    return run(packed, SOURCE, ids, names, 1024, "cpu", Told(lambda _step: None, lambda _note: None))


def test_every_layer_skips_by_the_gate(packed: Path) -> None:
    manifest = Manifest.read(packed)
    assert manifest.architecture.layers == 7, "the first of its 8 layers has no experts"
    assert manifest.signals == ("gate",) * 7


def test_it_loses_little_by_rounding_and_more_the_more_is_skipped(found: Evaluation) -> None:
    whole, high, fast = (one.divergence.kl_mean for one in found.presets)
    assert whole < high < fast
    assert whole < 0.16, "0.140 when these weights were kept"
