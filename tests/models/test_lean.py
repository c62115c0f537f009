"""Importing transformers from several threads at once, as a screen does that opens a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
from pathlib import Path
from floe_chat.models.checkpoint import read_config

folder, failed = Path(sys.argv[1]), []

def read(wait):
    time.sleep(wait)
    try:
        read_config(folder)
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}")

threads = [threading.Thread(target=read, args=(0.02 * i,)) for i in range(40)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(set(failed)))
"""


@pytest.mark.thorough
def test_threads_that_come_while_it_is_imported_find_its_names(tiny_checkpoint: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
