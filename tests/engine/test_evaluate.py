"""Evaluation: packs against their source or themselves, each figure by its plain formula, and what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_stores import GrowingStore, Layout
from floe_chat.engine.events import Advanced
from floe_chat.engine.loader import load
from floe_chat.engine.quality import evaluate, text_windows
from floe_chat.engine.quality.candidates import Candidate, compute
from floe_chat.engine.quality.divergence import Scores, score, summarize
from floe_chat.engine.quality.evaluate import Evaluation, PresetLoss, run
from floe_chat.engine.quality.source_model import SourceModel, identify
from floe_chat.engine.quality.text_windows import cut
from floe_chat.engine.quality.told import Told
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.rule import LATE, Rule
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, FloeError, PackError, UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing import logits_cache
from torch import Tensor

from ..helpers import edit_json, edit_tensors, make_checkpoint, reference_model, reseal
from .driver import answer, open_model, silent
from .step_models import feed
from .test_quantized import plain_model

WINDOW = 64  # tokens: short, to keep the tests so
TEXT = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(7)).tolist()


def unread(_what: str) -> None:
    """Progress that nobody looks at."""


def measured(
    pack: Path, source: Path, *presets: str, ids: list[int] = TEXT, tokens: int = 128, notes: list[str] | None = None
) -> Evaluation:
    """An evaluation on the CPU; what it notes goes to `notes`."""
    return run(pack, source, ids, presets, tokens, "cpu", Told(unread, unread if notes is None else notes.append))


def refused(pack: Path, source: Path, *presets: str, **options: Any) -> FloeError:
    with pytest.raises(FloeError) as caught:
        measured(pack, source, *presets, **options)
    assert caught.value.title and caught.value.hint, caught.value
    return caught.value


def cache_folder() -> Path:
    """Where the source's logits are kept."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "source-logits"


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes; the arithmetic is the same."""
    monkeypatch.setattr(text_windows, "WINDOW", WINDOW)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(evaluate, "NEW_TOKENS", 8)


def test_an_exact_pack_is_its_source(exact_pack: Path, tiny_checkpoint: Path) -> None:
    found = measured(exact_pack, tiny_checkpoint, "Exact")
    (row,) = found.presets
    assert row.preset == "Exact" and row.divergence.kl_max < 1e-9 and row.divergence.same_top == 1
    assert row.divergence.dp_rms < 1e-6 and row.first_divergence == (None,) * 4 and row.active_neurons == 1
    assert (found.windows, found.window, found.tokens, found.scored) == (2, WINDOW, 128, WINDOW)
    rows, keep = text_windows.cut(TEXT, Checkpoint(tiny_checkpoint).config, 128)
    labels = rows.clone()
    labels[:, :-keep] = -100  # what transformers leaves out of its loss
    with torch.inference_mode():
        loss = reference_model(tiny_checkpoint)(input_ids=rows, labels=labels).loss
    assert row.divergence.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
    assert row.divergence.source_perplexity == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_rounded_pack_diverges_as_computed_directly(tiny_pack: Path, tiny_checkpoint: Path) -> None:
    row = measured(tiny_pack, tiny_checkpoint, "High").presets[0]
    rows, keep = text_windows.cut(TEXT, Checkpoint(tiny_checkpoint).config, 128)
    loaded = open_model(tiny_pack)
    high = quality_presets.get("High", loaded.packed.manifest)
    with torch.inference_mode():
        p, q = (
            model(input_ids=rows[:, :-1], use_cache=False).logits[:, -keep:].double().softmax(-1)
            for model in (reference_model(tiny_checkpoint), plain_model(tiny_checkpoint, loaded, high))
        )
    kl = (p * (p / q).log()).sum(-1)
    assert row.divergence.kl_mean > 1e-3
    # High rounds what experts read to 15 bits, the plain model does not; Balanced, to 8, is off by up to 2 %.
    assert row.divergence.kl_mean == pytest.approx(float(kl.mean()), rel=0.01)
    assert row.divergence.kl_max == pytest.approx(float(kl.max()), rel=0.02)


def test_lenient_is_measured_as_if_no_weak_row_were_there(tiny_pack: Path, tiny_checkpoint: Path) -> None:
    def of(*, lenient: bool) -> Evaluation:
        told = Told(unread, unread)
        return run(tiny_pack, tiny_checkpoint, TEXT, ("Balanced",), 128, "cpu", told, lenient=lenient)

    strict, late = (of(lenient=lenient) for lenient in (False, True))
    assert not strict.lenient and late.lenient
    (waits,), (leaves,) = strict.presets, late.presets
    assert leaves.divergence.kl_mean > waits.divergence.kl_mean
    share = (leaves.active_neurons or 0) / (waits.active_neurons or 1)
    assert share == pytest.approx(1 - LATE, abs=0.1)


def test_without_a_source_a_pack_is_compared_with_itself(tiny_pack: Path) -> None:
    told, names = Told(unread, unread), ("No sparsity", "Fast")
    found = run(tiny_pack, None, TEXT, names, 128, "cpu", told)
    nothing, fast = found.presets
    assert found.source is None and nothing.divergence.kl_max == 0 and nothing.divergence.same_top == 1
    assert nothing.first_divergence == (None,) * 4 and fast.divergence.kl_mean > 0.01


def test_a_preset_set_by_hand_is_that_preset(tiny_pack: Path, tiny_checkpoint: Path) -> None:
    told, fast = Told(unread, unread), quality_presets.get("Fast", Manifest.read(tiny_pack))
    found = run(tiny_pack, tiny_checkpoint, TEXT, ("Fast",), 128, "cpu", told, rule=fast.rule)
    named, by_hand = found.presets
    assert (named.preset, by_hand.preset) == ("Fast", "Custom")
    assert replace(named, preset="Custom") == by_hand


@pytest.mark.thorough
def test_substitution_is_measured_as_the_frontier_measures_it(exact_pack: Path, tiny_checkpoint: Path) -> None:
    """Two simulations: routers of transformers' modules that answer otherwise, and candidates side by side."""
    told, rule = Told(unread, unread), Rule(alpha=0.6)
    (found,) = run(exact_pack, tiny_checkpoint, TEXT, (), 128, "cpu", told, rule=rule).presets
    checkpoint = Checkpoint(tiny_checkpoint)
    windows, keep = cut(TEXT, checkpoint.config, 128)
    passages = windows[:1, :-1]
    with torch.inference_mode():
        settings = [Candidate(), Candidate(rule=replace(rule, weighed=True))]
        plain, swapped = compute(checkpoint, settings, passages, windows[:, :-1], keep, unread)
    scores = [
        score(ours, theirs, row[-keep:])
        for ours, theirs, row in zip(swapped.logits(), plain.logits(), windows, strict=True)
    ]
    assert found.divergence.kl_mean > 1e-3
    assert found.divergence.kl_mean == pytest.approx(summarize(scores).kl_mean, rel=1e-3)


def test_8_bits_are_the_codes_that_a_chat_stores(
    exact_pack: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Layout] = []
    original = GrowingStore.__init__

    def noting(self: GrowingStore, layout: Layout) -> None:
        made.append(layout)
        original(self, layout)

    monkeypatch.setattr(GrowingStore, "__init__", noting)
    found: dict[int, PresetLoss] = {}
    for bits in (16, 8):
        made.clear()
        told = Told(unread, unread)
        (found[bits],) = run(exact_pack, tiny_checkpoint, TEXT, ("Exact",), 128, "cpu", told, kv_bits=bits).presets
        # Two windows and four prompts; with 8 bits, each window twice more, for the comparison with 16.
        coded = [layout.dtype == CODES for layout in made]
        assert (coded.count(False), coded.count(True)) == ((6, 0) if bits == 16 else (2, 8))
    assert found[16].divergence.kl_max < 1e-9 and found[16].kv is None
    rows, keep = text_windows.cut(TEXT, Checkpoint(tiny_checkpoint).config, 128)
    loaded = load(exact_pack, "Exact", "cpu", silent, advanced=Advanced(kv_bits="8"))[0]
    scores: list[Scores] = []
    for row in rows:
        kv, ids, first = KVCache(), row.tolist(), len(row) - keep
        pieces = [first, *[1] * (keep - 1)]
        with torch.inference_mode():
            exact = reference_model(tiny_checkpoint)(input_ids=row[None, :-1], use_cache=False).logits[0, -keep:]
        scores.append(score(feed(loaded.decoder, kv, ids, pieces), exact, row[-keep:]))
    chat, coarse = summarize(scores), found[8]
    assert chat.kl_mean > 1e-7 and coarse.divergence.kl_mean == pytest.approx(chat.kl_mean, rel=0.02)
    assert coarse.kv is not None and coarse.kv.kl_mean == pytest.approx(chat.kl_mean, rel=0.02)


def test_the_greedy_gate_finds_where_generated_answers_part(tiny_pack: Path, tiny_checkpoint: Path) -> None:
    found = measured(tiny_pack, tiny_checkpoint, "fast").presets[0].first_divergence
    theirs = reference_model(tiny_checkpoint)
    expected: list[int | None] = []
    for prompt in text_windows.cut_prompts(TEXT, theirs.config):
        ours = answer(open_model(tiny_pack, "Fast"), prompt.tolist(), max_new_tokens=8).tokens
        ids = prompt[None]
        with torch.inference_mode():
            for _ in range(8):
                ids = torch.cat([ids, theirs(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        pairs = list(zip(ours, ids[0, -8:].tolist(), strict=True))
        expected.append(next((place for place, (a, b) in enumerate(pairs) if a != b), None))
    assert found == tuple(expected) and any(place is not None for place in expected)


def test_windows_lie_apart_and_over_the_whole_text(tiny_checkpoint: Path) -> None:
    config = Checkpoint(tiny_checkpoint).config
    rows, keep = text_windows.cut(list(range(1000, 1150)), config, 10_000)
    assert keep == WINDOW // 2 and rows.shape == (2, WINDOW) and rows[:, 0].tolist() == [config.bos_token_id] * 2
    assert rows[0, 1:].tolist() == list(range(1000, 1063)) and rows[1, 1:].tolist() == list(range(1087, 1150))
    config.bos_token_id = None
    assert text_windows.cut(TEXT, config, 64)[0].tolist() == [TEXT[:WINDOW]]


def test_what_cannot_be_measured_is_refused(
    tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(tiny_pack, tiny_checkpoint, ids=TEXT[:10])
    assert isinstance(error, UsageError) and "10" in error.cause and str(WINDOW - 1) in error.cause
    assert "no preset 'Best'" in refused(tiny_pack, tiny_checkpoint, "Best").title
    assert "cannot run Exact" in refused(tiny_pack, tiny_checkpoint, "Exact").title
    error = refused(tiny_pack, make_checkpoint(tmp_path / "three", layers=3))
    assert isinstance(error, UsageError) and "num_hidden_layers is 3, the pack's is 2" in error.cause
    error = refused(tiny_pack, make_checkpoint(tmp_path / "other", seed=1))
    assert isinstance(error, UsageError) and "values of" in error.cause and "tiny" in error.cause
    error = refused(tiny_pack, tiny_checkpoint, tokens=WINDOW - 1)
    assert isinstance(error, UsageError) and str(WINDOW) in error.hint
    vocabulary = Checkpoint(tiny_checkpoint).config.vocab_size
    monkeypatch.setattr(logits_cache, "LIMIT_BYTES", 2 * (3 * WINDOW // 2 * vocabulary * 4))
    error = refused(tiny_pack, tiny_checkpoint, tokens=4 * WINDOW)
    assert isinstance(error, UsageError) and f"{3 * WINDOW} or fewer" in error.hint


def test_a_source_under_another_name_is_noted(tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    measured(tiny_pack, Path(shutil.copytree(tiny_checkpoint, tmp_path / "renamed")), "High", notes=notes)
    assert len(notes) == 1 and "renamed" in notes[0] and tiny_checkpoint.name in notes[0]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_source_without_a_tensor(tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    edit_tensors(source, lambda found, value: None if found == name else value)
    error = refused(tiny_pack, source)
    assert isinstance(error, CheckpointError) and name in error.cause


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("model.layers.1.block_sparse_moe.experts.2.w2.weight", "expert 2 of layer 1"),
        ("model.layers.1.self_attn.o_proj.weight", "attention of layer 1"),
        ("lm_head.weight", "the output head"),
    ],
)
def test_values_of_the_source_that_are_not_finite_are_traced(
    tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path, name: str, blamed: str
) -> None:
    source = Path(shutil.copytree(tiny_checkpoint, tmp_path / "source"))
    edit_tensors(source, lambda found, value: value * math.nan if found == name else value)
    error = refused(tiny_pack, source)
    assert isinstance(error, CheckpointError) and blamed in error.cause and not list(cache_folder().glob("*"))


def test_values_of_the_pack_that_are_not_finite_are_traced(
    exact_pack: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    pack = Path(shutil.copytree(exact_pack, tmp_path / "pack"))

    def spoil(name: str, value: Tensor) -> Tensor:
        if name != "rows" or value[3].isnan().any():
            return value
        value = value.clone()
        value[3] = torch.full_like(value[3].view(torch.bfloat16), math.nan).view(torch.uint8)
        return value

    layer = tmp_path / "only"
    layer.mkdir()
    shutil.move(pack / "layer_01.safetensors", layer)
    edit_tensors(layer, spoil)
    shutil.move(layer / "layer_01.safetensors", pack)
    reseal(pack)
    error = refused(pack, tiny_checkpoint)
    assert isinstance(error, PackError) and "expert 3 of layer 1" in error.cause


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each batch that the source really computed."""
    calls: list[int] = []
    original = SourceModel.logits

    def counting(self: SourceModel, ids: Tensor, keep: int) -> Tensor:
        calls.append(ids.shape[0])
        return original(self, ids, keep)

    monkeypatch.setattr(SourceModel, "logits", counting)
    return calls


def test_the_source_is_computed_once(tiny_pack: Path, tiny_checkpoint: Path, computed: list[int]) -> None:
    notes: list[str] = []
    first = measured(tiny_pack, tiny_checkpoint, "High", notes=notes)
    assert (computed, notes) == ([2, 4], [])  # windows, then prompts
    assert measured(tiny_pack, tiny_checkpoint, "High", notes=notes) == first
    assert (computed, notes) == ([2, 4], [])
    files = list(cache_folder().iterdir())
    assert len(files) == 4 and not any(path.suffix == ".part" for path in files)
    if os.name == "posix":
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    measured(tiny_pack, tiny_checkpoint, "High", ids=TEXT[::-1])
    assert computed == [2, 4, 2, 4], "another text is another entry"


def test_another_source_is_another_entry(tiny_pack: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    packed = PackedModel.open(tiny_pack)
    before = identify(Checkpoint(copy), packed)
    assert before == identify(Checkpoint(copy), packed)
    edit_tensors(copy, lambda name, value: value + 1 if ".experts.2.w2" in name else value)
    assert identify(Checkpoint(copy), packed) != before


Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "cut short": lambda entry: os.truncate(entry, 100),
    "another byte": lambda entry: entry.write_bytes(entry.read_bytes()[:-1] + bytes([entry.read_bytes()[-1] ^ 1])),
    "foreign": lambda entry: edit_json(entry.with_suffix(".json"), lambda fields: fields.update(format="another")),
    "no JSON": lambda entry: entry.with_suffix(".json").write_text("["),
    "another shape": lambda entry: logits_cache._store(entry.parent, entry.stem, torch.zeros(1, 2, 3)),  # pyright: ignore[reportPrivateUsage]
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_computed_again_and_said_so(damage: Damage) -> None:
    logits, notes, calls = torch.randn(2, 4, 64), list[str](), list[int]()

    def compute() -> Tensor:
        calls.append(1)
        return logits

    def asked() -> Tensor:
        return logits_cache.cached("key", (2, 4, 64), notes.append, compute)

    assert torch.equal(asked(), logits) and torch.equal(asked(), logits) and (len(calls), notes) == (1, [])
    entry = cache_folder() / "key.safetensors"
    fields = json.loads(entry.with_suffix(".json").read_text())
    assert set(fields) == {"format", "key", "size", "sha256"}
    damage(entry)
    assert torch.equal(asked(), logits) and len(calls) == 2 and len(notes) == 1 and "computed again" in notes[0]
    assert torch.equal(asked(), logits) and len(calls) == 2 and len(notes) == 1, "the entry is whole again"


def test_a_cache_that_cannot_be_written_only_costs_time() -> None:
    cache_folder().parent.mkdir(parents=True)
    cache_folder().write_text("a file where the folder should be")
    notes: list[str] = []
    assert logits_cache.cached("key", (1, 1, 1), notes.append, lambda: torch.ones(1, 1, 1)).item() == 1
    assert any("could not be cached" in note for note in notes)


def test_the_cache_stays_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.ones(1, 4, 64)
    monkeypatch.setattr(logits_cache, "LIMIT_BYTES", 3000)
    for number in range(4):
        logits_cache.cached(f"k{number}", (1, 4, 64), unread, lambda: logits)
        entry = cache_folder() / f"k{number}.safetensors"
        os.utime(entry, (number, number))
    assert sorted(path.stem for path in cache_folder().glob("*.json")) == ["k2", "k3"]
    assert sum(path.stat().st_size for path in cache_folder().glob("*.safetensors")) <= 3000


def by_hand(logits: Tensor, source: Tensor, following: list[int]) -> dict[str, float]:
    """Every figure with plain float64 loops and Python's own mathematics."""
    kl: list[float] = []
    nll: list[float] = []
    source_nll: list[float] = []
    dp: list[float] = []
    same = 0
    for ours, theirs, token in zip(logits.tolist(), source.tolist(), following, strict=True):
        q, p = ([math.exp(value - max(row)) for value in row] for row in (ours, theirs))
        q, p = [value / math.fsum(q) for value in q], [value / math.fsum(p) for value in p]
        kl.append(math.fsum(b * math.log(b / a) for a, b in zip(q, p, strict=True)))
        nll.append(-math.log(q[token]))
        source_nll.append(-math.log(p[token]))
        dp.append(q[token] - p[token])
        same += ours.index(max(ours)) == theirs.index(max(theirs))
    n = len(following)
    place = 0.99 * (n - 1)
    low, ordered = int(place), sorted(kl)
    return {
        "tokens": n,
        "perplexity": math.exp(math.fsum(nll) / n),
        "source_perplexity": math.exp(math.fsum(source_nll) / n),
        "kl_mean": math.fsum(kl) / n,
        "kl_99": ordered[low] + (place - low) * (ordered[low + 1] - ordered[low]),
        "kl_max": ordered[-1],
        "same_top": same / n,
        "dp_rms": math.sqrt(math.fsum(value * value for value in dp) / n),
    }


@pytest.mark.parametrize(("n", "noise"), [(2, 1e-4), (65, 3.0)])
def test_every_figure_is_the_plain_formula(n: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(n)
    source = 4 * torch.randn(n, 37, generator=generator)
    logits = source + noise * torch.randn(n, 37, generator=generator)
    following = torch.randint(0, 37, (n,), generator=generator)
    half = n // 2  # in two parts, as windows come
    parts = [score(logits[part], source[part], following[part]) for part in (slice(half), slice(half, None))]
    assert asdict(summarize(parts)) == pytest.approx(by_hand(logits, source, following.tolist()), rel=1e-9, abs=1e-15)


def test_divergence_does_not_drown_in_float32_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    source = 5 * torch.randn(64, 5000, generator=generator)
    noise = 1e-5 * torch.randn(64, 5000, generator=generator)
    found = summarize([score(source + noise, source, torch.zeros(64, dtype=torch.long))])
    assert 0 < found.kl_mean < 1e-9
    same = summarize([score(source, source, torch.zeros(64, dtype=torch.long))])
    assert (same.kl_max, same.dp_rms, same.same_top) == (0, 0, 1)
