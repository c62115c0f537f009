"""A model is set up from a GGUF file: planned, packed, killed and continued; the file itself is only read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from floe_chat.app.setup import setups
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.wish import forget, unfinished, wish
from floe_chat.app.widgets.setup.models import look
from floe_chat.models import catalog
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel

from ..families import one_shard
from ..helpers import explained, make_checkpoint, run_cli
from ..models.gguf.converting import convert
from .wizardry import ended, machine_of, start_until


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    return one_shard(make_checkpoint(folder, hidden=32, intermediate=64, dtype=torch.float16))


@pytest.fixture(scope="module")
def files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the type of their weights; one is in parts."""
    folder = tmp_path_factory.mktemp("files")
    found = {kind: convert(source, folder / f"Tiny Model-{kind}.gguf", kind) for kind in ("F16", "Q8_0", "Q4_0")}
    return {**found, "parts": convert(source, folder / "split.gguf", parts=6)}


@pytest.fixture(autouse=True)
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is one of 12 GB without a GPU."""
    monkeypatch.setattr("floe_chat.app.cli.plan.here", lambda: machine_of(12 << 30))


@pytest.fixture(scope="module")
def undisturbed(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with Setup(wish(str(files["F16"]))) as running:
            assert ended(running.start()).error is None
            return digest(running.wish.folder)


def test_a_file_is_set_up_and_left_alone(
    files: dict[str, Path], source: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    before = digest(files["F16"].parent)
    done = run_cli("setup", str(files["F16"]), "--yes", "--up", "3", "--rows", "4", "--dense", "4")
    assert done.code == 0, done.err
    folder = catalog.models_folder() / "tiny-model-f16"
    assert done.out == f"{folder}\n" and digest(folder) == undisturbed
    assert [path.name for path in catalog.models_folder().iterdir()] == ["tiny-model-f16"] and not unfinished()
    manifest = PackedModel.open(folder, recheck=True).manifest
    assert (manifest.source.name, manifest.source.rounding) == (files["F16"].name, "")
    with Setup(wish(str(source), "by-checkpoint")) as running:
        assert ended(running.start()).error is None
    theirs = digest(running.wish.folder)
    assert [name for name in theirs if name.endswith(".safetensors") and theirs[name] != undisturbed[name]] == []
    told = run_cli("ask", "--model", "tiny-model-f16", "--seed", "1", "hello")
    assert told.code == 0 and told.out == run_cli("ask", "--model", "by-checkpoint", "--seed", "1", "hello").out
    assert run_cli("models", "remove", "tiny-model-f16", "--yes").code == 0
    assert digest(files["F16"].parent) == before


def test_any_part_of_a_split_file_names_the_model(files: dict[str, Path], undisturbed: dict[str, str]) -> None:
    parts = sorted(files["parts"].parent.glob("split-*.gguf"))
    wanted = wish(str(parts[-1]))
    assert wanted.name == "split" and wanted.model == str(parts[0]) == wish(str(parts[1])).model
    with Setup(wanted) as running:
        assert ended(running.start()).error is None
    found = digest(running.wish.folder)
    assert [name for name in found if found[name] != undisturbed[name]] == ["manifest.json"]  # the file's name


@pytest.mark.parametrize(("kind", "recommended"), [("Q8_0", False), ("Q4_0", True)])
def test_what_was_rounded_before_is_said(kind: str, recommended: bool, files: dict[str, Path]) -> None:
    said = f"Weights of this file are {kind}; packed again at 3/4/4 they are rounded twice."
    more = " Q8_0 or F16 keeps more."
    bits = ["--up", "3", "--rows", "4", "--dense", "4"]
    done = run_cli("setup", str(files[kind]), "--name", "rounded", "--yes", *bits)
    assert done.code == 0 and said in done.err and (more in done.err) == recommended
    manifest = Manifest.read(catalog.models_folder() / "rounded")
    assert manifest.source.rounding == kind and manifest.source.called == f"{files[kind].name} ({kind})"
    assert not manifest.unquantized
    assert [model.details.count(manifest.source.called) for model in look([]).models if model.name == "rounded"] == [1]
    plan = run_cli("plan", str(files[kind]))
    assert plan.code == 0 and f"Weights of this file are {kind}" in plan.out.replace("\n    ", " ")
    fields = json.loads(run_cli("plan", str(files[kind]), "--json").out)["entry"]
    assert (fields["name"], fields["rounding"], fields["coarse"]) == (f"tiny-model-{kind.lower()}", kind, recommended)


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


def test_left_and_taken_up_again(files: dict[str, Path], undisturbed: dict[str, str]) -> None:
    with Setup(wish(str(files["F16"]))) as running:
        start_until(running, "Packing layer 2")
        running.cancel()
    (begun,) = unfinished()
    assert begun.local == files["F16"] and begun.fetched.is_dir()
    with Setup(begun) as again:
        assert ended(again.start()).error is None
        assert "Continuing the interrupted pack." in again.progress().notices
    assert digest(begun.folder) == undisturbed and not begun.fetched.exists()
    assert setups.look_up(begun).sizes.model_type == "mixtral"


def test_forgetting_a_setup_leaves_the_file(files: dict[str, Path]) -> None:
    with Setup(wish(str(files["F16"]))) as running:
        start_until(running, "Packing layer 1")
        running.cancel()
    (begun,) = unfinished()
    forget(begun)
    assert not unfinished() and files["F16"].is_file() and not list(catalog.models_folder().iterdir())
