"""A checkpoint on a hub, read by a packer as if it lay in a folder."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from floe_chat.models.checkpoint_files import INDEX, FolderShelf, Shelf
from floe_chat.models.errors import CheckpointError, TryAgainError
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve

from .conftest import REPO, SHARDS
from .fakehub import ALWAYS, FakeHub, Fault

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
