"""What an installed floe-chat has to do in a home without anything, with no compiler in reach.

`PYTHON -P tests/installed.py`, where PYTHON is that of the environment. Needs nothing beyond it, and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

# Prints the library's path and the instruction set in use; fails where the kernels are not compiled.
KERNELS = "from floe_chat.kernels.cpu import native; print(native.library_path(), native.isa().name, sep='\\n')"
ISAS = ("avx512", "avx2", "portable")
SYSTEM = ("SYSTEMROOT", "WINDIR", "TEMP", "TMP", "COMSPEC")  # without these Windows starts no process


class CheckError(Exception):
    """The program does not do what it has to; the text holds its words."""


class Home:
    """Runs commands in an empty home, whose PATH holds the environment's own scripts alone."""

    def __init__(self, folder: str) -> None:
        self._folder, self.scripts = folder, Path(sysconfig.get_path("scripts"))
        self._env = {name: os.environ[name] for name in SYSTEM if name in os.environ}
        self._env |= {"PATH": str(self.scripts), "HOME": folder, "USERPROFILE": folder, "LOCALAPPDATA": folder}

    def run(self, *command: str | Path, isa: str = "", may_fail: bool = False) -> str:
        """What it prints; stderr where it may fail and does."""
        env = self._env | ({"FLOE_CPU_ISA": isa} if isa else {})
        words = [str(part) for part in command]
        done = subprocess.run(words, cwd=self._folder, env=env, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode and not may_fail:
            raise CheckError(f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stderr if done.returncode else done.stdout


def check(home: Home) -> str:
    """What was found, in words.

    Raises:
        CheckError: the kernels are not compiled, lack an instruction set, or the program does not answer.
    """
    python, program = [sys.executable, "-P", "-c", KERNELS], home.scripts / "floe-chat"
    library, best = home.run(*python).splitlines()
    runs: list[str] = []
    for isa in ISAS:
        said = home.run(*python, isa=isa, may_fail=True)
        if said.splitlines()[-1] == isa:
            runs.append(isa)
        elif f"this CPU cannot run the {isa} kernels" not in said:
            raise CheckError(said)
    if best not in runs or "portable" not in runs:
        raise CheckError(f"{best} is in use, and {runs} can be asked for")
    version = home.run(program, "--version")
    for isa in dict.fromkeys((best, "portable")):
        if f"native {isa}" not in home.run(program, "doctor", isa=isa):
            raise CheckError(f"doctor does not name the {isa} kernels")
        answer = home.run(program, "ask", "--seed", "1", "What is an expert?", isa=isa)
        if len(answer.split()) < 4:
            raise CheckError(f"with {isa} kernels the answer is {answer!r}")
    size = Path(library).stat().st_size
    return f"{version.strip()}: {best} kernels in use, of {', '.join(runs)}; {library}, {size:,} bytes"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            sys.stdout.write(f"{check(Home(folder))}\n")
        except CheckError as error:
            sys.exit(str(error))
