"""Models are set up: ready packs, checkpoints of a hub, GGUF files; left, killed, taken up again, refused with reasons.

First ready packs, from a hub, a mirror, a web server and a folder: as they are, resumable, only if they are sound.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from floe_chat.app.cli.main import cli
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.ready_words import claims
from floe_chat.app.setup.setups import Setups, look_up
from floe_chat.app.setup.wish import Wish, bad_notes, discard, forget, unfinished, wish, write_note
from floe_chat.app.widgets.setup.models import look
from floe_chat.engine.planning import plan
from floe_chat.engine.quality import text_windows
from floe_chat.engine.quality_presets import LEVELS
from floe_chat.kernels.rule import Rule
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import ReadyPack
from floe_chat.models.errors import CheckpointError, FloeError, PackError, TryAgainError, UsageError
from floe_chat.models.hub import remote_gguf
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.pack.manifest import FILE_NAME, Manifest, TunedPreset
from floe_chat.models.pack.packed_model import PackedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..families import one_shard
from ..helpers import edit_json, edit_tensors, explained, make_checkpoint, run_cli, write_tokenizer
from ..models.fakehub import ALWAYS, FakeHub, Fault
from ..models.gguf.converting import convert
from ..models.test_quantized import rounded
from .made_up import ENTRIES
from .wizardry import IMPATIENT, REPO, ended, entry_of, machine_of, start_until

PACK = "floe/tiny-floe"
SMALL_PIECES = Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.01)


@pytest.fixture
def ready(tiny_pack: Path, tmp_path: Path) -> Path:
    """A pack with presets of its own, as its maker uploaded it."""
    folder = Path(shutil.copytree(tiny_pack, tmp_path / "ready"))
    manifest = Manifest.read(folder)
    source = dataclasses.replace(manifest.source, name="mistralai/Mixtral\x1b[2J", commit="0123456789abcdef")
    tuned = (TunedPreset("High", Rule(0.3), 0.0021, 1e5), TunedPreset("Fast\x1b[1m", Rule(0.6), 0.03, 1e5))
    dataclasses.replace(manifest, source=source, tuned=tuned).write(folder)
    (folder / "README.md").write_text("# Tiny")
    return folder


@pytest.fixture
def hub(ready: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({PACK: ready, REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def is_copy(folder: Path, ready: Path) -> bool:
    """Whether it holds the pack, all of it, and nothing else."""
    names = {path.name for path in ready.iterdir()} - {"README.md"}
    return {path.name for path in folder.iterdir()} == names and all(
        (folder / name).read_bytes() == (ready / name).read_bytes() for name in names
    )


def set_up(model: str, name: str = "tiny") -> Setup:
    with Setup(wish(model, name), tuning=IMPATIENT) as running:
        return ended(running.start())


def test_from_a_repository(hub: FakeHub, ready: Path) -> None:
    running = set_up(PACK)
    now = running.progress()
    assert (running.error, now.state, now.share, now.ready) == (None, "done", 1.0, True)
    assert now.peak is not None and now.peak == sum(path.stat().st_size for path in running.wish.folder.iterdir())
    assert is_copy(running.wish.folder, ready) and unfinished() == []
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny"]
    assert PackedModel.open(catalog.find("tiny")).manifest.tuned[0].kl == 0.0021
    assert hub.sent(".safetensors") == sum(path.stat().st_size for path in ready.glob("*.safetensors"))


@pytest.mark.parametrize("kind", ["mirror", "plain without ranges", "linked folder"])
def test_from_elsewhere(hub: FakeHub, ready: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET /plain/", times=ALWAYS, ignore_range=True))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    (tmp_path / "linked").mkdir()  # as in the hub's own cache
    for path in ready.iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    places = {"mirror": f"{hub.url}/{PACK}", "linked folder": str(tmp_path / "linked")}
    running = set_up(places.get(kind, f"{hub.url}/plain/{PACK}/"))
    assert running.error is None and is_copy(running.wish.folder, ready)
    assert not any(path.is_symlink() for path in running.wish.folder.iterdir())
    assert {request.token for request in hub.requests} <= {None}


@pytest.mark.parametrize("from_folder", [False, True])
def test_left_and_taken_up_again(hub: FakeHub, ready: Path, from_folder: bool, tmp_path: Path) -> None:
    if from_folder:
        shutil.copytree(ready, tmp_path / "tiny")
        last = tmp_path / "tiny" / "layer_01.safetensors"
        sound = last.read_bytes()
        last.write_bytes(sound[:-1] + b"?")
        failed = set_up(str(tmp_path / "tiny"))
        assert isinstance(failed.error, PackError) and "layer_01" in failed.error.title
        last.write_bytes(sound)
    else:
        hub.faults.append(Fault("GET /storage/.*layer_01", times=ALWAYS, rate=20_000))
        with Setup(wish(PACK, "tiny"), tuning=SMALL_PIECES) as running:
            running.start()
            while "layer_01.safetensors.journal" not in {path.name for path in _files(running.wish.folder)}:
                assert not running.wait(0.005)
            running.pause()
            assert running.progress().state == "paused"
            running.resume()
            running.cancel()
    (begun,) = unfinished()
    assert begun.pack and (from_folder or begun.commit)
    (broken,) = (one for one in catalog.installed() if one.name == "tiny")
    assert broken.trouble is not None and "incomplete" in broken.trouble
    hub.faults.clear()
    sent = hub.sent("layer_00")
    with Setup(begun, tuning=IMPATIENT) as again:
        assert ended(again.start()).error is None
    assert hub.sent("layer_00") == sent and is_copy(begun.folder, ready)


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def test_small_files_are_compared_before_large_ones(hub: FakeHub, ready: Path, tmp_path: Path) -> None:
    edit_json(ready / FILE_NAME, lambda fields: fields["files"]["tokenizer.json"].update(sha256="0" * 64))
    with FakeHub({PACK: ready}) as other, pytest.MonkeyPatch.context() as patch:
        other.used_by(patch, tmp_path / "other home")
        other.faults.append(Fault("GET /storage/", times=ALWAYS, rate=10_000))
        failed = set_up(PACK)
        assert isinstance(failed.error, PackError) and "tokenizer.json has another sha256" in failed.error.cause
        assert not (failed.wish.folder / FILE_NAME).exists()


def test_impossible_values_are_found_though_their_hash_is_right(hub: FakeHub, ready: Path) -> None:
    edit_tensors(ready, lambda name, one: one * float("nan") if name.endswith("norm.weight") else one, "dense*")
    dense = (ready / "dense.safetensors").read_bytes()
    entry = {"size": len(dense), "sha256": hashlib.sha256(dense).hexdigest()}
    edit_json(ready / FILE_NAME, lambda fields: fields["files"].update({"dense.safetensors": entry}))
    failed = set_up(str(ready))
    assert isinstance(failed.error, PackError) and "infinite or NaN" in failed.error.cause
    assert not (failed.wish.folder / FILE_NAME).exists()


def test_another_pack_under_the_same_name_is_not_mixed_in(
    hub: FakeHub, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    hub.faults.append(Fault("GET /plain/.*layer_01", times=ALWAYS, status=403))
    address = f"{hub.url}/plain/{PACK}/"
    assert set_up(address).error is not None
    (begun,) = unfinished()
    assert begun.pack
    shown = hub.repositories[PACK].files[FILE_NAME]
    edit_json(ready / FILE_NAME, lambda fields: fields.update(name="another"))
    size = (ready / FILE_NAME).stat().st_size
    hub.repositories[PACK].files[FILE_NAME] = dataclasses.replace(shown, size=size)
    hub.faults.clear()
    with Setup(begun, tuning=IMPATIENT) as again:
        ended(again.start())
    assert isinstance(again.error, UsageError) and "has changed" in again.error.title


def test_the_command_shows_what_it_is_first(hub: FakeHub, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))
    asked = CliRunner().invoke(cli, ["setup", PACK], standalone_mode=False)
    assert isinstance(asked.exception, UsageError) and "--yes" in asked.exception.hint
    assert hub.sent("/storage/") == 0 and unfinished() == []
    done = run_cli("setup", PACK, "--yes", "--name", "tiny")
    assert done.code == 0 and done.out == f"{catalog.models_folder() / 'tiny'}\n", done.err
    made = "A pack by floe, which says: it was made from mistralai/Mixtral"
    for words in (f"tiny: {PACK} into", made, "commit 0123456789ab; up 3", "High (KL 0.0021)", "It downloads"):
        assert words in done.err, done.err
    assert "\x1b" not in done.err and "tune" not in done.err
    assert "packed already" in explained(run_cli("setup", PACK, "--yes", "--name", "b", "--up", "4"), 2)
    copied = run_cli("setup", str(ready), "--yes", "--name", "copied")
    assert copied.code == 0 and "It copies" in copied.err and f"floe-chat --model {ready}" in copied.err
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(1 << 20))
    assert "does not fit this machine" in explained(run_cli("setup", PACK, "--yes", "--name", "c"), 1)


def listed(published: Path, monkeypatch: pytest.MonkeyPatch, place: str = PACK) -> None:
    """A listed model of which there is a ready pack."""
    pack = ReadyPack(place, 12_300_000_000, 3, 4, 4, 4)
    entry = dataclasses.replace(entry_of(published), ready=pack)
    monkeypatch.setattr("floe_chat.models.catalog.PUBLISHED", (entry,))
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))


def test_plans_name_it(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(published, monkeypatch)
    told = " ".join(run_cli("plan", "tiny").out.split())
    assert f"floe-chat setup tiny ({PACK}: ready pack, 12.3 GB, nothing to compute)" in told
    fields = json.loads(run_cli("plan", "tiny", "--json").out)
    assert fields["entry"]["ready"]["place"] == PACK


@pytest.mark.parametrize(("answer", "source"), [("p\ny\n", REPO), ("n\n", "")])
def test_the_other_way_is_a_key_away(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch, answer: str, source: str
) -> None:
    listed(published, monkeypatch)
    monkeypatch.setattr("floe_chat.app.cli.setup.command.sys.stdin.isatty", lambda: True, raising=False)
    ran = run_cli("setup", "tiny", "--no-tune", stdin=answer.encode(), terminal=True)
    if source:
        assert ran.code == 0 and Manifest.read(catalog.models_folder() / "tiny").source.name.startswith(source), ran
    else:
        assert ran.code == 130 and not catalog.models_folder().exists(), ran
    assert "Take it? (y: yes, n: no, p: pack it here instead)" in ran.err


def test_a_listed_pack_that_is_gone_or_broken_is_packed_here(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(published, monkeypatch, "floe/gone")
    done = run_cli("setup", "tiny", "--yes")
    assert done.code == 0 and "The ready pack cannot be used: There is no model floe/gone" in done.err, done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.name == REPO


def test_what_was_begun_is_found_by_the_listed_name(
    hub: FakeHub, ready: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(published, monkeypatch)
    fault = Fault("GET /storage/.*layer_01", times=ALWAYS, flip=True)
    hub.faults.append(fault)
    assert run_cli("setup", "tiny", "--yes").code == 1
    hub.faults.clear()
    for name in (REPO, "tiny"):
        assert run_cli("setup", name, "--yes", "--up", "8").code == 2  # it was begun with others
    done = run_cli("setup", REPO, "--yes")
    assert done.code == 0 and "Continuing the setup of tiny." in done.err
    assert is_copy(catalog.models_folder() / "tiny", ready)


@pytest.mark.parametrize("pack", ["", "x", "0" * 63, 5, "../" * 8])
def test_a_note_with_another_hash_is_not_used(pack: object) -> None:
    begun = Wish(PACK, "tiny")
    begun.home.mkdir(parents=True)
    begun.note.write_text(json.dumps({"model": "https://example.org/x/", "name": "tiny", "pack": pack}))
    assert len(unfinished()) == (pack == "")


def test_what_the_hubs_own_cache_has_is_not_fetched_again(hub: FakeHub, ready: Path, tmp_path: Path) -> None:
    commit = hub.repositories[PACK].commit
    snapshot = tmp_path / "hub home" / "hub" / "models--floe--tiny-floe" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    shutil.copy(ready / "layer_00.safetensors", snapshot)
    shutil.copy(ready / "tokenizer.json", snapshot)
    (snapshot / "layer_01.safetensors").write_bytes((ready / "layer_01.safetensors").read_bytes()[:-1] + b"?")
    running = set_up(PACK)
    assert running.error is None and is_copy(running.wish.folder, ready)
    assert hub.sent("layer_00") == hub.sent("tokenizer.json") == 0 < hub.sent("layer_01")
    assert (snapshot / "layer_00.safetensors").exists()


@pytest.mark.parametrize("from_folder", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_damage_is_repaired_from_the_pack_itself(hub: FakeHub, ready: Path, from_folder: bool) -> None:
    folder = set_up(PACK).wish.folder
    for name in ("layer_01.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"?" + (folder / name).read_bytes()[1:])
    sent = hub.sent("layer_00")
    told = run_cli("verify", "tiny")
    assert told.code == 1 and "--pack PLACE" in told.out
    wrong = run_cli("verify", "tiny", "--repair", "--pack", REPO)
    assert "does not have these files" in explained(wrong, 2)
    done = run_cli("verify", "tiny", "--repair", "--pack", str(ready) if from_folder else PACK)
    assert done.code == 0 and "repaired  layer_01.safetensors" in done.out, done
    assert is_copy(folder, ready) and hub.sent("layer_00") == sent
    explained(run_cli("verify", "tiny", "--pack", PACK), 2)


def test_a_pack_with_countless_presets_is_told_in_a_line(hub: FakeHub, ready: Path) -> None:
    manifest = Manifest.read(ready)
    dataclasses.replace(manifest, tuned=manifest.tuned * 500).write(ready)
    found = look_up(wish(str(ready), "tiny"))
    assert found.ready is not None and all(len(line) < 600 for line in claims(found.ready))
    assert "and 995 more" in claims(found.ready)[1]


# A model is set up from a hub over real HTTP: fetched, packed, checked; left, taken up again; refused with reasons


@pytest.fixture(scope="module")
def undisturbed_checkpoint(published: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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


def test_fetched_packed_checked_and_not_again(hub: FakeHub, undisturbed_checkpoint: dict[str, str]) -> None:
    with Setup(wish(REPO)) as running:
        ended(running.start())
        now = running.progress()
    assert (running.error, now.state, now.share) == (None, "done", 1.0)
    assert same_weights(running.wish.folder, undisturbed_checkpoint)
    manifest = PackedModel.open(running.wish.folder, recheck=True).manifest
    assert (manifest.source.name, manifest.source.commit) == (REPO, running.wish.commit)
    # Nothing is left beside the pack, and it can be called by its name.
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny"]
    assert catalog.find("tiny") == running.wish.folder and unfinished() == []
    with pytest.raises(UsageError, match="already a model called tiny"):
        wish(REPO)
    write_note(running.wish)  # as if it had been left just before its end
    (begun,) = unfinished()
    before, asked = digest(begun.folder), len(hub.requests)
    with Setup(begun) as again:
        assert ended(again.start()).error is None
    assert digest(begun.folder) == before and len(hub.requests) == asked and unfinished() == []


@pytest.mark.thorough
def test_a_checkpoint_is_left_and_taken_up_again(hub: FakeHub, undisturbed_checkpoint: dict[str, str]) -> None:
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
    assert same_weights(begun.folder, undisturbed_checkpoint)
    assert hub.sent("model-") < 2 * fetched  # what layer 1 needed was not fetched again
    assert unfinished() == []


def test_the_second_of_two_is_told(hub: FakeHub) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as first:
        start_until(first, "Packing")
        with Setup(wish(REPO), tuning=IMPATIENT) as second:
            ended(second.start())
        assert isinstance(second.error, TryAgainError) and "Another" in second.error.title
        assert first.error is None and first.progress().state == "paused"


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


@pytest.mark.thorough
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


# A model is set up from a GGUF file: planned, packed, killed and continued; the file itself is only read


@pytest.fixture(scope="module")
def source_of_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return one_shard(make_checkpoint(folder, hidden=32, intermediate=64, dtype=torch.float16))


@pytest.fixture(scope="module")
def files(source_of_files: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the type of their weights; one is in parts."""
    folder = tmp_path_factory.mktemp("files")
    found = {
        kind: convert(source_of_files, folder / f"Tiny Model-{kind}.gguf", kind) for kind in ("F16", "Q8_0", "Q4_0")
    }
    return {**found, "parts": convert(source_of_files, folder / "split.gguf", parts=6)}


@pytest.fixture(autouse=True)
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is one of 12 GB without a GPU."""
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))


@pytest.fixture(scope="module")
def undisturbed_file(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with Setup(wish(str(files["F16"]))) as running:
            assert ended(running.start()).error is None
            return digest(running.wish.folder)


def test_a_file_is_set_up_and_left_alone(
    files: dict[str, Path], source_of_files: Path, undisturbed_file: dict[str, str], tmp_path: Path
) -> None:
    before = digest(files["F16"].parent)
    done = run_cli("setup", str(files["F16"]), "--yes", "--up", "3", "--rows", "4", "--dense", "4")
    assert done.code == 0, done.err
    folder = catalog.models_folder() / "tiny-model-f16"
    assert done.out == f"{folder}\n" and digest(folder) == undisturbed_file
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny-model-f16"] and not unfinished()
    manifest = PackedModel.open(folder, recheck=True).manifest
    assert (manifest.source.name, manifest.source.rounding) == (files["F16"].name, "")
    with Setup(wish(str(source_of_files), "by-checkpoint")) as running:
        assert ended(running.start()).error is None
    theirs = digest(running.wish.folder)
    assert [name for name in theirs if name.endswith(".safetensors") and theirs[name] != undisturbed_file[name]] == []
    assert run_cli("ask", "--model", "tiny-model-f16", "--max-tokens", "2", "hello").code == 0
    assert run_cli("models", "remove", "tiny-model-f16", "--yes").code == 0
    assert digest(files["F16"].parent) == before


@pytest.mark.thorough
def test_any_part_of_a_split_file_names_the_model(files: dict[str, Path], undisturbed_file: dict[str, str]) -> None:
    parts = sorted(files["parts"].parent.glob("split-*.gguf"))
    wanted = wish(str(parts[-1]))
    assert wanted.name == "split" and wanted.model == str(parts[0]) == wish(str(parts[1])).model
    with Setup(wanted) as running:
        assert ended(running.start()).error is None
    found = digest(running.wish.folder)
    assert [name for name in found if found[name] != undisturbed_file[name]] == ["manifest.json"]  # the file's name


@pytest.mark.thorough
def test_what_was_rounded_before_is_said(files: dict[str, Path]) -> None:
    kind = "Q4_0"
    said = f"Its weights are {kind}; packed again at 3/4/4 they are rounded twice. Q8_0 or F16 keeps more."
    bits = ["--up", "3", "--rows", "4", "--dense", "4"]
    done = run_cli("setup", str(files[kind]), "--name", "rounded", "--yes", *bits)
    assert done.code == 0 and said in done.err
    manifest = Manifest.read(catalog.models_folder() / "rounded")
    assert manifest.source.rounding == kind and manifest.source.called == f"{files[kind].name} ({kind})"
    assert not manifest.unquantized
    assert [model.details.count(manifest.source.called) for model in look([]).models if model.name == "rounded"] == [1]
    plan = run_cli("plan", str(files[kind]))
    assert plan.code == 0 and f"Its weights are {kind}" in plan.out.replace("\n    ", " ")
    for kind, coarse in (("Q8_0", False), ("Q4_0", True)):
        fields = json.loads(run_cli("plan", str(files[kind]), "--json").out)["entry"]
        assert (fields["name"], fields["rounding"], fields["coarse"]) == (f"tiny-model-{kind.lower()}", kind, coarse)


GGUF = "floe/Tiny-Model-GGUF"


@pytest.fixture
def gguf_hub(
    files: dict[str, Path], published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    for kind in ("F16", "Q8_0"):
        shutil.copy(files[kind], folder / f"tiny-model-{kind}.gguf")
    monkeypatch.setattr(remote_gguf, "STRETCH", 1)
    with FakeHub({GGUF: folder, REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


def test_a_file_of_the_hub_is_set_up_as_it_comes(gguf_hub: FakeHub, undisturbed_file: dict[str, str]) -> None:
    with Setup(wish(f"{GGUF}:F16"), tuning=SMALL_PIECES) as running:
        start_until(running, "Packing layer 2")
    (begun,) = unfinished()
    assert (begun.model, begun.name) == (f"{GGUF}:F16", "tiny-model") and begun.commit
    sent = gguf_hub.sent("/storage/")
    taken = explained(run_cli("setup", f"{GGUF}:Q8_0", "--yes"), 2)
    assert "The name tiny-model is taken" in taken and f"unfinished setup of {GGUF}:F16" in taken
    done = run_cli("setup", f"{GGUF}:f16", "--yes")
    assert done.code == 0 and "Continuing the setup" in done.err, done.err
    assert gguf_hub.sent("/storage/") - sent < sent  # what is packed is not fetched again
    found = digest(begun.folder)
    assert [name for name in found if found[name] != undisturbed_file[name]] == ["manifest.json"]
    source = Manifest.read(begun.folder).source
    assert (source.name, source.commit, source.rounding) == (f"{GGUF}:F16", begun.commit, "")
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny-model"]
    layer = begun.folder / "layer_01.safetensors"
    layer.write_bytes(layer.read_bytes()[:-100] + bytes(100))
    assert run_cli("verify", "tiny-model", "--repair").code == 0 and digest(begun.folder) == found


def test_the_command_says_which_file_of_the_hub_it_takes(gguf_hub: FakeHub) -> None:
    asked = CliRunner().invoke(cli, ["setup", GGUF], standalone_mode=False)
    assert isinstance(asked.exception, UsageError) and "--yes" in asked.exception.hint
    said = asked.stderr.replace("\n  ", " ")
    assert f"{GGUF}:Q8_0 into" in said and "it takes Q8_0, the first of" in said and "there are also F16 (" in said
    assert "Its weights are Q8_0" in said and unfinished() == []
    refused = explained(run_cli("setup", f"{GGUF}:Q4_K_M", "--yes"), 2)
    assert "has no Q4_K_M" in refused and "Q8_0 (" in refused and f"floe-chat setup {GGUF}:Q8_0" in refused


def test_a_pack_of_a_file_is_repaired_from_it(files: dict[str, Path], tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    assert run_cli("pack", str(files["F16"]), str(pack)).code == 0
    before, layer = digest(pack), pack / "layer_01.safetensors"
    layer.write_bytes(layer.read_bytes()[:-100] + bytes(100))
    told = run_cli("verify", str(pack), "--repair")
    assert told.code == 2 and "--source PATH" in told.err
    assert run_cli("verify", str(pack), "--repair", "--source", str(files["F16"])).code == 0
    assert digest(pack) == before


def test_what_cannot_be_set_up_is_refused_at_once(files: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files["F16"].read_bytes()[:-1000])
    for command in (("setup", "--yes"), ("plan",)):
        said = explained(run_cli(command[0], str(broken), *command[1:]), 1)
        assert "broken.gguf cannot be read" in said and "its header needs" in said
    assert not unfinished() and not catalog.models_folder().exists()
    assert "There is no GGUF file" in explained(run_cli("setup", str(tmp_path / "absent.gguf"), "--yes"), 2)
    measured = run_cli("eval", "demo", "--source", str(files["F16"]))
    assert "It is no folder." in explained(measured, 2)
    assert "is not set up" in explained(run_cli("ask", "--model", str(files["F16"]), "hello"), 2)
    with pytest.raises(UsageError, match="cannot be called"):
        wish(str(files["F16"]), "../x")


# The note of a setup that was begun: what is continued and given up by it, and what is never used or deleted


@pytest.mark.thorough
def test_given_up_leaves_nothing(hub: FakeHub) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as running:
        start_until(running, "Packing layer 1")
    (begun,) = unfinished()
    forget(begun)
    assert unfinished() == [] and list(catalog.models_folder().iterdir()) == []


def test_the_command_goes_on_with_what_was_begun(hub: FakeHub) -> None:
    with Setup(wish(REPO), tuning=IMPATIENT) as running:
        start_until(running, "Packing layer 1")
    runner = CliRunner()
    for widths in (["--up", "8"], ["--rows", "3"], ["--up", "3", "--rows", "4", "--dense", "8"]):
        other = runner.invoke(cli, ["setup", REPO, *widths], standalone_mode=False)
        assert isinstance(other.exception, UsageError) and "tiny --forget" in other.exception.hint
    pinned = f"https://huggingface.co/{REPO}/tree/" + "0123456789" * 4
    other = runner.invoke(cli, ["setup", pinned, "--name", "tiny"], standalone_mode=False)
    assert isinstance(other.exception, UsageError) and "another commit" in other.exception.title
    done = runner.invoke(cli, ["setup", REPO, "--up", "3", "--rows", "4", "--dense", "4"])
    assert done.exit_code == 0, done.stderr
    assert "Continuing the setup of tiny." in done.stderr and "tiny is ready" in done.stderr


def started(called: str, **fields: Any) -> Wish:
    """A note of a setup, and a folder with what a pack leaves."""
    begun = Wish(REPO, called)
    begun.folder.mkdir(parents=True)
    (begun.folder / "packing.json").write_text("{}")
    begun.note.write_text(json.dumps({"model": REPO, "name": called} | fields))
    return begun


def test_the_command_finds_the_setup_that_is_meant() -> None:
    first, second = started("first"), started("second")
    invoke = CliRunner().invoke
    several = invoke(cli, ["setup", REPO, "--forget"], standalone_mode=False)
    assert isinstance(several.exception, UsageError) and "first, second" in several.exception.cause
    taken = invoke(cli, ["setup", "floe/other", "--name", "first"], standalone_mode=False)
    assert isinstance(taken.exception, UsageError) and "first --forget" in taken.exception.hint
    assert invoke(cli, ["setup", REPO, "--name", "first", "--forget"]).exit_code == 0
    assert unfinished() == [second] and not first.folder.exists()
    absent = invoke(cli, ["setup", REPO, "--name", "third", "--forget"], standalone_mode=False)
    assert isinstance(absent.exception, UsageError)
    assert invoke(cli, ["setup", REPO, "--forget"]).exit_code == 0
    assert unfinished() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../../precious"},
        {"name": ""},
        {"name": "demo"},
        {"name": 5},
        {"home": "/"},
        {"model": 5},
        {"model": "../relative/path"},
        {"up": 5},
        {"commit": "../x"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_note_that_names_something_else_is_ignored_and_reported(
    fields: dict[str, Any], own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_folders)
    precious = catalog.models_folder().parent.parent / "precious"
    precious.mkdir(parents=True)
    (precious / "packing.json").write_text("not yours")
    begun = started("bad", **fields)
    mine = begun.folder / "mine"
    mine.write_text("kept")
    assert unfinished() == []
    (bad,) = bad_notes()
    assert (bad.name, bad.path) == ("bad", begun.note) and str(bad.path) in str(bad)
    runner = CliRunner()
    for command in (["models"], ["models", "--json"]):
        assert "bad.setup.json is ignored" in runner.invoke(cli, command).stderr
    assert runner.invoke(cli, ["setup", "--forget", "bad"]).exit_code == 0
    assert bad_notes() == [] and not begun.note.exists()
    assert mine.exists() and precious.exists()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b"{}" + b" " * (2 << 20), None], ids=range(6))
def test_a_note_that_is_no_note_is_ignored(content: bytes | None) -> None:
    begun = started("bad")
    begun.note.unlink()
    if content is None:
        os.mkfifo(begun.note)
    else:
        begun.note.write_bytes(content)
    assert unfinished() == [] and len(bad_notes()) == 1
    discard(bad_notes()[0])
    assert bad_notes() == [] and begun.folder.exists()


def test_folders_of_other_files_are_neither_used_nor_deleted(hub: FakeHub) -> None:
    catalog.models_folder().mkdir(parents=True)
    for name in ("tiny", "tiny.download"):
        folder = catalog.models_folder() / name
        folder.mkdir()
        (folder / "mine").write_text("kept")
        with pytest.raises(UsageError, match="name tiny is taken"):
            wish(REPO)
        with Setup(Wish(REPO, "tiny")) as running:  # as an old note says
            ended(running.start())
        assert running.error is not None and "other files" in running.error.cause
        write_note(running.wish)
        forget(running.wish)
        assert not running.wish.note.exists() and (folder / "mine").read_text() == "kept"
        shutil.rmtree(folder)


def test_of_a_link_only_the_link_is_deleted(tmp_path: Path) -> None:
    begun = started("linked")
    begun.folder.rename(tmp_path / "elsewhere")
    begun.folder.symlink_to(tmp_path / "elsewhere")
    forget(begun)
    assert not begun.folder.is_symlink() and (tmp_path / "elsewhere" / "packing.json").exists()


def test_a_failed_setup_can_be_given_up(hub: FakeHub, setups: Setups) -> None:
    hub.faults.append(Fault("GET /api", status=404, headers={"X-Error-Code": "RepoNotFound"}))
    running = ended(setups.start(wish(REPO)))
    assert running.error is not None and len(unfinished()) == 1
    setups.give_up(unfinished()[0])
    assert setups.setup is None and unfinished() == [] and list(catalog.models_folder().iterdir()) == []


# Models on a hub that cannot be packed are refused by config.json or the shards' headers, before any weights come


Tensors = dict[str, Tensor]
QWEN: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a shared expert, in one shard."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    folder = tmp_path_factory.mktemp("published") / "qwen"
    folder.mkdir()
    model: Any = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=write_tokenizer(folder), **QWEN))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(qwen: Path, tmp_path: Path) -> Path:
    return shutil.copytree(qwen, tmp_path / "copy")


def served(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub({REPO: folder})
    hub.used_by(monkeypatch, tmp_path / "hub home")
    return hub


@pytest.mark.parametrize("name", ["FP8 of makers", pytest.param("NVFP4 of ModelOpt", marks=pytest.mark.thorough)])
def test_a_rounded_copy_is_packed_from_the_hub_and_said_to_be_one(
    name: str, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, kind = tmp_path / "copy", name.partition(" ")[0]
    rounded(qwen, copy, name)
    if kind == "NVFP4":  # config.json does not say it
        edit_json(copy / "config.json", lambda fields: fields.pop("quantization_config"))
        stated = {"quant_algo": kind, "group_size": 16, "exclude_modules": ["lm_head"]}
        (copy / "hf_quant_config.json").write_text(json.dumps({"quantization": stated}))
    whole = load_file(copy / "model.safetensors")
    scales = {name: tensor for name, tensor in whole.items() if "_scale" in name}
    save_file({name: whole[name] for name in whole.keys() - scales.keys()}, copy / "model.safetensors")
    save_file(scales, copy / "scales.safetensors")  # a shard without codes
    bits = ["--up", "3", "--rows", "4", "--dense", "4"]
    with served(copy, tmp_path, monkeypatch):
        done = run_cli("setup", REPO, "--name", "rounded", "--yes", *bits)
    said = " ".join(done.err.split())
    assert done.code == 0 and f"Its weights are {kind}; packed again at" in said and f"{kind} adds about 0." in said, (
        done.err
    )
    pack = catalog.models_folder() / "rounded"
    assert Manifest.read(pack).source.called.endswith(f" ({kind})")
    assert run_cli("pack", str(copy), str(tmp_path / "here"), *bits).code == 0
    assert digest(pack)["layer_00.safetensors"] == digest(tmp_path / "here")["layer_00.safetensors"]
    assert run_cli("ask", "--model", "rounded", "--no-save", "--max-tokens", "2", "hello").code == 0
    assert f"weights in {kind}" not in run_cli("plan", "rounded").out  # they have other bits now


def quantized(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, "bits": 4}}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (quantized("bitsandbytes"), f"{REPO} has bitsandbytes weights, which cannot be read yet"),
        ({"quantization_config": {"bits": 4}}, "has quantized weights"),
        ({"model_type": "bailing_moe", "auto_map": {"AutoConfig": "x.Y"}}, f"{REPO} needs code of its own"),
        ({"model_type": "brand_new_moe"}, "'brand_new_moe' is not supported yet"),
        ({"model_type": "dbrx"} | quantized("fp8"), "DBRX is not supported yet"),
        ({"model_type": "llama", "num_experts": None}, f"{REPO} is not a Mixture-of-Experts model"),
    ],
    ids=str,
)
def test_config_json_says_why(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], said: str
) -> None:
    config = copy / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    with served(copy, tmp_path, monkeypatch) as hub:
        with pytest.raises(CheckpointError) as caught:
            look_up(Wish(REPO, "tiny"))
        shown = explained(run_cli("setup", REPO, "--yes"), 1)
        with Setup(Wish(REPO, "tiny"), tuning=IMPATIENT) as running:
            ended(running.start())
    assert said in caught.value.title and caught.value.hint
    assert running.error is not None and said in running.error.title
    assert said in shown and not any(request.storage for request in hub.requests)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def reshaped(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        name: tensor[..., :-1].contiguous() if part in name else tensor for name, tensor in tensors.items()
    }


def as_integers(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor.to(torch.int8) if part in name else tensor for name, tensor in tensors.items()}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("layers.1.mlp.shared_expert.up_proj"), "layers.1.mlp.shared_expert.up_proj.weight is missing"),
        (without("layers.1.mlp.experts.3.down_proj"), "No shard holds model.layers.1.mlp.experts.3.down_proj.weight"),
        (reshaped("experts.2.up_proj"), "experts.2.up_proj.weight is BF16 of (64, 63)"),
        (reshaped("shared_expert_gate"), "shared_expert_gate.weight is of shape (1, 63)"),
        (as_integers("experts.0.gate_proj"), "experts.0.gate_proj.weight is I8"),
    ],
    ids=range(5),
)
def test_headers_say_why(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensors], Tensors], said: str
) -> None:
    shard = copy / "model.safetensors"
    save_file(change(load_file(shard)), shard)
    with served(copy, tmp_path, monkeypatch) as hub:
        look_up(Wish(REPO, "tiny"))
        with Setup(Wish(REPO, "tiny"), tuning=IMPATIENT) as running:
            ended(running.start())
    error = running.error
    assert isinstance(error, FloeError) and said in error.cause and error.hint
    # One look at the header, and the rest of the shard never came.
    looked = [request.range for request in hub.requests if request.storage]
    assert looked == ["bytes=0-262143"]
    assert not list(catalog.models_folder().rglob("*.safetensors*"))


# Setups that are killed at seeded moments have the same bytes in the end; FLOE_KILLS: how often


KILLS = int(os.environ.get("FLOE_KILLS", "8"))
# All that a setup needs is imported once, so that its children begin at once.
PARENT = """
import os, sys
import gguf
from floe_chat.app.setup import flow, ready_words, taking, wish
from floe_chat.models import checkpoint
from floe_chat.models.checking import verify
from floe_chat.models.gguf import shelf
from floe_chat.models.hub import pack_fetch, places, remote_checkpoint
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.hub_request import new_client
from floe_chat.models.modules import library_model
from floe_chat.models.pack import packed_model
from floe_chat.models.packing import calibration, pack
from huggingface_hub import get_token, try_to_load_from_cache
from transformers import AutoModelForCausalLM, MixtralForCausalLM

calibration.TEXT_SHAPE = (4, 256)  # as in the tests' own process
new_client("")
for line in sys.stdin:
    os.environ["HF_ENDPOINT"], model = line.split()
    child = os.fork()
    if child == 0:
        running = flow.Setup(
            (wish.unfinished() or [wish.wish(model, "tiny")])[0],
            tuning=Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.01),
        )
        running.start()
        running.wait(600)
        print(running.error, file=sys.stderr)
        os._exit(0 if running.error is None else 1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize(
    "source", ["checkpoint on a hub", "GGUF file", "GGUF file on a hub", "pack on a hub", "pack in a folder"]
)
def test_killed_again_and_again(
    published: Path, tiny_pack: Path, tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """In setups one after the other, until there were enough kills; files and folders are only read."""
    file = convert(published, tmp_path / "tiny.gguf", "F16")
    before, home = file.read_bytes(), catalog.models_folder()
    shutil.copy(file, (tmp_path / "gguf").mkdir() or tmp_path / "gguf" / "tiny-F16.gguf")
    places = {"GGUF file": str(file), "checkpoint on a hub": REPO, "pack on a hub": PACK, "GGUF file on a hub": GGUF}
    model, dice = places.get(source, str(tiny_pack)), random.Random(11)
    # Bytes are compared: the child has to round as this process does.
    rounding = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "FLOE_CPU_ISA", "PYTHONPATH")
    environment = {name: os.environ[name] for name in rounding if name in os.environ}
    environment |= {"NO_PROXY": "127.0.0.1", "HOME": str(own_folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT]
    with (
        FakeHub({PACK: tiny_pack, REPO: published, GGUF: tmp_path / "gguf"}) as hub,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent,
    ):
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("HOME", str(tmp_path / "undisturbed"))
            hub.used_by(elsewhere, tmp_path / "hub home")
            with Setup(wish(model, "tiny")) as running:
                assert ended(running.start()).error is None
            sound = contents(running.wish.folder)
        hub.faults.append(Fault("GET /storage/", times=ALWAYS, rate=400_000))
        assert parent.stdin is not None and parent.stdout is not None
        kills = finished = 0
        while kills < KILLS or not finished:
            parent.stdin.write(f"{hub.url} {model}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            if kills < KILLS:
                time.sleep(dice.uniform(0.0, 0.6 if "hub" in source else 0.3))
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(child, signal.SIGKILL)
            code = int(parent.stdout.readline())
            kills += code == -signal.SIGKILL
            assert code in (0, -signal.SIGKILL)
            folder = home / "tiny"
            if (folder / "manifest.json").exists():  # written last: whatever comes after, the pack is whole
                assert sound.items() <= contents(folder).items()
            if code == 0:
                finished += 1
                assert [path.name for path in home.iterdir()] == ["tiny"] and contents(folder) == sound
                shutil.rmtree(folder)
        parent.stdin.close()
    assert file.read_bytes() == before
