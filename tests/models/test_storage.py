"""How checkpoints store experts: gpt-oss's blocks of four bits mean what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families.storage import Interleaved, Mxfp4, mxfp4_values
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import EXACT, PackSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..engine.driver import open_model
from ..families import random_blocks
from ..helpers import make_pack, reference_model, relative_rms


def test_values_are_the_librarys() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_blocks(3, 10, 4)
    theirs = convert_moe_packed_tensors(blocks, scales)  # (E, columns, rows)
    for expert in range(3):
        assert torch.equal(mxfp4_values(blocks[expert], scales[expert]), theirs[expert].T)
    assert mxfp4_values(blocks[0], torch.zeros_like(scales[0])).isfinite().all()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return families.make_coded(tmp_path_factory.mktemp("mxfp4"))


def test_both_forms_are_the_same_experts(pair: tuple[Path, Path]) -> None:
    plain, coded = map(Checkpoint, pair)
    assert isinstance(plain.storage, Interleaved) and isinstance(coded.storage, Mxfp4)
    assert coded.exact and coded.float16 == torch.bfloat16
    for layer, expert in ((0, 0), (2, 4)):
        ours, theirs = plain.whole_expert(layer, expert), coded.whole_expert(layer, expert)
        assert all(torch.equal(mine, other) for mine, other in zip(ours[:3], theirs[:3], strict=True))
        assert ours.biases is not None and theirs.biases is not None
        assert all(torch.equal(mine, other) for mine, other in zip(ours.biases, theirs.biases, strict=True))


def test_a_pack_of_blocks_answers_as_their_values_do(pair: tuple[Path, Path], tmp_path: Path) -> None:
    make_pack(pair[1], tmp_path / "pack", EXACT)
    loaded, theirs = open_model(tmp_path / "pack", "Exact"), reference_model(pair[0])
    ids = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert relative_rms(loaded.decoder.forward(ids, KVCache())[0], wanted) <= 1e-5


def test_eight_bits_hold_blocks_without_loss(pair: tuple[Path, Path], tmp_path: Path) -> None:
    make_pack(pair[1], tmp_path / "pack", PackSpec(up=8, gate=8, down=8, dense=16, group=32))
    source, packed = Checkpoint(pair[1]), PackedModel.open(tmp_path / "pack")
    for number in range(5):
        layer, expert = packed.layer(1), source.whole_expert(1, number)
        gate = layer.signal.dense(number, torch.float32)
        up, down = layer.rows.layout.read(layer.rows.data[number], torch.float32)
        # Neurons are in another order: each row of theirs is one of ours.
        for ours, theirs in ((gate, expert.gate), (up, expert.up)):
            assert {tuple(row) for row in ours.tolist()} == {tuple(row) for row in theirs.tolist()}
        # Down's groups are columns' here, and rows' in the blocks: not every one is of alike sizes.
        assert relative_rms(down.T.sort(1).values, expert.down.float().sort(1).values) <= 1e-2


def edited(folder: Path, copy: Path, change: Any) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    for file in copy.glob("*.safetensors"):
        save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return copy


def other_bytes(name: str, tensor: Tensor) -> Tensor:
    return tensor.short() if name.endswith("1.mlp.experts.down_proj_blocks") else tensor


def too_few_scales(name: str, tensor: Tensor) -> Tensor:
    return tensor[:, :, :1].contiguous() if name.endswith("gate_up_proj_scales") else tensor


def a_short_bias(name: str, tensor: Tensor) -> Tensor:
    return tensor[:, :7].contiguous() if name.endswith("0.mlp.experts.down_proj_bias") else tensor


@pytest.mark.parametrize("change", [other_bytes, too_few_scales, a_short_bias])
def test_blocks_of_another_kind_are_refused(change: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be packed") as caught:
        Checkpoint(edited(pair[1], tmp_path / "copy", change))
    assert "is needed" in caught.value.cause
