"""Rarely used experts with fewer bits: the same answer as from weights rounded expert by expert, wherever rows lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine import plan, quality
from floe_chat.engine.estimate import Held, Speeds, Work, decode
from floe_chat.engine.footprint import Footprint
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.machine import Machine
from floe_chat.engine.moe import DECODE_TOKENS, MoELayer
from floe_chat.engine.opening import Needs
from floe_chat.engine.quality import Preset
from floe_chat.models.calibration import threshold_at
from floe_chat.models.catalog import described
from floe_chat.models.checkpoint import read_config
from floe_chat.models.pack import PackSpec
from floe_chat.models.packed import PackedModel
from floe_chat.models.widths import Narrow
from torch import Tensor

from ..helpers import make_checkpoint, make_pack, reference_model, relative_rms
from .driver import answer as generated
from .driver import open_model, silent
from .margins import clear_prompt, prompt_of
from .rounded import use_stored_linears
from .test_offload import Answer, answer, offloaded

SHAPE: dict[str, Any] = {"hidden": 100, "intermediate": 50, "experts": 7, "top_k": 3, "layers": 3}
SPEC = PackSpec(up=4, gate=8, down=4, dense=8, narrow=Narrow(0.4, up=2, gate=3, down=2))
PRESETS = {
    "nothing": Preset("", 0.0, lossless=True),
    "all": Preset("", 0.5, 0.7, drop=0.6, major=0.9, lossless=True, weighed=True),
    "lone": Preset("", 0.3, drop=0.95, major=0.95, lossless=True),
}
POOLS = {"1%": 0.01, "10%": 0.1, "all": 2.0}  # shares of the rows of experts that are not narrow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mixed") / "source", **SHAPE)


@pytest.fixture(scope="module")
def pack(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "pack"
    make_pack(source, folder, SPEC)
    return folder


@pytest.fixture(scope="module")
def loaded(pack: Path) -> LoadedModel:
    return open_model(pack)


class RoundedExperts(torch.nn.Module):
    """The experts of one layer written down plainly, each dequantized with its own widths."""

    def __init__(self, loaded: LoadedModel, layer: int, preset: Preset) -> None:
        super().__init__()
        self.preset = preset
        stored, manifest = loaded.packed.layer(layer), loaded.packed.manifest
        order, a = manifest.order(layer), manifest.architecture
        self.experts: list[tuple[Tensor, Tensor, Tensor, float, float]] = [()] * a.experts  # pyright: ignore
        assert stored.narrow is not None
        wide = len(stored.up.q)
        limits = threshold_at(stored.thresholds, preset.sparsity).tolist()
        products = threshold_at(stored.products, preset.product).tolist()
        for place, expert in enumerate(order):
            part, within = (stored, place) if place < wide else (stored.narrow, place - wide)
            up = part.up.dense(within, torch.float32)
            gate, down = part.rows.layout.read(part.rows.data[within], torch.float32)
            self.experts[expert] = (up, gate, down, limits[place], products[place])

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for token, chosen in enumerate(top_k_index.tolist()):
            for slot, expert in enumerate(chosen):
                up, gate, down, limit, product = self.experts[expert]
                score = top_k_weights[token, slot] / top_k_weights[token].mean()
                v = up @ hidden[token]
                worth = score if self.preset.weighed else 1.0
                v = torch.where(v.abs() >= limit / worth, v, 0.0)
                h = torch.nn.functional.silu(gate @ hidden[token]) * v
                h = torch.where(h.abs() >= product / worth, h, 0.0)
                if score < self.preset.drop:
                    continue
                if score < self.preset.major:
                    h[len(h) // 2 :] = 0.0
                out[token] += top_k_weights[token, slot] * (h @ down)
        return out


def plain_model(source: Path, loaded: LoadedModel, preset: Preset) -> Any:
    """transformers' own model with the values that the pack stands for."""
    model = reference_model(source)
    use_stored_linears(model, loaded.packed.folder)
    for layer in range(SHAPE["layers"]):
        model.model.layers[layer].mlp.experts = RoundedExperts(loaded, layer, preset)
    return model


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("length", [1, DECODE_TOKENS, 40])
def test_logits_are_those_of_experts_rounded_to_their_own_widths(
    source: Path, loaded: LoadedModel, preset: Preset, length: int
) -> None:
    loaded.control.preset = preset

    def run(prompt: list[int], model: Any = loaded.model) -> Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([prompt]), use_cache=False).logits

    prompt, ours = clear_prompt(loaded, run, [prompt_of(seed, length + 1)[1:] for seed in range(60)])
    assert relative_rms(ours, run(prompt, plain_model(source, loaded, preset))) <= 1e-5


@pytest.fixture(scope="module")
def answered(loaded: LoadedModel) -> tuple[list[int], dict[str, Answer]]:
    """A prompt and its answers without a pool, which the test above compares with the plain model's."""

    def run(prompt: list[int]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for name, preset in PRESETS.items():
            loaded.control.preset = preset
            found[name] = answer(loaded, prompt)
        return found

    return clear_prompt(loaded, run)


@pytest.fixture(scope="module")
def prompt(answered: tuple[list[int], dict[str, Answer]]) -> list[int]:
    return answered[0]


@pytest.fixture(scope="module")
def expected(answered: tuple[list[int], dict[str, Answer]]) -> dict[str, Answer]:
    """The prompt's answers by preset."""
    return answered[1]


@pytest.mark.parametrize("kind", ["throttled", "virtual"])
@pytest.mark.parametrize("share", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize("name", PRESETS)
def test_where_rows_are_changes_no_token(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer], name: str, share: float, kind: str
) -> None:
    with offloaded(loaded, PRESETS[name], share, kind=kind) as shared:
        logits, drawn = answer(loaded, prompt)
        assert shared.device.link.bytes_moved > 0
    assert drawn == expected[name][1]
    assert relative_rms(logits, expected[name][0]) <= 1e-5


@pytest.mark.parametrize("cpu", [1e6, 1e12], ids=["slow-cpu", "fast-cpu"])
def test_the_cpus_share_changes_no_token(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer], cpu: float
) -> None:
    with offloaded(loaded, PRESETS["nothing"], 0.1, cpu=cpu):
        logits, drawn = answer(loaded, prompt)
        counted = loaded.telemetry.layers
        on_cpu, copied = (sum(getattr(layer, name) for layer in counted) for name in ("on_cpu", "copied"))
    assert on_cpu > copied if cpu > 1e9 else copied > on_cpu
    assert drawn == expected["nothing"][1]
    assert relative_rms(logits, expected["nothing"][0]) <= 1e-5


def narrow_rows(loaded: LoadedModel) -> list[tuple[int, int]]:
    """For each layer, keys from which on rows are narrow, and by how many bytes."""
    layers = [loaded.packed.layer(index) for index in range(SHAPE["layers"])]
    lengths = [[rows.layout.nbytes for _, rows in layer.parts] for layer in layers]
    return [(len(layer.up.q) * 50, wide - narrow) for layer, (wide, narrow) in zip(layers, lengths, strict=True)]


def test_only_a_rows_own_bytes_are_moved(loaded: LoadedModel) -> None:
    """Of a pool that holds all, each row is brought once, and narrow ones leave the rest of their slots alone."""
    with offloaded(loaded, PRESETS["nothing"], 2.0, predict=False, cpu=1.0) as shared:
        with torch.inference_mode():
            loaded.model(input_ids=torch.tensor([[5, 9, 200]]))
        shared.settle()
        moved, wide, short = 0, shared.rows.shape[1], 0
        for table, (first, less) in zip(shared.pool.layers, narrow_rows(loaded), strict=True):
            slots, rest = table[first:], wide - less
            short += int((slots >= 0).sum())
            moved += int((table >= 0).sum()) * wide - int((slots >= 0).sum()) * less
            assert less > 0 and bool((shared.rows[slots[slots >= 0].tolist(), rest:] == 255).all())
        assert short and shared.device.link.bytes_moved == moved


def test_bytes_that_were_read_are_counted_by_width(loaded: LoadedModel) -> None:
    loaded.control.preset = PRESETS["nothing"]
    loaded.telemetry.begin(0, 0, 0.0)
    chosen: list[Tensor] = []

    def note(_layer: Any, given: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen.append(given[1])

    experts: list[MoELayer] = [block.mlp.experts for block in loaded.model.model.layers]
    handles = [layer.register_forward_pre_hook(note) for layer in experts]
    loaded.control.counting = True
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([[7, 8]]))
    loaded.control.counting = False
    for handle in handles:
        handle.remove()
    for index, (counts, called) in enumerate(zip(loaded.telemetry.layers, chosen, strict=True)):
        stored, read = loaded.packed.layer(index), 0
        for expert in called.flatten().tolist():
            up, rows, place = stored.of(expert)
            read += up.q[place].nbytes + up.scale[place].nbytes + up.zero[place].nbytes + rows.data[place].nbytes
        assert counts.bytes == read
        assert counts.calls == called.flatten().bincount(minlength=SHAPE["experts"]).tolist()


def counted(loaded: LoadedModel) -> list[tuple[int, ...]]:
    layers = loaded.telemetry.layers
    return [(one.bytes, one.active, one.neurons, one.dropped, *one.calls) for one in layers]


@pytest.mark.parametrize("name", ["all", "lone"])
def test_what_was_left_out_is_counted_as_without_a_pool(loaded: LoadedModel, prompt: list[int], name: str) -> None:
    loaded.control.preset = PRESETS[name]
    loaded.telemetry.begin(0, 0, 0.0)
    answer(loaded, prompt)
    wanted = counted(loaded)
    with offloaded(loaded, PRESETS[name], 0.1):
        answer(loaded, prompt)
        assert counted(loaded) == wanted and wanted[0][3] > 0


def test_experts_that_stand_in_are_told_by_number(loaded: LoadedModel, prompt: list[int]) -> None:
    """Only an expert whose rows are in the pool may be taken instead of one whose rows are not."""
    layer = loaded.packed.layer(0)
    places = layer.by_place(np.arange(7))
    assert sorted(places) == list(range(7)) and places.tolist() != list(range(7))
    shares = np.arange(7, dtype=np.float32)
    assert [layer.by_number(shares)[expert] for expert in range(7)] == places.tolist()
    swapped: list[int] = []
    with offloaded(loaded, Preset("", 0.0, alpha=0.9, lossless=True), 0.7) as shared:
        for index, block in enumerate(loaded.model.model.layers):
            experts, before = block.mlp.experts, dict[str, Any]()
            experts.gate, own = block.mlp.gate, loaded.packed.layer(index).by_place(np.arange(7))

            def note(layer: Any, given: Any, index: int = index, before: dict[str, Any] = before) -> None:
                before.update(shares=shared.pool.resident(index).copy(), asked=given[1].tolist())

            def compare(layer: Any, _given: Any, _out: Any, own: Any = own, before: dict[str, Any] = before) -> None:
                for asked, taken in zip(before["asked"], layer.chosen.tolist(), strict=True):
                    others = sorted(set(taken) - set(asked))
                    swapped.extend(others)
                    assert all(before["shares"][own[expert]] >= 0.5 for expert in others)

            experts.register_forward_pre_hook(note)
            experts.register_forward_hook(compare)
        answer(loaded, prompt)
    assert swapped


def needed(pack: Path) -> Needs:
    packed = PackedModel.open(pack)
    return Needs.of(packed.manifest, [packed.layer(index) for index in range(SHAPE["layers"])], read_config(pack), 2)


@pytest.mark.parametrize("device", ["throttled:8gb", "sim:rtx3060-12gb"])
def test_a_model_opened_on_a_device_answers_as_on_the_cpu(pack: Path, loaded: LoadedModel, device: str) -> None:
    loaded.control.preset = PRESETS["nothing"]
    prompt, wanted = clear_prompt(loaded, lambda prompt: generated(loaded, prompt, max_new_tokens=8).tokens)
    needs = needed(pack)
    there, facts = load(pack, None, device, silent, vram=needs.least() + 100 * needs.row)
    try:
        there.control.preset = PRESETS["nothing"]
        assert generated(there, prompt, max_new_tokens=8).tokens == wanted
        assert "the least used 40 % of experts" in facts.widths
    finally:
        there.close()


def test_the_pool_is_filled_with_the_popular_experts_rows(pack: Path) -> None:
    needs = needed(pack)
    there, _ = load(pack, None, "throttled:8gb", silent, vram=needs.least() + 100 * needs.row)
    try:
        assert there.offload is not None
        manifest = there.packed.manifest
        for layer, rare in enumerate(manifest.rare):
            filled = there.offload.pool.resident(layer)
            narrow = [place for place, expert in enumerate(manifest.order(layer)) if expert in rare.experts]
            assert filled[narrow].max() <= filled[[p for p in range(7) if p not in narrow]].min()
    finally:
        there.close()


def test_each_neuron_gets_its_heat_back_after_a_restart(pack: Path) -> None:
    """Heat is kept by place, and so is what is used: places are the pack's own, the same at each start."""
    needs = needed(pack)

    def opened() -> LoadedModel:
        return load(pack, None, "throttled:8gb", silent, vram=needs.least() + 100 * needs.row)[0]

    there = opened()
    assert there.offload is not None
    there.control.preset = PRESETS["nothing"]
    order = [there.packed.manifest.order(index) for index in range(SHAPE["layers"])]
    before = there.offload.pool.heat().uses
    generated(there, [1], max_new_tokens=3)
    after, called = there.offload.pool.heat(), [layer.calls for layer in there.telemetry.layers]
    there.close()
    for index, numbers in enumerate(order):
        cooled = {numbers[place] for place in np.flatnonzero((after.uses != before)[index].any(1))}
        decoded = {expert for expert, count in enumerate(called[index]) if count}
        assert decoded <= cooled and len(cooled - decoded) <= SHAPE["top_k"], "the prompt's token is not counted"
    there = opened()
    try:
        assert there.offload is not None
        again = there.offload.pool.heat()
        np.testing.assert_allclose(again.scores, after.scores, rtol=1e-6)
        np.testing.assert_allclose(again.uses, after.uses, atol=1e-3)
    finally:
        there.close()


def test_a_plan_counts_each_expert_by_its_width_and_by_how_often_it_is_called(pack: Path, loaded: LoadedModel) -> None:
    spec, a = PackSpec(4, 8, 4, 8, narrow=SPEC.narrow), loaded.packed.manifest.architecture
    takes = Footprint.of_entry(described(pack), spec)
    popularity, row, up = loaded.packed.profile()["popularity"].tolist(), 0.0, 0.0
    for index, shares in enumerate(popularity):
        stored = loaded.packed.layer(index)
        for expert, share in enumerate(shares):
            ups, rows, place = stored.of(expert)
            row += share * rows.layout.nbytes / a.layers
            up += share * sum(part[place].nbytes for part in (ups.q, ups.scale, ups.zero)) / a.layers
    assert takes.called_row == pytest.approx(row) and takes.called_up == pytest.approx(up)
    assert takes.called_row != pytest.approx(Footprint.of(takes.sizes, spec).called_row)
    speeds = Speeds(read=1e9)
    chosen = plan.make(Machine("made up", 8 << 30, 0, None, 2, speeds, 0.3), described(pack)).chosen
    preset = next(preset for preset in quality.PRESETS if preset.name == quality.DEFAULT)
    assert chosen and chosen.token == decode(takes, Work.of(preset), speeds, Held(gpu=False))


def test_what_a_pack_takes_is_what_its_files_hold(pack: Path, loaded: LoadedModel) -> None:
    packed = loaded.packed
    layers = [packed.layer(index) for index in range(SHAPE["layers"])]
    up = sum(up.nbytes for layer in layers for up, _ in layer.parts)
    rows = sum(rows.data.nbytes for layer in layers for _, rows in layer.parts)
    needs = needed(pack)
    takes = Footprint.of(described(pack).sizes, PackSpec(4, 8, 4, 8, narrow=SPEC.narrow))
    assert (needs.up, needs.rows) == (takes.ups, takes.rows) == (up, rows)
    assert needs.row == takes.row == max(rows.layout.nbytes for _, rows in layers[0].parts)
    # So few layers are one group, whose keys and values are there twice while they grow.
    assert needs.whole() == needs.dense + up + rows + 2 * needs.context * needs.kv
