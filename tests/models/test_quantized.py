"""Checkpoints that others rounded: each matrix is what its own library makes of it, to the last bit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.quality.source_model import identify
from floe_chat.kernels.codes import unpack_codes, widened
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, UsageError
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..helpers import edit_json, edit_tensors, make_checkpoint, make_pack, run_cli

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors that stand for a matrix by the ends of their names, and what its own library makes of them."""


def fp8(weight: Tensor, block: tuple[int, int], kind: torch.dtype) -> Stored:
    """As DeepSeek, Qwen, GLM and MiniMax publish: a scale for each block; (0, 0): for all."""
    rows, columns = weight.shape
    high, wide = block if all(block) else weight.shape
    padded = torch.nn.functional.pad(weight.float().abs(), (0, -columns % wide, 0, -rows % high))
    grid = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).amax((1, 3)) / 448
    if kind == torch.float8_e8m0fnu:
        exponents = grid.log2().ceil()
        scale, grid = (exponents + 127).to(torch.uint8), exponents.exp2()
    else:
        scale = grid = grid.to(kind)
    spread = grid.float().repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
    codes = (weight.float() / spread).to(torch.float8_e4m3fn)
    if rows % high or columns % wide:  # which transformers refuses, and DeepSeek publishes
        found = (codes.float() * spread).bfloat16()
    else:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        library = Fp8Dequantize(None)._dequantize_one  # pyright: ignore[reportPrivateUsage, reportArgumentType]
        found = library(codes, scale.reshape(grid.shape), torch.bfloat16)
    stored = scale.view(torch.float8_e8m0fnu) if kind == torch.float8_e8m0fnu else scale
    return {"weight": codes, "weight_scale_inv": stored if all(block) else stored.reshape(())}, found


def compressed(weight: Tensor, form: str, weights: Mapping[str, Any]) -> Stored:
    """By compressed-tensors itself, with a scale for each block, group or row; imported here, as that takes seconds."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    given = scheme.weights
    assert given is not None
    columns = weight.shape[1]
    if given.block_structure:
        high, wide = given.block_structure
    else:
        high, wide = 1, given.group_size or columns
    parts = weight.float().unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    low, most = parts.amin((1, 3)), parts.amax((1, 3))
    peak = {"float4": 6.0, "float8": 448.0, "int4": 7.0, "int8": 127.0}[f"{given.type}{given.num_bits}"]
    state = {"weight": weight}
    if not given.symmetric:
        scale = ((most.clamp(min=0) - low.clamp(max=0)) / (2 * peak + 1)).to(weight.dtype)
        state["weight_zero_point"] = (-(peak + 1) - low / scale).round().clamp(-(peak + 1), peak).to(torch.int8)
    else:
        scale = (parts.abs().amax((1, 3)) / peak).to(weight.dtype)
    if form.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([448 / float(scale.max())])
        scale = (scale.float() * state["weight_global_scale"]).to(torch.float8_e4m3fn).to(weight.dtype)
    if form.startswith("mxfp4"):
        scale = scale.float().log2().ceil().exp2().to(weight.dtype)
    library: Any = BaseCompressor.get_value_from_registry(form)
    stored = library.compress(state | {"weight_scale": scale}, scheme)
    return stored, library.decompress(stored, scheme)["weight"]


def words(codes: Tensor, bits: int) -> Tensor:
    """Neighbours in a row, in one number of 32 bits each, the first one lowest."""
    each = codes.long().unflatten(1, (-1, 32 // bits))
    whole = sum(each[..., at] << bits * at for at in range(32 // bits))
    assert isinstance(whole, Tensor)
    return (whole - (whole >> 31 << 32)).to(torch.int32)


def by_rows(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (K, N), zeros and float16 scales (K / group, N), and the matrix (N, K) that they stand for."""
    parts = weight.T.float().unflatten(0, (-1, group))
    scale = ((parts.amax(1) - parts.amin(1)) / (2**bits - 1)).half()
    zero = (-parts.amin(1) / scale.float()).round().clamp(1, 2**bits - 1).int()
    codes = (parts / scale.float()[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1).int()
    found = ((codes - zero[:, None]).half() * scale[:, None]).flatten(0, 1).T
    return codes.flatten(0, 1), zero, scale, found


def awq(weight: Tensor, group: int = 32) -> Stored:
    codes, zero, scale, found = by_rows(weight, 4, math.gcd(weight.shape[1], group))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of AutoAWQ's gemm
    swapped = [words(each.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for each in (codes, zero)]
    return {"qweight": swapped[0], "qzeros": swapped[1], "scales": scale}, found


def gptq(weight: Tensor, bits: int, *, version: int, moved: bool, group: int = 32) -> Stored:
    group = math.gcd(weight.shape[1], group)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))  # by importance
    order = order if moved else order.sort()[0]
    back = order.argsort()
    codes, zero, scale, found = by_rows(weight[:, order], bits, group)
    return (
        {
            "qweight": words(codes[back].T, bits).T.contiguous(),
            "qzeros": words(zero - int(version == 1), bits),
            "scales": scale,
            "g_idx": (torch.arange(len(codes)) // group)[back].int(),
        },
        found[:, back],
    )


def fours(weight: Tensor, group: int) -> Stored:
    """Two numbers of four bits in a byte: ModelOpt's NVFP4 in groups of 16, Quark's MXFP4 in those of 32."""
    parts = weight.float().unflatten(1, (-1, group))
    peak = parts.abs().amax(-1)
    if group == 16:
        whole = peak.max() / (6 * 448)
        scale = (peak / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        spread = scale.float() * whole
        stored = {"weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}
    else:
        exponents = (peak / 6).log2().ceil()
        spread = exponents.exp2()
        stored = {"weight_scale": (exponents + 127).to(torch.uint8)}
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    codes = ((parts / spread[..., None])[..., None] - table).abs().argmin(-1).flatten(1).to(torch.uint8)
    found = (table[codes.int()].unflatten(1, (-1, group)) * spread[..., None]).flatten(1).bfloat16()
    return stored | {"weight": codes[:, 1::2] << 4 | codes[:, ::2]}, found


def blocks_of_modelopt(weight: Tensor) -> Stored:
    """Its FP8_PB_WO, whose scales have four dimensions."""
    stored, found = fp8(weight, (128, 128), torch.float32)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"][:, None, :, None]}, found


def whole_of_modelopt(weight: Tensor) -> Stored:
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": 2 * scale}, (codes.float() * scale).bfloat16()


def by_library(form: str, weights: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Tensor], Stored]]:
    """What compressed-tensors states of a form, and how it stores a matrix."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stated = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return stated, lambda weight: compressed(weight, form, weights)


INT4, FP4 = {"num_bits": 4, "type": "int"}, {"num_bits": 4, "type": "float"}
BYTE, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
SCHEMES = {
    "INT4": ("pack-quantized", INT4 | {"group_size": 32, "strategy": "group"}),
    "INT4 with zeros": ("pack-quantized", INT4 | {"group_size": 32, "strategy": "group", "symmetric": False}),
    "INT4 by rows": ("pack-quantized", INT4 | {"strategy": "channel"}),
    "INT8": ("pack-quantized", BYTE | {"group_size": 16, "strategy": "group"}),
    "INT8 bytes": ("int-quantized", BYTE | {"strategy": "channel"}),
    "INT8 bytes with zeros": ("naive-quantized", BYTE | {"strategy": "channel", "symmetric": False}),
    "FP8": ("float-quantized", FLOAT8 | {"strategy": "channel"}),
    "FP8 blocks": ("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [16, 32]}),
    "NVFP4": ("nvfp4-pack-quantized", FP4 | {"group_size": 16, "strategy": "tensor_group"}),
    "MXFP4": ("mxfp4-pack-quantized", FP4 | {"group_size": 32, "strategy": "group", "scale_dtype": "torch.uint8"}),
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "group_size": 32}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}


def by_quark(dtype: str, **others: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": dtype, **others}}, "exclude": []}


# By name: config.json's part, and how a matrix is stored.
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "FP8 of makers": (FP8 | {"weight_block_size": [32, 16]}, lambda weight: fp8(weight, (32, 16), torch.float32)),
    "FP8, exponents": (
        FP8 | {"weight_block_size": [32, 16]},
        lambda weight: fp8(weight, (32, 16), torch.float8_e8m0fnu),
    ),
    "FP8, cut blocks": (FP8 | {"weight_block_size": [64, 48]}, lambda weight: fp8(weight, (64, 48), torch.float32)),
    "FP8 whole": (FP8, lambda weight: fp8(weight, (0, 0), torch.bfloat16)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq),
    "AWQ in wide groups": ({"quant_method": "awq", "bits": 4, "group_size": 64}, lambda weight: awq(weight, 64)),
    "GPTQ in wide groups": (
        GPTQ | {"bits": 4, "group_size": 64},
        lambda weight: gptq(weight, 4, version=1, moved=False, group=64),
    ),
    "GPTQ": (GPTQ | {"bits": 4}, lambda weight: gptq(weight, 4, version=1, moved=False)),
    "GPTQ of 8 bits": (GPTQ | {"bits": 8}, lambda weight: gptq(weight, 8, version=1, moved=True)),
    "GPTQ v2": (
        GPTQ | {"bits": 2, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 2, version=2, moved=False),
    ),
    "GPTQ of AutoRound": (
        AUTOROUND | {"packing_format": "auto_round:auto_gptq"},
        lambda weight: gptq(weight, 4, version=1, moved=False),
    ),
    "AWQ of AutoRound": (AUTOROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    # Layers may be wider than what is said of all.
    "GPTQ, wider than stated": (GPTQ | {"bits": 4}, lambda weight: gptq(weight, 8, version=1, moved=False)),
    "NVFP4 of ModelOpt": (MODELOPT | {"quant_algo": "NVFP4"}, lambda weight: fours(weight, 16)),
    "FP8 of ModelOpt": (MODELOPT | {"quant_algo": "FP8"}, whole_of_modelopt),
    "FP8 of ModelOpt, blocks": (MODELOPT | {"quant_algo": "fp8_pb_wo"}, blocks_of_modelopt),
    "MXFP4 of Quark": (by_quark("fp4", scale_format="e8m0", group_size=32), lambda weight: fours(weight, 32)),
    "FP8 of Quark": (by_quark("fp8_e4m3"), whole_of_modelopt),
    **{name: by_library(form, given) for name, (form, given) in SCHEMES.items()},
}


def rounded(source: Path, folder: Path, name: str) -> dict[str, Tensor]:
    """A copy of a checkpoint with all linear layers but routers and the head in this form; what they stand for."""
    stated, form = FORMS[name]
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors, found = dict[str, Tensor](), dict[str, Tensor]()
    for file in sorted(source.glob("*.safetensors")):
        for key, tensor in load_file(file).items():
            stem, _, part = key.rpartition(".")
            if (
                part != "weight"
                or tensor.dim() != 2
                or any(word in key for word in ("embed", "gate.weight", "lm_head"))
            ):
                tensors[key] = tensor
                continue
            stored, found[key] = form(tensor)
            tensors |= {f"{stem}.{end}": value.contiguous() for end, value in stored.items()}
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)  # of kept keys
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", lambda fields: fields.update(quantization_config=stated))
    return found


def broken(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantized") / "source", layers=1, experts=3)


@pytest.mark.parametrize("names", [[*SCHEMES], FORMS.keys() - SCHEMES.keys()], ids=["compressed-tensors", "others"])
def test_values_are_those_of_the_formats_own_library(source: Path, tmp_path: Path, names: Collection[str]) -> None:
    for name in names:
        expected = rounded(source, tmp_path / name, name)
        checkpoint, original = Checkpoint(tmp_path / name), Checkpoint(source)
        assert checkpoint.places.keys() == original.places.keys()
        assert expected and not checkpoint.exact and name.startswith(checkpoint.shelf.rounding.partition(",")[0])
        for key in original.places:
            found, wanted = checkpoint.tensor(key), expected.get(key, original.tensor(key))
            assert found.dtype == wanted.dtype and torch.equal(found, wanted), (name, key)
        first = min(expected)
        assert 0.0 < (expected[first].float() - original.tensor(first).float()).abs().mean() < 0.08, name


@pytest.mark.parametrize("name", ["FP8 of makers", "FP8, exponents", "FP8 whole"])
def test_experts_side_by_side_in_one_tensor_are_rounded_one_by_one(tmp_path: Path, name: str) -> None:
    """As newer families publish them; what is read is one expert."""
    copy = families.make("qwen3_5_moe", tmp_path / "copy", hidden_size=64, moe_intermediate_size=32)
    families.one_shard(copy)
    stated, form = FORMS[name]
    expected = dict[str, list[Tensor]]()

    def round_off(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            each = [form(one.contiguous()) for one in tensors.pop(key)]
            expected[key] = [found for _, found in each]
            for end in each[0][0]:
                tensors[key + end.removeprefix("weight")] = torch.stack([stored[end] for stored, _ in each])

    broken(copy, round_off)
    edit_json(copy / "config.json", lambda fields: fields.update(quantization_config=stated))
    checkpoint = Checkpoint(copy)
    assert len(expected) == 2 * len(checkpoint.layers)
    for key, each in expected.items():
        assert torch.equal(checkpoint.tensor(key), torch.stack(each))
        assert torch.equal(checkpoint.tensor(key, 2), each[2])


def test_a_pack_is_that_of_what_the_codes_stand_for(source: Path, tmp_path: Path) -> None:
    expected = rounded(source, tmp_path / "copy", "FP8 of makers")
    shutil.copytree(source, tmp_path / "plain")
    for file in (tmp_path / "plain").glob("*.safetensors"):
        save_file({key: expected.get(key, tensor) for key, tensor in load_file(file).items()}, file)
    packs = [tmp_path / "packs" / name for name in ("copy", "plain")]
    for pack in packs:
        make_pack(tmp_path / pack.name, pack, PackSpec())
    for file in ("dense.safetensors", "layer_00.safetensors"):
        found, wanted = (load_file(pack / file) for pack in packs)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    stated = json.loads((packs[0] / "manifest.json").read_text("utf-8"))["source"]
    assert stated["rounding"] == "FP8" and not stated["exact"]
    answers = [
        run_cli("ask", "--no-save", "--temperature", "0", "--max-tokens", "5", "--model", str(pack), "hi")
        for pack in packs
    ]
    assert answers[0].code == 0 and answers[0].out == answers[1].out != ""
    # What was rounded before is measured against the original too.
    measured = ("--preset", "High", "--tokens", "512", "--json")
    losses = [
        json.loads(run_cli("eval", str(packs[0]), "--source", str(reference), *measured).out)["presets"][0]["kl_mean"]
        for reference in (source, tmp_path / "copy")
    ]
    assert losses[0] > losses[1] > 0


def test_the_original_is_a_reference_of_a_copy_with_other_norms(source: Path, tmp_path: Path) -> None:
    """AWQ folds scales into them, and copies are of float16."""
    rounded(source, tmp_path / "copy", "AWQ")
    broken(
        tmp_path / "copy",
        lambda tensors: tensors.update(
            {
                name: (tensor * 1.5 if "norm" in name else tensor).half()
                for name, tensor in tensors.items()
                if tensor.dtype == torch.bfloat16
            }
        ),
    )
    make_pack(tmp_path / "copy", tmp_path / "pack", PackSpec())
    pack = PackedModel.open(tmp_path / "pack")
    assert len(identify(Checkpoint(source), pack)) == 64
    other = shutil.copytree(source, tmp_path / "other")
    edit_tensors(other, lambda name, tensor: tensor.roll(1) if "embed" in name else tensor)
    with pytest.raises(UsageError, match="is not the source"):
        identify(Checkpoint(other), pack)


@pytest.mark.parametrize(
    ("name", "end", "value", "said"),
    [
        ("FP8 of makers", "_scale_inv", None, "No shard holds {key}_scale_inv."),
        ("FP8 of makers", "_scale_inv", torch.ones(5, 2), "{key}_scale_inv of (5, 2) does not divide"),
        ("AWQ", "qzeros", None, "No shard holds {stem}.qzeros."),
        ("AWQ", "scales", torch.ones(2, 96).int(), "{stem}.scales is I32; floating point is needed."),
        *(
            pytest.param("INT4", end, value, said, marks=pytest.mark.thorough)
            for end, value, said in (
                ("_shape", torch.tensor([96, 80]), "{key}: its codes are (96, 64), and it says (96, 80)."),
                ("_packed", torch.ones(96, 8), "{key}_packed is F32; I32 or U8 is needed."),
                ("", torch.ones(96, 64), "{key} is there at 16 bits and in codes."),
            )
        ),
        ("GPTQ", "g_idx", torch.full((64,), 9), "{key}: "),
    ],
)  # fmt: skip
def test_files_that_contradict_themselves_are_refused_by_the_tensors_name(
    source: Path, tmp_path: Path, name: str, end: str, value: Tensor | None, said: str
) -> None:
    key = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    stem = key.removesuffix(".weight")
    rounded(source, tmp_path / "copy", name)
    whole = f"{stem}.{end}" if end[:1].isalpha() else key + end
    broken(tmp_path / "copy", lambda tensors: tensors.pop(whole) if value is None else tensors.update({whole: value}))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path / "copy").tensor(key)
    assert said.format(key=key, stem=stem) in refused.value.cause and refused.value.hint


@pytest.mark.parametrize(
    ("stated", "called"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ, 4 bits"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ, 3 bits"),
        ({"quant_method": "gptq"}, "GPTQ weights"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": INT4 | {"num_bits": 3}}}}, "INT3"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}, "sparse"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "ModelOpt"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "Quark's 'int4'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:exllamav2"}, "AutoRound"),
        ({"quant_method": 7}, "quantized"),
        (["fp8"], "quantized"),
    ],
)
def test_other_ways_are_refused_by_name(tmp_path: Path, tiny_checkpoint: Path, stated: Any, called: str) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    edit_json(tmp_path / "copy" / "config.json", lambda fields: fields.update(quantization_config=stated))
    with pytest.raises(CheckpointError, match="cannot be read yet") as refused:
        Checkpoint(tmp_path / "copy")
    assert called in refused.value.title


def test_a_config_json_of_another_copy_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    edit_json(tmp_path / "copy" / "config.json", lambda fields: fields.update(quantization_config=FP8))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint(tmp_path / "copy")
    assert "says that its weights are FP8, but no tensor has codes" in refused.value.cause


@pytest.mark.parametrize(
    ("name", "bits", "kept"),
    [
        ("AWQ in wide groups", "4/4/4", "qkv w1 w3"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (
                ("GPTQ in wide groups", "3/4/8", "w1"),
                ("INT4 by rows", "4/8/4", "qkv w3"),
                ("AWQ", "4/4/4", ""),  # in narrower groups than a pack's
            )
        ),
    ],
)
def test_codes_are_kept_where_a_packs_grid_is_as_wide(
    source: Path, tmp_path: Path, name: str, bits: str, kept: str
) -> None:
    """Scales of experts become the nearest bytes; those of attention stay."""
    rounded(source, tmp_path / "copy", name)
    up, rows, dense = map(int, bits.split("/"))
    make_pack(tmp_path / "copy", tmp_path / "pack", PackSpec(up, rows, rows, dense, signal="up"))
    checkpoint, pack = Checkpoint(tmp_path / "copy"), PackedModel.open(tmp_path / "pack")
    layer, attention = pack.layer(0), pack.dense()
    stem = "model.layers.0.self_attn.k_proj"
    stored = [attention[f"{stem}.{part}"] for part in ("q", "scale", "zero")]
    given = checkpoint.codes(f"{stem}.weight")
    assert given is not None and len(given.codes) == len(stored[0])
    same = dense == 4 and torch.equal(unpack_codes(stored[0], 64, 4), given.codes)
    assert same == ("qkv" in kept) and (not same or torch.equal(stored[1].float(), given.scale))
    row = layer.rows.layout.other
    raw = layer.rows.data[1][:, : row.nbytes]
    for part, width, packed, (scale, zero) in (
        ("w3", up, layer.signal.q[1], (layer.signal.scale[1], layer.signal.zero[1])),
        ("w1", rows, raw[:, row.head :], row.scales(raw)),
    ):
        given = checkpoint.codes(f"model.layers.0.block_sparse_moe.experts.1.{part}.weight")
        assert given is not None
        found = unpack_codes(packed, 64, width)
        order = torch.cdist(found.float(), given.codes.float()).argmin(1)  # neurons are sorted
        same = torch.equal(found, given.codes[order])
        assert same == (part in kept)
        if same:
            wide, level = widened(scale, zero, width)
            assert torch.equal(level, given.zero[order])
            assert (wide / given.scale[order] - 1).abs().max() <= 1 / 32


def test_an_order_by_importance_keeps_no_codes(source: Path, tmp_path: Path) -> None:
    rounded(source, tmp_path / "copy", "GPTQ of 8 bits")
    assert Checkpoint(tmp_path / "copy").codes("model.layers.0.self_attn.k_proj.weight") is None
