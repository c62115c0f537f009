"""What a hub says about a repository: what we read of it, who sees a token, and what we say of what is not there."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.checkpoint_files import INDEX
from floe_chat.models.errors import AccessError, CheckpointError, HubError, TryAgainError, UsageError
from floe_chat.models.hub.repository import resolve
from floe_chat.models.hub.repository_files import cached, is_wanted

from .conftest import REPO, SHARDS, failure
from .fakehub import ALWAYS, FakeHub, Fault

Serve = Callable[..., FakeHub]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts another hub, with the same arguments as `FakeHub`."""
    started: list[FakeHub] = []

    def start(files: dict[str, Path], **options: Any) -> FakeHub:
        hub = FakeHub(files, **options)
        started.append(hub.__enter__())
        hub.used_by(monkeypatch, tmp_path / "home")
        return hub

    yield start
    for hub in started:
        hub.__exit__()


def test_a_repository_is_what_its_listing_says_and_only_files_we_read_count(hub: FakeHub, published: Path) -> None:
    repo = resolve(REPO)
    assert (repo.name, repo.commit, repo.gated) == (REPO, hub.repositories[REPO].commit, False)
    names = [file.name for file in repo.files]
    assert names == ["chat_template.jinja", "config.json", *SHARDS, INDEX, "tokenizer.model"]
    shard = repo.file(SHARDS[0])
    content = (published / SHARDS[0]).read_bytes()
    assert shard is not None
    assert (shard.size, shard.hash) == (len(content), hashlib.sha256(content).hexdigest())
    assert [file.name for file in repo.shards()] == SHARDS
    assert [request.path.split("/")[-1] for request in hub.requests] == ["main", INDEX, INDEX]  # by way of the cache


@pytest.mark.parametrize("name", ["../config.json", "/etc/x.json", "a/b.safetensors", ".hidden.json", "x\x1b[2J.json"])
def test_names_that_could_leave_the_folder_are_not_wanted(name: str) -> None:
    assert not is_wanted(name)


def test_small_files_are_read_and_verified(hub: FakeHub, published: Path) -> None:
    repo = resolve(REPO)
    for name in ("config.json", "tokenizer.model"):
        assert repo.read(name) == (published / name).read_bytes()
    assert repo.read("absent.json") is None
    hub.faults.append(Fault("GET /storage/.*tokenizer", flip=True))
    assert repo.read("tokenizer.model") == (published / "tokenizer.model").read_bytes()
    hub.faults.append(Fault("GET /storage/.*tokenizer", flip=True, times=ALWAYS))
    with pytest.raises(TryAgainError, match="arrived damaged"):
        repo.read("tokenizer.model")


def test_a_header_is_had_from_the_first_bytes_of_a_shard(hub: FakeHub) -> None:
    repo = resolve(REPO)
    places = repo.header(SHARDS[1])
    place = places["model.layers.1.b.weight"]
    assert (place.dtype, place.shape, place.end - place.start) == ("BF16", (375_001,), 750_002)
    size = repo.file(SHARDS[1])
    assert size is not None
    assert place.end == size.size
    assert hub.sent("/storage/") <= 256 << 10
    repo.check_index({shard: repo.header(shard) for shard in SHARDS})


def test_a_header_is_had_from_a_server_that_knows_no_ranges(hub: FakeHub) -> None:
    hub.faults.append(Fault("GET /storage/", ignore_range=True))
    assert list(resolve(REPO).header(SHARDS[0])) == ["model.layers.0.a.weight", "model.layers.0.b.weight"]


def test_a_link_that_drops_early_still_brings_headers_and_small_files(hub: FakeHub, published: Path) -> None:
    hub.faults.append(Fault("GET /storage/", close_after=60_000, times=3))
    hub.faults.append(Fault("GET /storage/.*tokenizer", close_after=2000, times=ALWAYS))
    repo = resolve(REPO)
    assert len(repo.header(SHARDS[0])) == 2
    assert repo.read("tokenizer.model") == (published / "tokenizer.model").read_bytes()
    assert hub.sent("/storage/") == (256 << 10) + 5000
    hub.faults[:] = [Fault("GET /storage/", close_after=60_000, ignore_range=True, times=ALWAYS)]
    with pytest.raises(TryAgainError):
        repo.header(SHARDS[1])


def test_a_long_header_takes_a_second_request(tmp_path: Path, serve: Serve) -> None:
    header = {f"layer.{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(9000)}
    text = json.dumps(header).encode()
    assert len(text) > 256 << 10
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(9000))
    hub = serve({REPO: tmp_path / "files"})
    assert len(resolve(REPO).header("model.safetensors")) == 9000
    assert sum(request.storage for request in hub.requests) == 2


def test_an_absurd_header_is_refused_before_it_is_fetched(tmp_path: Path, serve: Serve) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + bytes(1000))
    serve({REPO: tmp_path / "files"})
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        resolve(REPO).header("model.safetensors")


@pytest.mark.parametrize("case", ["missing shard", "moved tensor", "no json", "tensor nowhere"])
def test_an_index_that_does_not_fit_the_shards_is_told(
    published: Path, tmp_path: Path, serve: Serve, case: str
) -> None:
    folder = tmp_path / "files"
    shutil.copytree(published, folder)
    index = json.loads((folder / INDEX).read_text())
    if case == "missing shard":
        (folder / SHARDS[2]).unlink()
    elif case == "moved tensor":
        index["weight_map"]["model.layers.0.a.weight"] = SHARDS[1]
    elif case == "tensor nowhere":
        index["weight_map"]["model.layers.9.a.weight"] = SHARDS[1]
    (folder / INDEX).write_text("[]" if case == "no json" else json.dumps(index))
    serve({REPO: folder})
    repo = resolve(REPO)
    with pytest.raises(CheckpointError, match=r"not complete|disagree|cannot be read"):
        repo.check_index({file.name: repo.header(file.name) for file in repo.shards()})


def test_a_token_is_sent_to_the_hub_and_not_to_its_storage(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    repo = resolve(REPO)
    repo.header(SHARDS[0])
    assert {request.token for request in hub.requests if not request.storage} == {hub.token}
    assert {request.token for request in hub.requests if request.storage} == {None}
    assert {request.agent.split("/")[0] for request in hub.requests} == {"floe-chat"}


def test_the_token_of_the_hubs_own_login_is_found(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(hub.token)
    assert resolve(REPO).token == hub.token


def test_gated_models_say_what_to_do(published: Path, serve: Serve) -> None:
    hub = serve({REPO: published}, gated=[REPO])
    repo = resolve(REPO)
    assert repo.gated
    with pytest.raises(AccessError, match="requires you to accept its terms") as caught:
        repo.read("config.json")
    assert f"{hub.url}/{REPO}" in caught.value.hint
    with pytest.raises(AccessError, match="has no access") as caught:
        resolve(REPO, token=hub.stranger).header(SHARDS[0])
    assert f"{hub.url}/{REPO}" in caught.value.hint
    assert resolve(REPO, token=hub.token).read("config.json") == (published / "config.json").read_bytes()


def test_private_models_are_like_absent_ones_without_their_token(published: Path, serve: Serve) -> None:
    hub = serve({REPO: published}, private=[REPO])
    assert "HF_TOKEN" in failure().hint
    assert resolve(REPO, token=hub.token).commit


def test_what_the_hub_does_not_have_is_told(hub: FakeHub) -> None:
    assert isinstance(failure("floe/absent"), HubError)
    assert "no such revision" in failure(revision="v9").title
    assert isinstance(wrong := failure(token="hf_wrong"), AccessError)
    assert "token" in wrong.title and "hf_wrong" not in str(wrong)
    seen = len(hub.requests)
    for token in ("hf_\nwrong", "hf_wröng", "hf wrong"):
        assert isinstance(failure(token=token), AccessError)
    assert len(hub.requests) == seen


@pytest.mark.parametrize(
    "name", ["", "tiny", "a/b/c", "floe/ti ny", "../../etc", "floe/..", "floe/x\x1b[2J", "x" * 200]
)
def test_malformed_ids_are_usage_errors(hub: FakeHub, name: str) -> None:
    assert isinstance(failure(name), UsageError)
    assert not hub.requests


@pytest.mark.parametrize(
    ("name", "word"), [("pytorch_model.bin", "pickle"), ("model.gguf", "GGUF"), ("notes.json", "safetensors")]
)
def test_a_repository_without_safetensors_is_refused_with_the_reason(
    tmp_path: Path, serve: Serve, name: str, word: str
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_bytes(b"{}")
    serve({REPO: tmp_path / "files"})
    assert word in failure().cause


def test_a_user_who_is_offline_stays_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOE_CHAT_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in failure().cause
    assert not hub.requests


PRIVATE = """
import os, sys
import floe_chat.app.cli.main
assert "huggingface_hub" not in sys.modules
from floe_chat.models.hub.privacy import offline, stay_private
stay_private()
stay_private()
print(offline())
from floe_chat.models.hub.repository import resolve
print(resolve("floe/tiny").commit)
from huggingface_hub import HfApi
try:
    HfApi().model_info("floe/tiny")
except Exception as error:
    print(type(error).__name__)
"""


def test_our_requests_go_out_while_every_library_stays_offline(hub: FakeHub) -> None:
    environment = {"HF_ENDPOINT": hub.url, "PATH": "/usr/bin", "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    told = subprocess.run([sys.executable, "-c", PRIVATE], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", hub.repositories[REPO].commit, "OfflineModeIsEnabled"]
    assert len(hub.requests) == 1


def test_signed_addresses_and_tokens_reach_no_log(
    hub: FakeHub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    repo = resolve(REPO, token=hub.token)
    repo.header(SHARDS[0])
    assert "signature" not in caplog.text and hub.token not in caplog.text
    assert hub.token not in repr(repo) and hub.token not in repr(vars(repo).get("files"))


REAL = """
import sys
from huggingface_hub import HfApi, snapshot_download
info = HfApi().model_info("floe/tiny", files_metadata=True)
print(info.sha, sum(s.size for s in info.siblings))
print(snapshot_download("floe/tiny", cache_dir=sys.argv[1], allow_patterns=["*.safetensors", "*.json"]))
"""


def test_the_fake_hub_satisfies_the_real_client_and_its_cache_is_found(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", REAL, str(tmp_path / "home" / "hub")]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    size = sum(path.stat().st_size for path in published.rglob("*") if path.is_file())
    assert told[:2] == [hub.repositories[REPO].commit, str(size)]
    repo = resolve(REPO)
    shard = repo.file(SHARDS[0])
    assert shard is not None
    assert cached(REPO, repo.commit, shard) == Path(told[2]) / SHARDS[0]
    model = repo.file("tokenizer.model")
    assert model is not None
    assert cached(REPO, repo.commit, model) is None
