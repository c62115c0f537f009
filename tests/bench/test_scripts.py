"""Every script here starts and explains itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SCRIPTS = [str(path) for path in sorted(FOLDER.glob("*.py")) if "\nif __name__ ==" in path.read_text(encoding="utf-8")]
ALL_OF_THEM = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
for path in sys.argv[2:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        if ended.code == 0:
            print(path)
"""


@pytest.mark.thorough
def test_each_starts() -> None:
    command = [sys.executable, "-P", "-c", ALL_OF_THEM, str(FOLDER), *SCRIPTS]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in ran.stdout.splitlines() if line in SCRIPTS] == SCRIPTS, ran.stderr
