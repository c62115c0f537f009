"""Packs by a hostile author: weights, headers, manifest, configuration, tokenizer, template. All checksums are right.

Each is opened by the chat's own client and asked a short question, at temperature 0 and sampled; some are verified and
planned for. Five small packs are made once, one with tables and one with a drafting head; an attempt links their files
and writes what it changes. Some tables become shorter while their pack is open.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from floe_chat.app.arguments import sampling_from
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question, TextDelta
from floe_chat.engine.events import Failed, Finished, Loaded, Sampling
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.models import catalog
from floe_chat.models.checking import verify
from floe_chat.models.errors import FloeError, UsageError
from floe_chat.models.pack.manifest import FILE_NAME, Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec
from floe_chat.models.visible import visible

from .. import families
from ..engine.test_tables import with_tables
from ..helpers import make_checkpoint, make_pack
from ._hostile_chat import run_one_process
from ._hostile_packs import CHANGES, TABLES, Changed, Made

_WAIT_S = 30.0
_PACKS: dict[str, tuple[str, PackSpec]] = {
    "mixtral": ("mixtral", PackSpec()),
    "even": ("mixtral", PackSpec(4, 4, 4, 8)),
    "olmoe": ("olmoe", PackSpec(up=16, gate=16, down=16, dense=16)),
    "tables": ("qwen4_exp", PackSpec()),
    "head": ("qwen3_next", PackSpec()),
}
_SIZES: dict[str, Any] = {  # of its tables, both of which have as many rows
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "ple_layer_ids": [1, 2],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 400,
}


_made: dict[str, Made] = {}


def _good(scratch: Path) -> dict[str, Made]:
    if not _made:
        run_one_process()
        logging.getLogger("floe_chat").setLevel(logging.CRITICAL)
        for name, (family, spec) in _PACKS.items():
            source, folder = scratch / "source" / name, scratch / "good" / name
            if name == "tables":
                with_tables(source, **_SIZES)
            elif name == "head":
                families.add_head(families.make(family, source, hidden_size=32, moe_intermediate_size=32))
            else:
                make_checkpoint(source, family=family, hidden=32, intermediate=32, window=128)
            make_pack(source, folder, spec)
            files = {path.name: path.read_bytes() for path in folder.iterdir()}
            _made[name] = Made(folder, files, json.loads(files.pop(FILE_NAME)))
    return _made


def good(scratch: Path) -> None:
    """Ask each of the good packs."""
    for name, made in _good(scratch).items():
        outcome = _asked(made.folder, Random(0), "cpu")
        assert outcome == "answered", f"{name}: {outcome}"


def attempt(seed: int, scratch: Path) -> str:
    """One pack with one to three changes."""
    rng = Random(seed)
    made = _good(scratch)[rng.choice(list(_PACKS))]
    changed: Changed = {}
    fields = json.loads(json.dumps(made.manifest))
    tables = made.tables.files
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(TABLES if tables and rng.random() < 0.7 else CHANGES)(rng, made, changed, fields)
    shrinks = rng.choice(list(tables)) if tables and rng.random() < 0.1 else ""
    if shrinks:
        changed.setdefault(shrinks, tables[shrinks])  # no link to the good one, which is to stay as it is
    folder = _written(scratch / "pack", made, changed, fields, rng)
    torch.manual_seed(seed)
    if rng.random() < (0.5 if "draft.safetensors" in made.files else 0.1):
        _looked_at(folder)
    device = rng.choice(("cpu", "cpu", "cpu", "throttled:8gb"))
    return _asked(folder, rng, device, shrinks)


def _looked_at(folder: Path) -> None:
    """What lists, plans and checks a pack does with it."""
    catalog.installed()
    try:
        manifest = Manifest.read(folder)
        packed = PackedModel(folder, manifest)
        packed.head()
        _check(packed.headless)
        verify.damages(folder, manifest, lambda _step, _share: None)
        entry = catalog.described(str(folder))
        assert Footprint.of(entry.sizes, PackSpec()).disk > 0
    except FloeError as error:
        _check(error.title, error.cause, error.hint)


def _asked(folder: Path, rng: Random, device: str, shrinks: str = "") -> str:
    """Open a pack and ask twice; "refused" or "answered". shrinks: a file, once it is open."""
    try:
        sampling, _, _ = sampling_from({"max_tokens": 4}, folder)
    except UsageError as error:
        raise AssertionError(f"the pack's own sampling values are blamed on the person: {error}") from error
    client = ChatClient(folder, None, device, 1 << 30 if device != "cpu" else None)
    client.start()
    try:
        loaded = _until(client, Loaded)
        if isinstance(loaded, Failed):
            return "refused"
        _check(loaded.model, loaded.source)
        client.costs()
        if shrinks and not (folder / shrinks).is_symlink():
            os.truncate(folder / shrinks, rng.randrange((folder / shrinks).stat().st_size + 1))
        hello = [PromptTurn("system", "Be brief."), PromptTurn("user", "hi <s> there"), PromptTurn("assistant", "aé")]
        outcome = "answered"
        for how in (Sampling(temperature=0), Sampling(**{**_fields(sampling), "seed": 1})):
            try:
                client.submit(Question([*hello, PromptTurn("user", "hi 🎉")], how, 4))
            except FloeError as error:
                _check(error.title, error.cause, error.hint)
                outcome = "refused the question"
                continue
            if isinstance(_until(client, Finished), Failed):
                outcome = "failed"
        return outcome
    except FloeError as error:
        _check(error.title, error.cause, error.hint)
        return "refused"
    finally:
        client.close()


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}


def _until(client: ChatClient, kind: type[Any]) -> Any:
    """The next event of a kind, or the failure that came instead."""
    for _ in range(int(_WAIT_S / 0.1)):  # no clock, so that a computer that sleeps is no finding
        for update in client.poll(timeout=0.1):
            if isinstance(update, TextDelta):
                assert update.text == visible(update.text), ascii(update.text[:100])
            elif isinstance(update, Failed):
                _check(update.title, update.cause, update.hint)
                return update
            elif isinstance(update, kind):
                return update
    raise AssertionError(f"no {kind.__name__} within {_WAIT_S:.0f} s")


def _check(*texts: str) -> None:
    for text in texts:
        assert "bug in floe-chat" not in text and "Traceback" not in text, texts
        assert len(text) < 5000, text[:300]


def _written(folder: Path, made: Made, changed: Changed, fields: Any, rng: Random) -> Path:
    """The pack with right sizes and checksums, and mostly a right one of the manifest's own."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in made.files.keys() - changed.keys():
        os.link(made.folder / name, folder / name)
    listed = fields.get("files") if isinstance(fields, dict) else None
    besides = fields.get("beside") if isinstance(fields, dict) else None
    for name, content in changed.items():
        entries = besides if isinstance(besides, dict) and name in besides else listed
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
            if isinstance(entries, dict) and content.is_file() and content.name in made.files:
                entries[name] = {**made.manifest["files"], **made.manifest.get("beside", {})}[content.name]
        elif content is not None:
            (folder / name).write_bytes(content)
            if isinstance(entries, dict):
                entries[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        elif isinstance(entries, dict):
            entries.pop(name, None)
    if isinstance(fields, dict):
        fields.pop("sha256", None)
        if rng.random() < 0.9:
            fields["sha256"] = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    (folder / FILE_NAME).write_text(json.dumps(fields))
    return folder
