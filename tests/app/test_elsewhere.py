"""Models that LM Studio, Ollama and llama.cpp have downloaded: found, only read, and packed where the user agrees."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup import elsewhere
from floe_chat.app.setup.setups import Setups
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import CatalogEntry
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest

from ..families import one_shard
from ..helpers import make_checkpoint, run_cli
from ..models.fakehub import FakeHub
from ..models.gguf.converting import convert
from .scripted import until
from .wizardry import REPO, around, entry_of, machine_of, results, see, shown, surveyor

DIGEST = "a" * 64


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    source = one_shard(make_checkpoint(folder / "source", hidden=32, intermediate=64, dtype=torch.float16))
    other = one_shard(make_checkpoint(folder / "other", hidden=64, intermediate=64, dtype=torch.float16))
    found = {kind: convert(source, folder / f"tiny-moe-instruct-{kind}.gguf", kind) for kind in ("F16", "Q4_0")}
    return {
        **found,
        "parts": convert(source, folder / "parts.gguf", parts=6),
        "other": convert(other, folder / "o.gguf"),
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any of these programs."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def entry(files: dict[str, Path], name: str = "tiny-moe-instruct") -> CatalogEntry:
    return replace(catalog.described(files["F16"]), name=name, folder=None, repo=f"somebody/{name}")


def put(file: Path, folder: Path, name: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(file, folder / (name or file.name)))


def ollama(file: Path, folder: Path, name: str = "tiny-moe", tag: str = "instruct", digest: str = DIGEST) -> Path:
    """As `ollama pull` leaves it."""
    blob = put(file, folder / "blobs", f"sha256-{digest}")
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'b' * 64}", "size": 3},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 3},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def test_copies_are_found_in_all_folders_the_most_exact_first(home: Path, files: dict[str, Path]) -> None:
    studio = put(files["F16"], home / ".lmstudio" / "models" / "somebody" / "tiny-moe-GGUF")
    blob = ollama(files["Q4_0"], home / ".ollama" / "models")
    put(files["other"], home / ".cache" / "llama.cpp")
    found = elsewhere.copies(entry(files))
    assert [(one.program, one.entry.folder, one.called) for one in found] == [
        ("LM Studio", studio, studio.stem),
        ("Ollama", blob, "tiny-moe:instruct"),
    ]
    assert [one.entry.rounding for one in found] == ["", "Q4_0"] and {one.entry.name for one in found} == {
        "tiny-moe-instruct"
    }
    assert elsewhere.programs() == "LM Studio, Ollama and llama.cpp"
    everything = elsewhere.copies()
    assert len(everything) == 3 and len({one.entry.name for one in everything}) == 3


def test_folders_that_were_moved_are_found(home: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'moved'}\n")
    put(files["F16"], home / "moved" / "models" / "a" / "b")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "disk"))
    ollama(files["Q4_0"], home / "disk")
    monkeypatch.setenv("LLAMA_CACHE", str(home / "llama"))
    put(files["Q4_0"], home / "llama")
    assert [one.program for one in elsewhere.copies(entry(files))] == ["LM Studio", "Ollama", "llama.cpp"]


def test_parts_are_one_model(home: Path, files: dict[str, Path]) -> None:
    folder = home / ".lmstudio" / "models" / "x"
    for part in files["parts"].parent.glob("parts-*.gguf"):
        put(part, folder)
    (one,) = elsewhere.copies(entry(files))
    assert one.bytes == sum(path.stat().st_size for path in folder.iterdir())
    next(folder.glob("*-00002-of-*")).unlink()
    assert elsewhere.copies(entry(files)) == []


def test_of_models_of_the_same_sizes_the_name_decides(
    home: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    instruct, thinking = entry(files), entry(files, "tiny-moe-thinking")
    monkeypatch.setattr(elsewhere, "PUBLISHED", (instruct, thinking))
    put(files["F16"], home / ".lmstudio" / "models", "Tiny-MoE-Thinking-F16.gguf")
    assert elsewhere.copies(instruct) == []
    assert [one.entry.name for one in elsewhere.copies(thinking)] == ["tiny-moe-thinking"]


def test_what_is_no_model_is_passed_over(home: Path, files: dict[str, Path]) -> None:
    assert elsewhere.folders() == [] and elsewhere.programs() == "" and elsewhere.copies(entry(files)) == []
    ollama(files["F16"], home / ".ollama" / "models")
    layer = '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": %s}]}'
    strange = ("", "[]", "{}", '{"layers": 3}', layer % '"sha256:../../../etc/passwd"', layer % "7", "[" * 100_000)
    for manifest in strange:
        (home / ".ollama/models/manifests/registry.ollama.ai/library/tiny-moe/instruct").write_text(manifest)
        assert elsewhere.copies() == [], manifest[:60]
    folder = home / ".lmstudio" / "models"
    put(files["F16"], folder).write_bytes(b"GGUF" + bytes(200))
    (folder / "notes.txt").write_text("hello")
    (folder / "gone.gguf").symlink_to(folder / "nowhere")
    assert elsewhere.copies() == []


def test_a_blob_of_ollamas_is_a_gguf_file_by_its_content(home: Path, files: dict[str, Path]) -> None:
    blob = ollama(files["F16"], home / "o")
    assert catalog.source(str(blob)).folder == blob
    text = home / "text"
    text.write_text("no model")
    with pytest.raises(UsageError):
        catalog.source(str(text))


# A copy of a model that another program downloaded is packed instead of a download, where the user agrees


BITS = ("--up", "3", "--rows", "4", "--dense", "4", "--no-tune")


@pytest.fixture
def copy(files: dict[str, Path], home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in LM Studio's folder."""
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))
    return put(files["Q4_0"], home / ".lmstudio" / "models" / "somebody" / "tiny-GGUF", "tiny-Q4_0.gguf")


@pytest.mark.thorough
def test_it_is_packed_if_the_user_agrees(copy: Path, published: Path, hub: FakeHub) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, stdin=b"y\ny\ny\n", terminal=True)
    assert done.code == 0, done.err
    assert "in the folders of LM Studio" in done.err and f"{copy.stem} of LM Studio: " in done.err
    assert f"Pack {copy.stem} instead of downloading" in done.err and "rounded twice" in done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == "Q4_0"
    assert copy.is_file() and not [one for one in hub.requests if "safetensors" in str(one)]


def test_it_is_left_alone_if_the_user_does_not(
    copy: Path, published: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, stdin=b"y\n\ny\n", terminal=True)
    assert done.code == 0 and "of LM Studio: " in done.err, done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == ""
    # Nobody looks without a yes, nor unasked.
    monkeypatch.setattr("floe_chat.app.setup.elsewhere.copies", lambda _entry=None: pytest.fail("looked"))  # pyright: ignore
    done = run_cli("setup", REPO, "--name", "no", *BITS, stdin=b"n\nn\n", terminal=True)
    assert "of LM Studio: " not in done.err
    done = run_cli("setup", REPO, "--name", "unasked", *BITS, "--yes")
    assert done.code == 0 and "LM Studio" not in done.err


def test_a_script_can_ask_for_it(copy: Path, published: Path, hub: FakeHub) -> None:
    done = run_cli("setup", REPO, "--name", "tiny", *BITS, "--yes", "--look")
    assert done.code == 0, done.err
    assert Manifest.read(catalog.models_folder() / "tiny").source.rounding == "Q4_0"
    copy.unlink()
    again = run_cli("setup", REPO, "--name", "another", *BITS, "--yes", "--look")
    assert again.code == 0 and "There is no copy of another in the folders of LM Studio" in again.err


async def test_the_wizard_looks_on_a_key(copy: Path, published: Path, setups: Setups) -> None:
    wizard = WizardScreen(setups, entries=[entry_of(published)], surveyor=surveyor())
    async with around(wizard) as pilot:
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "Speed: ", "L looks in the folders of LM Studio")
        assert "Q4_0" not in shown(pilot)
        await pilot.press("l")
        await see(pilot, "tiny-q4_0-lmstudio", "weights in Q4_0", "rounded twice")
        await pilot.press("k")
        await see(pilot, "KL, nats", "measured on the demo model")
        await pilot.press("k", "enter")
        await see(pilot, "is ready", "Enter chats with it")
        await pilot.press("enter")
        await until(pilot, lambda: bool(results(pilot)))
    assert Manifest.read(catalog.models_folder() / "tiny-q4_0-lmstudio").source.rounding == "Q4_0"
