"""Benchmarks of whole models, on tiny ones: which figures there are, and what is refused. No test waits for a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import layers, speed, synthetic
from floe_chat.engine.bench.layers import RoundKey
from floe_chat.engine.bench.measure import ResultTable, Section
from floe_chat.engine.bench.speed import SpeedRun
from floe_chat.engine.bench.subject import Subject
from floe_chat.engine.bench.synthetic import Spec
from floe_chat.engine.machine import read_floor
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.weights import LinearWeights
from floe_chat.models.catalog import described
from floe_chat.models.catalog_entry import Latent
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.families import FAMILIES
from floe_chat.models.families.sizes import sizes_of

TINY: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
TEXT = "Some words that a tokenizer of bytes makes many tokens of. " * 4


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes no time, and a floor that takes little."""
    monkeypatch.setitem(synthetic.MODELS, "tiny", described(TINY).sizes)
    monkeypatch.setattr(read_floor, "LEAST", 1 << 16)
    monkeypatch.setattr("floe_chat.engine.machine.random_weights.last_level_cache", lambda: 1 << 10)


def silent(_step: str, _done: int = 0, _total: int = 0) -> None:
    """Nobody watches."""


def make(**widths: int) -> Subject:
    torch.manual_seed(0)
    return synthetic.make(Spec("tiny", 3, **widths), "cpu", silent)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose times are made up: a first token after 10 ms, 1 ms per layer and 2 ms beside them."""
    whole = Subject.answer

    def answer(subject: Subject, prompt: Sequence[int], tokens: int) -> Any:
        made = whole(subject, prompt, tokens)
        run = subject.model.config.num_hidden_layers
        seconds = (2 + run) / 1e3
        return type(made)(seconds, 0.01, seconds, made.read, made.active)

    monkeypatch.setattr(Subject, "answer", answer)


def named(table: ResultTable, title: str) -> Section:
    return next(section for section in table.sections if title in section.title)


@pytest.mark.parametrize("widths", [{"up": 4, "rows": 8, "dense": 4}, {"up": 16, "rows": 16, "dense": 16}], ids=str)
def test_a_synthetic_model_answers_and_skips_what_its_preset_says(widths: dict[str, int]) -> None:
    subject = make(**widths)
    assert synthetic.nbytes(Spec("tiny", 3, **widths)) >= subject.weight_bytes(3, experts=1.0)
    for sparsity in (0.0, 0.5, 0.8):
        subject.control.preset = quality_presets.Preset("", Rule(sparsity, weighed=True))
        answer = subject.answer(subject.prompt(20), 20)
        assert answer.active == pytest.approx(1 - sparsity, abs=0.08)
        assert 0 < answer.prefill <= answer.first and answer.token > 0


SMALL: dict[str, Any] = {
    "hidden": 128,
    "intermediate": 256,
    "experts": 4,
    "top_k": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": 96,
}


@pytest.mark.parametrize("name", synthetic.MODELS)
def test_a_synthetic_model_has_the_published_layers(name: str) -> None:
    """All sizes but the number of layers are the catalogue's."""
    published, count = synthetic.MODELS[name], synthetic.usual_layers(name)
    family = FAMILIES[published.model_type]
    found = sizes_of(family, Spec(name, count).config())
    period, times = synthetic.period_of(name), published.decoder_layers / count
    assert count % period == 0 and (found.attending, found.recurrent is None) == (
        published.attending / times if period > 1 else count,
        published.recurrent is None,
    )
    counted: dict[str, Any] = {"layers": count, "dense_layers": 0, "dense_intermediate": 0}
    counted |= {name: getattr(found, name) for name in ("biases", "wide", "recurrent", "windowed", "draft")}
    assert found == replace(published, **counted) and bool(found.biases) == bool(published.biases)
    assert abs(found.windowed - published.windowed / times) <= 0.5
    if found.wide and published.wide:
        assert replace(found.wide, layers=published.wide.layers) == published.wide
    if found.recurrent and published.recurrent:
        assert replace(found.recurrent, layers=published.recurrent.layers) == published.recurrent
    with pytest.raises(UsageError, match="cannot have 1 layers") as caught:
        Spec(name, 1)
    assert f"{2 * period} to" in caught.value.hint


@pytest.mark.thorough
@pytest.mark.some(1)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3.6-35b-a3b", "gemma-4-26b-a4b", "deepseek-v2-lite"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt-oss-20b", "lfm2-8b-a1b")),
    ],
)
def test_a_narrower_one_of_two_periods_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published = synthetic.MODELS[name]
    latent = published.latent and Latent(published.latent.queries and 32, 64, 16, 64)
    small = SMALL | {"latent": latent, "shared": 256 if published.shared else 0}
    small |= {"kv_heads": 4} if latent else {}
    small |= {"wide": published.wide and replace(published.wide, kv_heads=1, head_dim=96)}
    monkeypatch.setitem(synthetic.MODELS, name, replace(published, **small))
    torch.manual_seed(0)
    subject = synthetic.make(Spec(name, synthetic.usual_layers(name), dense=8), "cpu", silent)
    assert subject.fewest == synthetic.period_of(name)
    subject.control.preset = quality_presets.Preset("", Rule(0.5, weighed=True))
    answer = subject.answer(subject.prompt(20), 8)
    assert answer.active == pytest.approx(0.5, abs=0.1) and answer.token > 0


def test_results_that_are_not_finite_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weights: LinearWeights, *, x_bits: int = 22) -> torch.Tensor:
        return torch.full((x.shape[0], weights.q.shape[0]), torch.nan if x_bits == 22 else 0.0)

    monkeypatch.setattr("floe_chat.kernels.operations.linear", wrong)
    with pytest.raises(FloeError, match="nothing was timed"):
        make()


def test_the_first_layers_alone_are_a_smaller_model() -> None:
    subject = make()
    with subject.first_layers(1):
        one = subject.answer(subject.prompt(8), 2)
    whole = subject.answer(subject.prompt(8), 2)
    assert subject.model.config.num_hidden_layers == 3
    assert subject.weight_bytes(1, experts=1.0) < subject.weight_bytes(3, experts=1.0)
    assert one.read < whole.read <= subject.weight_bytes(3, experts=1.0) + 3 * 11 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("kinds", "fewest"),
    [("aaaa", 1), ("aaabaaab", 4), ("aabaabaa", 5), ("aba", 2), ("abbbbb", 2), ("abbabbba", 2), ("a", 1)],
)
def test_the_layers_that_stand_for_all_leave_whole_periods(
    kinds: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floe_chat.engine.bench.subject._kind", str)
    model = SimpleNamespace(model=SimpleNamespace(layers=list(kinds)))
    monkeypatch.setattr("floe_chat.engine.bench.subject.choose", Mock())
    manifest: Any = None
    assert Subject("", model, manifest, manifest, manifest, 0, "cpu").fewest == fewest


@pytest.mark.some(1)
@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("bench", ["decode", "prefill"])
def test_a_layers_time_is_the_difference_of_layer_counts(bench: str) -> None:
    told: list[str] = []
    plan = SpeedRun(bench, ("No sparsity", "Fast"), 12, 1, 2, quick=False, published_layers=6)
    table = speed.run(make(), plan, [], lambda what, _done, _total: told.append(what))
    assert set(told) == {f"{bench} of tiny"} and len(told) == speed.WARM + 2
    presets = ["No sparsity", "Fast"]
    for title, ms in (("3 layers with", 5), ("one layer by", 1), ("all 6 layers", 8), ("First token", 10)):
        rows = [row for row in named(table, title).rows if row.name != read_floor.READ]
        assert [row.name for row in rows] == presets
        assert all(row.ms == pytest.approx(ms) and row.runs == 2 for row in rows)
    whole = named(table, "3 layers with")
    measured = any(row.name == read_floor.READ for row in whole.rows)
    assert all((row.of_floor is not None) == (measured and row.name != read_floor.READ) for row in whole.rows)
    if bench == "decode":
        assert "100 % active" in [row.note for row in whole.rows]
        assert [row.tokens_s for row in whole.rows][-1] == pytest.approx(200)
    else:
        assert [row.tokens_s for row in whole.rows][-1] == pytest.approx(12 / 0.005)


class FakePeer:
    """Half a layer's time of ours."""

    name, layers, version = "llama.cpp Q9", (1, 3), "llama.cpp 9"

    def answer(self, prompt: int, tokens: int, layers: int) -> tuple[float, float]:
        return (1 + layers) * prompt / 1e3, (1 + layers) * (tokens > 0) / 2e3

    def read_bytes(self, layers: int, *, all_experts: bool) -> int:
        return layers * (4000 if all_experts else 1000)

    def cpu_seconds(self) -> float:
        return 0.0


@pytest.mark.usefixtures("steady")
def test_a_peer_takes_part_in_every_round_and_all_are_compared_with_it() -> None:
    table = speed.run(make(), SpeedRun("decode", ("Fast",), 8, 1, 2, quick=False), [FakePeer()], silent)
    layer = {row.name: row for row in named(table, "one layer").rows}
    assert layer["llama.cpp Q9"].ms == pytest.approx(0.5) and layer["llama.cpp Q9"].peer is None
    assert layer["Fast"].peer == "llama.cpp Q9" and layer["Fast"].speedup == pytest.approx(0.5)
    assert FakePeer.name not in {row.name for row in named(table, "3 layers").rows}
    assert table.facts["peer"] == "llama.cpp 9"


def test_what_drowned_in_noise_is_said_and_not_shown() -> None:
    found: Mapping[RoundKey, Sequence[float]] = {
        RoundKey("a", 1, "seconds"): [1.0, 2.0],
        RoundKey("a", 3, "seconds"): [3.0, 4.0],
        RoundKey("b", 1, "seconds"): [1.0, 2.0, 2.0],
        RoundKey("b", 3, "seconds"): [3.0, 1.9, 1.8],
        RoundKey("c", 1, "seconds"): [1.0, 2.0, 2.0],
        RoundKey("c", 3, "seconds"): [3.0, 3.0, 2.0],
    }
    clear, notes = layers.told_apart(found, {"a": (1, 3), "b": (1, 3), "c": (1, 3), "one": (1, 1)})
    assert clear == ["a", "c"] and len(notes) == 1 and "noise: b." in notes[0]
    assert layers.slope(found, "a", (1, 3), "seconds") == [1.0, 1.0]
    assert layers.slope(found, "c", (1, 3), "seconds")[2] > 0


def test_too_little_memory_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2**30, available=2**30))

    def made(_spec: Spec) -> None:
        pytest.fail("weights were made")

    monkeypatch.setattr(synthetic, "expert_layers", made)
    with pytest.raises(FloeError, match="GB of free memory") as caught:
        synthetic.make(Spec("mixtral-8x7b", 3), "cpu", silent)
    assert "1.1 GB are available" in caught.value.cause and "--layers" in caught.value.hint
