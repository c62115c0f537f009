"""Notes, journals, stamps and measured rates: small files of ours that may be anything when they are read back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from floe_chat.app.setup import wish
from floe_chat.engine.offload import lane_rates
from floe_chat.engine.offload.links import tuned_link
from floe_chat.engine.planning import rates
from floe_chat.models import catalog, private_file
from floe_chat.models.errors import FloeError
from floe_chat.models.hub.fetch_part import PartFile, bytes_here, is_intact
from floe_chat.models.hub.repository_files import RepoFile
from floe_chat.models.pack import usage_file
from floe_chat.models.pack.manifest import FileEntry, file_entry
from floe_chat.models.pack.packed_model import _Stamp  # pyright: ignore[reportPrivateUsage]
from floe_chat.models.packing import journal, logits_cache, workplace

from . import _hostile

CONTENT = b"The file as it is on the hub."
FILE = RepoFile("model.safetensors", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), large=True)
SETTINGS: journal.Settings = {
    "version": "1.1",
    "weights": "ab",
    "text": "cd",
    "up": 3,
    "gate": 4,
    "threads": 1,
    "narrow": None,
}


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    kinds = KINDS if seed % 400 else [resumed_pack]  # which takes a hundred times as long
    kind = rng.choice(kinds)
    folder = scratch / "attempt"
    folder.mkdir()
    try:
        return f"{kind.__name__}: {kind(rng, folder)}"
    except FloeError as error:
        if "bug in floe-chat" in str(error) or len(str(error)) > 6100:
            raise
        return f"{kind.__name__}: refused"
    finally:
        catalog.use_models_folder(None)
        shutil.rmtree(folder)


def _put(rng: Random, path: Path, content: bytes) -> None:
    """The file with that content; seldom a pipe, a folder, or a link in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match rng.randrange(60):
        case 0:
            os.mkfifo(path)
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(rng.choice(("/dev/zero", "/nowhere", path.name, "/dev/tty", "..")))
        case 3:
            path.write_bytes(content)
            os.truncate(path, 1 << 40)
        case _:
            path.write_bytes(content)


def setup_note(rng: Random, folder: Path) -> str:
    """A setup's note; forgetting it deletes nothing but the folders of its own name."""
    models = folder / "a" / "models"
    catalog.use_models_folder(models)
    others = [folder / "x", folder / "a" / "x", models / "x", models / "tiny-2"]
    for other in others:
        other.mkdir(parents=True)
        (other / "packing.json").write_text("{}")
    good = {"model": "floe/tiny", "name": "tiny", "up": 3, "gate": 4, "down": 4, "dense": 4, "commit": "ab" * 20}
    good |= {"pack": "0" * 64, "to": str(folder / "a" / "x")} if rng.random() < 0.5 else {}
    _put(rng, models / "tiny.setup.json", _hostile.text(rng, good))
    begun, bad = wish.unfinished(), wish.bad_notes()
    assert len(begun) + len(bad) == 1
    for one in begun:
        one.folder.mkdir()
        assert one.folder == models / "tiny" and one.taken >= 0
        wish.forget(one)
    for note in bad:
        assert len(str(note)) < 4000
        if not note.path.is_dir() or note.path.is_symlink():  # a folder of that name is not deleted
            wish.discard(note)
    assert all((other / "packing.json").exists() for other in others)
    return "accepted" if begun else "ignored"


def fetch_journal(rng: Random, folder: Path) -> str:
    """The journal of a part of a file; what is missing of it can be fetched, and the hash tells what was wrong."""
    ranges = [[0, 5], [9, 20]]
    fields = {"hash": FILE.hash, "size": FILE.size, "ranges": ranges}
    part = CONTENT[:20] if rng.random() < 0.8 else _hostile.damaged(rng, CONTENT)
    _put(rng, folder / f"{FILE.name}.journal", _hostile.text(rng, fields))
    (folder / f"{FILE.name}.part").write_bytes(part)
    assert 0 <= bytes_here(folder, FILE) <= FILE.size
    fetched = PartFile(folder, FILE)
    for start, end in fetched.done.gaps(0, FILE.size):
        fetched.write(start, CONTENT[start:end])
        try:
            fetched.sync()
        except OSError:  # a folder or a pipe is in its place, which the download reports
            fetched.close()
            return "no journal"
    assert fetched.done.intervals() == [(0, FILE.size)]
    intact = is_intact(fetched.written, FILE)
    if intact:
        assert fetched.finish().read_bytes() == CONTENT
    else:
        fetched.discard()
    return "whole" if intact else "fetched again"


def pack_journal(rng: Random, folder: Path) -> str:
    """The journal of a pack."""
    lines: list[Any] = [
        {"settings": SETTINGS},
        {"dense": ["model.norm.weight"]},
        {"rare": 0, "experts": [1, 3], "popularity": [0.1, 0.2]},
        {"expert": [0, 1]},
        {"file": "layer_00.safetensors", "size": 7, "sha256": "ab"},
    ]
    at = rng.randrange(len(lines))
    texts = [json.dumps(line).encode() for line in lines]
    texts[at] = _hostile.text(rng, lines[at])
    sealed = [b"%08x %s" % (zlib.crc32(text), text) for text in texts]
    if rng.random() < 0.3:
        sealed[at] = _hostile.damaged(rng, sealed[at])
    _put(rng, folder / journal.FOLDER / "journal.jsonl", b"\n".join(sealed) + rng.choice((b"", b"\n")))
    try:
        found = journal.Journal.open(folder, dict(SETTINGS))
    except OSError:  # which packing reports
        return "unreadable"
    found.note_file("profile.safetensors", FileEntry(3, "cd"))
    assert journal.Journal.open(folder, dict(SETTINGS)).files["profile.safetensors"] == FileEntry(3, "cd")
    return "continued" if found.resumed else "new"


def marker(rng: Random, folder: Path) -> str:
    """The file that says who works in a folder."""
    path = folder / "packing.json"
    path.write_bytes(_hostile.text(rng, {"pid": 17}))
    said = workplace._holder(path)  # pyright: ignore[reportPrivateUsage]
    assert len(said) < 100
    with workplace.locked(path, "Another floe-chat packs"):
        assert private_file.read_json(path) == {"pid": os.getpid()}
    return "known" if said else "unknown"


def stamp(rng: Random, folder: Path) -> str:
    """The note that a pack's files passed their hashes."""
    (folder / "a.safetensors").write_text("abc")
    files = {"a.safetensors": file_entry(folder / "a.safetensors")}
    noted = _Stamp(folder, files)
    noted.write()
    assert not _Stamp(folder, files).unproven
    path = noted._path  # pyright: ignore[reportPrivateUsage]
    _put(rng, path, _hostile.text(rng, json.loads(path.read_text())))
    valid = not _Stamp(folder, files).unproven
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    return "valid" if valid else "void"


def measured(rng: Random, folder: Path) -> str:
    """Rates that were measured, of three kinds."""
    loaders: list[tuple[Callable[[Path], object], Any]] = [
        (
            rates.Measured.load,
            {"format": 1, "rates": {"disk read": 1e9}, "reasons": {"gpu": "none"}, "date": "2026-01-01", "busy": 0.1},
        ),
        (
            tuned_link.Tuned.load,
            {
                "format": 1,
                "device": "cuda:0",
                "row_bytes": 64,
                "staged": {"8": 1e9},
                "in_place": {"16": 2e9},
                "why_not": "",
            },
        ),
        (
            lane_rates.Rates.load,
            {
                "format": 1,
                "link_bytes_s": 1e9,
                "link_latency_s": 1e-5,
                "cpu_bytes_s": 1e9,
                "cpu_batch_bytes_s": 1e9,
                "cpu_latency_s": 1e-6,
                "gpu_bytes_s": 1e11,
                "launch_s": 1e-5,
            },
        ),
    ]
    load, good = rng.choice(loaders)
    path = folder / "rates.json"
    _put(rng, path, _hostile.text(rng, good))
    found = load(path)
    if isinstance(found, tuned_link.Tuned):
        assert found.describe(found.faster()) and found.beside("staged") is not None
    return "used" if found else "ignored"


def uses(rng: Random, folder: Path) -> str:
    """How much each expert was used."""
    import numpy as np

    path = folder / "heat.safetensors"
    usage_file.write(path, usage_file.from_popularity(np.ones((2, 3)), 4))
    content = _safetensors(rng, path.read_bytes())
    _put(rng, path, content)
    return "used" if usage_file.read(path, 2, 3, 4) else "ignored"


def _safetensors(rng: Random, content: bytes) -> bytes:
    """Such a file with its header or its bytes damaged."""
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:
        return _hostile.damaged(rng, content)
    header = _hostile.text(rng, json.loads(content[8 : 8 + length]))
    size = rng.choice((len(header), len(header), length, 0, 1 << 62))
    return size.to_bytes(8, "little") + header + content[8 + length :]


def source_logits(rng: Random, folder: Path) -> str:
    """Logits of a model that were stored."""
    again: list[str] = []
    cache = logits_cache._folder()  # pyright: ignore[reportPrivateUsage]
    shutil.rmtree(cache, ignore_errors=True)
    good = torch.arange(6.0).reshape(1, 2, 3)
    logits_cache.cached("key", (1, 2, 3), again.append, lambda: good)
    file = rng.choice(sorted(cache.iterdir()))
    if file.suffix == ".json":
        _put(rng, file, _hostile.text(rng, json.loads(file.read_text())))
    else:
        file.write_bytes(_safetensors(rng, file.read_bytes()))
    try:
        found = logits_cache.cached("key", (1, 2, 3), again.append, lambda: good)
        assert torch.equal(found, good)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return "computed again" if again else "used"


def listed(rng: Random, folder: Path) -> str:
    """The models folder with whatever a person put there."""
    catalog.use_models_folder(folder)
    for name in ("tiny", "other.download", "third", "note.setup.json"):
        (folder / name).mkdir() if rng.random() < 0.6 else _put(rng, folder / name, b"{}")
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            _put(rng, folder / name / "manifest.json", _hostile.text(rng, {"format": "floe-chat pack", "version": 1}))
            _put(rng, folder / name / "config.json", _hostile.text(rng, {"model_type": "mixtral"}))
    found = catalog.installed()
    wish.unfinished()
    for one in found:
        if one.name != catalog.DEMO:
            assert one.trouble is not None
    return f"{len(found)} models"


_PACKS: dict[str, Any] = {}


def good(scratch: Path) -> None:
    """A pack that was interrupted, and continued to its end."""
    from ..helpers import calibration_tokens, make_checkpoint

    source = make_checkpoint(scratch / "source", hidden=32, intermediate=64)
    _PACKS["source"], _PACKS["tokens"] = source, calibration_tokens()
    _PACKS["folder"] = scratch / "interrupted"
    _interrupt(source, _PACKS["folder"])
    again = scratch / "good"
    shutil.copytree(_PACKS["folder"], again)
    _pack(source, again)
    _PACKS["digest"] = _digest(again)
    shutil.rmtree(again)


class _StopError(Exception):
    pass


def _interrupt(source: Path, folder: Path) -> None:
    def stop(step: str, share: float, left: float | None) -> None:
        if share > 0.8:
            raise _StopError

    try:
        _pack(source, folder, stop)
    except _StopError:
        return
    raise AssertionError("the pack was not interrupted")


def _pack(source: Path, folder: Path, progress: Any = None) -> None:
    from floe_chat.models.checkpoint import Checkpoint
    from floe_chat.models.packing.pack import PackSpec, pack

    pack(Checkpoint(source), folder, PackSpec(), _PACKS["tokens"], "tiny", progress)


def resumed_pack(rng: Random, folder: Path) -> str:
    """An interrupted pack of which one file was damaged, packed to its end and opened."""
    from floe_chat.models.pack.packed_model import PackedModel

    pack = folder / "pack"
    shutil.copytree(_PACKS["folder"], pack)
    files = sorted(path for path in pack.rglob("*") if path.is_file() and path.name != "packing.json")
    path = rng.choice([file for file in files if file.parent.name == journal.FOLDER] if rng.random() < 0.8 else files)
    content = path.read_bytes()
    path.write_bytes(_safetensors(rng, content) if path.suffix == ".safetensors" else _hostile.damaged(rng, content))
    _pack(_PACKS["source"], pack)
    PackedModel.open(pack, recheck=True)
    if path.parent.name == journal.FOLDER and not path.name.startswith("measures"):  # these have no checksum
        assert _digest(pack) == _PACKS["digest"], f"{path.name} was damaged, and the pack is another"
    return "packed"


def _digest(pack: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(pack.iterdir()))).hexdigest()


KINDS = [
    setup_note,
    setup_note,
    fetch_journal,
    fetch_journal,
    pack_journal,
    marker,
    stamp,
    measured,
    uses,
    source_logits,
    listed,
]
