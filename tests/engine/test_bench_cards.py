"""Recorded tokens and prompts on one virtual card or several: what must hold of any card, trace and policy."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.answers import MOST
from floe_chat.engine.bench.cards import baselines, mixes, prompts
from floe_chat.engine.bench.cards.baselines import FIDDLER_S, MIXTRAL_OFFLOADING_S
from floe_chat.engine.bench.cards.offload import COUNTED, FREE, OTHERS, PLACED, named_presets, run, steps
from floe_chat.engine.bench.cards.replay import Played, ReplayDevice, Stage, play, room
from floe_chat.engine.bench.cards.replay import run as replayed
from floe_chat.engine.bench.cards.several import ALONE, division, in_proportion, sections
from floe_chat.engine.bench.cards.trace import Trace, record
from floe_chat.engine.bench.cards.width import Width
from floe_chat.engine.bench.measure import NAMES, ResultTable
from floe_chat.engine.bench.synthetic import MODELS, sizes_of
from floe_chat.engine.offload.cards import Card
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning import machine, speed_estimate
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.memory_plan import KEPT_LEAST
from floe_chat.engine.planning.speed_estimate import Held, Speeds, TokenWork, host_times
from floe_chat.engine.quality_presets import Preset
from floe_chat.models.catalog import asset, described
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_pack
from .driver import a_preset, open_model

MIXTRAL = Width(MODELS["mixtral-8x7b"])
WIDTH = Width(
    dataclasses.replace(
        MIXTRAL.sizes, hidden=256, intermediate=480, layers=2, experts=4, heads=8, kv_heads=2, head_dim=32, vocab=1000
    )
)
HALF, MORE = a_preset("half", 0.5), a_preset("more", 0.8)
WARM = 6


# So little memory that some rows fit, and not all.
SMALL = dataclasses.replace(card("sim:rtx3060-12gb", study=True), vram_bytes=WIDTH.fixed + 5 * WIDTH.expert_bytes)


@pytest.fixture(scope="module")
def trace(tiny_pack: Path) -> Trace:
    """20 tokens of no meaning."""
    ids = torch.randint(3, 250, (20,), generator=torch.Generator().manual_seed(5)).tolist()
    return record(tiny_pack, ids, "tiny")


PUBLISHED = {"mixtral-offloading": MIXTRAL_OFFLOADING_S, "Fiddler": FIDDLER_S}


@pytest.fixture(scope="module")
def demo() -> Trace:
    text = asset("demo", "manual.md").read_text(encoding="utf-8")
    pack = asset("demo", "packed")
    return record(pack, read_tokens(pack, text).flatten().tolist()[:24], "demo")


def test_the_values_are_the_signal_as_kernels_compare_it(tmp_path: Path, tiny_checkpoint: Path) -> None:
    make_pack(tiny_checkpoint, tmp_path / "gated", PackSpec(signal="gate"))
    found, seen = record(tmp_path / "gated", [7], "gated"), list[torch.Tensor]()
    loaded = open_model(tmp_path / "gated")
    experts = loaded.model.model.layers[0].mlp.experts

    def note(_layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        seen.append(given[0])

    experts.register_forward_pre_hook(note)
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([[7]]), use_cache=False)
    for expert in range(4):
        gate = experts.packed.signal.dense(expert, torch.float32)
        wanted = torch.nn.functional.silu(gate @ seen[0][0]).abs()
        assert found.values[0, 0, expert] == pytest.approx(wanted.numpy(), rel=5e-3, abs=1e-4)


def test_fewer_bytes_cross_the_link_the_more_is_skipped_kept_and_shared(trace: Trace) -> None:
    def moved(preset: Preset, parts: Parts, pool: int, *, ahead: bool = False) -> float:
        return play(SMALL, WIDTH, trace, preset, parts, ahead=ahead, warm=WARM, pool=pool).moved

    alone, shared = Parts(cpu=False), Parts()
    assert 0 < moved(MORE, alone, 200) < moved(HALF, alone, 200)
    assert moved(HALF, alone, 2000) < moved(HALF, alone, 200)
    assert moved(HALF, shared, 200) < moved(HALF, alone, 200)
    # A wrong guess costs bytes.
    assert moved(HALF, alone, 2000, ahead=True) >= moved(HALF, alone, 2000)


def test_every_active_neuron_is_counted_once(trace: Trace) -> None:
    played = play(SMALL, WIDTH, trace, HALF, Parts(), warm=WARM, pool=300)
    for layer in played.counts:
        assert layer.ready + layer.coming + layer.copied + layer.on_cpu == layer.active
        assert 0.3 < layer.active / (14 * 2 * WIDTH.neurons) < 0.7
    assert played.seconds > 0 and played.hidden is not None and 0 <= played.hidden <= 1


def test_rows_on_their_way_are_counted_where_something_is_fetched_ahead(trace: Trace) -> None:
    one = card("sim:rtx3060-12gb", study=True)

    def coming(*, ahead: bool) -> int:
        played = play(one, MIXTRAL, trace, HALF, Parts(), ahead=ahead, warm=WARM, pool=20_000)
        return sum(layer.coming for layer in played.counts)

    assert coming(ahead=False) == 0 < coming(ahead=True)


@pytest.mark.parametrize("together", [MOST, pytest.param(1, marks=pytest.mark.thorough)])
def test_lanes_end_together(trace: Trace, together: int) -> None:
    """Where RAM limits neither, the CPU and the link end a step within a tenth of its time: Algorithm 2's aim."""
    stage = Stage(SMALL, MIXTRAL, trace.widened(8, 2), HALF, Parts(), ahead=False, pool=20_000)
    stage.device.rates.ram_bytes_s = math.inf
    played = replayed(stage, WARM, together)
    assert len(stage.apart) == 2 * (len(trace.index) - WARM) and played.apart is not None
    assert played.apart <= 0.1 and played.apart == pytest.approx(np.mean(stage.apart))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("lane", "factor"),
    [
        ("link_bytes_s", 4.0),
        pytest.param("cpu_bytes_s", 10.0, marks=pytest.mark.thorough),
        ("cpu_bytes_s", 0.02),
    ],
)
def test_a_lane_that_was_misjudged_is_found_out(
    trace: Trace, monkeypatch: pytest.MonkeyPatch, lane: str, factor: float
) -> None:
    """Placement goes by wrong rates at first; what is observed corrects them, also of a lane that got nothing to do.
    RAM feeds both lanes here, whatever they read.
    """
    slow = dataclasses.replace(SMALL, link_bytes_s=2e8, pack_bytes_s=1e15, cpu_bytes_s=3e8)
    names = ("index", "weights", "values", "ahead", "scores", "heard")
    long = dataclasses.replace(trace, **{name: np.concatenate([getattr(trace, name)] * 6) for name in names})
    original, devices = ReplayDevice.__init__, list[ReplayDevice]()

    def misjudge(self: ReplayDevice, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.rates.ram_bytes_s = math.inf
        setattr(self.rates, lane, wrong * getattr(self.rates, lane))
        devices.append(self)

    def ignore(*_given: object) -> None:
        pass

    def uncorrected(rates: Rates) -> Any:
        record = measured(rates)
        record.step, record.hope = 0.0, 1.0
        return record

    def played() -> float:
        return play(slow, WIDTH, long, HALF, Parts(), ahead=False, warm=90, pool=300).seconds

    monkeypatch.setattr(ReplayDevice, "__init__", misjudge)
    wrong = 1.0
    right, wrong = played(), factor
    devices.clear()
    assert played() < 1.1 * right
    believed, true = (getattr(rates, lane) for rates in (devices[0].rates, slow.rates(4 * WIDTH.hidden / 512)))
    assert lane == "cpu_bytes_s" or 0.9 < believed / true < 1.1
    measured = Rates.record
    monkeypatch.setattr(Rates, "record", uncorrected)
    monkeypatch.setattr(Rates, "observed", ignore)
    monkeypatch.setattr(Rates, "unused", ignore)
    assert played() > 1.15 * right  # so it is the correction that does it


def test_naive_moves_all_that_is_chosen_and_others_not_again_what_stays(trace: Trace) -> None:
    found = baselines.naive(card("sim:rtx3060-12gb", study=True), MIXTRAL, trace, WARM)
    width = MIXTRAL.at(16, 16, 16)
    assert found.moved == pytest.approx(2 * width.expert_bytes * width.layers)
    assert width.expert_bytes == pytest.approx(3 * 4096 * 14336 * 2, rel=0.001)
    seconds = found.moved / card("sim:rtx3060-12gb", study=True).link_bytes_s
    assert found.busy == pytest.approx(seconds, rel=0.01) and found.seconds > seconds
    large = dataclasses.replace(card("sim:rtx3060-12gb", study=True), vram_bytes=200 << 30)
    little = dataclasses.replace(large, vram_bytes=6 << 30)
    moved = [baselines.mixtral_offloading(one, MIXTRAL, trace, WARM).moved for one in (large, little)]
    assert moved[0] < 0.5 * moved[1]
    assert baselines.fiddler(large, MIXTRAL, trace, WARM).moved == 0
    everything = baselines.gpu_int2(large, MIXTRAL, trace, WARM)
    assert everything is not None and everything.moved == 0
    assert baselines.gpu_int2(card("sim:rtx3060-12gb@4gb", study=True), MIXTRAL, trace, WARM) is None


@pytest.mark.parametrize("gigabytes", [6, 10, 24])
def test_llama_cpps_cache_keeps_what_was_used_last(trace: Trace, gigabytes: int) -> None:
    small = dataclasses.replace(card("sim:rtx3060-12gb", study=True), vram_bytes=gigabytes << 30)
    found, width = baselines.llama_cache(small, MIXTRAL, trace, WARM), MIXTRAL.at(4, 4, 4)
    tokens, layers, each = trace.index.shape
    room = int((small.vram_bytes - width.fixed) * layers / width.layers // width.expert_bytes)
    last: list[tuple[int, int]] = []  # used, the last one at the end
    absent = 0
    for token in range(tokens):
        for layer in range(layers):
            keys = [(layer, int(expert)) for expert in trace.index[token, layer]]
            absent += sum(key not in last for key in keys) * (token >= WARM)
            last = ([key for key in last if key not in keys] + keys)[-room:]
    assert room >= each and found is not None
    assert found.moved == pytest.approx(absent * width.expert_bytes * width.layers / layers / (tokens - WARM))
    assert baselines.llama_cache(dataclasses.replace(small, vram_bytes=1 << 30), MIXTRAL, trace, WARM) is None


def test_rules_that_a_replay_cannot_follow_are_refused(tiny_pack: Path) -> None:
    manifest = Manifest.read(tiny_pack)
    (rule,) = named_presets(["2t-drop"], manifest, Width(sizes_of("qwen3-30b-a3b")))
    assert rule.rule.drop == pytest.approx(8 * 0.07)  # by the K of the width, not of the pack
    for name in ("corm", "importance"):
        with pytest.raises(UsageError, match="cannot be replayed"):
            named_presets([name], manifest, MIXTRAL)


def test_layers_of_each_kind_take_their_own_lanes(trace: Trace) -> None:
    # These layers are so small that launches would be all of it.
    quick = dataclasses.replace(SMALL, launch_s=0.0, node_s=0.0)

    def played(mix: Mix, pool: int | None = None) -> Played:
        return play(quick, WIDTH, trace, HALF, Parts(mix=mix), warm=WARM, pool=pool)

    whole, beside, both = played(Mix(gpu=2)), played(Mix(cpu=2)), played(Mix(gpu=1, cpu=1))
    assert whole.moved == beside.moved == whole.busy == 0
    assert [layer.ready == layer.active > 0 for layer in whole.counts] == [True, True]
    assert [layer.on_cpu == layer.active > 0 for layer in beside.counts] == [True, True]
    assert whole.seconds < both.seconds < beside.seconds
    # Halfway: a layer costs the same whatever the other is, but that the text wants more of one of them.
    assert both.seconds == pytest.approx((whole.seconds + beside.seconds) / 2, rel=0.1)
    pooled = played(Mix(pool=1, cpu=1), 300)
    assert pooled.moved > 0 and pooled.counts[0].on_cpu == pooled.counts[0].active > pooled.counts[1].on_cpu
    assert sum(layer.active for layer in pooled.counts) == sum(layer.active for layer in whole.counts)


@pytest.mark.parametrize("mix", [Mix(gpu=2), Mix(cpu=2), Mix(gpu=1, cpu=1)], ids=str)
def test_the_cost_model_counts_what_a_virtual_card_takes(trace: Trace, mix: Mix) -> None:
    rtx, width = card("sim:rtx3060-12gb"), MIXTRAL
    speeds = dataclasses.replace(machine.speeds_of(rtx, disk=1e9), host_gpu=0.0, host_ram=0.0)
    share = speeds.of_cpu("rows", width.spec.gate) / rtx.cpu_bytes_s
    played = play(rtx, width, trace, HALF, Parts(mix=mix), cpu_share=share, warm=WARM)
    active = sum(layer.active for layer in played.counts) / sum(layer.neurons for layer in played.counts)
    takes = Footprint.of(described("mixtral-8x7b-instruct").sizes, PackSpec())
    held = Held(gpu=True, mix=Mix(gpu=16 * mix.gpu, cpu=16 * mix.cpu))
    token = speed_estimate.decode(takes, TokenWork(active=active), speeds, held, context=0)
    assert token.seconds == pytest.approx(played.seconds, rel=0.05)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param("mixtral-8x7b", "rtx3090-24gb@12gb", marks=pytest.mark.thorough),
        pytest.param("qwen3-30b-a3b", "rtx3060-12gb", marks=pytest.mark.thorough),
        ("gpt-oss-20b", "rtx2060-6gb"),
    ],
)
def test_plans_promise_what_the_replay_of_the_same_parts_takes(demo: Trace, model: str, name: str) -> None:
    width, rtx = Width(MODELS[model]), card(f"sim:{name}", study=True)
    wide = demo.widened(width.sizes.experts, width.sizes.top_k)
    for host in (True, False):
        played, plan = mixes.placed(rtx, width, wide, 12, host=host), mixes.estimated(rtx, width, host=host)
        assert played is not None and (played.host > 0) == host
        assert plan == pytest.approx(played.seconds, rel=0.15)


def test_the_hosts_time_is_what_plans_count(trace: Trace) -> None:
    own = host_times(Speeds(1.0))
    for mix, each in (
        (Mix(gpu=2), own.gpu),
        (Mix(cpu=2), own.gpu + own.ram),
        (Mix(pool=2), own.pool + own.behind),
    ):
        played = play(SMALL, WIDTH, trace, HALF, Parts(mix=mix), ahead=False, warm=WARM, pool=300, host=True)
        free = play(SMALL, WIDTH, trace, HALF, Parts(mix=mix), ahead=False, warm=WARM, pool=300)
        assert played.host == pytest.approx(2 * each) and free.host == 0 and played.seconds > free.seconds
    ahead = play(SMALL, WIDTH, trace, HALF, Parts(), warm=WARM, pool=300, host=True)
    assert ahead.host == pytest.approx(2 * (own.pool + own.behind) + own.ahead + own.fetch)


def test_a_card_without_room_is_refused(trace: Trace) -> None:
    with pytest.raises(ValueError, match="for rows"):
        room(dataclasses.replace(card("sim:rtx3060-12gb", study=True), vram_bytes=1 << 20), WIDTH, trace)


def test_a_trace_stands_for_a_model_of_more_experts(trace: Trace) -> None:
    wide, long = trace.widened(30, 5), len(trace.index)
    assert wide.heard is not None
    assert wide.index.shape == (long, 2, 5) and wide.scores.shape == wide.heard.shape == (long, 2, 30)
    assert wide.values.shape == wide.ahead.shape == (long, 2, 30, 96) and wide.index.max() < 30
    assert np.allclose(wide.weights.sum(2), 1) and np.allclose(wide.heard[:, :, :28].sum(2), 7 / 8, atol=1e-3)
    for token, layer in itertools.product(range(long), range(2)):
        chosen = wide.index[token, layer].tolist()
        assert len(set(chosen)) == 5
        places = {expert: (token + expert // 4 * long // 8) % long for expert in chosen}  # 8 blocks of 4, the last cut
        assert all(expert % 4 in trace.index[at, layer] for expert, at in places.items())
        for expert, at in places.items():
            assert (wide.values[token, layer, expert] == trace.values[at, layer, expert % 4]).all()
            assert (wide.plain[layer][expert] == trace.plain[layer][expert % 4]).all()
    assert (np.diff(wide.weights, axis=2) <= 0).all()  # the most of all blocks' choices
    assert trace.widened(4, 2) is trace
    for experts, top_k in ((3, 2), (4, 1)):
        with pytest.raises(UsageError, match="4 experts, 2 for each token"):
            trace.widened(experts, top_k)


def test_the_table_compares_all_with_floe(tiny_pack: Path) -> None:
    told: list[str] = []

    def replay(text: str, tokens: int) -> ResultTable:
        card, model = ["sim:rtx4060-8gb"], "mixtral-8x7b"

        def report(what: str, _done: int, _total: int) -> None:
            told.append(what)

        rules = ("1t-drop",)
        return run(
            tiny_pack, "tiny", text, card, tokens=tokens, skew=None, synthetic=model, presets=rules, report=report
        )

    table = replay("experts and neurons, " * 40, tokens=6)
    assert "mixtral-8x7b" in str(table.facts["model"])
    counted, free, *first = table.sections
    for section in (counted, free):
        names = [row.name for row in section.rows]
        others = [
            "whole experts, 16 bit, on demand",
            "mixtral-offloading",
            "Fiddler",
            "llama.cpp's expert cache, 4 bit",
        ]
        played = [*(step[0] for step in steps(MIXTRAL)), "1T-Drop, by this engine"]
        assert names == [*others, *played, *PLACED] and len(told) > len(names)
        assert max(map(len, names)) <= NAMES
        assert all(row.peer == (None if row.name == OTHERS else OTHERS) for row in section.rows)
        assert "all of it on the GPU" in section.title
    assert COUNTED in counted.title and FREE in free.title
    # Most others are granted none in either section; a row of ours has another time, and says what the host took.
    for ours, row in zip(counted.rows, free.rows, strict=True):
        if ours.name in PUBLISHED:
            assert row.ms < ours.ms <= row.ms + PUBLISHED[ours.name] * MIXTRAL.layers * 1e3 + 1e-6
        elif ours.name in names[:4] or ours.name.startswith("FloE"):
            assert ours == row and "host" not in ours.note
        else:
            assert ours.ms != row.ms and "host" in ours.note and "host" not in row.note
    *first, together = first
    assert all("first tokens" in section.title for section in first) and len(first) == 2
    assert "texts together" in together.title and len(together.rows) == 3 * MOST
    assert all((row.peer is None) == row.name.startswith("1 text,") for row in together.rows)
    with pytest.raises(UsageError, match="The text has"):
        replay("a", tokens=50)


LENGTHS = (8, 64)


def prompts_on(card: Card, trace: Trace, mix: Mix, *, host: bool = False) -> list[Played]:
    """With room for half of a layer's rows besides both layers' up projections."""
    one = WIDTH.layer(trace.thresholds[0])
    vram = WIDTH.fixed + 8 * one.signal.bytes_per_expert() + one.rows.data.nbytes // 2
    card = dataclasses.replace(card, vram_bytes=vram)
    return prompts.played(card, WIDTH, trace, mix, WARM, host=host, lengths=LENGTHS)


def test_a_prompts_experts_cross_the_link_once_or_not_at_all(trace: Trace) -> None:
    one = WIDTH.layer(trace.thresholds[0])
    rows, ups = one.rows.data.nbytes, 4 * one.signal.bytes_per_expert()
    slow = dataclasses.replace(SMALL, cpu_flops=1e6)  # so that none is computed by the CPU
    for played in prompts_on(slow, trace, Mix(gpu=2)):
        assert played.moved == 0 and played.hidden is None and played.seconds > 0
    long = prompts_on(slow, trace, Mix(cpu=2))[1]
    assert 0 < long.moved <= 2 * rows and not long.moved % (rows // 8)  # in halves, but for those of few tokens
    assert 0 < long.waited < long.busy
    assert 0 < prompts_on(slow, trace, Mix(pool=1, cpu=1))[1].moved < long.moved
    layerwise = prompts.layerwise(dataclasses.replace(slow, vram_bytes=1), WIDTH, trace, LENGTHS)[1]
    used = sum(len(np.unique(trace.index[:, layer])) for layer in range(2))
    assert layerwise.moved == used * (rows + ups) // 4 and layerwise.hidden == pytest.approx(0, abs=1e-9)


def test_first_tokens_are_compared_by_size_of_memory(trace: Trace) -> None:
    told: list[str] = []
    rtx = dataclasses.replace(card("sim:rtx3060-12gb"), vram_bytes=8 * 2**30)
    found = prompts.sections(rtx, MIXTRAL, trace, WARM, lambda text, _done, _of: told.append(text))
    assert [section.title.split(":")[0] for section in found] == ["rtx3060-12gb, 6 GB", "rtx3060-12gb, 8 GB"] and told
    for section in found:
        assert len(section.rows) == 4 * len(prompts.LENGTHS)
        assert all((row.speedup is None) == (prompts.LAYERWISE in row.name) for row in section.rows)


CARD = card("sim:rtx3060-12gb")


def test_the_hosts_time_counts_once_whichever_card_it_works_for(trace: Trace) -> None:
    stage = Stage(CARD, WIDTH, trace, HALF, Parts(mix=Mix(pool=1)), ahead=True, host=True, others=[(CARD, Mix(pool=1))])
    for token in range(4):
        stage.step([token])
    now, _, _, _, host = stage.spent()
    assert 0 < host < now and all(0 < one.clock.busy("host") < host for one in stage.devices)
    assert stage.devices[1].clock.now <= now


@pytest.mark.some(2)
@pytest.mark.parametrize("layers", [5, 2, 32, 8])
def test_a_trace_is_divided_as_the_model_is(layers: int) -> None:
    for cards in ((CARD, CARD), (card("3090"), CARD), (card("4060"), card("4060"))):
        parts = division(cards, MIXTRAL)
        own = in_proportion(parts, layers)
        assert sum(mix.layers for mix in own) == layers and all(mix.layers for mix in own)
        for mix, part in zip(own, parts, strict=True):
            assert mix.gpu / mix.layers <= part.best.mix.gpu / len(part.layers) + 1e-9
        if layers == 32:
            assert [(mix.gpu, mix.pool, mix.cpu) for mix in own] == [
                (one.best.mix.gpu, one.best.mix.pool, one.best.mix.cpu) for one in parts
            ]


@pytest.mark.parametrize("whole", [Mix(30, 1, 1), Mix(30, 0, 2), Mix(10, 20, 2), Mix(0, 32), Mix(0, 2, 30)])
def test_a_mix_is_played_with_as_many_layers_as_the_trace_has(whole: Mix) -> None:
    for layers in (1, 2, 5, 32):
        played = mixes.in_proportion(whole, layers)
        assert all(min(mix.gpu, mix.pool, mix.cpu) >= 0 and mix.layers == layers for mix, _share in played)
        assert sum(share * mix.gpu for mix, share in played) == pytest.approx(layers * whole.gpu / 32)


def test_the_table_compares_with_the_best_of_one_card(trace: Trace) -> None:
    small = dataclasses.replace(CARD, name="small", vram_bytes=KEPT_LEAST + (1 << 26))
    counted, free = sections([small, small], WIDTH, trace, WARM, lambda _step, _done, _all: None)
    assert "counted as plans count it" in counted.title and "no host time" in free.title
    for section in (counted, free):
        best, *rows = section.rows
        assert max(len(row.name) for row in rows) <= NAMES
        alone = [row.ms for row in rows if row.name.startswith("one card")]
        assert best.name == ALONE and best.ms == min(alone) and any(row.name.startswith("2 cards") for row in rows)
        assert all(row.peer == ALONE for row in rows)
