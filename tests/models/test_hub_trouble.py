"""What answers in a hub's place, wrongly, slowly or not at all is sat out, or refused in a few words."""

from __future__ import annotations

import functools
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.errors import HubError, TryAgainError, UsageError
from floe_chat.models.hub import hub_request
from floe_chat.models.hub import repository as hub_module
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.repository import resolve

from .conftest import REPO, SHARDS, failure
from .fakehub import ALWAYS, FakeHub, Fault, wait_all

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


@pytest.mark.parametrize("status", [500, 404, 302, 200])
def test_a_compressed_body_is_never_unpacked(hub: FakeHub, status: int) -> None:
    headers, body = doubly_compressed(b'{"error": "%s"}' % (b"a" * (64 << 20)))
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
