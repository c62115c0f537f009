"""What a pack holds, against the source checkpoint and against transformers' own pass over the calibration text."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine import quality_presets
from floe_chat.kernels.codes import dequantize, pack_codes
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.pack.quantize import by_hqq, quantize
from floe_chat.models.packing.calibration import quantile_table, threshold_at
from floe_chat.models.packing.pack import EXACT, PackSpec
from safetensors.torch import load_file
from torch import Tensor

from ..engine.test_quantized import use_stored_linears
from ..helpers import (
    calibration_tokens,
    edit_tensors,
    make_checkpoint,
    make_pack,
    packing_error,
    reference_model,
    relative_rms,
)

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "odd-mixtral": {"hidden": 40, "intermediate": 37, "experts": 5, "top_k": 3},
    "top-1": {"hidden": 48, "intermediate": 7, "experts": 3, "top_k": 1, "dtype": torch.float16},
    "olmoe": {"family": "olmoe", "hidden": 48, "intermediate": 40, "experts": 6, "top_k": 2},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint, its lossless pack, and for every layer what its experts were given: x, top-k and weights."""

    source: Path
    packed: PackedModel
    given: list[tuple[Tensor, Tensor, Tensor]]


def routed(case: Case, layer: int, expert: int) -> Tensor:
    """The hidden states that `expert` gets, all of them if it gets none, (T, H) float64."""
    x, index, _ = case.given[layer]
    mine = (index == expert).any(dim=1)
    return x[mine if bool(mine.any()) else slice(None)].double()


def worth(index: Tensor, weights: Tensor, expert: int) -> Tensor:
    """The router's weight for `expert` relative to the mean of its token's, of each token that it gets, (T, 1)."""
    mine = index == expert
    relative = weights / weights.mean(dim=1, keepdim=True)
    return relative[mine][:, None] if bool(mine.any()) else torch.ones(len(index), 1)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in ("odd-mixtral", "olmoe") else pytest.mark.thorough) for name in MODELS
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("contents")
    source = make_checkpoint(folder / "source", **MODELS[request.param])
    make_pack(source, folder / "packed", EXACT)
    return Case(source, PackedModel.open(folder / "packed"), what_experts_get(source))


def what_experts_get(source: Path, linears_of: Path | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(x, top-k index, top-k weights) of every layer when transformers' model reads the calibration text.

    With linears_of, its dense layers have the values of that pack's codes.
    """
    model = reference_model(source)
    if linears_of is not None:
        use_stored_linears(model, linears_of)
    given: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(_module: torch.nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        given.append(arguments)

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(note)
    with torch.inference_mode():
        model(input_ids=calibration_tokens())
    return given


def experts_of(case: Case) -> list[tuple[int, int]]:
    a = case.packed.manifest.architecture
    return [(layer, expert) for layer in range(a.layers) for expert in range(a.experts)]


def permutation(case: Case, layer: int, expert: int) -> list[int]:
    """Source index of every packed neuron, found by the bytes of its up row."""
    _, up, _ = Checkpoint(case.source).expert(layer, expert)
    index = {bytes(row.view(torch.uint8).tolist()): n for n, row in enumerate(up)}
    assert len(index) == len(up)
    return [index[bytes(row.tolist())] for row in case.packed.layer(layer).signal.q[expert]]


def test_sixteen_bit_rows_are_the_sources_bit_for_bit(case: Case) -> None:
    for layer, expert in experts_of(case):
        order = permutation(case, layer, expert)
        assert sorted(order) == list(range(len(order)))
        gate, _, down = Checkpoint(case.source).expert(layer, expert)
        hidden = gate.shape[1]
        records = case.packed.layer(layer).rows.data[expert]
        assert torch.equal(records[:, : 2 * hidden].clone().view(gate.dtype), gate[order])
        assert torch.equal(records[:, 2 * hidden : 4 * hidden].clone().view(gate.dtype), down.T[order])
        assert not records[:, 4 * hidden :].any()


def test_dense_tensors_are_the_sources(case: Case) -> None:
    source = Checkpoint(case.source)
    dense = case.packed.dense()
    assert sorted(dense) == sorted(source.dense_names())
    for name, tensor in dense.items():
        assert tensor.dtype == source.tensor(name).dtype and torch.equal(tensor, source.tensor(name)), name


def test_neurons_fall_in_importance(case: Case) -> None:
    for layer, expert in experts_of(case):
        order = permutation(case, layer, expert)
        gate, up, down = (part.double() for part in Checkpoint(case.source).expert(layer, expert))
        x = routed(case, layer, expert)
        g = x @ gate[order].T
        hidden = g / (1 + torch.exp(-g)) * (x @ up[order].T)
        importance = hidden.square().sum(0) * down[:, order].square().sum(0)
        # Energies are summed in bfloat16; in later layers a token at a tie may reach another expert than in float32.
        allowed = 0.01 if layer == 0 else 0.2
        assert relative_rms(importance, importance.sort(descending=True).values) <= allowed


def test_profile_holds_popularity(case: Case) -> None:
    a = case.packed.manifest.architecture
    for layer, (_, index, _) in enumerate(case.given):
        counts = torch.bincount(index.flatten(), minlength=a.experts) / index.numel()
        assert torch.allclose(case.packed.profile()["popularity"][layer], counts, atol=packing_error(), rtol=1e-4)


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.6, 0.8, 0.95])
def test_sparsity_on_the_calibration_text_is_the_one_asked_for(case: Case, sparsity: float) -> None:
    for layer in range(case.packed.manifest.architecture.layers):
        skipped, of = 0, 0
        for expert in (own for at, own in experts_of(case) if at == layer):
            threshold = float(threshold_at(case.packed.layer(layer).thresholds, sparsity)[expert])
            up = case.packed.layer(layer).signal.dense(expert, torch.float64)
            v = ((routed(case, layer, expert) @ up.T).abs() * worth(*case.given[layer][1:], expert)).flatten()
            skipped, of = skipped + int((v < threshold).sum()), of + v.numel()
        share = skipped / of
        assert share == 0 if sparsity == 0 else abs(share - sparsity) <= 0.012 + 2 / of


def test_same_source_and_text_give_the_same_bytes(case: Case, tmp_path: Path) -> None:
    again = make_pack(case.source, tmp_path / "again", EXACT)
    assert again.files == case.packed.manifest.files


def test_thresholds_are_measured_on_the_quantized_up(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_pack(tiny_checkpoint, tmp_path / "p", PackSpec(up=2, gate=4, down=4, dense=16))
    packed = PackedModel.open(tmp_path / "p")
    x, index, weights = what_experts_get(tiny_checkpoint)[0]  # the first layer's input depends on no packed expert
    layer = packed.layer(0)
    parts: list[Tensor] = []
    for expert in range(4):
        v = (x[(index == expert).any(dim=1)] @ layer.signal.dense(expert, torch.float32).T).abs()
        v *= worth(index, weights, expert)
        parts.append((v < threshold_at(layer.thresholds, 0.7)[expert]).flatten())
    assert abs(float(torch.cat(parts).float().mean()) - 0.7) <= 0.012


def test_product_tables_leave_out_the_share_they_say(tiny_pack: Path, tiny_checkpoint: Path) -> None:
    packed = PackedModel.open(tiny_pack)
    x, index, weights = what_experts_get(tiny_checkpoint, linears_of=tiny_pack)[0]
    layer = packed.layer(0)
    parts: list[Tensor] = []
    for expert in range(4):
        seen = x[(index == expert).any(dim=1)]
        gate, _ = layer.rows.layout.read(layer.rows.data[expert], torch.float32)
        h = torch.nn.functional.silu(seen @ gate.T) * (seen @ layer.signal.dense(expert, torch.float32).T)
        h *= worth(index, weights, expert)
        parts.append((h.abs() < threshold_at(layer.products, 0.7)[expert]).flatten())
    assert abs(float(torch.cat(parts).float().mean()) - 0.7) <= 0.012


def test_widths_may_differ_and_make_the_files_smaller(tmp_path: Path, tiny_checkpoint: Path, exact_pack: Path) -> None:
    make_pack(tiny_checkpoint, tmp_path / "p", PackSpec(up=3, gate=2, down=8))
    packed = PackedModel.open(tmp_path / "p")
    assert packed.manifest.widths.describe() == "up 3, gate 2, down 8, attention 4 bits"
    gate, _, down = Checkpoint(tiny_checkpoint).expert(0, 0)
    records = packed.layer(0).rows
    stored_gate, stored_down = records.layout.read(records.data[0], torch.float32)
    norms = gate.float().norm(dim=1).sort().values, down.float().norm(dim=0).sort().values
    assert relative_rms(stored_down.norm(dim=1).sort().values, norms[1]) <= 0.02
    assert relative_rms(stored_gate.norm(dim=1).sort().values, norms[0]) <= 0.3
    small, large = (folder / "layer_00.safetensors" for folder in (tmp_path / "p", exact_pack))
    assert small.stat().st_size < 0.6 * large.stat().st_size


def test_hqqs_rounding_is_stored_as_hqq_made_it(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Each neuron of the pack is one of hqq's own, whatever text the pack was calibrated on; and it is noted."""
    widths = {"up": 2, "gate": 3, "down": 4}
    manifest = make_pack(tiny_checkpoint, tmp_path / "p", PackSpec(2, 3, 4, dense=8, rounding="hqq"))
    assert Manifest.read(tmp_path / "p") == manifest and manifest.widths.describe().endswith("8 bits by HQQ")
    assert '"hqq"' in (tmp_path / "p" / "manifest.json").read_text() and not manifest.widths.short
    layer = PackedModel.open(tmp_path / "p").layer(1)
    gate, up, down = Checkpoint(tiny_checkpoint).expert(1, 2)
    stored_gate, stored_down = layer.rows.layout.read(layer.rows.data[2], torch.float32)
    stored = {"up": layer.signal.dense(2, torch.float32), "gate": stored_gate, "down": stored_down}
    order = torch.cdist(stored["up"], by_hqq(up, 2, manifest.widths.group).dense()).argmin(1)
    assert sorted(order.tolist()) == list(range(len(up)))
    for (part, bits), matrix in zip(widths.items(), (up, gate, down.T.contiguous()), strict=True):
        assert torch.equal(stored[part], by_hqq(matrix, bits, manifest.widths.group).dense()[order]), part


def test_packs_of_before_are_read_as_rounded_for_a_text(tiny_pack: Path) -> None:
    assert '"rounding": "calibrated"' not in (tiny_pack / "manifest.json").read_text()
    assert Manifest.read(tiny_pack).widths.rounding == "calibrated"


def linear_names(source: Checkpoint) -> list[str]:
    """Published names without .weight of attention projections and head."""
    parts = [f"self_attn.{part}_proj" for part in "qkvo"]
    return [f"model.layers.{n}.{part}" for n in range(source.config.num_hidden_layers) for part in parts] + ["lm_head"]


@pytest.mark.some(2)
@pytest.mark.parametrize(("model", "bits"), zip(MODELS, (4, 4, 8, 4), strict=True))
def test_low_bit_dense_layers_are_codes_and_the_rest_is_the_sources(tmp_path: Path, model: str, bits: int) -> None:
    source = Checkpoint(make_checkpoint(tmp_path / "source", **MODELS[model]))
    manifest = make_pack(source.folder, tmp_path / "p", PackSpec(up=16, gate=16, down=16, dense=bits))
    assert manifest.widths.dense == bits and not manifest.unquantized
    dense, linears = PackedModel.open(tmp_path / "p").dense(), linear_names(source)
    kept = set(source.dense_names()) - {f"{name}.weight" for name in linears}
    assert set(dense) == kept | {f"{name}.{part}" for name in linears for part in ("q", "scale", "zero")}
    assert all(torch.equal(dense[name], source.tensor(name)) for name in kept)
    for name in linears:
        matrix = source.tensor(f"{name}.weight")
        width, group = 8 if name == "lm_head" else bits, matrix.shape[1] if matrix.shape[1] < 64 else 64
        codes, scale, zero, _ = quantize(matrix, width, group)
        q, its_scale, its_zero = (dense[f"{name}.{part}"] for part in ("q", "scale", "zero"))
        if width == 8:
            assert torch.equal(q, pack_codes(codes, width)), name
            assert torch.equal(its_scale, scale) and torch.equal(its_zero, zero), name
        else:  # rounded for what the text gives them
            back = dequantize(q, its_scale, its_zero, matrix.shape[1], width, torch.float32)
            assert 0.01 < relative_rms(back, matrix.float()) < 0.2, name


@pytest.mark.some(1)
@pytest.mark.parametrize("model", ["odd-mixtral", "olmoe"])
def test_attention_is_rounded_for_its_inputs(tmp_path: Path, model: str) -> None:
    """What a layer's projections give on the text suffers less than by grids alone."""
    source = Checkpoint(make_checkpoint(tmp_path / "source", layers=1, **MODELS[model]))
    make_pack(source.folder, tmp_path / "p", PackSpec(up=16, gate=16, down=16, dense=4))
    seen: dict[str, Tensor] = {}
    reference = reference_model(source.folder)

    def note(name: str, _module: object, given: tuple[Tensor, ...]) -> None:
        seen[name] = given[0].flatten(0, 1)

    for name, module in reference.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            module.register_forward_pre_hook(partial(note, name))
    with torch.inference_mode():
        reference(input_ids=calibration_tokens())
    dense = PackedModel.open(tmp_path / "p").dense()
    assert len(seen) == 3
    for name, x in seen.items():
        matrix = source.tensor(f"{name}.weight").float()
        group = matrix.shape[1] if matrix.shape[1] < 64 else 64
        codes = quantize(matrix, 4, group)
        ours, theirs = (
            dequantize(q, scale, zero, matrix.shape[1], 4, torch.float32)
            for q, scale, zero in (
                (dense[f"{name}.q"], dense[f"{name}.scale"], dense[f"{name}.zero"]),
                (pack_codes(codes.codes, 4), codes.scale, codes.zero),
            )
        )
        assert relative_rms(x @ ours.T, x @ matrix.T) < 0.97 * relative_rms(x @ theirs.T, x @ matrix.T), name


def test_calibration_sees_the_rounded_dense_layers(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_pack(tiny_checkpoint, tmp_path / "p", PackSpec(up=16, gate=16, down=16, dense=4))
    stored = PackedModel.open(tmp_path / "p").profile()["router_score"]
    rounded = what_experts_get(tiny_checkpoint, linears_of=tmp_path / "p")
    for layer in range(2):
        seen, wide = (quantile_table(given[layer][2]) for given in (rounded, what_experts_get(tiny_checkpoint)))
        assert relative_rms(stored[layer], seen) <= packing_error() < relative_rms(stored[layer], wide)


def test_wider_sources_are_rounded_and_say_so(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, dtype=torch.float32)
    manifest = make_pack(source, tmp_path / "packed", EXACT)
    assert not manifest.source.exact and not manifest.unquantized
    assert manifest.source.loses == "model.embed_tokens.weight"
    with pytest.raises(UsageError) as refused:
        quality_presets.get("Exact", manifest)
    assert manifest.source.loses in refused.value.cause
    dense = load_file(tmp_path / "packed" / "dense.safetensors")
    assert {tensor.dtype for name, tensor in dense.items() if not name.startswith("_pad.")} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_a_wider_source_of_16_bit_numbers_is_packed_exactly(tmp_path: Path, kind: torch.dtype) -> None:
    narrow = make_checkpoint(tmp_path / "narrow", layers=1, dtype=kind)
    wide = shutil.copytree(narrow, tmp_path / "wide")
    edit_tensors(wide, lambda _name, tensor: tensor.float())
    packs = [make_pack(each, tmp_path / "packs" / each.name, EXACT) for each in (narrow, wide)]
    assert packs[1].unquantized and packs[1].float16 == kind
    assert packs[0].files["dense.safetensors"] == packs[1].files["dense.safetensors"]
    records = [load_file(tmp_path / "packs" / name / "layer_00.safetensors")["rows"] for name in ("narrow", "wide")]
    for expert in range(len(records[0])):  # which neuron comes first is a matter of sums
        first, second = (sorted(map(bytes, rows[expert].numpy())) for rows in records)
        assert first == second


@pytest.mark.parametrize(
    ("found", "exact"),
    [(torch.float32, True), (torch.float16, False)],  # what was bfloat16 lies in float32 already
    ids=str,
)
def test_mixed_widths_in_the_source_are_exact_where_nothing_is_lost(
    tmp_path: Path, found: torch.dtype, exact: bool
) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1)

    def widen(name: str, tensor: Tensor) -> Tensor:
        return (tensor if exact else 1.01 * tensor.float()).to(found) if ".experts.2.w2" in name else tensor

    edit_tensors(source, widen)
    manifest = make_pack(source, tmp_path / "packed", EXACT)
    assert manifest.unquantized == exact
    assert manifest.source.loses == ("" if exact else "model.layers.0.block_sparse_moe.experts.2.w2.weight")
