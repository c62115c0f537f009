"""Every figure is counted, and counted right: recomputed here from what the layers were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from floe_chat.engine.decoder.kv_stores import BLOCK
from floe_chat.engine.events import CardRows, Finished, Load, Loaded, Stats
from floe_chat.engine.loader import LoadedModel
from floe_chat.engine.telemetry import Telemetry, hidden
from safetensors.torch import load_file
from torch import Tensor

from .driver import Engine, a_preset, answer, asking, open_model
from .margins import CLEAR

PROMPT = [5, 6, 7]
EXPERTS, NEURONS = 4, 96
SKIPPING = a_preset("all at once", 0.5, 0.8, drop=0.4, major=0.9, lossless=True, weighed=True)


@pytest.fixture
def loaded(tiny_pack: Path) -> LoadedModel:
    loaded = open_model(tiny_pack)
    loaded.control.preset = SKIPPING
    return loaded


Hook = Callable[[torch.nn.Module, tuple[Tensor, Tensor, Tensor]], None]


class Recount:
    """Counts decode by itself, from the stored tensors: per layer active neurons, bytes, calls of each expert.

    `unsure` are those so near their limits that the order of a sum decides, which differs between processors.
    """

    def __init__(self, loaded: LoadedModel, pack: Path) -> None:
        self.active = [0, 0]
        self.bytes = [0, 0]
        self.calls = [[0] * EXPERTS for _ in range(2)]
        self.steps = self.unsure = 0
        for index, layer in enumerate(loaded.model.model.layers):
            stored = load_file(pack / f"layer_{index:02d}.safetensors")
            layer.mlp.experts.register_forward_pre_hook(self._counter(loaded, index, stored))

    def _counter(self, loaded: LoadedModel, index: int, stored: dict[str, Tensor]) -> Hook:
        up_bytes = sum(stored[name].nbytes for name in ("up.q", "up.scale", "up.zero")) // EXPERTS
        row_bytes = stored["rows"].nbytes // (EXPERTS * NEURONS)
        places = np.linspace(0, 1, stored["threshold"].shape[1])
        layer = loaded.packed.layer(index)

        def limit(table: str, expert: int, share: float) -> float:
            return float(np.interp(share, places, stored[table][expert].double().numpy()))

        def count(_layer: torch.nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
            hidden, top_k_index, top_k_weights = arguments
            if not loaded.control.counting:
                return
            self.steps += index == 0
            scores = (top_k_weights[0] / top_k_weights[0].mean()).tolist()
            for expert, score in zip(top_k_index[0].tolist(), scores, strict=True):
                self.calls[index][expert] += 1
                neurons = (
                    NEURONS if score >= SKIPPING.rule.major else NEURONS // 2 if score >= SKIPPING.rule.drop else 0
                )
                x = hidden[0].double()
                gate, _ = layer.rows.layout.read(layer.rows.data[expert], torch.float64)
                v = (layer.signal.dense(expert, torch.float64) @ x)[:neurons]
                h = torch.nn.functional.silu(gate @ x)[:neurons] * v
                reached = v.abs() * score / limit("threshold", expert, SKIPPING.rule.sparsity)
                weight = h.abs() * score / limit("product", expert, SKIPPING.rule.product)
                active, kept = int((reached >= 1).sum()), int(((reached >= 1) & (weight >= 1)).sum())
                self.unsure += int((((reached - 1).abs() < CLEAR) | ((weight - 1).abs() < CLEAR)).sum())
                gate_bytes = layer.rows.layout.other.nbytes
                self.active[index] += active
                self.bytes[index] += up_bytes * neurons // NEURONS + active * gate_bytes
                self.bytes[index] += kept * (row_bytes - gate_bytes)

        return count


def stats_of(loaded: LoadedModel) -> Stats:
    return loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=512)


@pytest.mark.parametrize("ending", ["length", "stop", "context"])
def test_what_decode_touched_is_what_is_told(loaded: LoadedModel, tiny_pack: Path, ending: str) -> None:
    prompt = PROMPT * 168 if ending == "context" else PROMPT
    stops: list[int] = []
    if ending == "stop":
        free = answer(loaded, prompt, max_new_tokens=8).tokens
        stops = [token for place, token in enumerate(free) if place >= 2 and token not in free[:place]][:1]
    recount = Recount(loaded, tiny_pack)
    result = answer(loaded, prompt, max_new_tokens=8 if ending == "length" else 100, stop_ids=stops)
    stats = stats_of(loaded)
    assert result.reason == ending and recount.steps >= 2
    calls = [sum(layer) for layer in recount.calls]
    unsure, row = recount.unsure, load_file(tiny_pack / "layer_00.safetensors")["rows"].shape[-1]
    each = [a / (c * NEURONS) for a, c in zip(recount.active, calls, strict=True)]
    active, nbytes = sum(recount.active) / (sum(calls) * NEURONS), sum(recount.bytes) / recount.steps
    assert stats.active_neurons == pytest.approx(active, rel=1e-9, abs=unsure / (sum(calls) * NEURONS))
    assert stats.bytes_per_token == pytest.approx(nbytes, rel=1e-9, abs=unsure * row / recount.steps)
    assert stats.layer_activity == pytest.approx(each, rel=1e-9, abs=unsure / (min(calls) * NEURONS))
    assert stats.expert_use == tuple(
        tuple(pytest.approx(n / total) for n in layer) for layer, total in zip(recount.calls, calls, strict=True)
    )


def test_an_exact_answer_activates_everything(exact_pack: Path) -> None:
    loaded = open_model(exact_pack, "Exact")
    answer(loaded, PROMPT, max_new_tokens=4)
    stored = load_file(exact_pack / "layer_00.safetensors")
    stats = stats_of(loaded)
    assert stats.active_neurons == 1.0 and stats.layer_activity == (1.0, 1.0)
    # 2 layers, 2 of 4 experts each, all of their bytes
    whole = sum(stored[name].nbytes for name in ("up.q", "up.scale", "up.zero", "rows"))
    assert stats.bytes_per_token == 2 * 2 * whole / 4


@pytest.fixture
def engine(tiny_pack: Path) -> Iterator[Engine]:
    with Engine() as engine:
        engine.load(tiny_pack)
        yield engine


def finished(engine: Engine, request: int) -> Stats:
    end = engine.end_of(request)
    assert isinstance(end, Finished)
    return end.stats


def test_an_answers_counters(engine: Engine) -> None:
    engine.send(asking(1, PROMPT, tokens=9))
    stats = finished(engine, 1)
    assert (stats.request, stats.prompt_tokens, stats.new_tokens, stats.context_window) == (1, 3, 9, 512)
    assert stats.first_token_s and stats.first_token_s > 0
    assert stats.prefill_tps and stats.prefill_tps > 0
    assert stats.decode_tps_mean and stats.decode_tps_mean > 0
    assert stats.ram_bytes > 50_000_000
    # The last token was drawn but not read: 3 + 8 are in the cache. Memory for keys and values grows by blocks; there
    # are 2 layers of both, hidden 64, float16.
    assert stats.context_used == 11 and stats.kv_bytes == BLOCK * 2 * 2 * 64 * 2
    assert stats.vram_bytes is None


def test_what_was_not_measured_is_none_and_not_zero(engine: Engine) -> None:
    engine.send(asking(1, PROMPT, tokens=1))
    stats = finished(engine, 1)
    assert stats.new_tokens == 1 and stats.first_token_s and stats.prefill_tps
    assert (stats.decode_tps_mean, stats.active_neurons, stats.bytes_per_token) == (None, None, None)
    assert stats.layer_activity == () and stats.expert_use == ()
    engine.send(asking(2, PROMPT, stop=engine.tokens_of(1)))
    stats = finished(engine, 2)
    assert (stats.new_tokens, stats.first_token_s) == (0, None)
    assert stats.reused_tokens == stats.prompt_tokens and stats.prefill_tps is None, (
        "the prompt was there with its logits"
    )


def test_each_answer_starts_counting_anew(engine: Engine) -> None:
    found: list[Stats] = []
    for request, tokens in ((1, 30), (2, 5), (3, 5)):
        engine.send(asking(request, PROMPT, tokens=tokens))
        found.append(finished(engine, request))
    _, second, third = found
    assert second.new_tokens == third.new_tokens == 5
    assert second.active_neurons == third.active_neurons and second.bytes_per_token == third.bytes_per_token


def test_counters_are_told_while_the_answer_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floe_chat.engine.session.STATS_EVERY_S", 0.0)
    engine.send(asking(1, PROMPT, tokens=200))
    finished(engine, 1)
    told = [event.new_tokens for event in engine.seen if isinstance(event, Stats) and event.request == 1]
    # After the prompt, the first token, and each call that draws some.
    assert told[:2] == [0, 1] and told == sorted(told) and 1 < told[-1] < 200


def test_recall_by_layer(tiny_pack: Path) -> None:
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, "throttled:4gb", 1 << 30))
        engine.until(Loaded)
        engine.send(asking(1, PROMPT, tokens=9))
        rows = finished(engine, 1).rows
    assert rows is not None and rows.recall is not None and rows.precision is not None
    # Nothing looks ahead to the first of the two layers; only active neurons of the second count for the whole.
    assert rows.recalls[0] is None and rows.precisions[0] is None
    assert rows.precisions[1] == rows.precision and rows.recalls[1] == rows.recall
    assert 0 < rows.recall <= 1
    # As many experts are named as are chosen, two of four in each of 8 steps: in 16ths.
    assert rows.expert_recalls == (None, rows.expert_recall) and rows.expert_precisions == (None, rows.expert_precision)
    assert rows.expert_recall is not None and rows.expert_recall == rows.expert_precision
    assert rows.expert_recall * 16 % 1 == 0
    assert rows.recall <= rows.expert_recall or rows.expert_recall == 1


class Pool:
    """What a pool reports: 4 MB moved so far, the link busy for 3 seconds."""

    def moved(self) -> tuple[int, float]:
        return 4_000_000, 3.0

    def sizes(self) -> dict[str, int]:
        return {"pool": 1, "pool_used": 1, "up": 1, "dense": 1}

    def resident(self) -> dict[int, float]:
        return {0: 0.5}

    def evicted(self) -> int:
        return 7

    def link_peak(self) -> float:
        return 1e9

    def cards(self) -> tuple[CardRows, ...]:
        return ()


def test_shares_of_rows_hold_where_active_neurons_are_counted_later() -> None:
    """A GPU's layers count active neurons a token later: shares of those added up to 2 after two tokens."""
    telemetry = Telemetry(1, EXPERTS)
    telemetry.memory, telemetry.clock = Pool(), lambda: 5.0
    telemetry.begin(1, 3, 0.0)
    layer = telemetry.layers[0]
    layer.ready, layer.copied, layer.left_out, layer.active = 6, 1, 1, 4
    rows = telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1).rows
    assert rows is not None
    assert (rows.ready, rows.coming, rows.copied, rows.on_cpu, rows.left_out) == (0.75, 0, 0.125, 0, 0.125)
    assert rows.evicted == 0  # those 7 were before


@pytest.mark.parametrize(("until", "share"), [(4.0, 0.75), (2.0, 1.0)])
def test_the_link_is_in_use_for_a_share_of_all_the_time(until: float, share: float) -> None:
    """Rows also move between two tokens, which decode's own time leaves out: it was "120 %"."""
    now = 0.0
    telemetry = Telemetry(1, EXPERTS)
    telemetry.clock = lambda: now
    telemetry.begin(1, 3, 0.0)
    telemetry.prefill_done(0.0)
    telemetry.memory = Pool()
    telemetry.decoded(1.5)
    now = until
    rows = telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1).rows
    assert rows is not None and rows.link_busy == share


def test_the_link_hides_what_was_needed_while_nobody_waited() -> None:
    telemetry = Telemetry(2, EXPERTS)
    telemetry.clock = lambda: 4.0
    telemetry.begin(1, 3, 0.0)
    telemetry.prefill_done(0.0)
    telemetry.memory = Pool()
    telemetry.decoded(1.5)
    moved, busy = Pool().moved()

    def share(waited: float, unused: float) -> float | None:
        for layer in telemetry.layers:
            layer.waited, layer.unused = waited * busy / 2, int(unused * moved / 2)
        rows = telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=1).rows
        return None if rows is None else rows.link_hidden

    assert share(0.0, 0.0) == 1 and share(0.25, 0.5) == pytest.approx(0.25, abs=0.02) and share(0.8, 0.8) == 0
    assert hidden(0.0, 0.0, 0.0, 0.0) is None
