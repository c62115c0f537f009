"""`floe-chat bench`: a table and a JSON line on stdout, progress on stderr, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.cli.bench.table import text
from floe_chat.engine.bench import synthetic, transfer
from floe_chat.engine.bench.measure import ResultTable, Row, Section
from floe_chat.engine.bench.peer import llama
from floe_chat.engine.bench.subject import from_pack
from floe_chat.engine.decoder.layers import Unsupported
from floe_chat.engine.events import MOST_TOGETHER
from floe_chat.engine.machine import gpus, read_floor
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.quality import text_windows
from floe_chat.engine.quality_presets import CUSTOM
from floe_chat.models.catalog import described
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.packing.pack import PackSpec

from .. import families
from ..engine.test_bench_peer import FAKE_GGUF, FAKE_LLAMA
from ..helpers import edit_json, explained, make_checkpoint, make_pack, run_cli

QUICK = ("bench", "kernels", "--device", "cpu", "--quick", "--runs", "2", "--threads", "1")
ROW_FIELDS = {
    **dict.fromkeys(("name", "note"), str),
    **dict.fromkeys(("ms",), float),
    **dict.fromkeys(("floor", "peer"), str | None),
    **dict.fromkeys(("spread", "gb_s", "of_floor", "speedup", "tokens_s"), float | None),
    "runs": int,
    "noisy": bool,
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, for every model."""

    def tiny(_name: str) -> Shapes:
        return Shapes(128, 256, experts=2, tokens=2, cache=0)

    monkeypatch.setattr(synthetic, "shapes_of", tiny)


def check_fields(fields: dict[str, Any]) -> None:
    assert set(fields) == {"version", "bench", "device", "facts", "sections", "notes", "history"}
    assert set(fields["history"]) == {"compared_with", "regressions"}
    assert (fields["bench"], fields["device"]) == ("kernels", "cpu")
    assert {"kernels", "reason", "cpu", "threads", "pages", "runs"} <= set(fields["facts"])
    assert fields["facts"]["threads"] == 1 and fields["facts"]["runs"] == 2
    rows = [row for section in fields["sections"] for row in section["rows"]]
    assert rows and all(set(section) == {"title", "rows", "other_cores"} for section in fields["sections"])
    for row in rows:
        assert set(row) == set(ROW_FIELDS)
        assert all(isinstance(row[name], kind) for name, kind in ROW_FIELDS.items()), row


@pytest.mark.usefixtures("tiny")
def test_the_table_comes_first_and_json_is_the_last_line() -> None:
    ran = run_cli(*QUICK)
    assert (ran.code, ran.err) == (0, "")
    *lines, last = ran.out.splitlines()
    fields = json.loads(last)
    check_fields(fields)
    table = "\n".join(lines)
    assert table.index(fields["facts"]["reason"].split()[0]) < table.index("spread")
    for section in fields["sections"]:
        assert section["title"] in table and all(row["name"] in table for row in section["rows"])


@pytest.mark.usefixtures("tiny")
def test_progress_goes_to_a_terminals_stderr_and_is_wiped() -> None:
    ran = run_cli(*QUICK, "--json", terminal=True)
    assert "round 5 of 5" in ran.err and ran.err.endswith(" \r") and "\n" not in ran.err
    check_fields(json.loads(ran.out))


def test_an_answer_is_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run(_pack: Path, _name: str, text: str, _cards: object, **_options: object) -> None:
        seen.append(text)
        raise UsageError("The text has 3 tokens", "12 are needed.", "Give fewer with --tokens.")

    monkeypatch.setattr("floe_chat.engine.bench.cards.offload.run", run)
    answer = tmp_path / "answer.md"
    answer.write_text("An answer", encoding="utf-8")
    assert "12 are needed" in explained(run_cli("bench", "offload", "--trace", str(answer)), 2)
    assert seen == ["An answer"]
    assert "cannot be read" in explained(run_cli("bench", "offload", "--trace", str(tmp_path / "none")), 2)


def test_a_gpu_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measured(*, quick: bool, **_rest: object) -> ResultTable:
        asked.append(quick)
        return ResultTable("kernels", "cuda", {"gpu": "Some Card"}, (), ())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = explained(run_cli("bench", "kernels", "--device", "cuda"), 2)
    assert "CUDA" in told and "--device cpu" in told
    monkeypatch.setattr(gpus, "of_torch", lambda: ((gpus.Gpu("Some Card", "8.6", 12 << 30, None),), ""))
    monkeypatch.setattr("floe_chat.engine.bench.kernels.gpu.run", measured)
    ran = run_cli("bench", "kernels", "--quick")
    assert (ran.code, asked) == (0, [True]) and "Some Card" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["device"] == "cuda"
    for options in (("--threads", "1"), ("--runs", "3")):  # a GPU has none
        assert "--device cpu" in explained(run_cli("bench", "kernels", *options), 2)


def test_the_table_fits_and_marks_what_is_noisy() -> None:
    plain = Row("read (floor)", 0.0123, 5, 0.02, False, 33.333, None, None, None, None, None)
    noisy = Row("60 % sparse, bfloat16 x", 1234.5, 5, 0.23, True, 0.0004, "a", 0.5, "dense int4", 1.8, None)
    once = Row("plain torch", 12.0, 1, None, False, None, None, None, None, None, 1234.0, "goal: less")
    reason = "plain torch, because " + "one thing after another " * 10
    shown = text(ResultTable("kernels", "cpu", {"reason": reason}, (Section("All", (plain, noisy, once)),), (reason,)))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("23 % !" in line and "1.80x dense int4" in line and "1.23 s" in line for line in lines)
    assert any("0.0123 ms" in line and "33.3 GB/s" in line and "!" not in line for line in lines)
    for cores in (None, 0.1, 0.94):
        shown = text(ResultTable("kernels", "cpu", {}, (Section("All", (plain,), cores),), ()))
        assert ("kept 0.9 cores busy" in shown) == (cores == 0.94)
    assert any("one run" in line and "1,230 tok/s" in line and line.endswith("goal: less") for line in lines)


@pytest.mark.usefixtures("tiny")
def test_a_second_run_is_compared_with_another_release(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_cli(*QUICK)
    assert "nothing to compare with" in first.out
    (kept,) = own_folders.rglob("*-kernels.jsonl")
    entry: dict[str, Any] = json.loads(kept.read_text().strip())
    assert entry["time"] and entry.pop("version") == version("floe-chat")

    def faster(fields: dict[str, Any]) -> dict[str, Any]:
        rows = [row | {"ms": row["ms"] / 1e3, "of_floor": row["of_floor"] and 1e3} for row in fields["rows"]]
        return fields | {"rows": rows}

    old = entry | {"version": "0.0.9", "sections": [faster(section) for section in entry["sections"]]}
    with kept.open("a") as file:
        file.write(json.dumps(old) + "\n" + '{"version": "0.0')
    second = run_cli(*QUICK)
    assert any(line.startswith("regression: ") and "in 0.0.9" in line for line in second.out.splitlines())
    history = json.loads(second.out.splitlines()[-1])["history"]
    assert history["compared_with"] == "0.0.9" and history["regressions"]
    assert [json.loads(line)["version"] for line in kept.read_text().splitlines() if line.endswith("}")][-1] != "0.0.9"


@pytest.mark.usefixtures("tiny")
def test_a_history_that_cannot_be_kept_is_no_failure(own_folders: Path) -> None:
    for parent in (own_folders / ".local" / "state", own_folders / "Library"):
        parent.parent.mkdir(parents=True, exist_ok=True)
        parent.write_text("a file where a folder should be")
    ran = run_cli(*QUICK, "--json")
    assert ran.code == 0 and "not saved" in ran.err and json.loads(ran.out)


# `floe-chat bench decode`, `prefill`, `transfer` and `share` on tiny models, and what they refuse


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
def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_passes_of_several_tokens_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floe_chat.engine.bench.drafts.WARM", 0)
    options = ("--synthetic", "tiny", "--layers", "2", "--device", "cpu", "--preset", "Fast", *ONCE)
    ran = run_cli("bench", "decode", "--draft", *options)
    assert (ran.code, ran.err) == (0, "") and max(map(len, ran.out.splitlines()[:-1])) <= 100
    fields = json.loads(ran.out.splitlines()[-1])
    assert fields["bench"] == "draft" and len(fields["sections"]) == 2
    measured, calculated = (section["rows"] for section in fields["sections"])
    assert len(measured) == MOST_TOGETHER and len(calculated) == 9
    one, two = measured[:2]
    gained, _, words = two["note"].partition("x ")
    assert words == "the tokens" and float(gained) == pytest.approx(2 * one["ms"] / two["ms"], abs=0.006)
    assert calculated[1]["name"] == "2 in a pass, 80 % right"
    assert calculated[1]["ms"] == pytest.approx(two["ms"] / 1.8, rel=1e-3)
    assert calculated[1]["speedup"] == pytest.approx(1.8 * one["ms"] / two["ms"], rel=1e-3)
    families.make("olmoe", tmp_path / "source")
    make_pack(tmp_path / "source", tmp_path / "pack", PackSpec())
    monkeypatch.setattr("floe_chat.engine.decoder.decoders.FusedDecoder", declined)
    ran = run_cli("bench", "decode", "--draft", str(tmp_path / "pack"), "--device", "cpu", "-p", "Fast", *ONCE)
    fields = json.loads(ran.out.splitlines()[-1])
    assert len(fields["sections"]) == 1 and [row["name"] for row in fields["sections"][0]["rows"]] == ["one"]
    assert "one token in a pass here" in fields["notes"][0] and "because a test says so" in fields["notes"][0]


def test_a_drafters_guesses_count(tiny_pack: Path, tmp_path: Path) -> None:
    make_pack(make_checkpoint(tmp_path / "source", layers=1, seed=3), tmp_path / "small", PackSpec(), "small")
    given = ("--draft", str(tiny_pack), "--device", "cpu", "-p", "Fast", *ONCE, "--drafter")
    ran = run_cli("bench", "decode", *given, str(tmp_path / "small"))
    assert (ran.code, ran.err) == (0, "")
    fields = json.loads(ran.out.splitlines()[-1])
    measured, calculated = (section["rows"] for section in fields["sections"])
    one, two, guess = measured[0], measured[1], measured[-1]
    assert guess["name"] == "a guess by small"
    assert float(guess["note"].split()[0]) == pytest.approx(guess["ms"] / one["ms"], abs=0.006)
    assert calculated[1]["ms"] == pytest.approx((two["ms"] + guess["ms"]) / 1.8, rel=1e-3)
    assert "demo cannot guess tokens for tiny" in explained(run_cli("bench", "decode", *given, "demo"), 2)


def declined(*_arguments: object) -> None:
    raise Unsupported("a test says so")


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


@pytest.mark.parametrize(
    ("quality", "name"),
    [(("-p", "fast"), "Fast"), (("--drop", "40%", "--major", "0.8"), CUSTOM)],
    ids=["preset", "hand"],
)
def test_a_pack_is_measured_at_the_quality_that_was_named(tiny_pack: Path, quality: tuple[str, ...], name: str) -> None:
    fields = json.loads(run_cli("bench", "decode", str(tiny_pack), "--device", "cpu", *quality, *ONCE, "--json").out)
    assert {row["name"] for section in fields["sections"] for row in section["rows"]} <= {read_floor.READ, name}


HYBRIDS = {
    "qwen3_next": ["linear_attention"] * 3 + ["full_attention"],
    "qwen3_5_moe": ["linear_attention"] * 3 + ["full_attention"],
    "qwen3_5_moe_text": ["linear_attention"] * 3 + ["full_attention"],
    "gpt_oss": ["sliding_attention", "full_attention"],
    "gemma4": ["sliding_attention", "full_attention"],
    "gemma4_text": ["sliding_attention", "full_attention"],
    "lfm2_moe biases": ["conv", "conv", "full_attention"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_measured_by_whole_periods(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = HYBRIDS[family]
    layers = {"num_hidden_layers": 2 * len(kinds), "layer_types": kinds * 2}
    monkeypatch.setitem(families.MODELS, family, families.MODELS[family] | layers)
    pack = tmp_path / "pack"
    make_pack(families.make(family, tmp_path / "source"), pack, PackSpec())
    # By themselves gpt-oss's layers are of one kind: a window takes nothing away from so short a prompt.
    assert from_pack(pack, "cpu", "A text.").fewest == (1 if family == "gpt_oss" else len(kinds))
    bench = "prefill" if family == "qwen3_5_moe" else "decode"
    ran = run_cli("bench", bench, str(pack), "--device", "cpu", "-p", "Balanced", "--tokens", "9", *ONCE)
    assert (ran.code, ran.err) == (0, ""), ran
    assert "one layer by" in ran.out or "was lost in noise" in ran.out
    text = tmp_path / "text.txt"
    text.write_text("Whole periods of layers. " * 4)
    monkeypatch.setattr(text_windows, "WINDOW", 64)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    ran = run_cli("eval", str(pack), "-p", "Balanced", "--tokens", "64", "--text", str(text), "--json")
    assert ran.code == 0 and json.loads(ran.out.splitlines()[-1])["presets"][0]["kl_mean"] >= 0, ran


def test_transfer_says_what_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = run_cli("bench", "transfer", "--quick", *ONCE)
    assert ran.code == 0 and "were not measured: " in ran.out and "memcpy" in ran.out


DECODE = "decode --device cpu"
BAD = [
    ("kernels --device cpu --threads 0", "threads"),
    ("kernels --device cpu --runs 0", "runs"),
    ("kernels --device tpu", "tpu"),
    (f"{DECODE} nonesuch", "no model 'nonesuch'"),
    (f"{DECODE} --synthetic nonesuch", "no synthetic model"),
    (f"{DECODE} --synthetic tiny --layers 0", "0 layers"),
    (f"{DECODE} --synthetic tiny --dense 3", "dense cannot be 3 bit"),
    (f"{DECODE} demo --synthetic tiny", "Leave out demo"),
    (f"{DECODE} --layers 2", "--layers is for a synthetic model"),
    (f"{DECODE} --dense 4", "--synthetic"),
    (f"{DECODE} --preset nonesuch", "no preset"),
    (f"{DECODE} --preset exact", "cannot run Exact"),
    (f"{DECODE} --sparsity 140%", "not a share"),
    (f"{DECODE} --tokens 100000", "leaves no room"),
    (f"{DECODE} --threads 9999", "9999 threads"),
    (f"{DECODE} --draft --peer python", "Leave out --peer"),
    (f"{DECODE} --drafter demo", "Add --draft"),
    (f"{DECODE} --peer /nonesuch/python", "cannot be run"),
    (f"{DECODE} --peer {sys.executable}", "cannot run llama.cpp"),
    ("share demo --prompt 100000", "do not fit the window"),
    ("share demo --preset Fast --sparsity 50%", "exclude each other"),
    ("share demo --preset Best", "as published: FloE 80 %"),
    ("share demo --vram much", "much"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_options_are_usage_errors(options: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert words in explained(run_cli("bench", *options.split()), 2)


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
    here = (str(tmp_path), str(Path.home()), platform.node() or "-none")
    for private in ("Alice", "diary", manifest.source.name, *here):
        assert private not in ran.out, private
    assert found["model"]["name"] is None
    assert found["model"]["architecture"] == dataclasses.asdict(manifest.architecture)
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
