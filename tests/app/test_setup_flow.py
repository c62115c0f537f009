"""A model is set up from a hub over real HTTP: fetched, packed, checked; left, taken up again; refused with reasons."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from floe_chat.app.cli.main import cli
from floe_chat.app.cli.setup import command as setup
from floe_chat.app.setup import flow
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.wish import Wish, forget, unfinished, wish, write_note
from floe_chat.engine.planning import plan
from floe_chat.engine.quality import text_windows
from floe_chat.engine.quality_presets import LEVELS
from floe_chat.models import catalog
from floe_chat.models.errors import FloeError, TryAgainError, UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel

from ..models.fakehub import ALWAYS, FakeHub, Fault
from .made_up import ENTRIES
from .wizardry import IMPATIENT, REPO, ended, machine_of, start_until


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def undisturbed(published: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a setup without a hub and without trouble makes, name and commit apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with Setup(wish(str(published), "tiny")) as running:
            assert ended(running.start()).error is None
            return digest(running.wish.folder)


def same_weights(folder: Path, expected: dict[str, str]) -> bool:
    """All but the manifest, which names where the model came from."""
    found = digest(folder)
    return found.keys() == expected.keys() and all(
        found[name] == expected[name] for name in found if name != "manifest.json"
    )


def test_fetched_packed_checked(hub: FakeHub, undisturbed: dict[str, str]) -> None:
    with Setup(wish(REPO)) as running:
        ended(running.start())
        now = running.progress()
    assert (running.error, now.state, now.share) == (None, "done", 1.0)
    assert same_weights(running.wish.folder, undisturbed)
    manifest = PackedModel.open(running.wish.folder, recheck=True).manifest
    assert (manifest.source.name, manifest.source.commit) == (REPO, running.wish.commit)
    # Nothing is left beside the pack, and it can be called by its name.
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny"]
    assert catalog.find("tiny") == running.wish.folder and unfinished() == []
    with pytest.raises(UsageError, match="already a model called tiny"):
        wish(REPO)


def test_left_and_taken_up_again(hub: FakeHub, undisturbed: dict[str, str]) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as running:
        start_until(running, "Packing layer 2")
        assert running.progress().state == "paused"
        running.resume()
        running.cancel()
        assert running.progress().state == "cancelled"
    (begun,) = unfinished()
    assert begun.commit == running.wish.commit != ""
    assert [one.trouble for one in catalog.installed() if one.name == "tiny"] != [None]
    fetched = hub.sent("model-")
    with Setup(begun, tuning=IMPATIENT) as again:
        assert ended(again.start()).error is None
        notices = again.progress().notices
    assert "Continuing the interrupted pack." in notices
    assert same_weights(begun.folder, undisturbed)
    assert hub.sent("model-") < 2 * fetched  # what layer 1 needed was not fetched again
    assert unfinished() == []


def test_the_second_of_two_is_told(hub: FakeHub) -> None:
    hub.faults.append(Fault("GET /storage/", times=ALWAYS, rate=20_000))
    with Setup(wish(REPO), tuning=IMPATIENT) as first:
        start_until(first, "Packing").resume()
        with Setup(wish(REPO), tuning=IMPATIENT) as second:
            ended(second.start())
        assert isinstance(second.error, TryAgainError) and "Another" in second.error.title
        assert first.error is None and first.progress().state == "working"


def test_what_cannot_be_is_refused(tmp_path: Path, hub: FakeHub) -> None:
    for model, name, words in (
        ("no such model", None, "no model 'no such model'"),
        ("~nobody-of-that-name/x", None, "no model '~nobody-of-that-name/x'"),
        ("x/" * 3000, None, "no model 'x/x/"),
        (REPO, "../escape", "cannot be called"),
        (REPO, "demo", "name demo is taken"),
        (REPO, "x.download", "cannot be called"),
    ):
        with pytest.raises(UsageError, match=words):
            wish(model, name)
    assert Wish("~nobody-of-that-name/x", "x").local is None
    with Setup(Wish("floe/absent", "absent")) as running:
        ended(running.start())
    assert running.error is not None and "floe/absent" in str(running.error)
    forget(running.wish)
    (tmp_path / "empty").mkdir()
    with Setup(wish(str(tmp_path / "empty"), "empty")) as running:
        ended(running.start())
    assert running.error is not None and "config.json" in str(running.error)
    with Setup(Wish(REPO, "odd", up=5)) as running:
        ended(running.start())
    assert running.error is not None and "5 bit" in running.error.title


def test_a_disk_that_is_too_small_is_known_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(_folder: Path, needed: int) -> None:
        asked.append(needed)
        raise FloeError("The disk is too small")

    monkeypatch.setattr("floe_chat.models.hub.download.check_room", refuse)
    with Setup(wish(REPO)) as running:
        ended(running.start())
    assert running.error is not None and running.error.title == "The disk is too small"
    assert hub.sent("model-") < asked[0]  # headers at the most
    assert not running.wish.folder.exists()


def test_left_between_packing_and_the_end(hub: FakeHub) -> None:
    with Setup(wish(REPO)) as running:
        assert ended(running.start()).error is None
    write_note(running.wish)
    (begun,) = unfinished()
    before, asked = digest(begun.folder), len(hub.requests)
    with Setup(begun) as again:
        assert ended(again.start()).error is None
    assert digest(begun.folder) == before and len(hub.requests) == asked and unfinished() == []


def test_damage_is_repaired_from_the_hub(hub: FakeHub) -> None:
    with Setup(wish(REPO)) as running:
        assert ended(running.start()).error is None
    folder = running.wish.folder
    before, all_of_it = digest(folder), hub.sent("model-")
    damaged = folder / "layer_01.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100] + bytes(100))
    told = CliRunner().invoke(cli, ["verify", "tiny"])
    assert told.exit_code == 1 and f"floe-chat verify {folder} --repair\n" in told.stdout
    (running.wish.fetched / "mine").mkdir(parents=True)
    taken = CliRunner().invoke(cli, ["verify", "tiny", "--repair"], standalone_mode=False)
    assert isinstance(taken.exception, UsageError) and (running.wish.fetched / "mine").is_dir()
    shutil.rmtree(running.wish.fetched)
    done = CliRunner().invoke(cli, ["verify", "tiny", "--repair"])
    assert done.exit_code == 0, done.output
    assert digest(folder) == before and not running.wish.fetched.exists()
    assert 0 < hub.sent("model-") - all_of_it < all_of_it  # not what only the other layer needs


@pytest.mark.usefixtures("rates_known")
def test_the_command(hub: FakeHub) -> None:
    runner = CliRunner()
    asked = runner.invoke(cli, ["setup", REPO], standalone_mode=False)
    assert isinstance(asked.exception, UsageError) and "--yes" in asked.exception.hint
    done = runner.invoke(cli, ["setup", REPO, "--yes", "--rows", "8"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{catalog.models_folder() / 'tiny'}\n"
    assert "floe-chat --model tiny" in done.stderr and "floe-chat tune tiny" in done.stderr
    widths = PackedModel.open(catalog.models_folder() / "tiny").manifest.widths
    assert (widths.gate, widths.down) == (8, 8)


@pytest.mark.thorough
def test_the_command_measures_presets_if_asked(hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_windows, "WINDOW", 64)
    monkeypatch.setattr(text_windows, "PROMPT_TOKENS", 16)
    done = CliRunner().invoke(cli, ["setup", REPO, "--yes", "--tune"])
    folder = catalog.models_folder() / "tiny"
    assert (done.exit_code, done.stdout) == (0, f"{folder}\n"), done.stderr
    tuned = Manifest.read(folder).tuned
    assert [preset.name for preset in tuned] == list(LEVELS) and {preset.against for preset in tuned} == {"pack"}
    assert "tuned on itself" in done.stderr


def test_without_a_name_the_recommended_model_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "PUBLISHED", ENTRIES)
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))
    runner, first = CliRunner(), plan.recommended(plan.offers(machine_of(12 << 30), ENTRIES))
    assert first is not None
    for more in ([], ["--yes"]):
        which = runner.invoke(cli, ["setup", *more], standalone_mode=False)
        assert isinstance(which.exception, UsageError) and "mixtral-8x7b-instruct" in which.exception.cause
        assert f"floe-chat setup {first.entry.name}" in which.exception.hint
    asked: list[str] = []

    def planned(model: str, *_more: object, **_named: object) -> None:
        asked.append(model)
        raise click.Abort

    monkeypatch.setattr("floe_chat.app.cli.setup.command._planned", planned)
    monkeypatch.setattr(
        "floe_chat.app.cli.setup.command.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    )
    offered = runner.invoke(cli, ["setup"])
    assert asked == [first.entry.name] and "recommended for this machine" in offered.stderr


def test_without_a_name_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "PUBLISHED", ENTRIES)
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(1 << 29))
    which = CliRunner().invoke(cli, ["setup"], standalone_mode=False)
    assert isinstance(which.exception, UsageError) and "fits this machine" in which.exception.title


def test_a_tokenizer_that_panics_fails_the_setup(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(published, source)
    fields = json.loads((source / "tokenizer.json").read_text())
    fields["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (source / "tokenizer.json").write_text(json.dumps(fields))
    with Setup(wish(str(source), "panics")) as running:
        ended(running.start())
    assert running.error is not None and running.progress().state == "failed"


def test_one_line_tells_how_far_it_is() -> None:
    now = flow.SetupProgress("working", "Packing layer 3 of 32", 0.125, 7200.0, None)
    assert setup.line(now) == "Packing layer 3 of 32, 12% · about 2 h 0 min left"
