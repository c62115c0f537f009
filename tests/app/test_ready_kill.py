"""A ready pack whose setup is killed at seeded moments has the same bytes in the end; FLOE_KILLS: how often."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from floe_chat.models import catalog

from ..models.fakehub import ALWAYS, FakeHub, Fault

PACK = "floe/tiny-floe"
KILLS = int(os.environ.get("FLOE_KILLS", "12"))
PARENT = """
import os, sys
from floe_chat.app.setup import flow, ready_words, taking, wish
from floe_chat.models import checkpoint
from floe_chat.models.checking import verify
from floe_chat.models.hub import pack_fetch, places
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.hub_request import new_client
from floe_chat.models.modules import library_model
from huggingface_hub import get_token, try_to_load_from_cache

new_client("")
for line in sys.stdin:
    os.environ["HF_ENDPOINT"], model = line.split()
    child = os.fork()
    if child == 0:
        running = flow.Setup(
            (wish.unfinished() or [wish.wish(model, "tiny")])[0],
            tuning=Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.01),
        )
        running.start()
        running.wait(600)
        print(running.error, file=sys.stderr)
        os._exit(0 if running.error is None else 1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize("source", ["hub", "folder"])
def test_killed_again_and_again(tiny_pack: Path, own_folders: Path, source: str) -> None:
    dice = random.Random(11)
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    environment |= {"NO_PROXY": "127.0.0.1", "HOME": str(own_folders), "OMP_NUM_THREADS": "1"}
    home, sound = catalog.models_folder(), {path.name: path.read_bytes() for path in tiny_pack.iterdir()}
    command = [sys.executable, "-c", PARENT]
    with (
        FakeHub({PACK: tiny_pack}) as hub,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent,
    ):
        assert parent.stdin is not None and parent.stdout is not None
        hub.faults.append(Fault("GET /storage/", times=ALWAYS, rate=400_000))
        kills = ended = 0
        while kills < KILLS or not ended:
            parent.stdin.write(f"{hub.url} {PACK if source == 'hub' else tiny_pack}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            if kills < KILLS:
                time.sleep(dice.uniform(0.0, 0.6 if source == "hub" else 0.2))
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(child, signal.SIGKILL)
            code = int(parent.stdout.readline())
            kills += code == -signal.SIGKILL
            assert code in (0, -signal.SIGKILL)
            folder = home / "tiny"
            if (folder / "manifest.json").exists():  # written last: whatever comes after, the pack is whole
                assert all((folder / name).read_bytes() == content for name, content in sound.items())
            if code == 0:
                ended += 1
                assert [path.name for path in home.iterdir()] == ["tiny"]
                assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound
                shutil.rmtree(folder)
        parent.stdin.close()
