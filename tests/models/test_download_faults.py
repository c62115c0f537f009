"""A download when something goes wrong: what it sits out, what it tells, and what is kept."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.models.errors import AccessError, FloeError, HubError, TryAgainError
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.repository import resolve

from .conftest import REPO, SHARDS
from .fakehub import ALWAYS, FakeHub, Fault, wait_all

FAST = Patience(piece=400_000, first_wait=0.01, longest_wait=0.05, sync=0.02)
HASTY = replace(FAST, give_up=1.0)


def fetched(folder: Path, tuning: Patience = FAST) -> Download:
    with Download(resolve(REPO), SHARDS, folder, tuning=tuning).start() as download:
        wait_all(download)
    return download


def failure(folder: Path, tuning: Patience = HASTY) -> FloeError:
    with Download(resolve(REPO), SHARDS, folder, tuning=tuning).start() as download:
        with pytest.raises(FloeError) as caught:
            wait_all(download)
        assert download.progress().state == "failed"
    return caught.value


def whole(folder: Path, published: Path) -> bool:
    return all((folder / name).read_bytes() == (published / name).read_bytes() for name in SHARDS)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("GET /storage/", reset_after=100_000, times=6)],
        [Fault("GET /storage/", close_after=100_000, times=6)],
        [Fault("GET /storage/", close_after=0, times=6)],
        [Fault("GET /storage/", short=70_000, times=6)],
        [Fault("GET /floe/", status=503, times=6)],
        [Fault("GET /storage/", status=500, times=6)],
        [Fault("GET /floe/", status=429, headers={"Retry-After": "0"}, times=6)],
        [Fault("GET /storage/", status=403, body=b"<Error>expired</Error>", times=6)],
        [Fault("GET /storage/", total=5, times=3), Fault("GET /floe/", linked_size=-5, times=3)],
        [Fault("GET /storage/", portal=True, times=6)],
        [Fault("GET /storage/", ignore_range=True, times=6)],
        [Fault("GET /storage/", stall_after=50_000, times=5)],
    ],
    ids=[
        "resets",
        "closes",
        "no body",
        "short",
        "503",
        "500",
        "429",
        "expired",
        "sizes",
        "portal",
        "no range",
        "stall",
    ],
)
def test_what_passes_is_sat_out(hub: FakeHub, published: Path, tmp_path: Path, faults: list[Fault]) -> None:
    hub.faults += faults
    download = fetched(tmp_path, replace(FAST, silence=0.3))
    assert whole(tmp_path, published)
    assert download.progress().note == ""
    assert sum(fault.times for fault in faults) == 0, "not all of it happened"


def test_a_link_that_drops_every_few_hundred_kilobytes_loses_not_a_byte(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    hub.faults.append(Fault("GET /storage/", close_after=150_000, times=ALWAYS))
    total = fetched(tmp_path, replace(FAST, piece=1 << 30)).progress().total
    assert whole(tmp_path, published)
    assert hub.sent("/storage/") == total


def test_signed_addresses_are_used_once(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub({REPO: published}, link_uses=1) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        hub.faults.append(Fault("GET /storage/", reset_after=100_000, times=5))
        fetched(tmp_path / "folder")
        assert not [request for request in hub.requests if request.status == 403]
    assert whole(tmp_path / "folder", published)


def test_a_server_without_ranges_is_read_from_start_to_end_on_one_connection(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    hub.faults += [
        Fault("GET /storage/.*-00002-", ignore_range=True, close_after=900_000, times=2),
        Fault("GET /storage/", ignore_range=True, times=ALWAYS),
    ]
    fetched(tmp_path)
    assert whole(tmp_path, published)


def test_a_server_without_ranges_that_always_breaks_at_the_same_place_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", ignore_range=True, close_after=900_000, times=ALWAYS))
    assert isinstance(failure(tmp_path, FAST), TryAgainError)


def test_the_hubs_wish_to_wait_holds_for_all_connections(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /floe/.*safetensors", status=429, headers={"Retry-After": "1"}, times=ALWAYS))
    error = failure(tmp_path, replace(HASTY, longest_asked=1.5))
    assert isinstance(error, TryAgainError) and "long pause" in error.title
    assert len([request for request in hub.requests if request.status == 429]) <= 2 * FAST.connections


def test_a_long_pause_that_the_hub_wants_is_told(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /floe/.*00001", status=429, headers={"Retry-After": "3600"}, times=ALWAYS))
    error = failure(tmp_path, FAST)
    assert isinstance(error, TryAgainError) and "60 minutes" in error.hint


def test_a_flipped_byte_has_that_file_fetched_once_more(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/.*-00002-", flip=True))
    notices = fetched(tmp_path).progress().notices
    assert len(notices) == 1 and SHARDS[1] in notices[0]
    assert whole(tmp_path, published)
    assert hub.sent(SHARDS[1]) == 2 * (published / SHARDS[1]).stat().st_size
    assert hub.sent(SHARDS[0]) == (published / SHARDS[0]).stat().st_size


def test_bytes_that_stay_wrong_are_an_error(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/.*-00002-", flip=True, times=ALWAYS))
    error = failure(tmp_path)
    assert isinstance(error, HubError) and "arrived damaged" in error.title
    assert not (tmp_path / SHARDS[1]).exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET /storage/", total=5, times=ALWAYS),
        Fault("GET /floe/.*safetensors", linked_size=5, times=ALWAYS),
        Fault("GET /storage/", ignore_range=True, short=5, times=ALWAYS),
        Fault("GET /storage/", status=206, headers={"Content-Range": "bytes 7-9/70"}, body=b"abc", times=ALWAYS),
    ],
    ids=["total", "linked", "length", "range"],
)
def test_sizes_that_stay_wrong_are_an_error(hub: FakeHub, tmp_path: Path, fault: Fault) -> None:
    hub.faults.append(fault)
    assert isinstance(failure(tmp_path, FAST), HubError)


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (Fault("GET /floe/.*-0000[23]-", status=503, times=ALWAYS), "has a problem"),
        (Fault("GET /storage/.*-0000[23]-", status=403, times=ALWAYS), "storage"),
        (Fault("GET /storage/.*-0000[23]-", portal=True, times=ALWAYS), "login page"),
        (Fault("GET /storage/.*-0000[23]-", close_after=0, times=ALWAYS), "reached"),
    ],
    ids=["503", "403", "portal", "no body"],
)
def test_it_gives_up_when_nothing_arrives_for_a_while_and_keeps_what_is_here(
    hub: FakeHub, published: Path, tmp_path: Path, fault: Fault, word: str
) -> None:
    hub.faults.append(fault)
    error = failure(tmp_path)
    assert isinstance(error, TryAgainError)
    assert word in error.cause and "saved" in error.hint
    assert (tmp_path / SHARDS[0]).read_bytes() == (published / SHARDS[0]).read_bytes()
    hub.faults.clear()
    with Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start() as download:
        wait_all(download)
    assert whole(tmp_path, published)
    assert hub.sent(SHARDS[0]) == (published / SHARDS[0]).stat().st_size


def test_a_hub_that_goes_away_is_told(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub({REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        repo = resolve(REPO)
    with Download(repo, SHARDS, tmp_path, tuning=HASTY).start() as download, pytest.raises(TryAgainError) as caught:
        wait_all(download)
    assert "cannot be reached" in caught.value.cause


def test_a_refusal_ends_it_at_once(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub({REPO: published}, gated=[REPO]) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        assert isinstance(failure(tmp_path), AccessError)
        assert len([request for request in hub.requests if request.status == 401]) <= FAST.connections
        hub.faults.append(Fault("GET /floe/.*-00003-", status=404, headers={"X-Error-Code": "EntryNotFound"}))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert "lacks a file" in failure(tmp_path).title


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, where one may be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_everything_on_it_kept(
    hub: FakeHub, published: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Download(resolve(REPO), SHARDS[:1], small_disk, tuning=FAST).start() as download:
        wait_all(download)
    error = failure(small_disk)
    gc.collect()
    assert caplog.text == "", "connections that failed beside the first one are heard of"
    assert "is full" in error.title and "saved" in error.hint and not isinstance(error, TryAgainError)
    assert (small_disk / SHARDS[0]).read_bytes() == (published / SHARDS[0]).read_bytes()
    (small_disk / SHARDS[0]).unlink()
    with Download(resolve(REPO), [SHARDS[1]], small_disk, tuning=FAST) as download:
        before = hub.sent(SHARDS[1])
        here = download.progress().done
        assert here > 0
        wait_all(download.start())
    assert hub.sent(SHARDS[1]) - before == (published / SHARDS[1]).stat().st_size - here


def test_a_folder_that_cannot_be_made_is_told(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FloeError, match="cannot be used"):
        Download(resolve(REPO), SHARDS, tmp_path / "file" / "folder")
    with pytest.raises(FloeError, match="cannot be used"):
        Download(resolve(REPO), SHARDS, Path("/proc/floe"))
