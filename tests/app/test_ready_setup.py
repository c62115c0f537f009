"""A ready pack is set up from a hub, a mirror, a web server and a folder: as it is, resumable, only if it is sound."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from floe_chat.app.cli.main import cli
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.ready_words import claims
from floe_chat.app.setup.setups import look_up
from floe_chat.app.setup.wish import Wish, unfinished, wish
from floe_chat.kernels.rule import Rule
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import ReadyPack
from floe_chat.models.errors import PackError, UsageError
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.pack.manifest import FILE_NAME, Manifest, TunedPreset
from floe_chat.models.pack.packed_model import PackedModel

from ..helpers import edit_json, edit_tensors, explained, run_cli
from ..models.fakehub import ALWAYS, FakeHub, Fault
from .wizardry import IMPATIENT, REPO, ended, entry_of, machine_of

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


@pytest.mark.parametrize("kind", ["mirror", "plain", "plain without ranges", "folder", "linked folder"])
def test_from_elsewhere(hub: FakeHub, ready: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults += [Fault("GET /plain/", times=ALWAYS, ignore_range=True)] if kind == "plain without ranges" else []
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    if kind == "linked folder":  # as in the hub's own cache
        (tmp_path / "linked").mkdir()
        for path in ready.iterdir():
            (tmp_path / "linked" / path.name).symlink_to(path)
    places = {"mirror": f"{hub.url}/{PACK}", "folder": str(ready), "linked folder": str(tmp_path / "linked")}
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
    for words in (
        f"tiny: {PACK} into",
        "ready pack,",
        "nothing to compute",
        "A pack by floe, which says: it was made from mistralai/Mixtral",
        "commit 0123456789ab; up 3, gate and down 4, attention 4 bits",
        "Its own presets, as its maker measured them: High (KL 0.0021)",
        "It downloads",
        "tiny is ready",
    ):
        assert words in done.err, done.err
    assert "\x1b" not in done.err and "tune" not in done.err
    assert "packed already" in explained(run_cli("setup", PACK, "--yes", "--name", "b", "--up", "4"), 2)
    assert "packed already" in explained(run_cli("setup", PACK, "--yes", "--name", "b", "--pack-here"), 2)
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


def test_a_listed_model_comes_as_its_ready_pack(
    hub: FakeHub, ready: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(published, monkeypatch)
    done = run_cli("setup", "tiny", "--yes")
    assert done.code == 0 and f"tiny: {PACK} into" in done.err, done.err
    assert is_copy(catalog.models_folder() / "tiny", ready) and hub.sent("model-0") == 0
    shutil.rmtree(catalog.models_folder() / "tiny")
    here = run_cli("setup", "tiny", "--yes", "--pack-here")
    assert here.code == 0 and Manifest.read(catalog.models_folder() / "tiny").source.name == REPO, here.err


def test_plans_name_it(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(published, monkeypatch)
    told = " ".join(run_cli("plan", "tiny").out.split())
    assert f"floe-chat setup tiny ({PACK}: ready pack, 12.3 GB, nothing to compute)" in told
    fields = json.loads(run_cli("plan", "tiny", "--json").out)
    assert fields["entry"]["ready"]["place"] == PACK


@pytest.mark.parametrize(("answer", "source"), [("\n", "mistralai"), ("p\ny\n", REPO), ("n\n", "")])
def test_the_other_way_is_a_key_away(
    hub: FakeHub, published: Path, monkeypatch: pytest.MonkeyPatch, answer: str, source: str
) -> None:
    listed(published, monkeypatch)
    monkeypatch.setattr("floe_chat.app.cli.setup.ready.sys.stdin.isatty", lambda: True, raising=False)
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


@pytest.mark.parametrize("from_folder", [False, True])
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
    dataclasses.replace(manifest, tuned=manifest.tuned * 5000).write(ready)
    found = look_up(wish(str(ready), "tiny"))
    assert found.ready is not None and all(len(line) < 600 for line in claims(found.ready))
    assert "and 9995 more" in claims(found.ready)[1]
