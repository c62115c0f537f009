"""Downloads: order, pieces, caches and room; what they sit out and report; what a kill leaves."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.models.errors import AccessError, FloeError, HubError, TryAgainError
from floe_chat.models.hub.download import Download, check_room, room
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.fetch_part import PartFile
from floe_chat.models.hub.repository import Repo, resolve

from .conftest import REPO, SHARDS
from .fakehub import ALWAYS, FakeHub, Fault, wait_all

FAST = Patience(piece=400_000, first_wait=0.01, longest_wait=0.05, sync=0.02)


def same(folder: Path, published: Path, names: list[str] = SHARDS) -> bool:
    return all((folder / name).read_bytes() == (published / name).read_bytes() for name in names)


def until(download: Download, done: int) -> None:
    """Wait until so many bytes are here."""
    ticks = threading.Event()
    for _ in range(6000):
        if download.progress().done >= done:
            return
        ticks.wait(0.01)
    raise AssertionError(f"it does not get there: {download.progress()}")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (*SHARDS, "download.lock"))


def test_files_arrive_whole_in_pieces_over_several_connections(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    with Download(resolve(REPO), SHARDS, tmp_path / "new" / "folder", tuning=FAST).start() as download:
        wait_all(download)
        progress = download.progress()
        assert same(download.folder, published) and leftovers(download.folder) == []
    assert (progress.state, progress.done, progress.total) == ("done", progress.total, progress.total)
    assert [(file.name, file.state) for file in progress.files] == [(name, "done") for name in SHARDS]
    pieces = [(request.path, request.range) for request in hub.requests if request.storage]
    assert len(pieces) == len(set(pieces)) == 12  # four of each shard, none asked for twice
    assert {request.token for request in hub.requests if request.storage} == {None}


def test_what_lies_verified_in_the_folder_is_not_fetched_again(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    for name in SHARDS[:2]:
        shutil.copy(published / name, tmp_path / name)
    damaged = bytearray((tmp_path / SHARDS[1]).read_bytes())
    damaged[1000] ^= 1
    (tmp_path / SHARDS[1]).write_bytes(damaged)
    with Download(resolve(REPO), SHARDS[:2], tmp_path, tuning=FAST).start() as download:
        wait_all(download)
        assert any("damaged" in notice for notice in download.progress().notices)
    assert hub.sent(SHARDS[0]) == 0 < hub.sent(SHARDS[1])
    assert same(tmp_path, published, SHARDS[:2])


def in_cache(repo: Repo, published: Path, home: Path, name: str) -> Path:
    """Put a file into the user's hub cache as the hub's own client does."""
    base = home / "hub" / f"models--{repo.name.replace('/', '--')}"
    file = repo.file(name)
    assert file is not None
    snapshot = base / "snapshots" / repo.commit
    (base / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    shutil.copy(published / name, base / "blobs" / file.hash)
    (snapshot / name).symlink_to(f"../../blobs/{file.hash}")
    return snapshot / name


def test_files_in_the_users_hub_cache_are_used_in_place_and_damaged_ones_are_not(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    repo = resolve(REPO)
    good = in_cache(repo, published, tmp_path / "home", SHARDS[0])
    bad = in_cache(repo, published, tmp_path / "home", SHARDS[1])
    content = bytearray(bad.read_bytes())
    content[-1] ^= 1
    bad.write_bytes(content)
    with Download(repo, SHARDS[:2], tmp_path / "folder", tuning=FAST).start() as download:
        assert download.wait(SHARDS[0]) == good
        assert download.wait(SHARDS[1]) == tmp_path / "folder" / SHARDS[1]
        assert any(str(bad) in notice for notice in download.progress().notices)
        download.release(SHARDS[0])
        download.release(SHARDS[1])
    assert good.exists() and bad.exists() and hub.sent(SHARDS[0]) == 0
    assert not (tmp_path / "folder" / SHARDS[1]).exists()


def test_it_goes_through_the_proxy(
    hub: FakeHub, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # where the storage is
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start() as download:
        wait_all(download)
    assert same(tmp_path, published)


def test_a_cached_file_that_cannot_be_read_is_fetched(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    repo = resolve(REPO)
    place = in_cache(repo, published, tmp_path / "home", SHARDS[0])
    place.resolve().chmod(0)
    if os.access(place, os.R_OK):
        pytest.skip("this user may read every file")
    with Download(repo, SHARDS[:1], tmp_path / "folder", tuning=FAST).start() as download:
        assert download.wait(SHARDS[0]) == tmp_path / "folder" / SHARDS[0]
        assert any("cannot be read" in notice for notice in download.progress().notices)


def test_it_is_cancelled_while_a_connection_stalls(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", stall_after=100_000, times=ALWAYS))
    download = Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start()
    until(download, 400_000)
    told: list[FloeError] = []

    def wait() -> None:
        with pytest.raises(FloeError) as caught:
            download.wait(SHARDS[0])
        told.append(caught.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    download.close()
    waiting.join()
    assert not hub.unstalled.is_set(), "it ended because the stall did"
    assert isinstance(told[0], TryAgainError) and "saved" in told[0].hint
    assert download.progress().state == "cancelled"


def test_it_is_cancelled_before_the_first_answer(hub: FakeHub, tmp_path: Path) -> None:
    repo = resolve(REPO)
    hub.faults.append(Fault("GET /storage/", stall_after=0, times=ALWAYS))
    with Download(repo, SHARDS, tmp_path, tuning=FAST).start():
        pass
    assert not hub.unstalled.is_set()


def test_a_pause_closes_the_connections_and_loses_nothing(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", stall_after=200_000, times=4))
    with Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start() as download:
        until(download, 800_000)
        download.pause()
        paused = download.progress()
        assert (paused.state, paused.rate, paused.left) == ("paused", 0.0, None)
        assert paused.done == 800_000
        download.resume()
        wait_all(download)
    assert same(tmp_path, published)
    assert hub.sent("/storage/") == download.progress().total


def test_pauses_while_a_file_is_checked_are_no_damage(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    repo = resolve(REPO)
    good = in_cache(repo, published, tmp_path / "home", SHARDS[0])
    with Download(repo, SHARDS[:1], tmp_path / "folder", tuning=FAST) as download:
        for _ in range(20):
            download.start()
            download.pause()
        download.resume()
        assert download.wait(SHARDS[0]) == good
        assert download.progress().notices == ()
    assert hub.sent("/storage/") == 0


def test_a_cancelled_download_can_be_started_again(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", stall_after=200_000, times=4))
    with Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start() as download:
        until(download, 800_000)
        download.cancel()
        wait_all(download.start())
    assert same(tmp_path, published)


def test_a_second_run_goes_on_where_the_first_was_cancelled(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    repo = resolve(REPO)
    hub.faults.append(Fault("GET /storage/", stall_after=150_000, times=4))
    with Download(repo, SHARDS, tmp_path, tuning=FAST).start() as download:
        until(download, 600_000)
    with Download(repo, SHARDS, tmp_path, tuning=FAST) as download:
        assert download.progress().done == 600_000
        wait_all(download.start())
        assert download.progress().notices == ()
    assert same(tmp_path, published)
    assert hub.sent("/storage/") == download.progress().total


@pytest.mark.parametrize("case", ["changed", "no json", "beyond", "no journal", "too long"])
def test_a_part_that_cannot_be_gone_on_with_is_fetched_anew_with_the_reason(
    hub: FakeHub, published: Path, tmp_path: Path, case: str
) -> None:
    repo = resolve(REPO)
    file = repo.file(SHARDS[0])
    assert file is not None
    part = PartFile(tmp_path, file)
    part.write(5000, b"x" * 1000)
    part.close()
    journal, data = tmp_path / f"{file.name}.journal", tmp_path / f"{file.name}.part"
    if case == "changed":
        journal.write_text(journal.read_text().replace(file.hash, "0" * 64))
    elif case == "no json":
        journal.write_text("{")
    elif case == "beyond":
        data.write_bytes(b"short")
    elif case == "no journal":
        journal.unlink()
    else:
        data.write_bytes(bytes(file.size + 1))
    with Download(repo, SHARDS[:1], tmp_path, tuning=FAST).start() as download:
        wait_all(download)
        notices = download.progress().notices
    assert same(tmp_path, published, SHARDS[:1]) and leftovers(tmp_path) == []
    assert any("again" in notice for notice in notices) == (case != "no journal")


def test_a_file_gets_its_name_once_its_last_bytes_are_on_the_disk(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen, fsync = resolve(REPO).file(SHARDS[0]), list[tuple[int, bool]](), os.fsync
    assert file is not None
    part = PartFile(tmp_path, file)

    def noted(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size, part.path.exists()))
        fsync(descriptor)

    part.write(0, b"first")
    part.sync()
    part.write(5, b"last")
    monkeypatch.setattr(os, "fsync", noted)
    assert part.finish().read_bytes() == b"firstlast" and seen[0] == (9, False)


def test_what_a_journal_does_not_claim_is_fetched_again(hub: FakeHub, published: Path, tmp_path: Path) -> None:
    repo = resolve(REPO)
    file = repo.file(SHARDS[0])
    assert file is not None
    content = (published / SHARDS[0]).read_bytes()
    part = PartFile(tmp_path, file)
    part.write(5000, content[5000:9000])
    part.sync()
    part.write(20_000, b"lost in a power cut")
    with Download(repo, SHARDS[:1], tmp_path, tuning=FAST).start() as download:
        wait_all(download)
    assert same(tmp_path, published, SHARDS[:1])
    assert hub.sent("/storage/") == len(content) - 4000


def test_small_and_empty_files_are_verified_by_gits_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, content in {"empty.json": b"", "a.json": b"{}", "model.safetensors": b"12345678"}.items():
        (source / name).write_bytes(content)
    with FakeHub({REPO: source}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        with Download(resolve(REPO), ["empty.json", "a.json"], tmp_path / "to", tuning=FAST).start() as download:
            wait_all(download)
        assert same(tmp_path / "to", source, ["empty.json", "a.json"])


def test_an_unknown_file_is_told_and_the_folder_let_go(hub: FakeHub, tmp_path: Path) -> None:
    repo = resolve(REPO)
    for _ in range(2):
        with pytest.raises(FloeError, match=r"no file absent\.json"):
            Download(repo, ["absent.json"], tmp_path)


def test_a_second_download_into_the_same_folder_is_told(hub: FakeHub, tmp_path: Path) -> None:
    repo = resolve(REPO)
    with Download(repo, SHARDS, tmp_path, tuning=FAST):
        with pytest.raises(TryAgainError, match="Another floe-chat"):
            Download(repo, SHARDS, tmp_path)
        Download(repo, SHARDS, tmp_path / "other").close()
    Download(repo, SHARDS, tmp_path).close()


def test_the_rate_and_the_time_left_are_told(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", rate=400_000, times=ALWAYS))
    with Download(resolve(REPO), SHARDS, tmp_path, tuning=FAST).start() as download:
        until(download, 500_000)
        progress = download.progress()
    assert progress.state == "fetching" and progress.rate > 0 and progress.left is not None and progress.left > 0
    assert progress.done == sum(file.done for file in progress.files) < progress.total


def test_room_is_that_of_the_disk_where_the_folder_will_be(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert room(folder) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    check_room(folder, 1)
    with pytest.raises(FloeError, match="too small") as caught:
        check_room(folder, 10**18)
    assert "GB" in caught.value.hint and not folder.exists()


HASTY = replace(FAST, give_up=1.0)


def fetched(folder: Path, tuning: Patience = FAST) -> Download:
    with Download(resolve(REPO), SHARDS, folder, tuning=tuning).start() as download:
        wait_all(download)
    return download


def refused_download(folder: Path, tuning: Patience = HASTY) -> FloeError:
    with Download(resolve(REPO), SHARDS, folder, tuning=tuning).start() as download:
        with pytest.raises(FloeError) as caught:
            wait_all(download)
        assert download.progress().state == "failed"
    return caught.value


def whole(folder: Path, published: Path) -> bool:
    return all((folder / name).read_bytes() == (published / name).read_bytes() for name in SHARDS)


@pytest.mark.some(3)
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


@pytest.mark.thorough
def test_a_server_without_ranges_that_always_breaks_at_the_same_place_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", ignore_range=True, close_after=900_000, times=ALWAYS))
    assert isinstance(refused_download(tmp_path, FAST), TryAgainError)


def test_the_hubs_wish_to_wait_holds_for_all_connections(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /floe/.*safetensors", status=429, headers={"Retry-After": "1"}, times=ALWAYS))
    error = refused_download(tmp_path, replace(HASTY, longest_asked=1.5))
    assert isinstance(error, TryAgainError) and "long pause" in error.title
    assert len([request for request in hub.requests if request.status == 429]) <= 2 * FAST.connections


def test_a_long_pause_that_the_hub_wants_is_told(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /floe/.*00001", status=429, headers={"Retry-After": "3600"}, times=ALWAYS))
    error = refused_download(tmp_path, FAST)
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
    error = refused_download(tmp_path)
    assert isinstance(error, HubError) and "arrived damaged" in error.title
    assert not (tmp_path / SHARDS[1]).exists()


@pytest.mark.some(2)
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
    assert isinstance(refused_download(tmp_path, FAST), HubError)


@pytest.mark.some(2)
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
    error = refused_download(tmp_path)
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
        assert isinstance(refused_download(tmp_path), AccessError)
        assert len([request for request in hub.requests if request.status == 401]) <= FAST.connections
        hub.faults.append(Fault("GET /floe/.*-00003-", status=404, headers={"X-Error-Code": "EntryNotFound"}))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        assert "lacks a file" in refused_download(tmp_path).title


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
    error = refused_download(small_disk)
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


KILLS = 5
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the other process is forked")


def forked(folder: Path) -> int:
    """A process that downloads all shards, by its number."""
    if child := os.fork():
        return child
    # Whatever happens here, pytest must not go on in two processes.
    try:
        fetched(folder, replace(FAST, sync=0.01))
        os._exit(0)
    finally:
        os._exit(1)


def ended(child: int) -> int:
    """Waits for the process; its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kept(folder: Path, sizes: dict[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Which bytes of each shard are here for certain."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name, size in sizes.items():
        journal = folder / f"{name}.journal"
        if (folder / name).exists():
            found[name] = [(0, size)]
        elif journal.exists():
            found[name] = [(start, end) for start, end in json.loads(journal.read_text())["ranges"]]
    return found


@needs_fork
def test_kills_at_random_moments_lose_only_what_was_not_recorded_yet(
    hub: FakeHub, published: Path, tmp_path: Path
) -> None:
    hub.faults.append(Fault("GET /storage/", rate=500_000, times=ALWAYS))
    chance = random.Random(17)
    folder, tick = tmp_path / "folder", threading.Event()
    sizes = {name: (published / name).stat().st_size for name in SHARDS}
    total = sum(sizes.values())
    kills = 0
    for _ in range(KILLS):
        before, hub.requests[:] = kept(folder, sizes), []
        child = forked(folder)
        missing = total - sum(end - start for ranges in before.values() for start, end in ranges)
        until = chance.randrange(min(missing, 300_000) + 1)
        while hub.sent("/storage/") < until:
            tick.wait(0.001)
        os.kill(child, signal.SIGKILL)
        kills += ended(child) == -signal.SIGKILL
        for request in list(hub.requests):
            if request.storage and request.range:
                start, end = (int(number) for number in request.range.removeprefix("bytes=").split("-"))
                shard = request.path.split("/")[-1]
                again = [(a, b) for a, b in before.get(shard, []) if a <= end and start < b]
                assert not again, f"{shard}: {again} was here, but {request.range} was asked for"
    assert kills == KILLS
    here = sum(end - start for ranges in kept(folder, sizes).values() for start, end in ranges)
    hub.requests.clear()
    hub.faults.clear()
    assert ended(forked(folder)) == 0
    assert hub.sent("/storage/") == total - here < total
    assert all((folder / name).read_bytes() == (published / name).read_bytes() for name in SHARDS)
    assert sorted(path.name for path in folder.iterdir() if path.name != "download.lock") == SHARDS


@needs_fork
def test_a_second_process_is_told_and_a_killed_one_is_in_nobodys_way(hub: FakeHub, tmp_path: Path) -> None:
    hub.faults.append(Fault("GET /storage/", stall_after=50_000, times=ALWAYS))
    child, tick = forked(tmp_path / "folder"), threading.Event()
    while hub.sent("/storage/") < 50_000:
        tick.wait(0.001)
    with pytest.raises(TryAgainError, match="Another floe-chat"):
        Download(resolve(REPO), SHARDS, tmp_path / "folder")
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    Download(resolve(REPO), SHARDS, tmp_path / "folder").close()
