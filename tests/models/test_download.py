"""A download when all goes well: order, pieces, pause, cancel, restart, caches, the room it needs."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from floe_chat.models.errors import FloeError, TryAgainError
from floe_chat.models.hub.download import Download, check_room, room
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.fetch_part import PartFile, Ranges
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


def test_ranges_are_a_set_of_positions() -> None:
    ranges = Ranges()
    for start, end in [(10, 20), (40, 50), (20, 25), (5, 7), (24, 41), (60, 61)]:
        ranges.add(start, end)
    assert ranges.intervals() == [(5, 7), (10, 50), (60, 61)]
    assert ranges.total == 43
    assert ranges.gaps(0, 70) == [(0, 5), (7, 10), (50, 60), (61, 70)]
    assert ranges.gaps(8, 9) == [(8, 9)]
    assert ranges.gaps(10, 50) == []
    assert ranges.gaps(6, 12) == [(7, 10)]


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
