"""`floe-chat bench decode`, `prefill` and `transfer` on tiny models, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.bench import synthetic, transfer
from floe_chat.engine.bench.peer import llama
from floe_chat.engine.bench.subject import from_pack
from floe_chat.engine.machine import read_floor
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.quality_presets import CUSTOM
from floe_chat.models.catalog import described
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.pack import PackSpec

from .. import families
from ..engine.test_bench_peer import FAKE_GGUF, FAKE_LLAMA
from ..helpers import edit_json, explained, make_pack, run_cli

TINY: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
ONCE = ("--runs", "1", "--threads", "1")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time."""
    monkeypatch.setitem(synthetic.MODELS, "tiny", described(TINY).sizes)
    monkeypatch.setattr(read_floor, "LEAST", 1 << 16)
    monkeypatch.setattr(transfer, "MIXTRAL", Shapes(128, 400, cache=0))
    monkeypatch.setattr("floe_chat.engine.machine.random_weights.last_level_cache", lambda: 1 << 10)
    monkeypatch.setattr("floe_chat.engine.bench.speed.WARM", 0)


@pytest.mark.parametrize("bench", ["decode", "prefill"])
def test_a_synthetic_model_is_measured(bench: str) -> None:
    options = ("--synthetic", "tiny", "--layers", "2", "--up", "4", "--rows", "8", "--dense", "4", "--tokens", "12")
    ran = run_cli("bench", bench, *options, "--device", "cpu", "--quick", *ONCE)
    assert (ran.code, ran.err) == (0, "")
    fields = json.loads(ran.out.splitlines()[-1])
    assert (fields["bench"], fields["device"]) == (bench, "cpu")
    assert fields["facts"]["model"] == "tiny, 2 layers, up 4, gate and down 8, attention 4 bits"
    assert fields["facts"]["prompt"] == "12 tokens"
    names = {row["name"] for section in fields["sections"] for row in section["rows"]}
    assert names <= {read_floor.READ, "Balanced"} and "Balanced" in names
    assert "% active" in ran.out or bench == "prefill"


def test_a_peer_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA)
    (tmp_path / "gguf.py").write_text(FAKE_GGUF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wide = described(TINY | {"hidden_size": 256, "num_local_experts": 8}).sizes
    monkeypatch.setitem(synthetic.MODELS, "wide", wide)
    files = ("--peer", sys.executable, "--peer-files", str(tmp_path / "files"))
    options = ("--synthetic", "wide", "--device", "cpu", "--quick", "--tokens", "40", "--runs", "1", *files)
    ran = run_cli("bench", "decode", *options)
    assert ran.code == 0 and "llama-cpp-python 9.9.9" in ran.out, ran
    assert len(list((tmp_path / "files").iterdir())) == 4
    first = json.loads(ran.out.splitlines()[-1])
    assert "llama.cpp Q4_K_M" in ran.out or "was lost in noise" in first["notes"][0]


def test_a_pack_is_measured_at_the_preset_that_was_named(tiny_pack: Path) -> None:
    ran = run_cli("bench", "decode", str(tiny_pack), "--device", "cpu", "-p", "fast", *ONCE, "--json")
    fields = json.loads(ran.out)
    assert {row["name"] for section in fields["sections"] for row in section["rows"]} <= {read_floor.READ, "Fast"}


HYBRIDS = {
    "qwen3_next": ["linear_attention"] * 3 + ["full_attention"],
    "qwen3_5_moe": ["linear_attention"] * 3 + ["full_attention"],
    "qwen3_5_moe_text": ["linear_attention"] * 3 + ["full_attention"],
    "gpt_oss": ["sliding_attention", "full_attention"],
    "gemma4": ["sliding_attention", "full_attention"],
    "gemma4_text": ["sliding_attention", "full_attention"],
    "lfm2_moe biases": ["conv", "conv", "full_attention"],
}


_SAMPLE = "qwen3_5_moe", "gpt_oss", "lfm2_moe biases"  # each kind of mixer, and a model within another


@pytest.mark.parametrize(
    "family", [family if family in _SAMPLE else pytest.param(family, marks=pytest.mark.thorough) for family in HYBRIDS]
)
def test_a_hybrid_is_measured_by_whole_periods(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = HYBRIDS[family]
    layers = {"num_hidden_layers": 2 * len(kinds), "layer_types": kinds * 2}
    monkeypatch.setitem(families.MODELS, family, families.MODELS[family] | layers)
    pack = tmp_path / "pack"
    make_pack(families.make(family, tmp_path / "source"), pack, PackSpec())
    # By themselves gpt-oss's layers are of one kind: a window takes nothing away from so short a prompt.
    assert from_pack(pack, "cpu", "A text.").fewest == (1 if family == "gpt_oss" else len(kinds))
    for bench in ("decode", "prefill") if family == "qwen3_5_moe" else ("decode",):
        ran = run_cli("bench", bench, str(pack), "--device", "cpu", "-p", "Balanced", "--tokens", "9", *ONCE)
        assert (ran.code, ran.err) == (0, ""), ran
        assert "one layer by" in ran.out or "was lost in noise" in ran.out
    text = tmp_path / "text.txt"
    text.write_text("Whole periods of layers. " * 40)
    ran = run_cli("eval", str(pack), "-p", "Balanced", "--tokens", "512", "--text", str(text), "--json")
    assert ran.code == 0 and json.loads(ran.out.splitlines()[-1])["presets"][0]["kl_mean"] >= 0, ran


def test_a_quality_set_by_hand_is_measured(tiny_pack: Path) -> None:
    ran = run_cli(
        "bench", "decode", str(tiny_pack), "--device", "cpu", "--drop", "40%", "--major", "0.8", *ONCE, "--json"
    )
    fields = json.loads(ran.out)
    assert {row["name"] for section in fields["sections"] for row in section["rows"]} <= {read_floor.READ, CUSTOM}


def test_transfer_says_what_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = run_cli("bench", "transfer", "--quick", *ONCE)
    assert ran.code == 0 and "were not measured: " in ran.out and "memcpy" in ran.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nonesuch"], "no model 'nonesuch'"),
        (["--synthetic", "nonesuch"], "no synthetic model"),
        (["--synthetic", "tiny", "--layers", "0"], "0 layers"),
        (["--synthetic", "tiny", "--dense", "3"], "dense cannot be 3 bit"),
        (["demo", "--synthetic", "tiny"], "Leave out demo"),
        (["--layers", "2"], "--layers is for a synthetic model"),
        (["--dense", "4"], "--synthetic"),
        (["--preset", "nonesuch"], "no preset"),
        (["--preset", "exact"], "cannot run Exact"),
        (["--sparsity", "140%"], "not a share"),
        (["--tokens", "100000"], "leaves no room"),
        (["--threads", "9999"], "9999 threads"),
        (["--peer", "/nonesuch/python"], "cannot be run"),
        (["--peer", sys.executable], "cannot run llama.cpp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_usage_errors(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert words in explained(run_cli("bench", "decode", "--device", "cpu", *options), 2)


def test_a_model_without_a_peer_of_its_widths_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "version_of", str)
    monkeypatch.setitem(synthetic.MODELS, "odd", described(TINY | {"hidden_size": 272}).sizes)
    told = explained(run_cli("bench", "decode", "--synthetic", "odd", "--device", "cpu", "--peer", "python"), 2)
    assert "no llama.cpp model" in told


SHARE = ("--prompt", "24", "--tokens", "8", "--answers", "2")


def test_a_run_to_post_names_no_person_and_no_private_model(tiny_pack: Path, tmp_path: Path) -> None:
    """Where the pack lies, what it is called and what was packed stay here."""
    folder = Path(shutil.copytree(tiny_pack, tmp_path / "Alices diary"))
    edit_json(folder / "manifest.json", lambda fields: fields.update(name="Alices diary"))
    ran = run_cli("bench", "share", str(folder), "--device", "cpu", *SHARE, "-p", "floe80")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    manifest = Manifest.read(folder)
    for private in (
        "Alice",
        "diary",
        manifest.source.name,
        str(tmp_path),
        str(Path.home()),
        platform.node() or "-none",
    ):
        assert private not in ran.out, private
    assert found["model"]["name"] is None and found["model"]["architecture"] == dataclasses.asdict(
        manifest.architecture
    )
    assert found["preset"]["name"] == "FloE 80 %" and "its weights are up 2" in found["preset"]["note"]
    assert len(found["figures"]["tokens_s_of_each"]) == 2 and found["run"]["prompt_tokens"] == 24
    low, high = sorted(found["figures"]["tokens_s_of_each"])
    assert low <= found["figures"]["tokens_s"] <= high and 0 < found["figures"]["active_neurons"] < 1
    assert found["rows"] is None and not found["simulated"]
    assert len(ran.out) < 4000


def test_a_run_to_post_on_a_simulated_card_says_so_and_its_rows_add_up() -> None:
    card = ("--device", "sim:rtx3060-12gb", "--vram", "10mb")
    ran = run_cli("bench", "share", "demo", *card, *SHARE, "--sparsity", "50%")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    assert found["simulated"] and found["model"]["name"] == "demo" and found["run"]["vram_limit"] == 10 << 20
    assert (found["preset"]["name"], found["preset"]["rule"]["sparsity"]) == (CUSTOM, 0.5)
    parts = [found["rows"][name] for name in ("ready", "coming", "copied", "on_cpu", "left_out", "in_place")]
    assert sum(parts) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--prompt", "100000"], "do not fit the window"),
        (["--preset", "Fast", "--sparsity", "50%"], "exclude each other"),
        (["--preset", "Best"], "as published: FloE 80 %"),
        (["--device", "abacus"], "abacus"),
        (["--vram", "much"], "much"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_shared_is_a_usage_error(options: list[str], part: str) -> None:
    assert part in explained(run_cli("bench", "share", "demo", *options), 2)
