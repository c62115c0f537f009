"""What a hub says about a repository and its shards, who sees a token, and what answers in its place."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import logging
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.checkpoint_files import INDEX, FolderShelf, Shelf
from floe_chat.models.errors import AccessError, CheckpointError, HubError, TryAgainError, UsageError
from floe_chat.models.hub import hub_request
from floe_chat.models.hub import repository as hub_module
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve
from floe_chat.models.hub.repository_files import cached, is_wanted

from .conftest import REPO, SHARDS, failure
from .fakehub import ALWAYS, FakeHub, Fault, wait_all

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


@pytest.mark.parametrize(("name", "word"), [("pytorch_model.bin", "pickle"), ("notes.json", "safetensors")])
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


@pytest.mark.thorough
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


HASTY = Patience(first_wait=0.01, longest_wait=0.05, give_up=1.0)


def test_passing_trouble_is_sat_out_and_lasting_trouble_told(hub: FakeHub) -> None:
    hub.faults += [Fault("GET /api", status=503), Fault("GET /api", reset_after=20)]
    assert resolve(REPO).commit
    hub.faults.append(Fault("GET /api", times=ALWAYS, status=500, body=b'{"error": "out\\u001b[2J of order"}'))
    error = failure()
    assert isinstance(error, TryAgainError) and "of order" in error.cause and "\x1b" not in str(error)
    assert len([request for request in hub.requests if request.status == 500]) == 3


def test_too_many_requests_are_told_with_the_time_to_wait(hub: FakeHub) -> None:
    hub.faults.append(Fault("GET /api", status=429, headers={"Retry-After": "0"}))
    assert resolve(REPO).commit
    hub.faults.append(Fault("GET /api", status=429, headers={"RateLimit": '"api";r=0;t=250'}))
    error = failure()
    assert isinstance(error, TryAgainError) and "250 seconds" in error.hint


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET /api", portal=True),
        Fault("GET /api", status=200, body=b"<html>", headers={"Content-Type": "text/html"}),
        Fault("GET /api", status=200, body=b"[1, 2]"),
        Fault("GET /api", status=200, body=b'{"sha": "x", "siblings": [{"rfilename": "model.safetensors"}]}'),
        Fault("GET /api", status=200, body=b"[" * 100_000),
    ],
    ids=["portal", "page", "list", "no sizes", "deep"],
)
def test_answers_of_somebody_else_are_not_taken_for_a_hubs(hub: FakeHub, fault: Fault) -> None:
    hub.faults.append(fault)
    assert isinstance(failure(), TryAgainError)


LISTED = {"rfilename": "model.safetensors", "size": 9, "blobId": "a" * 40}


@pytest.mark.parametrize(
    "entry",
    [
        {"size": float("inf")},
        {"size": 10**400},
        {"size": True},
        {"size": "9"},
        {"size": -1},
        {"lfs": {"sha256": float("nan")}},
        {"lfs": {}},
        {"lfs": "x" * (1 << 20)},
        {"blobId": "x" * (1 << 20)},
        {"rfilename": "x" * (1 << 20)},
        {"commit": "x" * (1 << 20)},
        {"twice": True},
    ],
    ids=["infinite", "huge", "bool", "text", "negative", "no hash", "no lfs", "lfs", "hash", "name", "commit", "twice"],
)
def test_a_listing_of_nonsense_is_refused_in_a_few_words(hub: FakeHub, entry: dict[str, Any]) -> None:
    files = [LISTED, LISTED | {"size": 8}] if "twice" in entry else [LISTED | entry]
    body = json.dumps({"sha": entry.get("commit", "f" * 40), "siblings": files}).encode()
    hub.faults.append(Fault("GET /api", status=200, body=body))
    error = failure()
    assert "twice" not in entry or "twice" in error.cause
    assert isinstance(error, TryAgainError) and len(str(error)) < 500


@functools.cache
def doubly_compressed(content: bytes) -> tuple[dict[str, str], bytes]:
    return {"Content-Encoding": "gzip, gzip"}, gzip.compress(gzip.compress(content))


@pytest.mark.some(2)
@pytest.mark.parametrize("status", [500, 404, 302, 200])
def test_a_compressed_body_is_never_unpacked(hub: FakeHub, status: int) -> None:
    headers, body = doubly_compressed(b'{"error": "%s"}' % (b"a" * (24 << 20)))
    assert len(body) < 10_000
    if status == 302:
        headers = {**headers, "Location": "/api/models/floe/absent/revision/main"}
    hub.faults.append(
        Fault("GET /api", times=ALWAYS if status == 500 else 1, status=status, headers=headers, body=body)
    )
    tracemalloc.start()
    try:
        error = failure()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "aaaa" not in str(error)
    words = {500: "status 500", 404: "There is no model", 302: "There is no model", 200: "compressed data"}
    assert words[status] in str(error)


def test_a_compressed_shard_is_refused(hub: FakeHub) -> None:
    repo = resolve(REPO)
    headers, body = doubly_compressed(bytes(1 << 20))
    hub.faults.append(Fault("GET /storage", status=206, headers=headers, body=body))
    with pytest.raises(HubError, match="compressed"):
        repo.header(SHARDS[0])


@pytest.mark.parametrize(
    ("headers", "hint"),
    [
        ({"Retry-After": "\xb2"}, "in a few minutes"),
        ({"Retry-After": "9" * 400}, "in 24 hours"),
        ({"Retry-After": "9" * 5000}, "in 24 hours"),
        ({"Retry-After": "1e400"}, "in a few minutes"),
        ({"Retry-After": "Fri, 31 Dec 9999 23:59:59 -2359"}, "in 24 hours"),
        ({"RateLimit": f'"api";r=0;t={"9" * 5000}'}, "in 24 hours"),
        ({"Retry-After": "7200"}, "in 120 minutes"),
    ],
    ids=["superscript", "400 digits", "5000 digits", "exponent", "date", "ratelimit", "two hours"],
)
def test_a_wait_that_is_none_is_not_passed_on(hub: FakeHub, headers: dict[str, str], hint: str) -> None:
    hub.faults.append(Fault("GET /api", times=ALWAYS, status=429, headers=headers))
    error = failure()
    assert isinstance(error, TryAgainError) and hint in error.hint


@pytest.mark.parametrize(
    "headers",
    [{"X-Linked-Size": "\xb2"}, {"X-Linked-Size": "9" * 5000}, {"Content-Range": f"bytes 0-{'9' * 5000}/7"}],
    ids=["superscript", "long", "range"],
)
def test_numbers_in_a_shards_headers_are_read_with_care(hub: FakeHub, tmp_path: Path, headers: dict[str, str]) -> None:
    hub.faults.append(Fault("GET /storage", status=206, headers=headers, body=b"abc", times=ALWAYS))
    download = Download(resolve(REPO), SHARDS[:1], tmp_path / "here", tuning=HASTY).start()
    with download, pytest.raises(HubError):
        wait_all(download)


@pytest.mark.parametrize(
    "location", ["ftp://elsewhere/x", "http://[::1", "http://127.0.0.1:99999/", "/api/models/floe/tiny/revision/main"]
)
def test_a_redirect_that_leads_nowhere_is_the_hubs(hub: FakeHub, location: str) -> None:
    hub.faults.append(Fault("GET /api", times=ALWAYS, status=302, headers={"Location": location}))
    error = failure()
    assert not isinstance(error, UsageError) and "HF_ENDPOINT" not in error.title


def test_a_stall_is_tried_again_like_a_reset(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_request, "SILENCE_S", 0.2)
    hub.faults.append(Fault("GET /api", stall_after=20))
    repo = resolve(REPO)
    hub.faults.append(Fault("GET /storage/", stall_after=100))
    assert len(repo.header(SHARDS[0])) == 2
    assert [fault.times for fault in hub.faults] == [0, 0]
    hub.faults.append(Fault("GET /api", stall_after=20, times=ALWAYS))
    assert "in time" in failure().cause


@pytest.mark.parametrize("match", ["GET /api", "GET /storage"])
def test_an_answer_that_drips_has_a_deadline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    repo = resolve(REPO)
    monkeypatch.setattr(hub_module, "_PATIENCE_S", 1.0)
    hub.faults.append(Fault(match, rate=50.0, times=ALWAYS))
    with pytest.raises(TryAgainError, match="too slow"):
        resolve(REPO) if match == "GET /api" else repo.header(SHARDS[0])


def test_cookies_are_not_taken(hub: FakeHub) -> None:
    for cookie in ("track=me", "\xff\xfe=\xff"):
        headers = {"Set-Cookie": cookie, "Location": "/api/models/floe/tiny/revision/main?blobs=true"}
        hub.faults.append(Fault("GET /api", status=302, headers=headers))
        assert resolve(REPO).commit
    assert [request.cookie for request in hub.requests] == [None] * 4


def test_a_portal_in_place_of_a_shard_is_told(hub: FakeHub) -> None:
    repo = resolve(REPO)
    hub.faults.append(Fault("GET /storage", portal=True))
    with pytest.raises(TryAgainError, match="Something else answered") as caught:
        repo.header(SHARDS[0])
    assert "sign in" in caught.value.hint


def test_without_a_network_one_is_told_to_try_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert isinstance(failure(), TryAgainError)
    monkeypatch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
    assert isinstance(failure(), TryAgainError)


@pytest.mark.parametrize("address", ["ftp://hub", "no address", "http://[::1", "http://127.0.0.1:99999"])
def test_a_malformed_mirror_is_a_usage_error(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert "HF_ENDPOINT" in failure().hint


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://x"])
def test_a_proxy_that_does_not_work_is_not_gone_around(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", address)
    failure()
    assert not hub.requests


def test_no_proxy_is_honoured(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert resolve(REPO).commit


def test_certificates_that_cannot_be_read_are_told(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    assert "SSL_CERT_FILE" in failure().title


FAST = Patience(piece=400_000, first_wait=0.01, longest_wait=0.05, sync=0.02, give_up=0.3)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name in SHARDS)


def settle(shelf: HubShelf, files: int) -> None:
    """Wait until so many files are ready, or parts of more would have been begun."""
    tick = threading.Event()
    for _ in range(6000):
        if sum(file.state == "done" for file in shelf.progress().files) >= files:
            return
        tick.wait(0.005)
    raise AssertionError(shelf.progress())


def test_it_tells_the_same_as_a_folder_with_the_same_files(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    with HubShelf(resolve(REPO), tmp_path / "here", tuning=FAST) as fetched:
        shelf: Shelf = fetched
        assert shelf.headers() == FolderShelf(published).headers()
        assert (shelf.name, shelf.commit) == (REPO, hub.repositories[REPO].commit)
        assert hub.sent("/storage/") < 3 * 300_000
        for name in ("config.json", "tokenizer.model", INDEX):
            path = shelf.small(name)
            assert path is not None and path == tmp_path / "here" / name
            assert path.read_bytes() == (published / name).read_bytes()
        assert shelf.small("tokenizer.json") is None


def test_small_files_are_fetched_once_and_again_if_damaged(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    with HubShelf(resolve(REPO), tmp_path, tuning=FAST) as shelf:
        shelf.small("config.json")
        before = len(hub.requests)
        shelf.small("config.json")
        assert len(hub.requests) == before
        (tmp_path / "config.json").write_text("{}")
        path = shelf.small("config.json")
        assert path is not None and path.read_bytes() == (published / "config.json").read_bytes()


def test_at_most_two_unread_shards_lie_on_the_disk_and_read_ones_go(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    with HubShelf(resolve(REPO), tmp_path, tuning=FAST) as shelf:
        shelf.order(SHARDS)
        for number, name in enumerate(SHARDS):
            path = shelf.path(name)
            assert path.read_bytes() == (published / name).read_bytes()
            settle(shelf, min(number + 2, 3))
            assert shards_in(tmp_path) == SHARDS[number : number + 2]
            if number == 0:
                assert hub.sent(SHARDS[2]) == 0 and not list(tmp_path.glob(f"{SHARDS[2]}*"))
            shelf.done(name)
        assert shards_in(tmp_path) == []
        assert shelf.progress().state == "done"
        assert shelf.progress().done == shelf.progress().total


def test_the_order_is_the_packers_and_may_change(hub: FakeHub, tmp_path: Path) -> None:
    with HubShelf(resolve(REPO), tmp_path, ahead=1, tuning=FAST) as shelf:
        shelf.order([SHARDS[2], SHARDS[0]])
        settle(shelf, 1)
        assert shards_in(tmp_path) == [SHARDS[2]]
        shelf.order([SHARDS[1]])
        shelf.done(SHARDS[2])
        settle(shelf, 2)
        assert shards_in(tmp_path) == [SHARDS[1]]
        assert hub.sent(SHARDS[0]) == 0


def test_any_shard_can_be_asked_for_at_any_time(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    with HubShelf(resolve(REPO), tmp_path, ahead=1, tuning=FAST) as shelf:
        shelf.order(SHARDS)
        paths = [shelf.path(name) for name in reversed(SHARDS)]  # three at once, though one may be fetched ahead
        assert [path.read_bytes() for path in paths] == [(published / name).read_bytes() for name in reversed(SHARDS)]
        for name in SHARDS:
            shelf.done(name)
        assert shelf.path(SHARDS[0]).read_bytes() == (published / SHARDS[0]).read_bytes()
        assert hub.sent(SHARDS[0]) == 2 * (published / SHARDS[0]).stat().st_size


def test_what_an_earlier_run_left_of_unneeded_shards_goes(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    shutil.copy(published / SHARDS[0], tmp_path)
    (tmp_path / f"{SHARDS[1]}.part").write_bytes(b"abc")
    (tmp_path / "mine.txt").write_text("")
    with HubShelf(resolve(REPO), tmp_path, tuning=FAST) as shelf:
        shelf.order([SHARDS[2]])
        shelf.done(SHARDS[0])
        shelf.done(SHARDS[1])
        shelf.done(SHARDS[2] if shelf.path(SHARDS[2]) else "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["download.lock", "mine.txt"]


def test_it_serves_without_an_order(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    with HubShelf(resolve(REPO), tmp_path, tuning=FAST) as shelf:
        assert shelf.path(SHARDS[1]).read_bytes() == (published / SHARDS[1]).read_bytes()
    assert hub.sent(SHARDS[0]) == hub.sent(SHARDS[2]) == 0


def test_what_goes_wrong_in_the_background_is_told_where_a_shard_is_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /floe/.*-00002-", status=503, times=ALWAYS))
    with HubShelf(resolve(REPO), tmp_path, tuning=FAST) as shelf:
        shelf.order(SHARDS)
        shelf.done(SHARDS[0] if shelf.path(SHARDS[0]) else "")
        with pytest.raises(TryAgainError, match="Nothing has arrived"):
            shelf.path(SHARDS[1])
        hub.faults.clear()
        shelf.download.resume()
        assert shelf.path(SHARDS[1]).exists()


def test_the_users_cache_is_read_and_left_alone(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    repo = resolve(REPO)
    snapshot = tmp_path / "home" / "hub" / "models--floe--tiny" / "snapshots" / repo.commit
    snapshot.mkdir(parents=True)
    for name in (*SHARDS, "config.json"):
        shutil.copy(published / name, snapshot / name)
    before = len(hub.requests)
    with HubShelf(repo, tmp_path / "here", tuning=FAST) as shelf:
        shelf.order(SHARDS)
        for name in SHARDS:
            assert shelf.path(name) == snapshot / name
            shelf.done(name)
        assert shelf.small("config.json") == tmp_path / "here" / "config.json"
    assert len(hub.requests) == before
    assert shards_in(snapshot) == SHARDS


def test_shards_that_disagree_with_their_index_are_told_before_a_weight_is_fetched(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(published, source)
    (source / INDEX).write_text((source / INDEX).read_text().replace("layers.1.a", "layers.7.a"))
    with FakeHub({REPO: source}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        with HubShelf(resolve(REPO), tmp_path / "here") as shelf, pytest.raises(CheckpointError, match="disagree"):
            shelf.headers()
