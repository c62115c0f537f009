"""The engine thread: commands in any order, failures that reach the reader, cancels at any moment."""

from __future__ import annotations

import errno
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine import loader, session
from floe_chat.engine.events import (
    Cancel,
    Command,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Loading,
    NewTokens,
    PrefillProgress,
    PresetChanged,
    Rule,
    Sampling,
    SetPreset,
    SetQuality,
    Shutdown,
    Stats,
    Unload,
    Unloaded,
)
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK, MoELayer
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.session import Session
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from ..helpers import edit_tensors, make_pack, reseal
from .driver import DEADLINE_S, Engine, answer, asking, layer_by_layer, open_model

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def engine(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with the tiny model loaded, which says what it has read of a prompt after each part of it."""
    monkeypatch.setattr(session, "READING_EVERY_S", math.inf)
    with Engine() as engine:
        engine.load(tiny_pack)
        yield engine


def explained(event: object) -> Failed:
    assert isinstance(event, Failed), event
    assert event.title and event.cause + event.hint
    return event


def test_loading_tells_its_steps_and_what_was_loaded(tiny_pack: Path) -> None:
    with Engine() as engine:
        loaded = engine.load(tiny_pack)
        steps = [event for event in engine.seen if isinstance(event, Loading)]
    assert len(steps) >= 3 and all(step.step for step in steps)
    assert [step.fraction for step in steps] == sorted(step.fraction for step in steps)
    assert all(0 <= step.fraction <= 1 for step in steps)
    assert (loaded.model, loaded.context_window, loaded.preset) == ("tiny", 512, "Balanced")
    assert loaded.presets == ("High", "Balanced", "Fast") and loaded.device == "cpu" and loaded.backend
    assert (
        loaded.widths == "up 3, gate and down 4, attention 4 bits"
        and loaded.memory_bytes > 100_000
        and loaded.seconds > 0
    )


def test_an_answer_is_prefill_then_tokens_then_its_end(engine: Engine, tiny_pack: Path) -> None:
    engine.send(asking(1, PROMPT))
    finished = engine.end_of(1)
    assert isinstance(finished, Finished) and finished.reason == "length"
    kinds = [type(event) for event in engine.seen if not isinstance(event, Loading | Loaded | Stats)]
    assert kinds == [PrefillProgress, *[NewTokens] * 16, Finished]
    assert engine.tokens_of(1) == answer(open_model(tiny_pack), PROMPT).tokens


def test_commands_sent_before_the_start_are_kept(tiny_pack: Path) -> None:
    engine = Engine()
    engine.send(Load(str(tiny_pack), None, "cpu"), asking(1, PROMPT, tokens=2))
    with engine:
        assert isinstance(engine.end_of(1), Finished)


def test_a_question_after_unloading_fails_and_loading_again_helps(engine: Engine, tiny_pack: Path) -> None:
    engine.send(Unload(), asking(1, PROMPT), SetPreset("Fast"))
    engine.until(Unloaded)
    assert explained(engine.end_of(1)).request == 1 and explained(engine.until(Failed)).request is None
    engine.load(tiny_pack)
    engine.send(asking(2, PROMPT, tokens=2))
    assert isinstance(engine.end_of(2), Finished)


def test_a_models_memory_is_given_back_once_nothing_holds_it(
    engine: Engine, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's allocator keeps after a model counts as taken: the next one would get less of the card."""
    held: list[weakref.ref[Any]] = []
    left: list[int] = []

    def closing(loaded: LoadedModel, close: Callable[[LoadedModel], None] = LoadedModel.close) -> None:
        held.append(weakref.ref(loaded.model))
        close(loaded)

    engine.send(asking(1, PROMPT, tokens=2))
    engine.end_of(1)
    monkeypatch.setattr(LoadedModel, "close", closing)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(sum(model() is not None for model in held)))
    engine.send(Unload())
    engine.until(Unloaded)
    assert len(held) == 1 and {*left} == {0}


def test_a_load_that_fails_keeps_no_memory(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its error, whose frames hold what was loaded so far."""
    held: list[weakref.ref[Any]] = []
    left: list[int] = []

    def joining(model: Any, *_: object) -> None:
        held.append(weakref.ref(model))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loader, "_decoder", joining)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(sum(model() is not None for model in held)))
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, "cpu"), Unload())
        assert "graphics card" in explained(engine.until(Failed)).title
        engine.until(Unloaded)
    assert len(held) == 1 and left and left[-1] == 0


def test_a_damaged_pack_fails_to_load_and_a_good_one_loads_after_it(tiny_pack: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(tiny_pack, tmp_path / "bad"))
    whole = (bad / "layer_00.safetensors").read_bytes()
    (bad / "layer_00.safetensors").write_bytes(whole[:-100])
    with Engine() as engine:
        engine.send(Load(str(bad), None, "cpu"))
        failed = explained(engine.until((Failed, Loaded)))
        assert "layer_00" in failed.cause and failed.exit_code == 1
        engine.load(tiny_pack)


@pytest.mark.parametrize(
    ("preset", "device"), [("Nonsense", "cpu"), ("Exact", "cpu"), (None, "cuda:77"), (None, "mps"), (None, "rubbish")]
)
def test_what_cannot_be_loaded_this_way_is_a_usage_error(tiny_pack: Path, preset: str | None, device: str) -> None:
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), preset, device))
        failed = explained(engine.until((Failed, Loaded)))
    assert failed.exit_code == 2 and failed.hint


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "The graphics card ran out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "This computer ran out of memory"),
        (MemoryError(), "This computer ran out of memory"),
        (OSError(errno.EIO, "Input/output error", "layer_00.safetensors"), "The model's files cannot be read"),
        (
            RuntimeError("Triton Error [HIP]: Code: 1, Messsage: invalid argument"),
            "The graphics card reported an error",
        ),
        (RuntimeError("the GPU's driver: out of memory"), "The graphics card reported an error"),
        (RuntimeError("a fault in a layer"), ""),
    ],
    ids=["gpu", "torch", "python", "disk", "triton", "link", "fault"],
)
def test_what_no_check_can_rule_out_ends_the_answer_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, title: str
) -> None:
    def out(*_arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MoELayer, "forward", out)
        layer_by_layer(patch)
        engine.send(asking(1, PROMPT))
        failed = explained(engine.end_of(1))
    if title:
        assert failed.title == title and failed.hint and "fault" not in failed.hint
    assert failed.request == 1 and (title or "a fault in a layer" in failed.cause)
    engine.send(asking(2, PROMPT))
    assert isinstance(engine.end_of(2), Finished)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("reported", "meaning"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be", "overclocked"),
        ("CUDA error: the launch timed out and was terminated", "drives a display"),
        ("CUDA error: uncorrectable ECC error encountered", "memory has a fault"),
        ("HIP error: CUDA-capable device(s) is/are busy or unavailable", "no longer there"),
        ("Triton Error [CUDA]: device-side assert triggered", "overclocked"),
        ("the GPU's driver: GPU is lost", "no longer there"),
    ],
)
def test_a_card_that_fails_for_good_ends_answers_with_a_sentence_and_nothing_else(
    engine: Engine, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, reported: str, meaning: str
) -> None:
    """CUDA refuses every later call of the process: nothing is freed, and what needs no card goes on."""
    failed: list[str] = []

    def refused(*_arguments: Any) -> None:
        failed.append(reported)
        raise RuntimeError(reported)

    for name, found in {"is_initialized": True, "device_count": 1, "memory_reserved": 1}.items():
        monkeypatch.setattr(torch.cuda, name, Mock(return_value=found))
    with monkeypatch.context() as patch:
        layer_by_layer(patch)
        for of, name in [(MoELayer, "forward"), (torch.cuda, "synchronize"), (torch.cuda, "empty_cache")]:
            patch.setattr(of, name, refused)
        patch.setattr(LoadedModel, "close", refused)
        engine.send(asking(1, PROMPT), asking(2, PROMPT), Load(str(tiny_pack), None, "auto"))
        said = [explained(engine.end_of(1)), explained(engine.end_of(2)), explained(engine.until(Failed, request=None))]
        assert all("no longer answers" in each.title and meaning in each.cause for each in said)
        assert all("\n" not in each.cause and "Start floe-chat again" in each.hint for each in said)
        assert 1 < len(failed) <= 6  # the answer, the question whether it is lost, and memory that is given back
    engine.load(tiny_pack)
    engine.send(asking(3, PROMPT, tokens=2))
    assert isinstance(engine.end_of(3), Finished)
    engine.send(SetPreset("Fast"))
    engine.until(PresetChanged)


@pytest.mark.some(2)
@pytest.mark.parametrize("prompt", [[], [5] * 512, [99_999], [-1]], ids=["empty", "too-long", "unknown", "negative"])
def test_prompts_that_cannot_be_answered_fail_and_the_next_one_works(engine: Engine, prompt: list[int]) -> None:
    engine.send(asking(1, prompt))
    assert explained(engine.end_of(1)).request == 1
    engine.send(asking(2, PROMPT, tokens=2))
    assert isinstance(engine.end_of(2), Finished)


def test_sampling_out_of_range_is_a_usage_error(engine: Engine) -> None:
    engine.send(Generate(1, (5,), Sampling(top_p=7), 4, ()))
    assert explained(engine.end_of(1)).exit_code == 2


def watch_calls(monkeypatch: pytest.MonkeyPatch, on_call: Callable[[int], None]) -> None:
    """Have `on_call(number of the call)` called after each MoE layer's computation."""
    original = MoELayer.forward
    done: list[int] = []

    def forward(self: MoELayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = original(self, hidden, top_k_index, top_k_weights)
        done.append(self.index)
        on_call(len(done))
        return out

    monkeypatch.setattr(MoELayer, "forward", forward)
    layer_by_layer(monkeypatch)


def send_at(monkeypatch: pytest.MonkeyPatch, engine: Engine, call: int, command: Command) -> None:
    """Send a command when the n-th MoE layer has been computed."""

    def on_call(number: int) -> None:
        if number == call:
            engine.send(command)

    watch_calls(monkeypatch, on_call)


def test_a_preset_changes_in_the_middle_of_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.send(SetPreset("high"))
    assert engine.until(PresetChanged).preset == "High"
    send_at(monkeypatch, engine, 40, SetPreset("Fast"))
    engine.send(asking(1, PROMPT, tokens=60))
    changed = engine.until(PresetChanged, preset="Fast")
    finished = engine.end_of(1)
    assert isinstance(finished, Finished)
    where = engine.seen.index(changed)
    assert 5 < sum(isinstance(event, NewTokens) for event in engine.seen[:where]) < 55
    engine.send(asking(2, PROMPT, tokens=60))
    only_fast = engine.end_of(2)
    assert isinstance(only_fast, Finished)
    # 20 steps at 60 % active and 40 at 20 % lie well above 20 % alone.
    assert finished.stats.active_neurons and only_fast.stats.active_neurons
    assert finished.stats.active_neurons > only_fast.stats.active_neurons + 0.05


def test_the_dial_turns_by_hand_in_the_middle_of_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    send_at(monkeypatch, engine, 20, SetQuality(Rule(sparsity=0.9)))
    engine.send(asking(1, PROMPT, tokens=60))
    assert engine.until(PresetChanged).preset == "Custom"
    assert isinstance(engine.end_of(1), Finished)
    engine.send(asking(2, PROMPT, tokens=30))
    sparse = engine.end_of(2)
    assert isinstance(sparse, Finished) and sparse.stats.active_neurons
    assert 0.02 < sparse.stats.active_neurons < 0.25
    engine.send(SetQuality(Rule()), asking(3, PROMPT, tokens=30))
    whole = engine.end_of(3)
    assert isinstance(whole, Finished) and whole.stats.active_neurons == 1.0


@pytest.mark.some(1)
@pytest.mark.parametrize("wrong", [Rule(1.5), Rule(-0.1), Rule(float("nan")), Rule(0.5, drop=2.0)], ids=str)
def test_a_dial_that_cannot_be_turned_so_far_stays(engine: Engine, wrong: Rule) -> None:
    engine.send(SetQuality(wrong))
    failed = explained(engine.until(Failed))
    assert failed.exit_code == 2 and "0 to 1" in failed.hint


def test_a_preset_that_does_not_exist_does_not_end_the_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    send_at(monkeypatch, engine, 8, SetPreset("Nonsense"))
    engine.send(asking(1, PROMPT))
    failed = explained(engine.until(Failed))
    assert failed.request is None and failed.exit_code == 2
    assert isinstance(engine.end_of(1), Finished)
    assert len(engine.tokens_of(1)) == 16


@pytest.mark.parametrize("first", [Load, Unload])
def test_a_preset_behind_a_load_is_for_the_model_that_comes(
    engine: Engine, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, first: type[Load | Unload]
) -> None:
    commands: list[Command] = [Load(str(tiny_pack), "High", "cpu"), SetPreset("Fast"), asking(2, PROMPT, tokens=2)]
    if first is Unload:
        commands.insert(0, Unload())

    def on_call(number: int) -> None:
        if number == 10:
            engine.send(*commands)

    watch_calls(monkeypatch, on_call)
    engine.send(asking(1, PROMPT))
    assert isinstance(engine.end_of(1), Finished)
    assert not [event for event in engine.seen if isinstance(event, PresetChanged | Failed)]
    assert engine.until(Loaded).preset == "High"
    assert engine.until(PresetChanged).preset == "Fast"
    assert isinstance(engine.end_of(2), Finished)


def reused(engine: Engine, request: int, prompt: list[int]) -> int:
    """Ask; how many of the prompt's tokens were not computed again."""
    engine.send(asking(request, prompt))
    finished = engine.end_of(request)
    assert isinstance(finished, Finished)
    steps = [event for event in engine.seen if isinstance(event, PrefillProgress) and event.request == request]
    kept = finished.stats.reused_tokens
    assert [(step.done, step.total) for step in steps] == [(n, len(prompt)) for n in sorted({kept, len(prompt)} - {0})]
    assert finished.stats.prompt_tokens == len(prompt)
    # All but the token drawn last.
    assert finished.stats.context_used == len(prompt) + 15
    return kept


def test_a_conversation_is_computed_once(engine: Engine, tiny_pack: Path) -> None:
    assert reused(engine, 1, PROMPT) == 0
    longer = [*PROMPT, *engine.tokens_of(1), 9, 10]
    assert reused(engine, 2, longer) == len(PROMPT) + 15
    assert reused(engine, 3, [*longer[:7], 99, 98]) == 7
    assert reused(engine, 4, [99, *longer]) == 0
    engine.load(tiny_pack)
    assert reused(engine, 5, [99, *longer]) == 0
    assert engine.tokens_of(5) == engine.tokens_of(4)


def test_what_a_coarser_preset_computed_is_computed_anew(engine: Engine) -> None:
    for request, preset, kept in ((1, "Fast", 0), (2, "High", 0), (3, "Fast", 4), (4, "Fast", 4)):
        engine.send(SetPreset(preset))
        # The third keeps what High computed; its answer is Fast's.
        assert reused(engine, request, PROMPT) == kept


def test_shutdown_ends_a_running_answer(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    engine = Engine()
    watch_calls(monkeypatch, calls.append)
    engine.session.start()
    engine.load(tiny_pack)
    engine.send(asking(1, PROMPT, tokens=480))
    engine.until(NewTokens)
    engine.send(Shutdown())
    assert engine.session.join(DEADLINE_S)
    assert max(calls) < 2 * 400


def test_shutdown_does_not_wait_for_questions_in_the_queue(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    watch_calls(monkeypatch, calls.append)
    engine = Engine()
    engine.send(Load(str(tiny_pack), None, "cpu"), asking(1, PROMPT, tokens=480), Shutdown())
    engine.session.start()
    assert engine.session.join(DEADLINE_S)
    assert not calls


def test_a_session_that_never_started_can_be_left(tiny_pack: Path) -> None:
    session = Session()
    session.send(Load(str(tiny_pack), None, "cpu"))
    session.send(Cancel(1))
    session.send(Shutdown())
    assert session.join(0.0)
    assert session.poll() == []


def spoilt_pack(pack: Path, folder: Path, file: str, name: str, value: float) -> Path:
    """A copy of a pack in which one tensor has a bad value and all checksums are right."""
    shutil.copytree(pack, folder)

    def change(key: str, tensor: Tensor) -> Tensor:
        if key == name:
            tensor = tensor.clone()
            tensor.view(-1)[0] = value
        return tensor

    edit_tensors(folder, change, file)
    reseal(folder)
    return folder


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.scale", "lm_head.zero"])
def test_a_weight_of_the_dense_part_that_is_no_number_is_named(
    tiny_pack: Path, tmp_path: Path, name: str, value: float
) -> None:
    pack = spoilt_pack(tiny_pack, tmp_path / "pack", "dense.safetensors", name, value)
    with Engine() as engine:
        engine.send(Load(str(pack), None, "cpu"))
        failed = explained(engine.until((Failed, Loaded)))
    assert "damaged" in failed.title and name in failed.cause and str(pack) in failed.hint


def test_experts_that_make_no_numbers_are_named_by_their_layer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    make_pack(tiny_checkpoint, pack, PackSpec(short=False))  # no byte is a scale that is no number

    def change(key: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, torch.nan) if key == "up.scale" else tensor

    edit_tensors(pack, change, "layer_01.safetensors")
    reseal(pack)
    with Engine() as engine:
        engine.load(pack)
        engine.send(asking(1, PROMPT))
        failed = explained(engine.until((Failed, Finished)))
    assert "layer 1" in failed.cause and "bug in floe-chat" not in failed.hint and str(pack) in failed.hint


LAYERS = 2


class Watch:
    """Counts MoE layers that began and that were computed; cancels a request when the n-th has been computed."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.computed = 0
        self.cancel_after: int | None = None
        self.request = 1
        original = MoELayer.forward

        def forward(layer: MoELayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            self.begun += 1
            out = original(layer, hidden, top_k_index, top_k_weights)
            self.computed += 1
            if self.computed == self.cancel_after:
                engine.send(Cancel(self.request))
            return out

        monkeypatch.setattr(MoELayer, "forward", forward)
        layer_by_layer(monkeypatch)


@pytest.fixture
def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(engine, monkeypatch)


def cancelled(engine: Engine, request: int = 1) -> Finished:
    end = engine.end_of(request)
    assert isinstance(end, Finished) and end.reason == "cancelled", end
    return end


def test_it_says_how_far_it_is_within_a_part_of_a_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "READING_EVERY_S", 0)
    engine.send(asking(1, [5, 6, 7] * 150, tokens=1))
    engine.end_of(1)
    done = [event.done for event in engine.seen if isinstance(event, PrefillProgress)]
    assert done == [128, 256, 256, 353, 450, 450]  # behind each of two layers, then as it is


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_cancel_in_prefill_is_seen_within_one_layer(engine: Engine, watch: Watch, after: int) -> None:
    watch.cancel_after = after
    engine.send(asking(1, [5, 6, 7] * 150))
    finished = cancelled(engine)
    assert watch.computed == after and watch.begun <= after + 1
    assert engine.tokens_of(1) == [] and finished.stats.new_tokens == 0
    done = [event.done for event in engine.seen if isinstance(event, PrefillProgress)]
    assert done == ([PREFILL_CHUNK] if after > LAYERS else [])


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_cancel_in_decode_is_seen_within_one_layer(engine: Engine, watch: Watch, steps: int, layer: int) -> None:
    watch.cancel_after = after = LAYERS * steps + layer
    engine.send(asking(1, PROMPT, tokens=400))
    finished = cancelled(engine)
    assert watch.computed == after and watch.begun <= after + 1
    assert len(engine.tokens_of(1)) == steps
    assert finished.stats.new_tokens == steps + (1 if layer == LAYERS else 0)  # drawn, but after the cancel


def test_a_cancel_before_its_question_holds(engine: Engine, watch: Watch) -> None:
    engine.send(Cancel(1), asking(1, PROMPT))
    cancelled(engine)
    assert watch.computed == 0 and engine.tokens_of(1) == []


def test_a_question_in_the_queue_is_cancelled_and_the_one_before_is_not(engine: Engine, watch: Watch) -> None:
    watch.cancel_after, watch.request = 6, 2
    engine.send(asking(1, PROMPT), asking(2, PROMPT), asking(3, PROMPT))
    cancelled(engine, 2)  # at once: it does not wait for its turn
    first, third = engine.end_of(1), engine.end_of(3)
    assert isinstance(first, Finished) and first.reason == "length"
    assert isinstance(third, Finished) and third.reason == "length"
    assert engine.tokens_of(3) == engine.tokens_of(1)


@pytest.mark.parametrize(("after", "kept"), [(1, 0), (3, PREFILL_CHUNK), (4, 450), (5, 450), (6, 451), (7, 451)])
def test_what_a_cancelled_answer_computed_is_not_computed_again(
    engine: Engine, watch: Watch, after: int, kept: int
) -> None:
    prompt = [5, 6, 7] * 150
    watch.cancel_after = after
    engine.send(asking(1, prompt))
    cancelled(engine)
    prompt += [*engine.tokens_of(1), 9]
    engine.send(asking(2, prompt))
    end = engine.end_of(2)
    assert isinstance(end, Finished) and end.stats.reused_tokens == kept


def test_a_cancel_that_comes_too_late_harms_nobody(engine: Engine) -> None:
    engine.send(asking(1, PROMPT, tokens=2))
    engine.end_of(1)
    engine.send(Cancel(1), Cancel(1), Cancel(99), asking(2, PROMPT, tokens=2))
    end = engine.end_of(2)
    assert isinstance(end, Finished) and end.reason == "length"
