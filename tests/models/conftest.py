"""A small published model and a hub that serves it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.models.errors import FloeError
from floe_chat.models.hub import hub_errors
from floe_chat.models.hub.repository import resolve

from .fakehub import FakeHub

REPO = "floe/tiny"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as on a hub: three shards of 1.5 MB of noise, their index, small files, and what nobody wants."""
    folder = tmp_path_factory.mktemp("published")
    noise = random.Random(5)
    index: dict[str, str] = {}
    for number, shard in enumerate(SHARDS):
        header, end = {}, 0
        for part in ("a", "b"):
            name, size = f"model.layers.{number}.{part}.weight", 750_000 + 2 * number
            header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
            index[name], end = shard, end + size
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / shard).write_bytes(len(text).to_bytes(8, "little") + text + noise.randbytes(end))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    (folder / "tokenizer.model").write_bytes(noise.randbytes(5000))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "consolidated.00.pt").write_bytes(b"pickle")
    (folder / "consolidated.safetensors").write_bytes(b"not ours")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with `published` as floe/tiny, which our code finds in HF_ENDPOINT, and soon asks again."""
    monkeypatch.setattr(hub_errors, "backoff", soon)
    with FakeHub({REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        yield hub


_backoff = hub_errors.backoff


def soon(failures: int, first: float = 0.01, longest: float = 0.02) -> float:
    """Where nothing else is asked for."""
    return _backoff(failures, first, longest)


def failure(repo: str = REPO, revision: str = "main", token: str | None = None) -> FloeError:
    """What resolving a repository fails with."""
    with pytest.raises(FloeError) as caught:
        resolve(repo, revision, token)
    return caught.value
