"""A token as one graph is a token through layer after layer; it takes one wait, and no call per layer.

The card is fake_card.py's; tests marked gpu do the same on a real one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder import graphs, kv_stores, state_store
from floe_chat.engine.decoder.card import card_ends, card_token
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.events import Finished, Notice, Sampling, SetQuality
from floe_chat.engine.experts.moe_layer import Cancelled, MoELayer
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.quality_presets import Preset
from floe_chat.engine.sampling import Sampler
from floe_chat.kernels import operations
from floe_chat.kernels.rule import Rule
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from .. import families
from ..helpers import edit_json, make_checkpoint, make_pack, relative_rms
from .driver import GREEDY, Engine, answer, asking, layer_by_layer, silent
from .fake_card import Calls, FakeCard
from .test_token_pass import IDS, MODELS, PRESETS, WARM

DEMO = asset("demo", "packed")
PLAIN = PRESETS["neurons"]
# Attention in torch's order and in ours differ by rounding: a key may become the next float16, x the next of 8 bits.
LIMITS = {22: 1e-4, 15: 1e-3, 8: 3e-2}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    return FakeCard(monkeypatch)


def open_on(card: FakeCard, pack: Path) -> LoadedModel:
    loaded = load(pack, None, "cpu", silent, library=True)[0]
    assert "one graph per token" in loaded.decoder.reason and len(card.captures) == 1
    return loaded


def use(loaded: LoadedModel, preset: Preset) -> Preset:
    loaded.control.preset = preset
    return preset


def feed(loaded: LoadedModel, ids: list[int], kv: KVCache | None = None) -> Tensor:
    """Logits after each of `ids`, counted."""
    kv, logits = kv or KVCache(), list[Tensor]()
    loaded.control.counting = True
    for one in ids:
        logits.append(loaded.decoder.forward([one], kv))
        kv.computed([one], loaded.control.preset)
    loaded.control.counting = False
    return torch.cat(logits)


def counted(loaded: LoadedModel) -> list[dict[str, Any]]:
    loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1)
    return [dataclasses.asdict(layer) for layer in loaded.telemetry.layers]


def eager(loaded: LoadedModel, compute: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
    """What layer after layer computes, and what it counts."""
    loaded.telemetry.begin(0, 0, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        layer_by_layer(patch)
        return compute(), counted(loaded)


@pytest.fixture(
    scope="module",
    params=["odd", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("16-bit", "one layer"))],
)
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    shape, spec = MODELS[request.param]
    make_pack(make_checkpoint(folder / "source", **shape), folder / "pack", spec)
    return folder / "pack"


def test_a_token_is_layer_after_layer(pack: Path, card: FakeCard) -> None:
    loaded = open_on(card, pack)
    for preset in PRESETS.values():
        use(loaded, preset)
        loaded.telemetry.begin(0, 0, 0.0)
        found = feed(loaded, IDS)
        counts = counted(loaded)
        expected, as_counted = eager(loaded, lambda: feed(loaded, IDS))
        assert found.isfinite().all() and relative_rms(found, expected) <= LIMITS[preset.x_bits]
        for mine, other in zip(counts, as_counted, strict=True):
            assert mine["neurons"] == other["neurons"] > 0 and mine["dropped"] == other["dropped"]
            assert sum(mine["calls"]) == sum(other["calls"])
            assert mine["bytes"] == pytest.approx(other["bytes"], rel=0.05)
            assert mine["active"] == pytest.approx(other["active"], rel=0.05, abs=3)
    assert card.waits == card.replays == len(IDS) * len(PRESETS)


@pytest.mark.some(1)
@pytest.mark.parametrize("sampling", [WARM, GREEDY], ids=["warm", "greedy"])
def test_what_is_drawn_is_the_same(tiny_pack: Path, card: FakeCard, sampling: Sampling) -> None:
    loaded = open_on(card, tiny_pack)
    found = answer(loaded, IDS, sampling=sampling, max_new_tokens=20)
    expected, _ = eager(loaded, lambda: answer(loaded, IDS, sampling=sampling, max_new_tokens=20))
    assert found == expected and card.replays == 19


def test_limits_change_without_another_capture(tiny_pack: Path, card: FakeCard) -> None:
    loaded = open_on(card, tiny_pack)
    layers = loaded.packed.manifest.architecture.layers
    weighed = dataclasses.replace(PRESETS["weighed"], x_bits=22)
    use(loaded, weighed)
    feed(loaded, IDS)
    captures = len(card.captures)
    for rule in (
        {"sparsity": 0.2},
        {"drop": 0.9, "major": 0.95},
        {"layers": tuple(0.5 + i / layers for i in range(layers))},
        {"product": 0.1},
    ):
        use(loaded, dataclasses.replace(weighed, rule=dataclasses.replace(weighed.rule, **rule)))
        found = feed(loaded, IDS)
        assert relative_rms(found, eager(loaded, lambda: feed(loaded, IDS))[0]) <= LIMITS[22]
    assert len(card.captures) == captures
    use(loaded, PRESETS["nothing"])
    found = feed(loaded, IDS)
    assert relative_rms(found, eager(loaded, lambda: feed(loaded, IDS))[0]) <= LIMITS[22]
    assert len(card.captures) == captures + 1  # another structure
    use(loaded, dataclasses.replace(PRESETS["nothing"], x_bits=8))
    coarse = feed(loaded, IDS)
    assert relative_rms(coarse, eager(loaded, lambda: feed(loaded, IDS))[0]) <= LIMITS[22] < relative_rms(coarse, found)
    assert len(card.captures) == captures + 2  # x is read less finely


def test_a_conversation_that_grows_needs_no_other_capture(
    tiny_pack: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 4)
    loaded = open_on(card, tiny_pack)
    use(loaded, PRESETS["nothing"])
    captures = len(card.captures) + 1
    kv, other = KVCache(), KVCache()
    ids = [1 + 7 * i % 200 for i in range(20)]
    found = torch.cat([feed(loaded, ids[:10], kv), feed(loaded, ids[:3], other), feed(loaded, ids[10:], kv)])
    assert kv.store is not None and kv.store.nbytes() > 0 and len(card.captures) == captures
    expected, _ = eager(loaded, lambda: feed(loaded, ids))
    assert relative_rms(torch.cat([found[:10], found[13:]]), expected) <= LIMITS[22]
    assert relative_rms(found[10:13], expected[:3]) <= LIMITS[22]
    edited = [*ids[:11], 3]
    assert kv.keep(edited, loaded.control.preset) == 11
    assert relative_rms(feed(loaded, [3], kv), eager(loaded, lambda: feed(loaded, edited)[-1:])[0]) <= LIMITS[22]


def test_a_text_with_states_is_gone_back_in(tmp_path: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """To copies that were made between replays, with another text and a stop in the meantime."""
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    monkeypatch.setattr(state_store, "EVERY", 16)
    make_pack(families.make("qwen3_next", tmp_path / "source"), tmp_path / "pack", PackSpec(up=3))
    loaded, kv, other = open_on(card, tmp_path / "pack"), KVCache(), KVCache()
    preset = use(loaded, PRESETS["nothing"])
    captures, ids = len(card.captures) + 1, [1 + 7 * i % 200 for i in range(42)]
    loaded.decoder.forward(ids[:5], kv)
    kv.computed(ids[:5], preset)
    found = torch.cat([feed(loaded, ids[5:14], kv), feed(loaded, ids[:3], other), feed(loaded, ids[14:32], kv)])
    edited = [*ids[:27], *ids[32:]]
    loaded.control.cancelled.set()
    with pytest.raises(Cancelled):
        loaded.decoder.forward(ids[32:33], kv)
    loaded.control.cancelled.clear()
    kept = kv.keep(edited, preset)
    assert kept == 5 + 16
    found = torch.cat([found, feed(loaded, edited[kept:], kv)])
    assert len(card.captures) == captures and card.replays == len(found)
    expected, _ = eager(loaded, lambda: [feed(loaded, part) for part in (ids[:32], ids[:3], edited)])
    expected = torch.cat([expected[0][5:14], expected[1], expected[0][14:], expected[2][kept:]])
    assert relative_rms(found, expected) <= LIMITS[22]


@pytest.mark.parametrize("window", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_window_slides(window: int, tmp_path: Path, card: FakeCard) -> None:
    edit_json(make_checkpoint(tmp_path / "source") / "config.json", lambda config: config.update(sliding_window=window))
    make_pack(tmp_path / "source", tmp_path / "pack", PackSpec())
    loaded = open_on(card, tmp_path / "pack")
    use(loaded, PRESETS["nothing"])
    found = feed(loaded, IDS)
    assert relative_rms(found, eager(loaded, lambda: feed(loaded, IDS))[0]) <= LIMITS[22]


def test_a_layer_that_somebody_watches_is_called(tiny_pack: Path, card: FakeCard) -> None:
    loaded, seen = open_on(card, tiny_pack), list[int]()

    def note(layer: MoELayer, _given: Any) -> None:
        seen.append(layer.index)

    hooks = [layer.mlp.experts.register_forward_pre_hook(note) for layer in loaded.model.model.layers]
    answer(loaded, IDS, max_new_tokens=3)
    assert seen == [0, 1] * 3 and card.replays == 0
    for hook in hooks:
        hook.remove()
    answer(loaded, IDS, max_new_tokens=3)
    assert len(seen) == 6 and card.replays == 2


def test_a_stop_is_seen_between_tokens(tiny_pack: Path, card: FakeCard) -> None:
    loaded, kv = open_on(card, tiny_pack), KVCache()
    use(loaded, PRESETS["nothing"])
    expected = feed(loaded, [4, 5])
    feed(loaded, [4], kv)
    loaded.control.cancelled.set()
    with pytest.raises(Cancelled):
        loaded.decoder.forward([5], kv)
    with pytest.raises(Cancelled):
        loaded.decoder.several(5, kv, Sampler(GREEDY, [4]), 3, ())
    assert kv.length == 1 and card.replays == 3
    loaded.control.cancelled.clear()
    assert torch.equal(feed(loaded, [5], kv), expected[1:])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")], ids=str
)
def test_what_cannot_be_captured_goes_layer_by_layer(tiny_pack: Path, card: FakeCard, error: Exception) -> None:
    card.refuses = error
    loaded = load(tiny_pack, None, "cpu", silent)[0]
    assert "by torch's operations, because a layer could not be captured" in loaded.decoder.reason
    assert str(error) in loaded.decoder.reason
    expected = answer(loaded, IDS)
    card.refuses = None
    loaded = open_on(card, tiny_pack)
    first = loaded.control.preset
    card.refuses = error  # in the middle of a chat
    use(loaded, PRESETS["weighed"])
    before = card.replays
    found, as_eager = answer(loaded, IDS), eager(loaded, lambda: answer(loaded, IDS))[0]
    assert found == as_eager and card.replays == before
    card.refuses = None
    use(loaded, first)
    assert answer(loaded, IDS) == expected and card.replays > before


def test_memory_that_cannot_be_pinned_is_the_reason(
    tiny_pack: Path, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=RuntimeError("CUDA error: out of memory\nSearch for it"))

    def pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", refused)
            return graphs.pinned(*shape, dtype=dtype, device=device)

    monkeypatch.setattr(card_ends, "pinned", pinned)
    loaded = load(tiny_pack, None, "cpu", silent)[0]
    assert loaded.decoder.reason.endswith("memory for graphs cannot be pinned: CUDA error: out of memory")
    assert refused.called and len(answer(loaded, IDS).tokens) == 16 and not card.replays


def test_the_chat_says_that_it_became_slower(tiny_pack: Path, card: FakeCard) -> None:
    with Engine() as engine:
        engine.load(tiny_pack)
        engine.send(asking(1, IDS, tokens=3))
        engine.end_of(1)
        assert card.replays == 2
        card.refuses = torch.OutOfMemoryError("CUDA out of memory")
        engine.send(SetQuality(Rule(sparsity=0.3)), asking(2, IDS, tokens=3))
        notice = engine.until(Notice)
        assert "slower" in notice.title and "CUDA out of memory" in notice.cause
        assert len(engine.tokens_of(2)) <= 3 and isinstance(engine.end_of(2), Finished)
        assert sum(isinstance(event, Notice) for event in engine.seen) == 1 and card.replays == 2


def test_what_is_counted_is_drained_into_its_own_answer(tiny_pack: Path, card: FakeCard) -> None:
    loaded = open_on(card, tiny_pack)
    telemetry, waiting = loaded.telemetry, list[Any]()
    telemetry.count = lambda count, *tensors: waiting.append((count, tensors))  # pyright: ignore[reportAttributeAccessIssue]

    def settle() -> None:
        for count, tensors in waiting:
            count(*(tensor.clone() for tensor in tensors))
        waiting.clear()

    telemetry.settle = settle
    use(loaded, PLAIN)
    answer(loaded, IDS, max_new_tokens=4)
    assert len(waiting) == 1 and sum(telemetry.layers[0].calls) == 0  # nobody has read it
    three = counted(loaded)
    assert sum(three[0]["calls"]) == 3 * 2 and counted(loaded) == three
    feed(loaded, IDS)
    assert waiting
    use(loaded, PRESETS["halves"])  # another structure counts in other parts
    feed(loaded, IDS[:2])
    assert len(waiting) == 2
    assert sum(counted(loaded)[0]["calls"]) == (3 + len(IDS) + 2) * 2
    feed(loaded, IDS)
    telemetry.begin(2, 1, 0.0)
    assert sum(counted(loaded)[0]["calls"]) == 0
    loaded.decoder.forward(IDS[:1], KVCache())  # a prompt of one token is not counted
    assert sum(counted(loaded)[0]["calls"]) == 0


def test_a_token_takes_no_call_per_layer_and_one_wait(tiny_pack: Path, tmp_path: Path, card: FakeCard) -> None:
    calls: list[list[str]] = []
    make_pack(make_checkpoint(tmp_path / "source", layers=4), tmp_path / "more layers", PackSpec())
    for pack in (tiny_pack, tmp_path / "more layers"):
        loaded = load(pack, None, "cpu", silent)[0]
        kv, sampler = KVCache(), Sampler(GREEDY, [4])
        for token in (4, 5):  # the first one takes the addresses of keys and values
            waits, counts = card.waits, Calls()
            with counts:
                drawn = loaded.decoder.several(token, kv, sampler, 3, ())
            assert drawn is not None and len(drawn[0]) == 1 and card.waits == waits + 1
            kv.computed([token], loaded.control.preset)
        calls.append(counts.names)
    assert calls[0] == calls[1] and 10 < len(calls[0]) < 120


@pytest.mark.parametrize("what", ["same numbers", "not static"])
@pytest.mark.usefixtures("card")
def test_the_fake_card_sees_what_a_replay_would_not(
    what: str, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of Python's that is another, or a tensor that is."""
    state: dict[str, Any] = {"number": 1.0, "tensor": torch.zeros(1)}
    through = card_token._Form.through  # pyright: ignore[reportPrivateUsage]

    def faulty(*given: Any) -> Tensor:
        stream = through(*given)
        return stream * state["number"] if what == "same numbers" else stream + state["tensor"]

    monkeypatch.setattr(card_token._Form, "through", faulty)  # pyright: ignore[reportPrivateUsage]
    loaded = load(tiny_pack, None, "cpu", silent)[0]
    feed(loaded, [1])
    state.update(number=2.0, tensor=torch.ones(1))
    with pytest.raises(AssertionError, match=what):
        feed(loaded, [1])


def on_gpu() -> LoadedModel:
    """The demo, which is there without any other package."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    loaded = load(DEMO, None, "cuda", silent)[0]
    assert "one graph per token" in loaded.decoder.reason, loaded.decoder.reason
    return loaded


def form_of(loaded: LoadedModel) -> Any:
    """What a token was captured as, which it has to be."""
    decoder: Any = loaded.decoder
    token = decoder.way._token
    assert token is not None and token.declined == "", token and token.declined
    return token._form


@pytest.mark.gpu
@pytest.mark.parametrize("open_at_once", [1, 3])
def test_a_gpu_captures_for_every_model_and_structure(open_at_once: int) -> None:
    opened, found = list[LoadedModel](), list[Tensor]()
    last = torch.empty(0)
    for _ in range(3):
        opened.append(on_gpu())
        for preset in (*PRESETS.values(), *PRESETS.values()):
            use(opened[-1], preset)
            last = feed(opened[-1], IDS)
            assert form_of(opened[-1]) is not None
        found.append(last)
        if len(opened) > open_at_once - 1:
            opened.pop().close()
    assert found[0].isfinite().all() and all(torch.equal(one, found[0]) for one in found)


@pytest.mark.gpu
def test_a_token_on_a_gpu_is_layer_after_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 4)
    loaded = on_gpu()
    for preset in PRESETS.values():
        use(loaded, preset)
        loaded.telemetry.begin(0, 0, 0.0)
        found = feed(loaded, IDS)
        counts = counted(loaded)
        assert form_of(loaded)
        expected, as_counted = eager(loaded, lambda: feed(loaded, IDS))
        assert relative_rms(found, expected.float().cpu()) <= 0.1, preset
        assert sum(counts[0]["calls"]) == sum(as_counted[0]["calls"]) > 0
        assert counts[0]["active"] == pytest.approx(as_counted[0]["active"], rel=0.1)
    assert answer(loaded, IDS, sampling=WARM) == answer(loaded, IDS, sampling=WARM)


@pytest.mark.gpu
def test_a_token_on_a_gpu_waits_once() -> None:
    loaded, kv = on_gpu(), KVCache()
    feed(loaded, IDS, kv)
    loaded.control.counting = True
    captured, waits = form_of(loaded).captured[1], list[int]()
    wait = captured.wait

    def once() -> None:
        torch.cuda.set_sync_debug_mode("default")  # it would forbid this too
        wait()
        waits.append(1)
        torch.cuda.set_sync_debug_mode("error")

    captured.wait = once
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert loaded.decoder.several(7, kv, Sampler(GREEDY, IDS), 1, ()) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
    chosen = loaded.packed.manifest.architecture.top_k
    assert sum(counted(loaded)[0]["calls"]) == (len(IDS) + 1) * chosen


@pytest.mark.gpu
def test_a_gpu_whose_memory_runs_out_goes_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, moe_step = answer(on_gpu(), IDS), operations.moe_step

    def out(*given: Any, **named: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return moe_step(*given, **named)

    monkeypatch.setattr(operations, "moe_step", out)
    loaded = load(DEMO, None, "cuda", silent)[0]
    assert "CUDA out of memory" in loaded.decoder.reason and "one graph per layer" in loaded.decoder.reason
    assert len(answer(loaded, IDS).tokens) == len(expected.tokens)
