"""Source checkpoints: what cannot be packed is refused with an explanation, before or while it is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.models.checkpoint import Checkpoint, read_config
from floe_chat.models.checkpoint_files import INDEX, FolderShelf
from floe_chat.models.errors import CheckpointError
from floe_chat.models.families.storage import Interleaved, Mxfp4, mxfp4_values
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import calibration
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import EXACT, PackSpec, pack
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..engine.driver import open_model
from ..families import random_blocks
from ..helpers import (
    calibration_tokens,
    edit_json,
    edit_tensors,
    make_checkpoint,
    make_pack,
    reference_model,
    relative_rms,
)


@pytest.fixture
def source(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own to damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))


def refused(source: Path, spec: PackSpec = EXACT) -> CheckpointError:
    """The explanation that packing `source` ends with; no manifest is left behind."""
    destination = source.parent / "packed"
    with pytest.raises(CheckpointError) as caught:
        make_pack(source, destination, spec)
    assert caught.value.title and caught.value.hint
    assert not (destination / "manifest.json").exists()
    return caught.value


def test_up_is_w3_and_gate_is_w1(tiny_checkpoint: Path) -> None:
    found: dict[str, Tensor] = {}
    for path in tiny_checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys() if "layers.0" in name and ".2.w" in name}  # noqa: SIM118
    gate, up, down = Checkpoint(tiny_checkpoint).expert(0, 2)
    prefix = "model.layers.0.block_sparse_moe.experts.2"
    for part, tensor in (("w1", gate), ("w3", up), ("w2", down)):
        assert torch.equal(found[f"{prefix}.{part}.weight"], tensor)


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_what_is_no_checkpoint_is_explained(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path / kind)
    assert str(tmp_path / kind) in caught.value.title and caught.value.cause and caught.value.hint


@pytest.mark.parametrize("model_type", ["llama", "bert", "dbrx", "", None, 7, ["mixtral"], {}], ids=repr)
def test_other_architectures_are_refused_by_name(source: Path, model_type: Any) -> None:
    def change(fields: Any) -> None:
        fields["model_type"] = model_type

    edit_json(source / "config.json", change)
    error = refused(source)
    assert repr(model_type) in error.cause
    known = isinstance(model_type, str) and model_type
    assert ("Mixtral, OLMoE, " if known else "config.json") in error.hint


GARBAGE = {"empty": b"", "open": b"{", "list": b"[]", "null": b"null", "raw": b"\xff\xff", "deep": b"[" * 100_000}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_configuration_is_refused(source: Path, content: bytes) -> None:
    (source / "config.json").write_bytes(content)
    assert "config.json" in str(refused(source))


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "layers-as-text": {"num_hidden_layers": "two"},
    "hidden-as-text": {"hidden_size": "big"},
    "hidden-of-another-model": {"hidden_size": 128},
    "intermediate-larger": {"intermediate_size": 128},
    "intermediate-smaller": {"intermediate_size": 90},
    "more-layers": {"num_hidden_layers": 3},
    "more-experts": {"num_local_experts": 5},
    "fewer-experts": {"num_local_experts": 3},
    "no-experts": {"num_local_experts": 0},
    "top-k-above-experts": {"num_experts_per_tok": 9},
    "no-heads": {"num_attention_heads": 0},
    "vocabulary-of-another-model": {"vocab_size": 100},
    "activation-that-experts-do-not-use": {"hidden_act": "gelu"},
    "activation-that-does-not-exist": {"hidden_act": "bogus"},
    "rope-that-does-not-exist": {"rope_parameters": {"rope_type": "bogus"}},
}


@pytest.mark.parametrize("changes", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_configuration_that_does_not_fit_the_weights_is_refused(source: Path, changes: dict[str, Any]) -> None:
    def change(fields: Any) -> None:
        fields.update(changes)

    edit_json(source / "config.json", change)
    refused(source)


def test_pickle_files_are_never_read(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        path.unlink()
    torch.save({"model.norm.weight": torch.ones(1)}, source / "pytorch_model.bin")
    error = refused(source)
    assert "pytorch_model.bin" in error.cause and "never read" in error.cause


def _lists_too_much(weights: dict[str, str]) -> None:
    weights["model.layers.0.extra.weight"] = next(iter(weights.values()))


def _lists_too_little(weights: dict[str, str]) -> None:
    del weights["model.norm.weight"]


def _swaps_files(weights: dict[str, str]) -> None:
    weights["model.norm.weight"] = next(file for file in weights.values() if file != weights["model.norm.weight"])


def _names_a_lost_file(weights: dict[str, str]) -> None:
    weights["model.norm.weight"] = "model-00009-of-00009.safetensors"


def _climbs(weights: dict[str, str]) -> None:
    weights["model.norm.weight"] = "../model-00001-of-00003.safetensors"


@pytest.mark.parametrize("change", [_lists_too_much, _lists_too_little, _swaps_files, _names_a_lost_file, _climbs])
def test_shards_that_disagree_with_the_index_are_refused(source: Path, change: Any) -> None:
    edit_json(source / INDEX, lambda fields: change(fields["weight_map"]))
    error = refused(source)
    assert "index" in error.title and ("model.norm" in error.cause or "extra" in error.cause or "model-" in error.cause)


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_in_the_index_is_refused(source: Path, content: bytes) -> None:
    (source / INDEX).write_bytes(content)
    assert INDEX in refused(source).title


def test_a_tensor_in_two_shards_is_refused(source: Path) -> None:
    (source / INDEX).unlink()
    first = sorted(source.glob("*.safetensors"))[0]
    shutil.copyfile(first, source / "model-copy.safetensors")
    error = refused(source)
    assert first.name in error.cause and "model-copy.safetensors" in error.cause


def test_files_that_the_index_does_not_name_are_left_alone(source: Path) -> None:
    (source / "adapter.safetensors").write_bytes(sorted(source.glob("*.safetensors"))[0].read_bytes())
    (source / "consolidated.safetensors").write_bytes(b"not one at all")
    assert Checkpoint(source).experts == 4


def test_headers_say_where_every_tensor_lies(tiny_checkpoint: Path) -> None:
    for file, places in FolderShelf(tiny_checkpoint).headers().items():
        whole = (tiny_checkpoint / file).read_bytes()
        for name, tensor in load_file(tiny_checkpoint / file).items():
            place = places.pop(name)
            assert whole[place.start : place.end] == tensor.view(torch.uint8).numpy().tobytes()
            assert place.shape == tuple(tensor.shape) and place.dtype == "BF16"
        assert not places


def _with_header(shard: bytes, **changes: Any) -> bytes:
    """The same with other fields of its first tensor."""
    length = int.from_bytes(shard[:8], "little")
    header: dict[str, Any] = json.loads(shard[8 : 8 + length])
    header.pop("__metadata__", None)
    first = next(iter(header))
    header[first] = {name: value for name, value in (header[first] | changes).items() if value is not None}
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + shard[8 + length :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda whole: whole[:-7],
    "empty": lambda _whole: b"",
    "zeros": lambda whole: b"\0" * len(whole),
    "offsets beyond its end": lambda whole: _with_header(whole, data_offsets=[0, len(whole)]),
    "negative offsets": lambda whole: _with_header(whole, data_offsets=[-8, 8]),
    "no shape": lambda whole: _with_header(whole, shape=None),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "missing"])
def test_every_damaged_shard_is_named(source: Path, damage: str) -> None:
    """Before weights are read."""
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) >= 3
    for shard in shards:
        whole = shard.read_bytes()
        shard.write_bytes(DAMAGE[damage](whole)) if damage != "missing" else shard.unlink()
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(source)
        assert shard.name in str(caught.value) and caught.value.hint
        shard.write_bytes(whole)


NOT_FINITE = [
    pytest.param(part, value, spec, id=f"{part}-{value}-{spec.up}-bit")
    for part in ("experts.1.w1", "experts.1.w2", "experts.1.w3", "q_proj", "moe.gate", "embed_tokens", "model.norm")
    for value, spec in ((float("nan"), EXACT), (float("-inf"), PackSpec()))
]


@pytest.mark.parametrize(("part", "value", "spec"), NOT_FINITE)
def test_weights_that_are_not_finite_are_refused(source: Path, part: str, value: float, spec: PackSpec) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if part not in name:
            return tensor
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    edit_tensors(source, change)
    refused(source, spec)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32], ids=str)
def test_expert_weights_of_other_kinds_are_refused(source: Path, dtype: torch.dtype) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if ".experts." in name else tensor

    edit_tensors(source, change)
    refused(source, PackSpec())


def test_an_expert_of_another_shape_is_refused(source: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor[:-1].clone() if "layers.1" in name and "experts.2.w1" in name else tensor

    edit_tensors(source, change)
    refused(source)


DENSE_DAMAGE = [
    pytest.param(damage, spec, id=f"{damage}-{spec.dense}-bit")
    for spec in (EXACT, PackSpec())
    for damage in ("missing", "shape", "rank", "empty", "codes")
    if damage != "codes" or spec.dense < 16  # integers of the right shape are taken as they are
]


@pytest.mark.parametrize(("damage", "spec"), DENSE_DAMAGE)
def test_a_dense_layer_that_does_not_fit_is_refused(source: Path, damage: str, spec: PackSpec) -> None:
    def change(name: str, tensor: Tensor) -> Tensor | None:
        if not name.endswith("layers.0.self_attn.o_proj.weight"):
            return tensor
        return {
            "missing": None,
            "shape": tensor[:, :-2].clone(),
            "rank": tensor.flatten(),
            "empty": tensor[:, :0].clone(),
            "codes": tensor.to(torch.int8),
        }[damage]

    edit_tensors(source, change)
    assert "o_proj" in str(refused(source, spec))


def test_tied_embeddings_need_no_head_of_their_own(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1)

    def tie(fields: Any) -> None:
        fields["tie_word_embeddings"] = True

    def drop_head(name: str, tensor: Tensor) -> Tensor | None:
        return None if name == "lm_head.weight" else tensor

    edit_json(source / "config.json", tie)
    edit_tensors(source, drop_head)
    edit_json(source / INDEX, lambda fields: fields["weight_map"].pop("lm_head.weight"))
    assert make_pack(source, tmp_path / "packed", EXACT).unquantized
    make_pack(source, tmp_path / "rounded", PackSpec())
    dense = PackedModel.open(tmp_path / "rounded").dense()
    embedding = Checkpoint(source).tensor("model.embed_tokens.weight")
    assert torch.equal(dense["model.embed_tokens.weight"], embedding) and len(dense["lm_head.q"]) == len(embedding)


def test_code_in_a_checkpoint_is_never_run(source: Path) -> None:
    def change(fields: Any) -> None:
        fields["auto_map"] = {"AutoConfig": "evil.Evil"}

    edit_json(source / "config.json", change)
    (source / "evil.py").write_text("raise SystemExit('this code ran')\nclass Evil: ...\n")
    assert read_config(source).model_type == "mixtral"


@pytest.mark.parametrize("kind", ["missing", "garbage"])
def test_a_tokenizer_is_needed_to_read_the_calibration_text(source: Path, kind: str) -> None:
    (source / "tokenizer.json").unlink()
    if kind == "garbage":
        (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        read_tokens(source, "some text")
    assert "tokenizer.json" in caught.value.title and caught.value.hint


@pytest.mark.parametrize("text", ["", "a", "a few words", "x" * 300, "x" * 10_000], ids=len)
def test_calibration_tokens_are_passages_of_the_text(source: Path, text: str) -> None:
    if not text:
        with pytest.raises(CheckpointError):
            read_tokens(source, text)
        return
    tokens = read_tokens(source, text)
    assert tokens.ndim == 2 and tokens.dtype == torch.int64
    rows, length = calibration.TEXT_SHAPE
    assert tokens.shape[1] == min(length, len(text)) and 1 <= tokens.shape[0] <= rows


def test_tokens_that_the_model_does_not_know_are_refused(source: Path) -> None:
    with pytest.raises(CheckpointError):
        pack(Checkpoint(source), source.parent / "packed", EXACT, torch.full((1, 8), 10_000), "x")
    assert calibration_tokens().max() < 259


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
        signal = layer.signal.dense(number, torch.float32)
        other, down = layer.rows.layout.read(layer.rows.data[number], torch.float32)
        by_gate = bool(packed.manifest.signals) and packed.manifest.signals[1] == "gate"
        gate, up = (signal, other) if by_gate else (other, signal)
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
