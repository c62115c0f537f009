"""llama.cpp beside the engine: a model of the same widths, quantized as llama.cpp's own tool would, random weights.

It runs in a process of its own (worker.py) by the interpreter of any environment that has llama-cpp-python, with
as many threads. Files of two numbers of layers are made once and stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from ....models import private_file
from ....models.errors import FloeError, UsageError
from ..measure import MeasureReport
from .recipes import PeerSizes, Recipe

WORKER = Path(__file__).with_name("worker.py")
_CAUSE_LINES = 3
_ANSWER = 512  # tokens of context beside the prompt


class LlamaCpp:
    """One kind of file in llama.cpp."""

    def __init__(self, worker: PeerProcess, recipes: dict[int, Recipe], kind: str, version: str) -> None:
        self._worker, self._recipes = worker, recipes
        self._kind = kind
        self.name = f"llama.cpp {kind}"
        few, many = recipes
        self.layers = few, many
        self.version = f"llama.cpp of llama-cpp-python {version}"

    def answer(self, prompt: int, tokens: int, layers: int) -> tuple[float, float]:
        """Seconds of a prompt, and the median of the tokens after it."""
        found = self._worker.ask({"kind": self._kind, "layers": layers, "prompt": prompt, "tokens": tokens})
        return found["prompt"], found["token"]

    def read_bytes(self, layers: int, *, all_experts: bool) -> int:
        """Bytes of weights that a step reads."""
        return self._recipes[layers].read_bytes(all_experts=all_experts)

    def cpu_seconds(self) -> float:
        """CPU time of the process, which all kinds share."""
        return self._worker.cpu_seconds() if self._kind == self._recipes[self.layers[0]].widths.files[0] else 0.0


class PeerProcess:
    """The peer's process: one JSON line in, one out."""

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        command = [python, str(WORKER), "answer", *arguments]
        # Our threads' wait policy (app/cli/main.py) is not meant for llama.cpp's.
        own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        pipe, self._said = subprocess.PIPE, tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=own)
        self._usage = psutil.Process(self._process.pid)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises FloeError: the process ended instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            ended = self._process.wait()
            self._said.seek(0)
            cause = f"Its process ended with {ended}: {_last(self._said.read())}"
            raise FloeError("llama.cpp stopped", cause, "Measure without --peer.")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        times = self._usage.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


def default_folder() -> Path:
    """The default folder for the files."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "peers"


def memory_bytes(widths: PeerSizes) -> int:
    """llama.cpp's memory: all files, which it may repack as it loads them."""
    return sum(recipe.nbytes() for recipe in _recipes(widths).values())


def version_of(python: str) -> str:
    """The version of llama-cpp-python that an interpreter has.

    Raises:
        UsageError: there is no such interpreter, or it lacks llama_cpp or gguf.
    """
    hint = "Make one: python3 -m venv PEER && PEER/bin/pip install llama-cpp-python gguf, then --peer PEER/bin/python."
    try:
        asked = subprocess.run([python, str(WORKER), "version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"{python} cannot be run", f"{error.strerror}.", hint) from error
    if asked.returncode:
        raise UsageError(f"{python} cannot run llama.cpp", _last(asked.stderr), hint)
    return asked.stdout.strip()


@contextlib.contextmanager
def running(
    python: str, widths: PeerSizes, folder: Path, threads: int, prompt: int, report: MeasureReport
) -> Generator[list[LlamaCpp]]:
    """llama.cpp with its files loaded, one contestant per kind, for prompts so long; missing files are made first.

    Raises:
        UsageError: an interpreter that cannot run it. FloeError: no space for the files, or they cannot be made.
    """
    version = version_of(python)
    recipes = _recipes(widths)
    _make(python, recipes, folder, report)
    report("llama.cpp is loading its files", 0, 1)
    files = [f"{kind}:{layers}:{recipe.file(folder)}" for (kind, layers), recipe in recipes.items()]
    worker = PeerProcess(python, [str(threads), str(prompt + _ANSWER), str(widths.sizes.vocab), *files])
    try:
        worker.ask({})
        yield [
            LlamaCpp(worker, {layers: recipes[kind, layers] for layers in widths.layers}, kind, version)
            for kind in widths.files
        ]
    finally:
        worker.close()


def _recipes(widths: PeerSizes) -> dict[tuple[str, int], Recipe]:
    return {(kind, layers): Recipe(kind, widths, layers) for kind in widths.files for layers in widths.layers}


def _make(python: str, recipes: dict[tuple[str, int], Recipe], folder: Path, report: MeasureReport) -> None:
    missing = [recipe for recipe in recipes.values() if not recipe.file(folder).exists()]
    wanted = sum(recipe.nbytes() for recipe in missing)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise FloeError(f"{folder} cannot be used", f"{error.strerror}.", "Name another with --peer-files.") from error
    if wanted > free:
        raise FloeError(
            f"The files for llama.cpp take {wanted / 1e9:.1f} GB",
            f"{free / 1e9:.1f} GB are free in {folder}.",
            "Name a folder on another disk with --peer-files.",
        )
    for index, recipe in enumerate(missing):
        report(f"Making {wanted / 1e9:.1f} GB of files for llama.cpp in {folder}", index, len(missing))
        make_file(python, recipe, recipe.file(folder))


def make_file(python: str, recipe: Recipe, file: Path) -> None:
    """Write the file with an interpreter that has gguf.

    Raises:
        FloeError: it could not.
    """
    wanted = {
        "architecture": recipe.widths.architecture,
        "header": recipe.header(),
        "tensors": recipe.tensors(),
    }
    with private_file.replacing(file, private_file.SHARED) as partial:
        command = [python, str(WORKER), "make", str(partial)]
        made = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, check=False)
        if made.returncode:
            raise FloeError(f"{file.name} for llama.cpp cannot be made", _last(made.stderr), "Measure without --peer.")


def _last(text: str) -> str:
    """The last lines of an interpreter's error output, or what llama.cpp asserted before a trace."""
    text = next((line for line in text.splitlines() if "GGML_ASSERT" in line), text)
    return " ".join(text.strip().splitlines()[-_CAUSE_LINES:]) or "It printed nothing."
