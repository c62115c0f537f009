"""What each layer and expert leaves out: by the projection that loses less, and where it costs least."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.client.costs import costs_of
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import load
from floe_chat.engine.planning import plan
from floe_chat.engine.planning.speed_estimate import TokenWork
from floe_chat.engine.quality_presets import custom, differs, get, lenient, of, published
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.rule import NEVER, Rule
from floe_chat.models.catalog import described
from floe_chat.models.checking.verify import compare
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import PackError
from floe_chat.models.pack.manifest import FILE_NAME, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import pack_experts
from floe_chat.models.packing.allotment import (
    LEAST,
    STEPS,
    LayerTables,
    directions,
    lost_below,
    read_at,
    shares_of,
)
from floe_chat.models.packing.calibration import QUANTILES, quantile_table, threshold_at
from floe_chat.models.packing.pack import EXACT, PackSpec, pack
from floe_chat.models.packing.signal_choice import choose, exempt
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..engine.driver import answer, open_model
from ..engine.offloading import offloaded
from ..engine.test_plan import a_machine
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


@pytest.mark.some(1)
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
            for one in compare(PackedModel.open(tmp_path / signal), Checkpoint(source), [1], lambda _step, _share: None)
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


def scrambled(folder: Path, layer: int) -> None:
    """Make the values of a layer's neurons say nothing of what they add: loud ones have quiet down columns."""
    factors: dict[str, Tensor] = {}

    def scramble(name: str, tensor: Tensor) -> Tensor:
        expert, _, part = name.removesuffix(".weight").rpartition(".")
        if f"layers.{layer}." not in name or ".experts." not in name:
            return tensor
        neurons = tensor.shape[1 if part == "w2" else 0]
        if expert not in factors:
            factors[expert] = 10 ** (2 * torch.rand(neurons, generator=torch.Generator().manual_seed(9)) - 1)
        factor = factors[expert]
        return (tensor.float() * (factor**-2 if part == "w2" else factor[:, None])).to(tensor.dtype)

    edit_tensors(folder, scramble)


@pytest.fixture(scope="module")
def scrambled_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scrambled")
    scrambled(make_checkpoint(folder / "source", layers=3, shards=False), 1)
    manifest = packed(folder / "source", folder / "pack", LOW)
    assert manifest.whole == (1,)
    assert Manifest.read(folder / "pack") == manifest
    return folder / "pack"


def test_a_layer_whose_values_say_nothing_skips_no_neuron(scrambled_pack: Path) -> None:
    loaded, ids = open_model(scrambled_pack), list(range(5, 25))
    manifest = loaded.packed.manifest
    neurons = manifest.architecture.intermediate
    by_hand = custom(manifest, Rule(0.7, 0.9, drop=0.3, major=0.6))
    presets = [*of(manifest), *published(manifest), by_hand, lenient(by_hand)]
    for preset in presets:
        loaded.control.preset = preset
        answer(loaded, ids, max_new_tokens=8)
        loaded.telemetry.settle()
        rule, (first, whole, _) = preset.rule, loaded.telemetry.layers
        assert 2 * whole.active == 2 * whole.neurons - whole.dropped * neurons, preset.name
        assert whole.bytes * manifest.architecture.experts * neurons == whole.active * manifest.layer_bytes, preset.name
        assert whole.neurons and (rule.drop or not whole.dropped), preset.name
        assert (2 * first.active < 2 * first.neurons - first.dropped * neurons) is bool(rule.sparsity), preset.name
    with offloaded(loaded, by_hand, 0.2):
        answer(loaded, ids, max_new_tokens=8)
        loaded.telemetry.settle()
        first, whole, _ = loaded.telemetry.layers
        assert 2 * whole.active == 2 * whole.neurons - whole.dropped * neurons and first.active < whole.active


def test_what_skips_nothing_is_said(scrambled_pack: Path) -> None:
    said = "no neurons are skipped in 1 of 3 layers (2)"
    _, facts = load(scrambled_pack, None, "cpu", lambda _step, _share: None)
    assert said in facts.widths
    manifest = Manifest.read(scrambled_pack)
    assert said in differs("FloE 80 %", manifest) and said not in differs("1T-Drop", manifest)
    work, usual = (TokenWork.of(get("Balanced", manifest), one) for one in (manifest, replace(manifest, whole=())))
    assert work.active == pytest.approx((2 * usual.active + 1) / 3) and work.layers[1].read == 1
    assert costs_of(scrambled_pack).unskipped == said
    found = plan.make(a_machine(), described(str(scrambled_pack)))
    assert said in " ".join(found.why)


def test_a_manifest_with_impossible_whole_layers_is_refused(scrambled_pack: Path, tmp_path: Path) -> None:
    shutil.copytree(scrambled_pack, tmp_path / "pack")
    for wrong in ([3], [-1], [1, 0], [1, 1], ["1"]):
        edit_json(tmp_path / "pack" / FILE_NAME, lambda fields, wrong=wrong: fields.update(whole=wrong))
        with pytest.raises(PackError, match="damaged"):
            Manifest.read(tmp_path / "pack")


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_lost_is_the_outputs_own_error() -> None:
    values, h, down = drawn(0, 40, 60), drawn(1, 40, 60), drawn(2, 60, 48)
    table = quantile_table(values)
    found = lost_below(values, table, h, directions(down))  # 48 columns are seen whole
    for step in (1, 7, 13, STEPS):
        limit = threshold_at(table[None], step / STEPS)[0]
        wanted = (h.masked_fill(values.abs() >= limit, 0) @ down).square().sum() / len(h)
        assert abs(float(found[step]) - float(wanted)) <= 1e-4 * float(wanted), step
    assert float(found[0]) == 0


def test_few_directions_tell_lengths() -> None:
    down, h = drawn(3, 200, 1024), drawn(4, 100, 200)
    seen = directions(down)
    assert seen.shape[1] < 100
    assert abs(float((h @ seen).square().sum() / (h @ down).square().sum()) - 1) < 0.1


@pytest.mark.parametrize("seed", range(4))
def test_shares_make_up_the_layers_and_cost_less(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(LEAST, 400, (6,), generator=random).double()
    scale = 10 ** (2 * torch.rand(6, 1, generator=random, dtype=torch.float64))
    even = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
    power = 1 + 3 * torch.rand(6, 1, generator=random, dtype=torch.float64)
    lost = scale * even**power
    shares = shares_of(lost, tokens)
    assert shares.shape == (6, QUANTILES)
    assert bool((shares.diff(dim=1) >= -1e-12).all()) and bool((shares[:, 0] == 0).all())
    asked = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    assert torch.allclose((shares * tokens[:, None]).sum(0) / tokens.sum(), asked, atol=1e-9)
    for place in (20, 50, 80):
        cost, usual = (
            float((read_at(lost, part[:, None].expand(6, 1)) * tokens[:, None]).sum())
            for part in (shares[:, place], asked[place].expand(6))
        )
        assert cost < usual


def test_alike_experts_leave_out_alike() -> None:
    lost = (torch.linspace(0, 1, STEPS + 1, dtype=torch.float64) ** 2).repeat(3, 1)
    shares = shares_of(lost, torch.tensor([100.0, 20.0, 57.0]))
    assert float((shares - torch.linspace(0, 1, QUANTILES, dtype=torch.float64)).abs().max()) <= 1 / STEPS


def test_experts_that_are_exempt_or_hardly_heard_keep_their_tables() -> None:
    tables = LayerTables(4)
    for expert, (count, loud) in enumerate(((50, 1.0), (LEAST - 1, 1.0), (50, 8.0), (60, 3.0))):
        v, h = (loud * drawn(10 * expert + part, count, 32) for part in range(2))
        tables.measure(expert, v, h, drawn(expert, 32, 16), torch.ones(count, 1), torch.ones(count, 1))
    found = tables.allotted(exempt=[2])
    for name, own in tables.own.items():
        assert torch.equal(found[name][1:3], own[1:3])
        assert not torch.equal(found[name][0], own[0]) and not torch.equal(found[name][3], own[3])
        assert bool((found[name].diff(dim=1) >= 0).all())


def test_a_layer_of_one_expert_is_as_it_was() -> None:
    tables = LayerTables(1)
    v, h = drawn(0, 50, 32), drawn(1, 50, 32)
    tables.measure(0, v, h, drawn(2, 32, 16), torch.ones(50, 1), torch.ones(50, 1))
    for name, own in tables.own.items():
        assert torch.allclose(tables.allotted()[name], own, rtol=1e-5)
