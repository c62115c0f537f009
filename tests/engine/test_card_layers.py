"""A token through a graph per layer, with its experts computed in between, is the token through torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import graphs, kv_stores
from floe_chat.engine.decoder.card import card_ends
from floe_chat.engine.decoder.decoders import FusedDecoder, choose
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import BorrowingStore
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload import predictor
from floe_chat.engine.offload.device_memory import DeviceMemory
from floe_chat.engine.quality_presets import Preset
from torch import Tensor

from ..helpers import relative_rms
from .fake_card import FakeCard
from .offloading import EVERYTHING, PLAIN, SKIPPING, offloaded
from .step_models import EACH_HEAD, LIMIT, WINDOW, Guessing, Noting, feed, ids_of, make_model


def graphed(model: Any) -> FusedDecoder:
    decoder = choose(model, WINDOW)
    assert isinstance(decoder, FusedDecoder) and "one graph per layer and token" in decoder.reason, decoder.reason
    return decoder


@pytest.mark.parametrize("name", EACH_HEAD)
def test_logits_are_the_librarys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    card, model = FakeCard(monkeypatch), make_model(name)
    decoder, ids = graphed(model), ids_of(24)
    assert len(card.captures) == len(model.model.layers) + 1  # what follows the last one
    found = feed(decoder, KVCache(), ids, [3, *[1] * 21])
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 2:]
    assert relative_rms(found, expected) <= 2 * LIMIT
    assert card.replays == 21 * len(card.captures) and card.waits == 21


@pytest.mark.parametrize("name", ["mixtral-sliding", "olmoe", "qwen3_moe"])
def test_the_next_layers_input_is_foreseen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCard(monkeypatch)
    model, guesses = make_model(name), list[Tensor]()
    blocks = [Guessing(0, guesses), Guessing(1, guesses), Noting()]
    for layer, experts in zip(model.model.layers, blocks, strict=True):
        layer.mlp.experts = experts
    decoder = graphed(model)
    for block in blocks[:2]:
        assert isinstance(block, Guessing)
        block.decoder = decoder
    feed(decoder, KVCache(), ids_of(12), [1] * 12)
    for turn in range(12):
        assert relative_rms(guesses[2 * turn], blocks[1].calls[turn][0]) <= LIMIT
        assert relative_rms(guesses[2 * turn + 1], blocks[2].calls[turn][0]) <= LIMIT


def fed(loaded: LoadedModel, ids: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Logits after each of `ids`, and how often each expert was called."""
    loaded.telemetry.begin(0, 0, 0.0)
    loaded.control.counting = True
    logits = feed(loaded.decoder, KVCache(), ids, [1] * len(ids))
    loaded.control.counting = False
    loaded.telemetry.settle()
    return logits, [layer.calls for layer in loaded.telemetry.layers]


@pytest.mark.parametrize("predict", ["none", "gate", "partial"])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("preset", [SKIPPING, PLAIN, EVERYTHING], ids=lambda preset: preset.name)
def test_where_rows_are_changes_no_token(
    loaded: LoadedModel, preset: Preset, share: float, predict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [1, 5, 9, 200, 17, 17, 3, 42]
    loaded.control.preset = preset
    expected, calls = fed(loaded, ids)
    with monkeypatch.context() as patch:
        card = FakeCard(patch)
        with offloaded(loaded, preset, share, predict=False) as shared:
            assert isinstance(loaded.decoder, FusedDecoder)
            if predict != "none":
                shared.predictor = predictor.make(predict, loaded.model, loaded.packed, loaded.decoder.ahead)
            found, as_called = fed(loaded, ids)
    layers = len(loaded.model.model.layers)
    assert card.replays >= len(ids) * layers > 0
    assert card.waits == len(ids) * (1 if predict == "partial" else layers + 1)  # the logits, and each layer's record
    assert relative_rms(found, expected) <= 1e-4 and as_called == calls


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
    assert "the last norm and the head one by one, because they could not be captured: Out" in decoder.reason
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
        patch.setattr(decoder, "_graphs", None)
        assert relative_rms(found, feed(decoder, KVCache(), ids, [1] * 5)) <= LIMIT
    model.config.num_hidden_layers = layers
    assert torch.equal(feed(decoder, KVCache(), ids, [1] * 5), before) and len(card.captures) == captures + 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mixtral", "mixtral-sliding", "olmoe-biased-clipped", "qwen2_moe-mixed", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpus_layers_are_torchs(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("transformers", reason="it makes the models")
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    model = make_model(name, dtype).cuda()
    decoder, ids = graphed(model), ids_of(24)
    found = feed(decoder, KVCache(), ids, [3, *[1] * 21])
    decoder._graphs = None  # pyright: ignore[reportPrivateUsage]
    expected = feed(decoder, KVCache(), ids, [3, *[1] * 21])
    assert relative_rms(found, expected) <= (1e-4 if dtype == torch.float32 else 5e-2)
