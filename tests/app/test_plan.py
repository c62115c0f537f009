"""`floe-chat plan` and `doctor --measure`: what they print, what they refuse, and how they end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.planning import rates
from floe_chat.engine.planning.plan import offers
from floe_chat.engine.planning.rates import Measured
from floe_chat.models.catalog import asset
from floe_chat.models.published import PUBLISHED

from ..helpers import explained, run_cli

BIG = ("--ram", "64GiB", "--disk-free", "1TB")
DESCRIBED = ("--vram", "12GiB", *BIG, "--cpu-gbs", "40", "--pcie", "4x16", "--disk-gbs", "2")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Measuring takes seconds: rates that are made up instead. The list is of the folders that were measured."""
    asked: list[Path] = []

    def measure(folder: Path, report: Callable[[str], None]) -> Measured:
        asked.append(folder)
        report("memory read")
        found = {"memory read": 3e10, "disk read": 1e9, "gpu launches": 2.5e5}
        reasons = {"link pinned": "no driver", "in a graph": "operation not permitted"}
        found = Measured(found, reasons, "2026-11-21T09:00:00")
        found.save(rates.kept_file())
        return found

    monkeypatch.setattr(rates, "measure", measure)
    return asked


def planned(*arguments: str, code: int = 0) -> dict[str, Any]:
    ran = run_cli("plan", *arguments, "--json")
    assert ran.code == code, ran.err
    return json.loads(ran.out)


def test_a_machine_that_is_not_at_hand() -> None:
    ran = run_cli("plan", "mixtral-8x7b-instruct", *DESCRIBED, "--net-mbs", "50")
    assert (ran.code, ran.err) == (0, "")
    for wanted in ("3/4/4", "GPU and CPU", "tokens/s", "23.3 GB", "Apache-2.0", "accept terms", "download", "nats"):
        assert wanted in ran.out
    assert max(map(len, ran.out.splitlines())) <= 100


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of all listed models takes seconds: these instead."""
    names = ("mixtral-8x7b", "qwen3-30b-a3b-instruct-2507")
    monkeypatch.setattr(offers, "__defaults__", (tuple(entry for entry in PUBLISHED if entry.name in names),))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "asked", [pytest.param((), marks=pytest.mark.thorough), ("mixtral-8x7b-instruct",)], ids=["all", "one"]
)
def test_a_page_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, asked: tuple[str]) -> None:
    """No word is broken, no figure is lost in a narrow one, and each is plain."""
    monkeypatch.setenv("COLUMNS", "200")
    wide = run_cli("plan", *asked, *DESCRIBED)
    monkeypatch.setenv("COLUMNS", "80")
    ran = run_cli("plan", *asked, *DESCRIBED)
    assert wide.code == ran.code == 0 and max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.split() == wide.out.split()
    assert not re.search(r"\de[+-]?\d", wide.out.replace("mixtral-8x", "")) and "rounding" not in wide.out
    assert wide.out.count("Quality loss (KL)") == 1 and wide.out.count("Bits: bits per weight") == bool(asked)


def test_json_says_the_same_in_bytes_and_seconds() -> None:
    fields = planned("mixtral-8x7b-instruct", *DESCRIBED, "--context", "1024")
    chosen = fields["chosen"]
    assert fields["fits"] is True and fields["context"] == 1024 and chosen in fields["options"]
    assert {"version", "entry", "machine", "chosen", "options", "why", "missing", "instead"} <= set(fields)
    assert fields["entry"]["checkpoint_bytes"] == 93_405_585_408 and fields["entry"]["folder"] is None
    assert sum(chosen["vram"].values()) == 12 << 30 and chosen["spec"]["up"] == 3
    assert chosen["decode"]["low"] < chosen["decode"]["mid"] < chosen["decode"]["high"]
    assert fields["machine"]["speeds"]["read"] == 40e9 and fields["why"]


def test_this_machine_is_measured_once(measured: list[Path]) -> None:
    first = planned("demo")
    second = planned("demo")
    assert len(measured) == 1 and first["chosen"]["place"] == "cpu"
    assert first["machine"]["speeds"]["read"] == second["machine"]["speeds"]["read"] == 3e10
    assert any("2026-11-21" in told for told in second["machine"]["told"].values())


def test_a_card_needs_no_measuring(measured: list[Path]) -> None:
    fields = planned("mixtral-8x7b-instruct", "--card", "sim:rtx3060-12gb", *BIG)
    assert not measured and fields["machine"]["name"] == "RTX 3060" and fields["chosen"]["place"] == "pool"
    assert fields["chosen"]["cards"] == []


@pytest.mark.usefixtures("no_library")
def test_a_card_that_shares_a_model_needs_compiled_code() -> None:
    fields = planned("mixtral-8x7b-instruct", "--card", "sim:rtx3060-12gb", *BIG)
    assert any("it was not compiled" in why and "build.py" in why for why in fields["why"])


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("model", "name", "card"),
    [
        ("https://huggingface.co/Qwen/Qwen3-30B-A3B/tree/main", "qwen3-30b-a3b", "GeForce RTX 3090 24GB"),
        ("glm 4.5 air", "glm-4.5-air", "3090"),
    ],
)
def test_names_as_people_type_them(model: str, name: str, card: str) -> None:
    plain = planned(model, "--card", card, "--ram", "64", "--disk-free", "1TB")
    assert plain["entry"]["name"] == name and plain["machine"]["vram"] == 24 << 30
    assert plain["machine"] == planned(model, "--card", card, "--ram", "64 GB", "--disk-free", "1TB")["machine"]


@pytest.mark.usefixtures("few")
def test_without_a_model_all_are_ranked() -> None:
    ran, fields = run_cli("plan", *DESCRIBED), planned(*DESCRIBED)
    names = [plan["entry"]["name"] for plan in fields["plans"]]
    rows = [line.split()[0] for line in ran.out.splitlines() if line.startswith("  ")]
    assert ran.code == 0 and [row for row in rows if row in names] == names and len(names) == 2
    assert f"Recommended: floe-chat setup {names[0]}" in ran.out and fields["recommended"] == names[0]
    assert max(map(len, ran.out.splitlines())) <= 100
    for said in ("at reading speed, best first", "cannot chat", "not measured here"):
        assert said in " ".join(ran.out.split()), said


@pytest.mark.usefixtures("few")
def test_without_a_model_on_a_machine_for_none() -> None:
    ran = run_cli("plan", "--card", "none", "--ram", "2", "--disk-free", "3GB")
    assert ran.code == 1 and "of disk space more" in ran.out and "demo model always works" in ran.out


def test_the_list_of_cards() -> None:
    ran = run_cli("plan", "--card", "list")
    assert ran.code == 0 and "RTX 3080 10 or 12 GB" in ran.out and "RTX 5090 32 GB" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 102


@pytest.mark.usefixtures("few")
def test_nothing_fits_and_what_would_instead() -> None:
    ran = run_cli("plan", "mixtral-8x22b-instruct", "--ram", "16GB", "--disk-free", "1TB")
    assert ran.code == 1 and "does not fit" in ran.out and re.search(r"\w with \d/\d/\d bits works, at about", ran.out)
    fields = planned("mixtral-8x22b-instruct", "--ram", "16GB", "--disk-free", "1TB", code=1)
    assert fields["fits"] is False and fields["chosen"] is None and fields["missing"]["ram"] > 0
    tiny = planned("mixtral-8x7b-instruct", "--card", "none", "--ram", "64GB", "--disk-free", "2GB", code=1)
    assert tiny["missing"]["disk"] > 10**10 and "demo" in tiny["instead"]
    assert tiny["machine"]["vram"] == 0 and "link" not in tiny["machine"]["told"]


def test_a_context_beyond_the_models_is_told() -> None:
    ran = run_cli("plan", "demo", "--context", "99999999", *DESCRIBED)
    assert ran.code == 0 and "context of 1,024 tokens" in ran.err


def test_a_drafting_head_counts_unless_it_is_left_out() -> None:
    given = "qwen3.6-35b-a3b", "--card", "none", "--ram", "64", "--cpu-gbs", "30"
    whole, without = planned(*given)["chosen"], planned(*given, "--no-draft")["chosen"]
    head = whole["disk"]["draft"]
    assert head > 1e8 and whole["disk"]["pack"] == without["disk"]["pack"] + head and "draft" not in without["disk"]


def test_a_model_that_guesses_takes_ram() -> None:
    given = "gpt-oss-120b", "--card", "none", "--cpu-gbs", "30", "--disk-free", "1TB"
    by = ("--draft", "gpt-oss-20b")
    alone, both = (planned(*given, "--ram", "64", *more) for more in ((), by))
    drafter = both["chosen"]["ram"]["drafter"]
    assert 9e9 < drafter < 16e9 and "drafter" not in alone["chosen"]["ram"]
    assert both["machine"]["ram"] == alone["machine"]["ram"] and sum(both["chosen"]["ram"].values()) <= 64 << 30
    assert "gpt-oss-20b, which guesses tokens, takes" in (why := " ".join(both["why"]))
    assert both["chosen"]["spec"] != alone["chosen"]["spec"] and "Without it there is room for" in why
    short = planned(*given, "--ram", "16", *by, code=1)
    assert short["chosen"] is None and "which guesses tokens" in " ".join(short["why"])
    assert "32,000" in explained(run_cli("plan", "gpt-oss-120b", "--draft", "mixtral-8x7b-instruct", "--ram", "64"), 2)
    for more in (("demo", *by, "--no-draft"), by):
        assert "--draft names what guesses" in explained(run_cli("plan", *more), 2)


def test_a_checkpoint_in_a_folder(tiny_checkpoint: Path) -> None:
    fields = planned(str(tiny_checkpoint), *DESCRIBED)
    assert fields["entry"]["folder"] == str(tiny_checkpoint) and fields["download_s"] is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonesuch",), "mixtral-8x7b-instruct"),
        (("demo", "--vram", "much"), "not a memory size"),
        (("demo", "--card", "RX 7900 XTX"), "AMD cards are not supported yet"),
        (("Qwen/Qwen3-30B-A3B-exl3",), "Use the original, Qwen/Qwen3-30B-A3B"),
        (("Qwen/Qwen3-30B-A3B-FP8",), "`floe-chat setup Qwen/Qwen3-30B-A3B-FP8` asks the hub"),
        (("model.gguf",), "There is no GGUF file"),
        (("mixtrl",), "Did you mean mixtral"),
        (("demo", "--pcie", "9x16"), "not a PCIe link"),
        (("demo", "--link-gbs", "inf"), "cannot be inf"),
        (("demo", "--card", "rtx9999"), "no card"),
        (("demo", "--card", "rtx3060-12gb@99gb"), "12 GB"),
        (("demo", "--context", "0"), "context"),
        (("demo", "--pcie", "4x16", "--link-gbs", "5"), "--pcie and --link-gbs"),
        (("demo", "--card", "none", "--vram", "8gb"), "Leave out --vram"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in explained(run_cli("plan", *arguments), 2)


def test_a_model_that_is_none_names_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = explained(run_cli("plan", str(tmp_path)), 1)
    assert "not a Mixture-of-Experts model" in said and "Mixtral" in said and "OLMoE" in said


def test_names_from_outside_cannot_paint_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[31mb"
    folder.mkdir()
    (folder / "config.json").write_text(asset("demo", "packed", "config.json").read_text())
    ran = run_cli("plan", str(folder), *DESCRIBED)
    assert ran.code == 0 and "\x1b" not in ran.out + ran.err


def test_doctor_tells_measured_rates(measured: list[Path]) -> None:
    before = run_cli("doctor")
    assert "doctor --measure" in before.out and not measured
    after = run_cli("doctor", "--measure")
    assert len(measured) == 1 and "30 GB/s" in after.out and "no driver" in after.out
    assert "4 us a kernel" in after.out and "operation not permitted" in after.out
    assert "30 GB/s" in run_cli("doctor").out and len(measured) == 1
    fields = json.loads(run_cli("doctor", "--json").out)
    assert fields["measured"]["rates"]["memory read"] == 3e10 and fields["hardware"]["sources"]["ram_total"]


def test_two_cards_share_a_model(measured: list[Path]) -> None:
    ran = run_cli("plan", "mixtral-8x7b-instruct", "--card", "3060", "--card", "3060", *BIG)
    assert (ran.code, ran.err, measured) == (0, "", [])
    for wanted in ("Machine: 2 x RTX 3060", "card 1", "card 2", "layers 17 to 32", "as fast as one of them alone"):
        assert wanted in " ".join(ran.out.split()), wanted
    found = planned("mixtral-8x7b-instruct", "--card", "3090", "--card", "RTX 3060", *BIG)
    assert [card["layers"] for card in found["chosen"]["cards"]] == [31, 1] and found["machine"]["others"]
    refused = run_cli("plan", "mixtral", "--card", "3060", "--card", "none")
    assert refused.code == 2 and "--card none" in refused.err
