"""Each layer's signal is the projection that loses less, and experts that lose out of proportion are not skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.rule import NEVER
from floe_chat.models.checking.verify import compare
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import PackError
from floe_chat.models.pack.manifest import FILE_NAME, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import pack_experts
from floe_chat.models.packing.pack import EXACT, PackSpec, pack
from floe_chat.models.packing.signal_choice import choose, exempt
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..engine.driver import open_model
from ..helpers import (
    calibration_tokens,
    edit_json,
    edit_tensors,
    make_checkpoint,
    reference_model,
    relative_rms,
    reseal,
)

LOW = PackSpec(up=3, gate=4, down=4, dense=8)


def packed(source: Path, folder: Path, spec: PackSpec) -> Manifest:
    return pack(Checkpoint(source), folder, spec, calibration_tokens(), "signals")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("signals") / "source", layers=3, shards=False)


def quietened(folder: Path, part: str) -> None:
    """Make most neurons' values of one projection small: they are told by it alone."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(f".{part}.weight"):
                tensor[tensor.shape[0] // 4 :] *= 0.02
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(("part", "signal"), [("w1", "gate"), ("w3", "up")])
def test_the_projection_that_tells_more_is_chosen(part: str, signal: Projection, tmp_path: Path) -> None:
    quietened(make_checkpoint(tmp_path / "source", shards=False), part)
    checkpoint = Checkpoint(tmp_path / "source")
    torch.manual_seed(0)
    hidden, chosen = torch.randn(200, 64), torch.rand(200, 4).topk(2).indices
    weights = torch.full((200, 2), 0.5)
    assert choose(checkpoint, 0, hidden, chosen, weights) == signal
    manifest = packed(tmp_path / "source", tmp_path / "pack", LOW)
    assert {manifest.signal_of(layer) for layer in range(2)} == {signal}
    names = {name.partition(".")[0] for name in load_file(tmp_path / "pack" / "layer_00.safetensors") if ".q" in name}
    assert names == {signal}


def test_what_is_asked_for_is_done(source: Path, tmp_path: Path) -> None:
    for signal in ("up", "gate"):
        manifest = packed(source, tmp_path / signal, PackSpec(up=3, gate=4, down=4, dense=8, signal=signal))
        assert [manifest.signal_of(layer) for layer in range(3)] == [signal] * 3
        assert Manifest.read(tmp_path / signal) == manifest
        assert all(
            one.error <= one.limit
            for one in compare(
                PackedModel.open(tmp_path / signal), Checkpoint(source), range(3), lambda _step, _share: None
            )
        )


@pytest.fixture
def mixed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[PackSpec], Path]:
    """Packs whose layers have one signal and the other in turn."""
    asked: Iterator[Any] = iter(["gate", "up", "gate"])

    def one_after_another(*_given: object) -> Any:
        return next(asked)

    monkeypatch.setattr(pack_experts, "choose", one_after_another)

    def make(spec: PackSpec) -> Path:
        manifest = packed(source, tmp_path / "mixed", spec)
        assert manifest.signals == ("gate", "up", "gate")
        return tmp_path / "mixed"

    return make


def test_layers_of_both_kinds_answer_as_the_source(mixed: Callable[[PackSpec], Path], source: Path) -> None:
    loaded, theirs = open_model(mixed(EXACT), "Exact"), reference_model(source)
    ids = torch.randint(3, 250, (14,), generator=torch.Generator().manual_seed(4)).tolist()
    kv, got = KVCache(), list[Tensor]()
    for piece in (ids[:11], *([one] for one in ids[11:])):
        got.append(loaded.decoder.forward(piece, kv))
        kv.computed(piece, loaded.control.preset)
    with torch.inference_mode():
        wanted = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 10:]
    assert relative_rms(torch.cat(got), wanted) <= 1e-5


def test_a_manifest_with_other_signals_is_refused(mixed: Callable[[PackSpec], Path]) -> None:
    folder = mixed(LOW)
    edit_json(folder / FILE_NAME, lambda fields: fields.update(signals=["gate", "down", "gate"]))
    with pytest.raises(PackError, match="damaged"):
        Manifest.read(folder)
    edit_json(folder / FILE_NAME, lambda fields: fields.update(signals=["gate"]))
    with pytest.raises(PackError, match="damaged"):
        Manifest.read(folder)
    edit_json(folder / FILE_NAME, lambda fields: fields.update(signals=["up", "up", "gate"]))
    reseal(folder)
    with pytest.raises(PackError, match="damaged"):
        PackedModel.open(folder).layer(0)


def test_only_what_is_out_of_proportion_is_exempt() -> None:
    tokens = torch.tensor([100.0, 100.0, 20.0, 100.0, 3.0])
    lost = torch.tensor([1.0, 1.2, 0.2, 0.9, 500.0])  # too few tokens say nothing
    assert exempt(lost, tokens) == []
    assert exempt(torch.tensor([1.0, 1.2, 40.0, 0.9, 0.0]), tokens) == [2]
    assert exempt(torch.tensor([1.0, 1.2, 0.9, 0.9, 0.0]), tokens) == []  # not of all that is lost
    assert exempt(torch.zeros(5), tokens) == []


def test_an_expert_that_loses_out_of_proportion_is_not_skipped(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shards=False)

    def louder(name: str, tensor: Tensor) -> Tensor:
        return tensor * 40 if name.endswith("layers.1.block_sparse_moe.experts.2.w2.weight") else tensor

    edit_tensors(source, louder)
    packed(source, tmp_path / "pack", LOW)
    layer = PackedModel.open(tmp_path / "pack").layer(1)
    for table in (layer.thresholds, layer.products):
        assert (table[2] == NEVER).all() and all((table[expert, -1] > 0) for expert in (0, 1, 3))
