"""A token through a graph per layer, with experts in a pool as graphs around the host's decisions: as one by one.

Through the graphs of several cards it is the token of one processor, wherever experts are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import fused_pass, graphs, kv_stores, layers
from floe_chat.engine.decoder.card import card_ends, card_layers, card_lists
from floe_chat.engine.decoder.card.card_parts import CardParts
from floe_chat.engine.decoder.decoders import FusedDecoder, LibraryDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BorrowingStore
from floe_chat.engine.decoder.quantized_linear import PackedLinear
from floe_chat.engine.decoder.ways import Graphs, Way
from floe_chat.engine.experts.moe_layer import Cancelled, Control
from floe_chat.engine.experts.offloaded_layer import Neighbours
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.offload import predictor
from floe_chat.engine.offload.cards import FIND_LAUNCHES, LAUNCHES, SUM_LAUNCHES
from floe_chat.engine.offload.device_memory import DeviceMemory
from floe_chat.engine.offload.looking import Looking
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.speed_estimate import dense_launches
from floe_chat.engine.quality_presets import PRESETS, Preset
from floe_chat.engine.sampling import Sampler
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.kernels.rule import LATE
from floe_chat.kernels.weights import LinearWeights
from floe_chat.models.families import FAMILIES
from floe_chat.models.families.sizes import sizes_of
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor, nn

from .. import families
from ..helpers import make_pack, relative_rms
from .driver import GREEDY, a_preset, open_model, silent
from .fake_card import VIEWS, Calls, FakeCard, FakeGraph
from .margins import CLEAR, clear_prompt, prompt_of, watched
from .offloading import EVERYTHING, PLAIN, SHAPES, SKIPPING, needs_of, offloaded, resize
from .step_models import (
    LIMIT,
    MODELS,
    PRESET,
    WINDOW,
    Guessing,
    Noting,
    blocks_of,
    feed,
    ids_of,
    make_model,
)


def graphed(model: Any) -> FusedDecoder:
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, FusedDecoder) and "one graph per layer and token" in decoder.reason, decoder.reason
    return decoder


# Each family, and what is special on a card; the others are variants of rope, of heads and of routers.
SPECIAL = ("mixtral-odd", "mixtral-sliding", "olmoe-biased-clipped", "qwen2_moe-mixed", "phimoe-longrope")


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "name",
    [name if "-" not in name or name in SPECIAL else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS],
)
def test_logits_are_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    card, model = FakeCard(monkeypatch), make_model(name)
    decoder, ids = graphed(model), ids_of(14)
    assert len(card.captures) == len(model.model.layers) + 1  # what follows the last one
    found = feed(decoder, KVCache(), ids, [3, *[1] * 11])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 2:]
    assert relative_rms(found, expected) <= 2 * LIMIT
    assert card.replays == 11 * len(card.captures) and card.waits == 11


def coded(model: Any) -> Any:
    """The model with its dense part as packs have it."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Linear and name not in ("gate", "shared_expert_gate", "proj"):
                rows, columns = child.weight.shape
                q, parts = torch.randint(256, (rows, columns), dtype=torch.uint8), torch.rand(2, rows, 1).half()
                weights = LinearWeights(VectorLayout(columns, 8, columns), q, *parts)
                setattr(module, name, PackedLinear(weights, child.bias, Control(PRESETS[0])))
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "gemma4_text", "deepseek_v2", "glm4_moe_lite"])
def test_plans_count_what_a_layer_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    card, model = FakeCard(monkeypatch), coded(make_model(name))
    graphed(model)
    launched = [operation for operation in card.captures[1].operations() if operation not in VIEWS]
    planned = dense_launches(sizes_of(FAMILIES[name], model.config))
    assert sum(LAUNCHES.get(operation, 1) for operation in launched) == planned, launched


def test_a_text_passes_the_length_that_rope_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And another one, later, does not."""
    FakeCard(monkeypatch)
    rope = MODELS["phimoe-longrope"]["rope_parameters"] | {"original_max_position_embeddings": 6}
    model = make_model("phimoe-longrope", rope_parameters=rope)
    decoder, ids, pieces = graphed(model), ids_of(10), [3, *[1] * 7]
    for kv in KVCache(), KVCache():
        expected = feed(LibraryDecoder(model), KVCache(), ids, pieces)
        assert relative_rms(feed(decoder, kv, ids, pieces), expected) <= 2 * LIMIT
    assert kv.keep(ids[:5], PRESET) == 4
    assert relative_rms(feed(decoder, kv, ids, [1]), expected[2:3]) <= 2 * LIMIT


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["mixtral-sliding", "olmoe", "gemma4_text", "qwen3_moe"])
def test_the_next_layers_input_is_foreseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCard(monkeypatch)
    model, guesses = make_model(name), list[Tensor]()
    blocks = [Guessing(0, guesses), Guessing(1, guesses), Noting()]
    for block, experts in zip(blocks_of(model), blocks, strict=False):
        block.experts = experts
    decoder = graphed(model)
    for block in blocks[:2]:
        assert isinstance(block, Guessing)
        block.decoder = decoder
    feed(decoder, KVCache(), ids_of(5), [1] * 5)
    for turn in range(5):
        assert relative_rms(guesses[2 * turn], blocks[1].calls[turn][0]) <= LIMIT
        assert relative_rms(guesses[2 * turn + 1], blocks[2].calls[turn][0]) <= LIMIT


def test_keys_and_values_may_move_between_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, before = [1, 5, 9, 200, 17, 17, 3, 42], list[Tensor]()
    loaded.control.preset = EVERYTHING
    expected, _ = fed(loaded, ids)
    give = DeviceMemory.give

    def hoard(memory: DeviceMemory) -> None:
        before.append(memory.lent())  # so that the new memory is elsewhere
        give(memory)

    monkeypatch.setattr(DeviceMemory, "give", hoard)
    monkeypatch.setattr(kv_stores, "BLOCK", 3)
    FakeCard(monkeypatch)
    with offloaded(loaded, EVERYTHING, 0.5) as shared:
        assert isinstance(loaded.decoder, FusedDecoder)
        loaded.decoder.rooms = [shared]
        shared.share()
        kv, found = KVCache(), list[Tensor]()
        for one in ids:
            found.append(feed(loaded.decoder, kv, [*ids[: len(found)], one], [1]))
            if len(found) in (2, 5):
                assert shared.make_room()
                before[-1].fill_(255)
        assert isinstance(kv.store, BorrowingStore)
    assert relative_rms(torch.cat(found), expected) <= 1e-4


def no_head(patch: pytest.MonkeyPatch) -> None:
    """The card refuses what follows the last layer."""

    def refuses(_work: graphs.Work, _device: torch.device) -> graphs.Captured:
        raise torch.OutOfMemoryError("CUDA out of memory")

    patch.setattr(card_ends, "capture", refuses)


def test_without_its_graph_the_head_is_launched_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    card, model, ids = FakeCard(monkeypatch), make_model("mixtral"), ids_of(6)
    expected = feed(graphed(model), KVCache(), ids, [1] * 6)
    replays = card.replays
    no_head(monkeypatch)
    decoder = graphed(model)
    decoder.prepare()
    assert "the last norm and the head one by one, because they could not be captured: CUDA out" in decoder.reason
    assert relative_rms(feed(decoder, KVCache(), ids, [1] * 6), expected) <= LIMIT
    assert card.replays == replays + 6 * len(model.model.layers) and card.waits == 6


def test_a_token_may_leave_out_the_last_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a benchmark."""
    card, model, ids = FakeCard(monkeypatch), make_model("mixtral"), ids_of(5)
    decoder, layers = graphed(model), model.config.num_hidden_layers
    before = feed(decoder, KVCache(), ids, [1] * 5)
    captures = len(card.captures)
    model.config.num_hidden_layers = 1
    found = feed(decoder, KVCache(), ids, [1] * 5)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "way", Way(decoder))
        assert relative_rms(found, feed(decoder, KVCache(), ids, [1] * 5)) <= LIMIT
    model.config.num_hidden_layers = layers
    assert torch.equal(feed(decoder, KVCache(), ids, [1] * 5), before) and len(card.captures) == captures + 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["mixtral", "mixtral-sliding", "olmoe-biased-clipped", "qwen2_moe-mixed", "qwen3_moe", "qwen3_next", "lfm2_moe"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpus_layers_are_torchs(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("transformers", reason="it makes the models")
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    model = make_model(name, dtype).cuda()
    decoder, ids = graphed(model), ids_of(24)
    found = feed(decoder, KVCache(), ids, [3, *[1] * 21])
    decoder.way = Way(decoder)
    expected = feed(decoder, KVCache(), ids, [3, *[1] * 21])
    assert relative_rms(found, expected) <= (1e-4 if dtype == torch.float32 else 5e-2)


Counts = list[tuple[Any, ...]]
CLOSE = 1e-5
THOROUGH = pytest.mark.thorough
OTHER = a_preset("Other limits", 0.2, 0.3, drop=0.5, major=0.9, lossless=True, weighed=True)
PRESETS_HERE = [
    PLAIN,
    SKIPPING,
    EVERYTHING,
    a_preset("Dropping", 0.3, drop=0.9, lossless=True),
    a_preset("By layer", 0.3, 0.2, lossless=True, drop=0.4, major=0.4, layers=(0.5, 1.5, 1.0)),
    a_preset("Halves in one layer", 0.3, 0.2, lossless=True, drop=0.3, major=0.9, layers=(0.0, 1.0, 1.0)),
    *(replace(preset, x_bits=22) for preset in PRESETS),
]


@pytest.fixture(scope="module", autouse=True)
def as_they_are() -> Generator[None]:
    """Keys and values are kept as computed: in 16 bits, a sum in another order may round one the other way, and with it
    bring a neuron over its threshold.
    """

    def as_computed(model: Any, _family: object, kv_bits: int) -> torch.dtype:
        return CODES if kv_bits == 8 else model.model.embed_tokens.weight.dtype

    with pytest.MonkeyPatch.context() as patch:
        for module in (layers, fused_pass):
            patch.setattr(module, "kept_dtype", as_computed)
        yield


@pytest.fixture(scope="module", params=["mixtral", pytest.param("olmoe", marks=THOROUGH)])
def loaded(shape: Callable[[str], Path], request: pytest.FixtureRequest) -> LoadedModel:
    return open_model(shape(request.param))


@pytest.fixture(scope="module")
def ids(loaded: LoadedModel) -> list[int]:
    """A text in which no neuron is at its threshold."""
    return clear_ids(loaded, [*PRESETS_HERE, OTHER])


def fitting(loaded: LoadedModel, preset: Preset) -> Preset:
    return replace(preset, rule=replace(preset.rule, layers=preset.rule.layers[: len(loaded.telemetry.layers)]))


def clear_ids(loaded: LoadedModel, presets: Sequence[Preset]) -> list[int]:
    def run(ids: list[int]) -> None:
        for preset in presets:
            whole(loaded, fitting(loaded, preset), ids)

    return clear_prompt(loaded, run, [prompt_of(seed, 8) for seed in range(3, 103)])[0]


def fed(loaded: LoadedModel, ids: list[int]) -> tuple[Tensor, Counts]:
    """Logits after each of `ids`, and what each layer counted, wherever rows were."""
    loaded.telemetry.begin(0, 0, 0.0)
    loaded.control.counting = True
    logits = feed(loaded.decoder, KVCache(), ids, [1] * len(ids))
    loaded.control.counting = False
    loaded.telemetry.settle()
    return logits, counted(loaded)


def counted(loaded: LoadedModel) -> Counts:
    """What each layer counted, wherever rows were."""
    return [(one.calls, one.neurons, one.dropped, one.active, one.bytes) for one in loaded.telemetry.layers]


def alike(counts: Counts, expected: Counts) -> bool:
    """The same calls; and up to rounding, which may take a neuron over its threshold, what was computed."""
    return all(
        mine[:3] == its[:3] and mine[3:] == pytest.approx(its[3:], rel=0.005)
        for mine, its in zip(counts, expected, strict=True)
    )


def whole(loaded: LoadedModel, preset: Preset, ids: list[int]) -> tuple[Tensor, Counts]:
    """`fed` with all rows where they are computed."""
    loaded.control.preset = preset
    return fed(loaded, ids)


def located(loaded: LoadedModel) -> list[int]:
    """By layer, the rows whose place was counted."""
    return [one.ready + one.coming + one.copied + one.on_cpu for one in loaded.telemetry.layers]


@pytest.mark.parametrize("loaded", SHAPES, indirect=True)
@pytest.mark.parametrize(
    ("share", "cpu"),
    [
        *((0.01, 2e9), (0.3, 0.0), (1.0, 2e9), (0.1, 1e12)),
        *(pytest.param(*both, marks=THOROUGH) for both in ((0.01, 0.0), (0.3, 2e9))),
    ],
)
@pytest.mark.parametrize("predict", ["none", "in turns", "partial", pytest.param("gate", marks=THOROUGH)])
@pytest.mark.parametrize(
    "preset",
    [
        preset if preset.rule.layers or preset in (PLAIN, SKIPPING) else pytest.param(preset, marks=THOROUGH)
        for preset in PRESETS_HERE
    ],
    ids=lambda preset: preset.name,
)
def test_tokens_and_counts_are_those_of_experts_one_by_one(
    loaded: LoadedModel,
    ids: list[int],
    preset: Preset,
    predict: str,
    share: float,
    cpu: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preset = fitting(loaded, preset)
    expected, counts = whole(loaded, preset, ids)
    card = FakeCard(monkeypatch)
    with offloaded(loaded, preset, share, predict=False, parts=Parts(cpu=cpu > 0), cpu=cpu or 2e9) as shared:
        assert isinstance(loaded.decoder, FusedDecoder)
        if predict != "none":
            names = ("gate", "partial") if predict == "in turns" else (predict,)
            made = (predictor.make(name, loaded.model, loaded.packed, loaded.decoder.ahead) for name in names)
            shared.tried = partial(Looking, len(shared.pooled)) if predict == "in turns" else None
            shared.predict_by([*made])
        found, as_counted = fed(loaded, ids)
        each = [[operation for operation in one.operations() if operation not in VIEWS] for one in card.captures]
        finding = next(one for one in each if one[0] == "add" and "list_active" in one)
        added = next(one for one in each if one[-1] == "add_listed" and "add_" not in one)
        config = loaded.model.config
        planned = dense_launches(sizes_of(FAMILIES[config.model_type], config)) + FIND_LAUNCHES
        assert 1 + sum(LAUNCHES.get(one, 1) for one in finding) == planned, finding  # views have the name of `select`
        assert sum(LAUNCHES.get(one, 1) for one in added) == SUM_LAUNCHES, added
        # Each layer's record, and the logits.
        assert card.waits == len(ids) * (len(as_counted) + 1)
    assert relative_rms(found, expected) <= CLOSE and alike(as_counted, counts)
    assert located(loaded) == [one.active for one in loaded.telemetry.layers]
    on_cpu = [one.on_cpu > 0 for one in loaded.telemetry.layers]
    assert not any(on_cpu) if not cpu else all(on_cpu) or cpu < 1e12


def test_absent_experts_are_replaced_as_without_graphs(
    loaded: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = a_preset("Replacing", 0.2, 0.1, alpha=0.9, lossless=True)

    def answer(ids: list[int]) -> tuple[Tensor, int, float]:
        with offloaded(loaded, preset, 0.4, predict=False, parts=Parts(cpu=False)), watched(loaded) as margins:
            for layer in loaded.model.model.layers:
                experts = layer.mlp.experts
                experts.neighbours = Neighbours(layer.mlp.gate, experts.neighbours.following)
            logits, _ = fed(loaded, ids)
            return logits, sum(one.substituted for one in loaded.telemetry.layers), margins.least

    texts = (prompt_of(seed, 8) for seed in range(3, 103))
    ids, (expected, substituted, _) = next((ids, found) for ids in texts if (found := answer(ids))[2] > CLEAR)
    FakeCard(monkeypatch)
    found, again, _ = answer(ids)
    assert relative_rms(found, expected) <= CLOSE and again == substituted > 0


def test_a_lenient_preset_leaves_weak_rows_out(
    loaded: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = a_preset("Lenient", 0.2, late=LATE, lossless=True)
    FakeCard(monkeypatch)
    with offloaded(loaded, preset, 0.1, predict=False, parts=Parts(cpu=False)):
        found, _ = fed(loaded, ids)
        assert found.isfinite().all() and sum(one.left_out for one in loaded.telemetry.layers) > 0


def test_limits_change_without_another_capture(
    loaded: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {preset.name: whole(loaded, preset, ids) for preset in (SKIPPING, OTHER, PLAIN)}
    card = FakeCard(monkeypatch)
    with offloaded(loaded, SKIPPING, 0.3, predict=False):
        before = 0
        for preset, again in ((SKIPPING, True), (OTHER, False), (SKIPPING, False), (PLAIN, True)):
            loaded.control.preset = preset
            found, counts = fed(loaded, ids)
            assert relative_rms(found, wanted[preset.name][0]) <= CLOSE and alike(counts, wanted[preset.name][1])
            assert (len(card.captures) > before) == again
            before = len(card.captures)


def test_what_happens_between_tokens(loaded: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that moved are added up by other graphs, a layer that somebody watches is called, and a stop is seen."""
    expected, _ = whole(loaded, PLAIN, ids)
    card, seen = FakeCard(monkeypatch), list[int]()
    with offloaded(loaded, PLAIN, 0.3, predict=False) as shared:
        assert relative_rms(fed(loaded, ids)[0], expected) <= CLOSE
        captures, before = len(card.captures), shared.memory.rows
        resize(shared, shared.pool.capacity // 2)
        before.fill_(255)
        assert relative_rms(fed(loaded, ids)[0], expected) <= CLOSE
        assert len(card.captures) == captures + 2  # the sums of what is there and of what comes later, but no layer

        def see(_module: Any, _given: Any, _output: Any) -> None:
            seen.append(1)

        waits, wait = card.waits, FakeGraph.wait
        handle = loaded.model.model.layers[1].mlp.experts.register_forward_hook(see)
        assert relative_rms(fed(loaded, ids)[0], expected) <= CLOSE
        assert len(seen) == len(ids) and card.waits == waits + len(ids)
        handle.remove()

        def stop(graph: FakeGraph) -> None:
            loaded.control.cancelled.set()
            wait(graph)

        with monkeypatch.context() as patch:
            patch.setattr(FakeGraph, "wait", stop)
            with pytest.raises(Cancelled):
                loaded.decoder.forward([1], KVCache())
        assert card.waits == waits + len(ids) + 1  # at the next layer
        loaded.control.cancelled.clear()
        assert relative_rms(fed(loaded, ids)[0], expected) <= CLOSE and card.waits > waits + 3 * len(ids)


def refusing(card: FakeCard, first: int, count: int, patch: pytest.MonkeyPatch) -> None:
    """The card refuses so many captures, from number `first` on."""
    numbers, capture = itertools.count(), card_layers.capture

    def refuses(work: graphs.Work, device: torch.device) -> graphs.Captured:
        if first <= next(numbers) < first + count:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return capture(work, device)

    for module in (card_layers, card_lists):
        patch.setattr(module, "capture", refuses)


@pytest.mark.parametrize("count", [1, 100], ids=["once", "from then on"])
@pytest.mark.parametrize("after", ["a layer", "a sum", pytest.param("the layers", marks=THOROUGH)])
def test_what_cannot_be_captured_is_launched_one_by_one(
    loaded: LoadedModel, ids: list[int], after: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, counts = whole(loaded, SKIPPING, ids)
    card, layers = FakeCard(monkeypatch), len(loaded.telemetry.layers)
    first = {"a layer": 1, "the layers": layers, "a sum": layers + 1}[after]
    refusing(card, first, count, monkeypatch)
    loaded.control.notices.clear()
    with offloaded(loaded, SKIPPING, 0.3, predict=False):
        decoder = loaded.decoder
        assert isinstance(decoder, FusedDecoder)
        decoder.prepare()
        how = "experts one by one" if count == 1 else "but by torch's operations"
        assert f", {how}, because " in decoder.reason and "CUDA out of memory" in decoder.reason
        assert not loaded.control.notices  # a reason is enough
        found, as_counted = fed(loaded, ids)
        waits = len(ids) if count == 1 else 0  # for the logits, whose work is captured even so
        assert card.waits == waits and (card.replays > 0) == (count == 1)
        assert relative_rms(found, expected) <= CLOSE and alike(as_counted, counts)
        loaded.control.preset = PLAIN  # with another preset it is tried again
        fed(loaded, ids)
        assert (card.waits > 2 * waits) == (count == 1)


def test_the_chat_says_that_it_became_slower(
    loaded: LoadedModel, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = whole(loaded, PLAIN, ids)[0]
    card, layers = FakeCard(monkeypatch), len(loaded.telemetry.layers)
    refusing(card, layers + 2 + 1, 1, monkeypatch)
    loaded.control.notices.clear()
    with offloaded(loaded, SKIPPING, 0.3, predict=False):
        fed(loaded, ids)
        assert card.waits == len(ids) * (layers + 1) and not loaded.control.notices
        loaded.control.preset = PLAIN
        assert relative_rms(fed(loaded, ids)[0], wanted) <= CLOSE
        assert card.waits == len(ids) * (layers + 2) and "CUDA out of memory" in loaded.control.notices[0].cause
        assert len(loaded.control.notices) == 1


@pytest.mark.some(1)
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("preset", [SKIPPING, PLAIN], ids=lambda preset: preset.name)
def test_a_layer_takes_six_calls_and_one_wait(
    loaded: LoadedModel, ids: list[int], preset: Preset, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Python's own functions, torch's, the library's and the card's: the difference that layers make."""
    card, kv = FakeCard(monkeypatch), KVCache()
    with offloaded(loaded, preset, share, predict=False):
        feed(loaded.decoder, kv, ids, [1] * len(ids))
        loaded.control.counting, layers = True, len(loaded.telemetry.layers)
        decoder = loaded.decoder
        assert isinstance(decoder, FusedDecoder) and isinstance(decoder.way, Graphs)
        by_layers = decoder.way.by_layer
        assert by_layers is not None
        calls = list[int]()
        for count in (1, layers):
            with torch.inference_mode():
                by_layers.run(count)  # captures what follows so many layers
                waits = card.waits
                with Calls() as seen:
                    by_layers.run(count)
            assert card.waits - waits == count + 1
            calls.append(len(own(seen)))
        loaded.control.counting = False
    assert 0 < (calls[1] - calls[0]) / (layers - 1) <= 6, calls


def own(seen: Calls) -> list[str]:
    """Without the fake card's."""
    return [name for name in seen.names if name not in ("getprofile", "setprofile")]


@pytest.mark.some(1)
@pytest.mark.parametrize("preset", [SKIPPING, PLAIN], ids=lambda preset: preset.name)
def test_a_token_takes_so_many_calls_besides_its_layers(
    loaded: LoadedModel, ids: list[int], preset: Preset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a token to the next one's number. Lower the limit as the calls become fewer."""
    card, kv, sampler = FakeCard(monkeypatch), KVCache(), Sampler(GREEDY, ids)
    with offloaded(loaded, preset, 1.0, predict=False):
        feed(loaded.decoder, kv, ids, [1] * len(ids))
        loaded.control.counting, waits, layers = True, card.waits, len(loaded.telemetry.layers)
        for token in (7, 8):  # the first one makes what all others use
            with Calls() as seen:
                drawn = loaded.decoder.several(token, kv, sampler, 3, ())
            assert drawn is not None and len(drawn[0]) == 1
            kv.computed([token], preset)
        loaded.control.counting = False
    assert card.waits - waits == 2 * (layers + 1)
    assert 0 < len(own(seen)) - 6 * layers <= 124, seen.names


LAYERS = 3
TEXTS = [prompt_of(seed, 5) for seed in range(3, 103)]
TWO = "throttled:4gb,throttled:4gb"
MIXES = {
    "pools": Mix(pool=LAYERS),
    "a pool and whole layers": Mix(gpu=1, pool=2),
    "whole layers": Mix(gpu=LAYERS),
    "all kinds": Mix(gpu=1, pool=1, cpu=1),
}


@pytest.fixture(scope="module")
def pack(shape: Callable[[str], Path]) -> Path:
    return shape("mixtral")


def opened(pack: Path, mix: Mix, *, predictor: str = "none", division: tuple[int, ...] = (1, 2)) -> LoadedModel:
    needs = needs_of(pack)
    vram = needs.whole() if mix.gpu == sum(division) else needs.least(mix) + 40 * needs.row
    parts = Parts(mix=mix, division=division, predictor=predictor)
    return load(pack, None, TWO, silent, vram=vram, parts=parts)[0]


Computed = tuple[list[int], Tensor, list[list[int]]]


def by_one(pack: Path, preset: Preset) -> Computed:
    """A text without a close decision; on one processor, its logits and how often each expert was called."""
    plain = open_model(pack)
    plain.control.preset = preset
    ids, (expected, counts) = clear_prompt(plain, lambda ids: fed(plain, ids), TEXTS)
    return ids, expected, [one[0] for one in counts]


def as_one(
    pack: Path, mix: Mix, division: tuple[int, ...], preset: Preset, wanted: Computed, patch: pytest.MonkeyPatch
) -> None:
    """Logits are those of one processor."""
    ids, expected, called = wanted
    card = FakeCard(patch)
    loaded = opened(pack, mix, division=division)
    assert "on each card" in loaded.decoder.reason and isinstance(loaded.decoder, FusedDecoder)
    assert isinstance(loaded.decoder.way, Graphs)
    assert isinstance(loaded.decoder.way.by_layer, CardParts)
    assert (", with the experts in the pool" in loaded.decoder.reason) == (mix.pool > 0)
    loaded.control.preset = preset
    found, counts = fed(loaded, ids)
    loaded.close()
    assert card.replays >= len(ids) * (sum(division) + 1)
    assert relative_rms(found, expected) <= 1e-5 and [one[0] for one in counts] == called


@pytest.fixture(
    scope="module", params=[SKIPPING, pytest.param(EVERYTHING, marks=THOROUGH)], ids=lambda preset: preset.name
)
def preset_and_wanted(pack: Path, request: pytest.FixtureRequest) -> tuple[Preset, Computed]:
    return request.param, by_one(pack, request.param)


@pytest.mark.parametrize(
    "mix",
    [pytest.param(mix, id=name, marks=THOROUGH if mix.gpu and not mix.cpu else ()) for name, mix in MIXES.items()],
)
@pytest.mark.parametrize("division", [(1, 2), pytest.param((2, 1), marks=THOROUGH)], ids=str)
def test_logits_are_those_of_one_processor(
    pack: Path,
    mix: Mix,
    division: tuple[int, ...],
    preset_and_wanted: tuple[Preset, Computed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_one(pack, mix, division, *preset_and_wanted, monkeypatch)


@pytest.mark.parametrize(
    ("family", "mix", "division", "fields"),
    [
        ("gemma4", Mix(gpu=1, pool=2, cpu=1), (1, 3), {}),  # heads of two kinds, and norms that the next card closes
        pytest.param("deepseek_v2", Mix(gpu=1, pool=1), (1, 1), {}, marks=THOROUGH),
        # Which the text passes.
        pytest.param("phimoe", MIXES["pools"], (1, 2), {"original_max_position_embeddings": 4}, marks=THOROUGH),
    ],
)
def test_other_families_are_divided(
    family: str,
    mix: Mix,
    division: tuple[int, ...],
    fields: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = {"rope_parameters": families.MODELS[family]["rope_parameters"] | fields} if fields else {}
    make_pack(families.make(family, tmp_path / "source", **changes), tmp_path / "pack", PackSpec(up=3))
    as_one(tmp_path / "pack", mix, division, PLAIN, by_one(tmp_path / "pack", PLAIN), monkeypatch)


@pytest.mark.parametrize("predictor", ["gate", "partial"])
def test_rows_are_looked_for_ahead_across_the_cards(
    pack: Path, predictor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor that attends goes without graphs."""
    plain = open_model(pack)
    plain.control.preset = EVERYTHING
    expected, _ = fed(plain, TEXTS[0])
    FakeCard(monkeypatch)
    loaded = opened(pack, MIXES["pools"], predictor=predictor)
    loaded.control.preset = EVERYTHING
    assert ("runs a layer before its turn" in loaded.decoder.reason) == (predictor == "partial")
    assert relative_rms(fed(loaded, TEXTS[0])[0], expected) <= 1e-5
    assert predictor == "partial" or all(layer.guessed > 0 for layer in loaded.telemetry.layers[1:])
    loaded.close()
