"""Ready packs by a hostile author: whatever manifest.json and config.json say, they are refused, or what is taken is
what they describe, and nothing lies outside the pack's folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from random import Random

import yaml
from floe_chat.app.setup import taking
from floe_chat.app.setup.ready_words import claims
from floe_chat.app.setup.wish import Wish
from floe_chat.app.text.plain_text import printable
from floe_chat.models.errors import FloeError
from floe_chat.models.hub.model_card import card
from floe_chat.models.hub.ready_pack import in_folder
from floe_chat.models.pack.manifest import FILE_NAME, Manifest
from floe_chat.models.packing import pack_copy
from floe_chat.models.packing.pack import PackSpec
from floe_chat.models.visible import visible

from ..engine.test_tables import with_tables
from ..helpers import make_checkpoint, make_pack
from . import _hostile

_MADE: list[Path] = []


def good(scratch: Path) -> None:
    """Two honest ones, one of them with tables, taken."""
    sources = make_checkpoint(scratch / "experts", hidden=32, intermediate=32), with_tables(scratch / "tables")
    for source in sources:
        make_pack(source, scratch / f"{source.name} pack", PackSpec())
        _MADE.append(scratch / f"{source.name} pack")
        assert _take(_MADE[-1], scratch / "good") == "taken"
        shutil.rmtree(scratch / "good")


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    folder = scratch / "attempt"
    offered = folder / "offered"
    offered.mkdir(parents=True)
    for path in rng.choice(_MADE).iterdir():
        (offered / path.name).hardlink_to(path)
    fields = json.loads((offered / FILE_NAME).read_text())
    del fields["sha256"]
    if rng.random() < 0.4:  # a configuration whose hash is right
        content = _hostile.text(rng, json.loads((offered / "config.json").read_text()))
        (offered / "config.json").unlink()
        (offered / "config.json").write_bytes(content)
        fields["files"]["config.json"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = json.dumps(fields).encode() if rng.random() < 0.3 else _hostile.text(rng, fields)
    (offered / FILE_NAME).unlink()
    (offered / FILE_NAME).write_bytes(manifest)
    try:
        return _take(offered, folder)
    except FloeError as error:
        assert "bug in floe-chat" not in str(error) and len(str(error)) < 6100
        return f"refused: {type(error).__name__}"
    finally:
        shutil.rmtree(folder)


def _take(offered: Path, folder: Path) -> str:
    """As a setup does it."""
    if (offer := in_folder(offered)) is None:
        return "no pack"
    taking.check_place(offered, offer)
    for line in claims(offer.described(str(offered), "somebody")):
        assert printable(line) == visible(printable(line)) and len(line) < 5000
    fields = yaml.safe_load(card(offer.manifest, offer.manifest.name).split("---\n")[1])
    assert fields["library_name"] == "floe-chat"
    wanted = Wish(str(offered), "taken", home=folder / "models")
    taking.copy(offered, offer, wanted.folder, lambda _step, _share: None)
    taking.look_through(wanted, offer, lambda _step, _share: None)
    pack_copy.finish(wanted.folder, offer.files, offer.content)
    pack_copy.tidy(wanted.folder)
    assert {path.name for path in wanted.folder.iterdir()} == {*offer.files, FILE_NAME}
    assert Manifest.read(wanted.folder) == offer.manifest
    assert {path.name for path in folder.iterdir()} <= {"models", "offered"}
    return "taken"
