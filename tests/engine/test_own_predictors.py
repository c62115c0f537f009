"""Predictors that are trained again on a person's text."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
import torch
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload import predictor
from floe_chat.engine.paper.predictors import watch
from floe_chat.engine.quality import own_predictors
from floe_chat.engine.quality.own_predictors import LEAST
from floe_chat.engine.quality.told import Told
from floe_chat.models.catalog import asset
from floe_chat.models.checking.verify import damages
from floe_chat.models.pack.learned_predictor import recall
from floe_chat.models.pack.manifest import AHEAD, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.tokenizer.chat_process import encode

TOLD = Told(lambda _step: None, lambda _note: None)


def opened(pack: Path) -> LoadedModel:
    return load(pack, None, "cpu", lambda _step, _share: None, library=True)[0]


def named(loaded: LoadedModel, windows: torch.Tensor) -> float:
    """The mean share of the next layer's experts that "auto" names."""
    used = predictor.make("auto", loaded.model, loaded.packed)
    with torch.inference_mode():
        seen, _ = watch(loaded.model, windows)
        found: list[float] = []
        for layer, (now, then) in enumerate(itertools.pairwise(seen)):
            scores = used.experts(layer, now.hidden, now.chosen, used.guess(layer, now.hidden, None))
            found.append(recall(scores, then.chosen))
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(asset("demo", "packed"), tmp_path_factory.mktemp("own") / "demo"))


def test_a_pack_learns_of_a_text_and_keeps_what_is_better(demo: Path) -> None:
    ids = encode(demo, asset("demo", "manual.md").read_text(encoding="utf-8"))
    loaded = opened(demo)
    found = own_predictors.run(loaded, ids, TOLD)
    assert found is not None and found.kept and found.after > found.before + 0.02
    length = read_tokens(demo, asset("calibration.txt").read_text(encoding="utf-8")).shape[1]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    tail = rows[-found.tokens // length :]
    assert tail.numel() == found.tokens
    assert named(loaded, tail) == pytest.approx(found.before, abs=0.005)
    again = opened(demo)
    assert named(again, tail) == pytest.approx(found.after, abs=0.005)
    manifest = Manifest.read(demo)
    assert AHEAD in manifest.beside and not damages(demo, manifest, lambda _step, _share: None)

    # What is no better than what was learned before is left.
    kept = (demo / AHEAD).read_bytes()
    second = own_predictors.run(again, ids, TOLD)
    assert second is not None and second.before == pytest.approx(found.after, abs=0.005) and not second.kept
    assert (demo / AHEAD).read_bytes() == kept

    # Nothing needs it.
    (demo / AHEAD).write_bytes(kept[:-99] + bytes(255 - byte for byte in kept[-99:]))
    usual = PackedModel.open(asset("demo", "packed"))
    for one, other in zip(PackedModel.open(demo).lookahead(), usual.lookahead(), strict=True):
        assert torch.equal(one.linear, other.linear)
    assert [damage.file for damage in damages(demo, manifest, lambda _step, _share: None)] == [AHEAD]


def test_little_text_teaches_nothing(demo: Path) -> None:
    assert own_predictors.run(opened(demo), [5] * (LEAST - 1), TOLD) is None
