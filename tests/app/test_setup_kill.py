"""Setups that are killed at seeded moments have the same bytes in the end; FLOE_KILLS: how often."""

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
from floe_chat.app.setup.flow import Setup
from floe_chat.app.setup.wish import wish
from floe_chat.models import catalog

from ..models.fakehub import ALWAYS, FakeHub, Fault
from ..models.gguf.converting import convert
from .wizardry import REPO, ended

PACK = "floe/tiny-floe"
KILLS = int(os.environ.get("FLOE_KILLS", "8"))
# All that a setup needs is imported once, so that its children begin at once.
PARENT = """
import os, sys
import gguf
from floe_chat.app.setup import flow, ready_words, taking, wish
from floe_chat.models import checkpoint
from floe_chat.models.checking import verify
from floe_chat.models.gguf import shelf
from floe_chat.models.hub import pack_fetch, places, remote_checkpoint
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.hub_request import new_client
from floe_chat.models.modules import library_model
from floe_chat.models.pack import packed_model
from floe_chat.models.packing import pack
from huggingface_hub import get_token, try_to_load_from_cache
from transformers import AutoModelForCausalLM, MixtralForCausalLM

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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
@pytest.mark.parametrize("source", ["checkpoint on a hub", "GGUF file", "pack on a hub", "pack in a folder"])
def test_killed_again_and_again(
    published: Path, tiny_pack: Path, tmp_path: Path, own_folders: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """In setups one after the other, until there were enough kills; files and folders are only read."""
    file = convert(published, tmp_path / "tiny.gguf", "F16")
    before, home = file.read_bytes(), catalog.models_folder()
    places = {"GGUF file": str(file), "checkpoint on a hub": REPO, "pack on a hub": PACK}
    model, dice = places.get(source, str(tiny_pack)), random.Random(11)
    # Bytes are compared: the child has to round as this process does.
    rounding = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "FLOE_CPU_ISA", "PYTHONPATH")
    environment = {name: os.environ[name] for name in rounding if name in os.environ}
    environment |= {"NO_PROXY": "127.0.0.1", "HOME": str(own_folders), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT]
    with (
        FakeHub({PACK: tiny_pack, REPO: published}) as hub,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent,
    ):
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("HOME", str(tmp_path / "undisturbed"))
            hub.used_by(elsewhere, tmp_path / "hub home")
            with Setup(wish(model, "tiny")) as running:
                assert ended(running.start()).error is None
            sound = contents(running.wish.folder)
        hub.faults.append(Fault("GET /storage/", times=ALWAYS, rate=400_000))
        assert parent.stdin is not None and parent.stdout is not None
        kills = finished = 0
        while kills < KILLS or not finished:
            parent.stdin.write(f"{hub.url} {model}\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            if kills < KILLS:
                time.sleep(dice.uniform(0.0, 0.6 if "hub" in source else 0.3))
                with suppress(ProcessLookupError):  # it was faster
                    os.kill(child, signal.SIGKILL)
            code = int(parent.stdout.readline())
            kills += code == -signal.SIGKILL
            assert code in (0, -signal.SIGKILL)
            folder = home / "tiny"
            if (folder / "manifest.json").exists():  # written last: whatever comes after, the pack is whole
                assert sound.items() <= contents(folder).items()
            if code == 0:
                finished += 1
                assert [path.name for path in home.iterdir()] == ["tiny"] and contents(folder) == sound
                shutil.rmtree(folder)
        parent.stdin.close()
    assert file.read_bytes() == before
