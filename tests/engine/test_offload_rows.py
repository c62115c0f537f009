"""What rows a pool holds and an answer reads, counted once each, and what becomes of both when memory runs out."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.offload.placing import Found
from floe_chat.kernels.rule import LATE
from floe_chat.models.pack.usage_file import Heat
from torch import Tensor

from ..helpers import relative_rms
from .driver import answer as generated
from .driver import with_rule
from .margins import clear_prompt
from .offloading import (
    EVERYTHING,
    PLAIN,
    PROMPT,
    SHAPES,
    SKIPPING,
    answer,
    cache,
    device,
    forward,
    offloaded,
    open_shape,
    resize,
)


@pytest.fixture(scope="module", params=SHAPES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return open_shape(request.param, tmp_path_factory.mktemp(request.param))


def test_a_guess_that_a_prompt_left_is_not_counted_for_the_next_token(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt goes neuron by neuron and guesses for all of its tokens; the next token's guess comes too late."""
    with offloaded(loaded, SKIPPING, 0.3) as shared:
        kv = cache()
        forward(loaded, PROMPT[:5], kv)
        monkeypatch.setattr(shared.scheduler, "look", lambda: None)
        loaded.control.counting = True
        forward(loaded, [9], kv)
        loaded.control.counting = False
        assert shared.predictor is not None
        assert not any(layer.guessed or layer.experts_guessed for layer in loaded.telemetry.layers)


def test_eviction_hears_the_scores_of_all_experts(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = list[Found]()
    with offloaded(loaded, SKIPPING, 0.3) as shared:
        start = shared.scheduler.start

        def noted(found: Found, *given: Any) -> Any:
            heard.append(found)
            return start(found, *given)

        monkeypatch.setattr(shared.scheduler, "start", noted)
        kv = KVCache()
        with torch.inference_mode():
            loaded.decoder.forward([5], kv)
        architecture = loaded.packed.manifest.architecture
        assert len(heard) == architecture.layers
        for found in heard:
            assert found.heard is not None and found.heard.shape == (1, architecture.experts)
            assert float(found.heard.sum()) == pytest.approx(1)
            most, chosen = found.heard.topk(architecture.top_k)
            assert chosen.equal(found.chosen)
            gate = loaded.model.model.layers[0].mlp.gate
            scores = most / most.sum() if getattr(gate, "norm_topk_prob", True) else most
            assert torch.allclose(found.scores.float(), scores, rtol=1e-5)


def test_lenient_leaves_out_weak_rows_alone_and_uses_all_that_have_arrived(loaded: LoadedModel) -> None:
    """With nothing in the pool an answer is that of the higher sparsity, to which the weak rows are the difference."""
    lenient = with_rule(PLAIN, late=LATE)
    assert lenient.rule.lateness > lenient.rule.sparsity
    late, token = with_rule(PLAIN, sparsity=lenient.rule.lateness), [7]

    def run(prompt: list[int]) -> tuple[Tensor, Tensor]:
        loaded.control.preset = PLAIN
        kv = cache()
        forward(loaded, prompt, kv)
        whole = forward(loaded, token, kv)
        kv.crop(-1)
        loaded.control.preset = late
        return whole, forward(loaded, token, kv)

    prompt, (whole, bound) = clear_prompt(loaded, run)
    with offloaded(loaded, PLAIN, 1.0, predict=False) as shared:
        kv = cache()
        forward(loaded, prompt, kv)
        rows = shared.pool.capacity
        resize(shared, 0)
        resize(shared, rows)
        loaded.control.preset, loaded.control.counting = lenient, True
        first = forward(loaded, token, kv)
        counts = loaded.telemetry.layers
        assert all(layer.left_out > 0 and layer.ready == layer.coming == 0 for layer in counts)
        assert relative_rms(first, bound) <= 1e-5
        for index, table in enumerate(shared.pool.layers):
            shared.scheduler.fetch(index, np.flatnonzero(table < 0), urgent=False)  # as a prediction would
        shared.scheduler.await_all()
        kv.crop(-1)
        again = forward(loaded, token, kv)
        loaded.control.counting = False
    assert relative_rms(first, again) > 1e-3  # rows were missing
    assert relative_rms(again, whole) <= 1e-5


@pytest.mark.parametrize("kind", ["throttled", "virtual"])
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "link"])
@pytest.mark.parametrize("lenient", [True, False], ids=["lenient", "strict"])
@pytest.mark.parametrize("preset", [SKIPPING, PLAIN, EVERYTHING], ids=lambda preset: preset.name)
def test_the_shares_of_rows_add_up_to_all(
    loaded: LoadedModel, kind: str, cpu: bool, lenient: bool, preset: Preset
) -> None:
    with offloaded(loaded, with_rule(preset, late=LATE * lenient), 0.2, kind=kind, parts=Parts(cpu=cpu)) as shared:
        loaded.telemetry.memory = shared
        try:
            answer(loaded, PROMPT)
            told = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1)
        finally:
            loaded.telemetry.memory = None
        for layer in loaded.telemetry.layers:
            parts = layer.ready, layer.coming, layer.copied, layer.on_cpu, layer.left_out
            assert sum(parts) == layer.active > 0 and min(parts) >= 0
            assert (layer.left_out > 0) == lenient and (cpu or layer.on_cpu == 0)
            assert layer.hit < layer.looked  # a pool so small cannot have half of every expert's rows
        rows = told.rows
        assert rows is not None and rows.expert_hits is not None and 0 <= rows.expert_hits < 1
        shares = rows.ready, rows.coming, rows.copied, rows.on_cpu, rows.left_out
        assert sum(share or 0.0 for share in shares) == pytest.approx(1) and None not in shares


def test_rows_that_were_left_out_are_not_counted_as_read(loaded: LoadedModel) -> None:
    def read(preset: Preset) -> tuple[int, int]:
        with offloaded(loaded, preset, 1.0, predict=False) as shared:
            kv = cache()
            forward(loaded, PROMPT[:-1], kv)
            rows = shared.pool.capacity
            resize(shared, 0)
            resize(shared, rows)
            loaded.telemetry.begin(0, 0, 0.0)
            loaded.control.counting = True
            forward(loaded, PROMPT[-1:], kv)
            loaded.control.counting = False
            counts = loaded.telemetry.layers[0]
            return counts.bytes, counts.left_out

    weak = with_rule(PLAIN, late=LATE)
    (found, left_out), (bound, none) = read(weak), read(with_rule(PLAIN, sparsity=weak.rule.lateness))
    assert left_out > 0 == none and found == bound


def test_a_warm_pool_holds_what_was_hottest(loaded: LoadedModel) -> None:
    with offloaded(loaded, PLAIN, 0.2) as shared:
        layers, experts, neurons = shared.pool.slots.shape
        random = np.random.default_rng(4)
        hot = Heat(
            random.random((layers, experts), dtype=np.float32), random.random(shared.pool.slots.shape, dtype=np.float32)
        )
        shared.warm(hot)
        order = np.argsort(-(hot.scores[..., None] * hot.uses).reshape(-1))
        assert shared.pool.used == shared.pool.capacity
        for flat in order[: shared.pool.capacity]:
            layer, key = divmod(int(flat), experts * neurons)
            slot = shared.pool.slots[layer].reshape(-1)[key]
            assert slot >= 0 and torch.equal(shared.memory.rows[slot], shared.scheduler.sources[layer][key])


def test_a_pool_needs_a_row(loaded: LoadedModel) -> None:
    experts: MoELayer = loaded.model.model.layers[0].mlp.experts
    link = device("throttled", experts)
    with pytest.raises(ValueError, match="at least one row"):
        Offload(link, Parts(), [experts.packed], 0)
    link.close()


def run_out(monkeypatch: pytest.MonkeyPatch, shared: Offload, times: int) -> None:
    """Let the device's memory run out at its next computations."""
    original, left = shared.device.rows, times

    def rows(*given: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*given)

    monkeypatch.setattr(shared.device, "rows", rows)


@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory_the_pool_shrinks_and_the_answer_goes_on(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    with offloaded(loaded, SKIPPING, 1.0) as shared:
        prompt, want = clear_prompt(loaded, lambda prompt: generated(loaded, prompt, max_new_tokens=8).tokens)
        monkeypatch.setattr(loaded.control, "make_room", shared.make_room)
        before = shared.pool.capacity
        run_out(monkeypatch, shared, times)
        assert generated(loaded, prompt, max_new_tokens=8).tokens == want
        assert shared.pool.capacity == len(shared.memory.rows) < before * 0.76**times
        assert [notice.title for notice in shared.notices] == ["The graphics card ran out of memory"] * times


def test_memory_that_is_given_back_has_no_view_left(loaded: LoadedModel) -> None:
    with offloaded(loaded, SKIPPING, 1.0) as shared:
        generated(loaded, PROMPT, max_new_tokens=3)
        nbytes = shared.memory.rows.untyped_storage().nbytes()
        assert shared.make_room()
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        assert tensors and not [each for each in tensors if each.untyped_storage().nbytes() == nbytes]


def test_out_of_memory_with_nothing_left_to_give_is_an_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offloaded(loaded, SKIPPING, 0.02) as shared:
        monkeypatch.setattr(loaded.control, "make_room", shared.make_room)
        run_out(monkeypatch, shared, 1000)
        with pytest.raises(torch.OutOfMemoryError):
            generated(loaded, PROMPT, max_new_tokens=8)
