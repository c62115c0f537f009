"""Rows in RAM and a pool of them on a device: whatever the pool, the link and the placement, the answer is the same."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import Cancelled, Choice, MoELayer
from floe_chat.engine.experts.offloaded_layer import OffloadedLayer
from floe_chat.engine.experts.offloaded_prefill import StreamedPrompt
from floe_chat.engine.experts.ruled_layer import Share
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.offload.cards import ADD_LAUNCHES
from floe_chat.engine.offload.expert_ring import Piece
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.quality_presets import Preset
from floe_chat.kernels.offload.placing import Found
from floe_chat.kernels.rule import LATE
from floe_chat.models.pack.usage_file import Heat
from torch import Tensor

from ..helpers import relative_rms
from .driver import a_preset, with_rule
from .driver import answer as generated
from .fake_card import Recording
from .margins import clear_prompt
from .offloading import (
    EVERYTHING,
    PLAIN,
    PROMPT,
    SKIPPING,
    Answer,
    answer,
    cache,
    device,
    forward,
    offloaded,
    resize,
)


@pytest.fixture(scope="module")
def answered(loaded: LoadedModel) -> tuple[list[int], dict[str, Answer]]:
    """A prompt and its answers without any pool, in which no neuron is at its threshold."""

    def run(prompt: list[int]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for preset in (SKIPPING, PLAIN, EVERYTHING):
            loaded.control.preset = preset
            found[preset.name] = answer(loaded, prompt)
        return found

    return clear_prompt(loaded, run)


@pytest.fixture(scope="module")
def prompt(answered: tuple[list[int], dict[str, Answer]]) -> list[int]:
    return answered[0]


@pytest.fixture(scope="module")
def expected(answered: tuple[list[int], dict[str, Answer]]) -> dict[str, Answer]:
    """The prompt's answers by preset."""
    return answered[1]


@pytest.mark.some(2)
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize(
    ("kind", "predict", "cpu", "preset"),
    [
        ("throttled", True, 2e9, SKIPPING),
        ("throttled", False, 2e9, PLAIN),
        ("throttled", True, None, PLAIN),
        ("throttled", False, None, SKIPPING),
        ("throttled", True, 1e14, SKIPPING),
        ("virtual", True, 2e9, PLAIN),
        ("virtual", True, None, SKIPPING),
        ("virtual", False, 2e9, SKIPPING),
    ],
    ids=lambda value: value.name if isinstance(value, Preset) else str(value),
)
def test_tokens_do_not_depend_on_where_rows_are(
    loaded: LoadedModel,
    prompt: list[int],
    expected: dict[str, Answer],
    share: float,
    kind: str,
    predict: bool,
    cpu: float | None,
    preset: Preset,
) -> None:
    parts = Parts(cpu=cpu is not None)
    with offloaded(loaded, preset, share, kind=kind, predict=predict, cpu=cpu or 2e9, parts=parts) as shared:
        logits, tokens = answer(loaded, prompt)
        assert relative_rms(logits, expected[preset.name][0]) <= 1e-5
        assert tokens == expected[preset.name][1]
        for layer in loaded.telemetry.layers:
            assert layer.ready + layer.coming + layer.copied + layer.on_cpu == layer.active > 0 == layer.left_out
            assert cpu is not None or layer.on_cpu == 0
        counts = loaded.telemetry.layers
        assert sum(layer.ready for layer in counts) > 0 or share < 0.5
        # On the virtual device so small a model has nothing to wait for, and a guess may come too late to be used.
        assert any(layer.guessed for layer in counts) == predict or kind == "virtual"
        assert shared.device.link.bytes_moved > 0 or cpu == 1e14


def test_a_prompts_experts_are_added_in_one_order(loaded: LoadedModel) -> None:
    """Whichever of them arrive first, or are computed by the CPU: not even the last bit changes."""
    ids = torch.randint(3, 250, (200,), generator=torch.Generator().manual_seed(5)).tolist()
    found: list[Tensor] = []
    for share, cpu in ((0.3, 2e9), (0.6, 1e3), (1.0, 2e9), (0.01, 1e14)):
        with offloaded(loaded, PLAIN, share, predict=False, cpu=cpu):
            found += [forward(loaded, ids, cache()) for _ in range(2)]  # the pool has others the second time
    assert all(torch.equal(found[0], logits) for logits in found[1:])


@pytest.mark.some(2)
@pytest.mark.parametrize(("eviction", "threads"), [("score", 1), ("lru", 2), ("fifo", 1)])
def test_nor_on_what_is_evicted_nor_on_threads(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer], eviction: Any, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with offloaded(loaded, EVERYTHING, 0.3, parts=Parts(eviction=eviction)):
            logits, tokens = answer(loaded, prompt)
    finally:
        torch.set_num_threads(before)
    assert relative_rms(logits, expected["Everything"][0]) <= 1e-5
    assert tokens == expected["Everything"][1]


@pytest.mark.some(1)
def test_a_pool_may_change_its_size_between_tokens(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer]
) -> None:
    with offloaded(loaded, SKIPPING, 0.5) as shared:
        kv = cache()
        logits = [forward(loaded, prompt, kv)]
        for step, token in enumerate(expected["Skipping"][1]):
            if step % 2:
                size = (3, 40, 333, 11)[step // 2 % 4]
                resize(shared, size)
                shared.memory.rows.fill_(255)  # poison again
                assert shared.pool.capacity == len(shared.memory.rows) == size
            logits.append(forward(loaded, [token], kv))
    assert relative_rms(torch.cat(logits), expected["Skipping"][0]) <= 1e-5


@pytest.mark.some(1)
def test_a_preset_may_change_between_tokens(loaded: LoadedModel) -> None:
    def run(prompt: list[int]) -> Tensor:
        kv = cache()
        loaded.control.preset = SKIPPING
        logits = [forward(loaded, prompt, kv)]
        for step, preset in enumerate((PLAIN, SKIPPING, EVERYTHING, SKIPPING)):
            loaded.control.preset = preset
            logits.append(forward(loaded, [7 + step], kv))
        return torch.cat(logits)

    prompt, want = clear_prompt(loaded, run)
    with offloaded(loaded, SKIPPING, 0.2):
        assert relative_rms(run(prompt), want) <= 1e-5


@pytest.mark.some(2)
@pytest.mark.parametrize("at_layer", [0, 1])
@pytest.mark.parametrize("ids", [PROMPT, PROMPT[:1]], ids=["prompt", "token"])
def test_cancelled_at_any_layer_it_answers_the_next_time(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer], at_layer: int, ids: list[int]
) -> None:
    with offloaded(loaded, SKIPPING, 0.1):
        layer = loaded.model.model.layers[at_layer].mlp.experts

        def stop(*_given: object) -> None:
            loaded.control.cancelled.set()

        handle = layer.register_forward_pre_hook(stop)
        with pytest.raises(Cancelled):
            forward(loaded, ids, cache())
        handle.remove()
        loaded.control.cancelled.clear()
        assert relative_rms(answer(loaded, prompt)[0], expected["Skipping"][0]) <= 1e-5


@pytest.mark.some(1)
def test_cancelled_between_the_experts_of_a_prompt(
    loaded: LoadedModel, prompt: list[int], expected: dict[str, Answer]
) -> None:
    with offloaded(loaded, SKIPPING, 0.1, parts=Parts(cpu=False)) as shared:
        original = shared.device.expert

        def stop(*given: Any) -> Tensor:
            loaded.control.cancelled.set()
            return original(*given)

        shared.device.expert = stop  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(Cancelled):
            forward(loaded, PROMPT, cache())
        shared.device.expert = original  # pyright: ignore[reportAttributeAccessIssue]
        loaded.control.cancelled.clear()
        assert relative_rms(answer(loaded, prompt)[0], expected["Skipping"][0]) <= 1e-5


@pytest.mark.some(1)
def test_adding_a_streamed_expert_takes_as_many_launches_as_plans_count(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, seen, run = list[int](), list[list[object]](), StreamedPrompt.run

    def recorded(prompt: StreamedPrompt, shares: Sequence[Share]) -> None:
        with Recording(set()) as recording:
            run(prompt, shares)
        experts.extend(share.expert for share in shares)
        seen.extend(recording.log)

    def nothing(x: Tensor, *_given: Any) -> Tensor:
        return x

    with offloaded(loaded, PLAIN, 0.1, parts=Parts(cpu=False)) as shared, monkeypatch.context() as patch:
        patch.setattr(shared.device, "expert", nothing)
        patch.setattr(StreamedPrompt, "run", recorded)
        forward(loaded, list(range(5, 105)), cache())
    launched = [  # numbers are of one type here
        str(name) for name, *_ in seen if not re.match(r"aten\.(view|slice|select|to|unsqueeze)", str(name))
    ]
    assert len(launched) == ADD_LAUNCHES * len(experts) > 0, launched[:12]


@pytest.mark.parametrize("kind", ["throttled", "virtual"])
def test_a_prompt_that_fails_leaves_no_expert_on_its_way(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It would be written over what the next prompt copies into the same buffer."""
    with offloaded(loaded, SKIPPING, 0.1, kind=kind, parts=Parts(cpu=False)) as shared:
        sent, original = list[Transfer](), shared.device.link.submit

        def submit(transfer: Transfer) -> None:
            sent.append(transfer)
            original(transfer)

        def out(*_given: Any) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(shared.device, "expert", out)
            patch.setattr(shared.device.link, "submit", submit)
            patch.setattr(shared.device.link, "rate", 1e6, raising=False)  # 0.2 to 0.8 s for two experts
            with pytest.raises(torch.OutOfMemoryError):
                forward(loaded, PROMPT, cache())
        to_buffers = [transfer for transfer in sent if transfer.target is not shared.memory.rows]
        assert to_buffers and all(transfer.done for transfer in to_buffers)


@pytest.mark.some(1)
@pytest.mark.parametrize("preset", [PLAIN, SKIPPING], ids=lambda preset: preset.name)
def test_a_prompts_experts_come_before_their_layers_turn(
    loaded: LoadedModel,
    prompt: list[int],
    expected: dict[str, Answer],
    monkeypatch: pytest.MonkeyPatch,
    preset: Preset,
) -> None:
    """From one layer to the next too; a wrong guess of which changes time alone."""

    def nothing(_prompt: StreamedPrompt, _used: int) -> Iterator[Piece]:
        """What is sent ahead where nothing is."""
        return iter(())

    def read(expert: int | None) -> tuple[float, int]:
        def favoured(_layer: int) -> list[int]:
            return sorted(range(experts), key=lambda one: one != expert)

        with offloaded(loaded, preset, 0.1, kind="virtual", parts=Parts(cpu=False)) as shared:
            if expert is None:
                monkeypatch.setattr(StreamedPrompt, "_following", nothing)
            else:
                monkeypatch.setattr(shared.pool, "favoured", favoured)
            logits = forward(loaded, prompt, cache())
            monkeypatch.undo()
            assert relative_rms(logits, expected[preset.name][0][: len(prompt)]) <= 1e-5
            assert not shared.ring.coming
            return shared.device.now(), shared.device.link.bytes_moved

    experts = loaded.packed.manifest.architecture.experts
    alone, ahead = read(None), [read(expert) for expert in range(experts)]
    assert all(seconds <= alone[0] * 1.2 for seconds, _ in ahead)
    assert all(moved >= alone[1] for _, moved in ahead)  # a wrong guess costs bytes
    assert min(seconds for seconds, _ in ahead) < alone[0]


def test_a_guess_that_a_prompt_left_is_not_counted_for_the_next_token(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt goes neuron by neuron and guesses for all of its tokens; the next token's guess never comes."""
    with offloaded(loaded, SKIPPING, 0.3) as shared:
        kv = cache()
        forward(loaded, PROMPT[:5], kv)
        for look in ("look", "look_again"):
            monkeypatch.setattr(shared.scheduler, look, lambda: None)
        loaded.control.counting = True
        forward(loaded, [9], kv)
        loaded.control.counting = False
        assert shared.predictors
        assert not any(layer.guessed or layer.experts_guessed for layer in loaded.telemetry.layers)


def test_only_experts_in_the_pool_stand_in(loaded: LoadedModel) -> None:
    swapped: list[int] = []
    with offloaded(loaded, a_preset("", 0.0, alpha=0.9, lossless=True), 0.7) as shared:
        for index, block in enumerate(loaded.model.model.layers):
            experts: OffloadedLayer = block.mlp.experts
            experts.neighbours = replace(experts.neighbours, gate=block.mlp.gate)

            def compare(
                hidden: Tensor, routed: Tensor, weights: Tensor, index: int = index, choose: Any = experts.choose
            ) -> Choice:
                shares = shared.pool.resident(index)
                choice: Choice = choose(hidden, routed, weights)
                for asked, taken in zip(routed.tolist(), choice.experts.tolist(), strict=True):
                    others = sorted(set(taken) - set(asked))
                    swapped.extend(others)
                    assert all(shares[expert] >= 0.5 for expert in others)
                return choice

            experts.choose = compare  # pyright: ignore[reportAttributeAccessIssue]
        answer(loaded, PROMPT)
    assert swapped


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


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", ["throttled", "virtual"])
@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "link"])
@pytest.mark.parametrize("lenient", [True, False], ids=["lenient", "strict"])
@pytest.mark.parametrize("preset", [SKIPPING, EVERYTHING], ids=lambda preset: preset.name)
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


@pytest.mark.some(1)
def test_rows_that_are_evicted_are_counted_by_answer(loaded: LoadedModel) -> None:
    each: list[int] = []
    with offloaded(loaded, EVERYTHING, 0.5, parts=Parts(cpu=False)) as shared:
        loaded.telemetry.memory = shared
        try:
            for prompt in (PROMPT, PROMPT[:3], [*PROMPT[::-1]]):
                loaded.telemetry.begin(len(each), len(prompt), 0.0)
                answer(loaded, prompt)
                rows = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1).rows
                assert rows is not None
                each.append(rows.evicted)
        finally:
            loaded.telemetry.memory = None
        assert min(each) > 0 and sum(each) == shared.pool.evicted


@pytest.mark.some(1)
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


@pytest.mark.some(1)
@pytest.mark.parametrize("times", [2, 1])
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


@pytest.mark.some(1)
@pytest.mark.parametrize("taken", [0.9, 0.2])
def test_a_pool_takes_what_there_is_where_there_is_less(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, taken: float
) -> None:
    """Another program may have taken some of the memory since it was planned."""
    prompt, want = clear_prompt(loaded, lambda prompt: generated(loaded, prompt, max_new_tokens=8).tokens)
    with offloaded(loaded, SKIPPING, 1.0) as shared:
        new, whole = shared.memory._new, shared.memory.nbytes  # pyright: ignore[reportPrivateUsage]

        def limited(nbytes: int) -> Tensor:
            if nbytes > (1 - taken) * whole:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return new(nbytes)

        monkeypatch.setattr(shared.memory, "_new", limited)
        monkeypatch.setattr(loaded.control, "make_room", shared.make_room)
        run_out(monkeypatch, shared, 1)
        assert generated(loaded, prompt, max_new_tokens=8).tokens == want
        there = shared.memory.nbytes
        assert 0.9 * min(0.75, 1 - taken) * whole < there <= (1 - taken) * whole
        assert shared.pool.capacity == len(shared.memory.rows) == there // shared.memory.row_bytes


@pytest.mark.some(1)
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
