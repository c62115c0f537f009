"""A download whose process is killed: again and again, at any byte."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from floe_chat.models.errors import TryAgainError
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.repository import resolve

from .conftest import REPO, SHARDS
from .fakehub import ALWAYS, FakeHub, Fault

KILLS = 5
# Imports once; every line on its input makes it fork a process that downloads.
PARENT = """
import os, sys
from pathlib import Path
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.repository import resolve
from floe_chat.models.hub.hub_request import new_client
from huggingface_hub import get_token, try_to_load_from_cache

new_client("")
tuning = Patience(piece=400_000, first_wait=0.01, longest_wait=0.05, sync=0.01)
for line in sys.stdin:
    os.environ["HF_ENDPOINT"], folder = line.split()
    child = os.fork()
    if child == 0:
        repo = resolve("floe/tiny")
        names = [file.name for file in repo.shards()]
        with Download(repo, names, Path(folder), tuning=tuning) as download:
            download.start()
            for name in names:
                download.wait(name)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # torch would take its time
"""


@dataclass
class Downloader:
    """Starts processes that download all shards into a folder."""

    parent: subprocess.Popen[str]

    def start(self, hub: FakeHub, folder: Path) -> int:
        assert self.parent.stdin is not None
        self.parent.stdin.write(f"{hub.url} {folder}\n")
        self.parent.stdin.flush()
        return self._number()

    def ended(self) -> int:
        """Waits for the process; its exit code, or minus the signal."""
        return self._number()

    def _number(self) -> int:
        assert self.parent.stdout is not None
        return int(self.parent.stdout.readline())


@pytest.fixture(scope="module")
def downloader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Downloader]:
    if not hasattr(os, "fork"):
        pytest.skip("processes are forked here")
    environment = {"NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path_factory.mktemp("home"))}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        yield Downloader(parent)
        assert parent.stdin is not None
        parent.stdin.close()


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


def test_kills_at_random_moments_lose_only_what_was_not_recorded_yet(
    hub: FakeHub, published: Path, tmp_path: Path, downloader: Downloader
) -> None:
    hub.faults.append(Fault("GET /storage/", rate=500_000, times=ALWAYS))
    chance = random.Random(17)
    folder, tick = tmp_path / "folder", threading.Event()
    sizes = {name: (published / name).stat().st_size for name in SHARDS}
    total = sum(sizes.values())
    kills = 0
    for _ in range(KILLS):
        before, hub.requests[:] = kept(folder, sizes), []
        child = downloader.start(hub, folder)
        missing = total - sum(end - start for ranges in before.values() for start, end in ranges)
        until = chance.randrange(min(missing, 300_000) + 1)
        while hub.sent("/storage/") < until:
            tick.wait(0.001)
        os.kill(child, signal.SIGKILL)
        kills += downloader.ended() == -signal.SIGKILL
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
    downloader.start(hub, folder)
    assert downloader.ended() == 0
    assert hub.sent("/storage/") == total - here < total
    assert all((folder / name).read_bytes() == (published / name).read_bytes() for name in SHARDS)
    assert sorted(path.name for path in folder.iterdir() if path.name != "download.lock") == SHARDS


def test_a_second_process_is_told_and_a_killed_one_is_in_nobodys_way(
    hub: FakeHub, tmp_path: Path, downloader: Downloader
) -> None:
    hub.faults.append(Fault("GET /storage/", stall_after=50_000, times=ALWAYS))
    child, tick = downloader.start(hub, tmp_path / "folder"), threading.Event()
    while hub.sent("/storage/") < 50_000:
        tick.wait(0.001)
    with pytest.raises(TryAgainError, match="Another floe-chat"):
        Download(resolve(REPO), SHARDS, tmp_path / "folder")
    os.kill(child, signal.SIGKILL)
    assert downloader.ended() == -signal.SIGKILL
    Download(resolve(REPO), SHARDS, tmp_path / "folder").close()
