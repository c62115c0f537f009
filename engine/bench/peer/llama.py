"""llama.cpp beside the engine: a Mixtral of the same widths, quantized as llama.cpp's own tool would, random weights.

It runs in a process of its own (worker.py) by the interpreter of any environment that has llama-cpp-python, with
as many threads. Files of one and of three layers are made once and stored.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import psutil

from ....models import private_file
from ....models.errors import FloeError, UsageError
from ..measure import MeasureReport

WORKER = Path(__file__).with_name("worker.py")
LAYERS = (1, 3)  # the two extra layers stand for the two kinds of layers of Q4_K_M
BLOCKS = {  # values and bytes of a block (ggml-common.h)
    "F32": (1, 4),
    "Q4_0": (32, 18),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
KINDS = ("Q4_0", "Q4_K_M")
_CAUSE_LINES = 3
_ANSWER = 512  # tokens of context beside the prompt


@dataclass(frozen=True, slots=True)
class PeerSizes:
    """The sizes of a Mixtral, from transformers' configuration."""

    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    vocabulary: int
    experts: int
    top_k: int

    @staticmethod
    def possible(config: Any) -> bool:
        """Whether llama.cpp's recipes can be made for a model."""
        sizes = (config.hidden_size, config.intermediate_size)
        return config.model_type == "mixtral" and config.num_local_experts == 8 and not any(s % 256 for s in sizes)

    @classmethod
    def of(cls, config: Any) -> PeerSizes:
        """Raises UsageError: they cannot."""
        sizes = (config.hidden_size, config.intermediate_size)
        if not cls.possible(config):
            raise UsageError(
                "There is no llama.cpp model to compare this one with",
                "Its recipes need a Mixtral of 8 experts whose sizes are multiples of 256; this is "
                f"{config.model_type} of hidden size {sizes[0]} and {sizes[1]} neurons per expert.",
                "Leave out --peer, or measure --synthetic mixtral-8x7b.",
            )
        return cls(
            *sizes,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.vocab_size,
            config.num_local_experts,
            config.num_experts_per_tok,
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """One file: which tensor has which type, as `llama_tensor_get_type` (llama-quant.cpp) chooses for 8 experts."""

    kind: str
    widths: PeerSizes
    layers: int

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape (outputs first) and type."""
        w, base = self.widths, "Q4_0" if self.kind == "Q4_0" else "Q4_K"
        found: dict[str, tuple[tuple[int, ...], str]] = {
            "token_embd.weight": ((w.vocabulary, w.hidden), base),
            "output_norm.weight": ((w.hidden,), "F32"),
            "output.weight": ((w.vocabulary, w.hidden), "Q6_K"),
        }
        kv = w.hidden // w.heads * w.kv_heads
        for layer in range(self.layers):
            # Of Mixtral's 32 layers 16 have a Q6_K down (use_more_bits); here every second one.
            down = "Q6_K" if base == "Q4_K" and layer % 2 else base
            parts: dict[str, tuple[tuple[int, ...], str]] = {
                "attn_norm": ((w.hidden,), "F32"),
                "attn_q": ((w.hidden, w.hidden), base),
                "attn_k": ((kv, w.hidden), "Q8_0"),
                "attn_v": ((kv, w.hidden), "Q8_0"),
                "attn_output": ((w.hidden, w.hidden), "Q5_K" if base == "Q4_K" else base),
                "ffn_norm": ((w.hidden,), "F32"),
                "ffn_gate_inp": ((w.experts, w.hidden), "F32"),
                "ffn_gate_exps": ((w.experts, w.neurons, w.hidden), base),
                "ffn_up_exps": ((w.experts, w.neurons, w.hidden), base),
                "ffn_down_exps": ((w.experts, w.hidden, w.neurons), down),
            }
            found |= {f"blk.{layer}.{part}.weight": tensor for part, tensor in parts.items()}
        return found

    def nbytes(self) -> int:
        """The file's size, but for a header of kilobytes."""
        return sum(_nbytes(*tensor) for tensor in self.tensors().values())

    def read_bytes(self, *, all_experts: bool) -> int:
        """What a token reads: everything but the embedding, and of the experts those that it chose, unless all."""
        share = 1.0 if all_experts else self.widths.top_k / self.widths.experts
        sizes = {name: _nbytes(*tensor) for name, tensor in self.tensors().items() if name != "token_embd.weight"}
        return int(sum(size * share if "_exps." in name else size for name, size in sizes.items()))

    def file(self, folder: Path) -> Path:
        """The file's path: its name contains everything that it depends on."""
        w = self.widths
        sizes = f"{w.hidden}-{w.neurons}-{w.heads}-{w.kv_heads}-{w.vocabulary}"
        return folder / f"{self.kind}-{sizes}-{self.layers}.gguf"


def _nbytes(shape: tuple[int, ...], kind: str) -> int:
    values, size = BLOCKS[kind]
    count = 1
    for length in shape:
        count *= length
    return count // values * size


class LlamaCpp:
    """One kind of file in llama.cpp."""

    def __init__(self, worker: PeerProcess, recipes: dict[int, Recipe], kind: str, version: str) -> None:
        self._worker, self._recipes = worker, recipes
        self._kind = kind
        self.name = f"llama.cpp {kind}"
        self.layers = LAYERS
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
        return self._worker.cpu_seconds() if self._kind == KINDS[0] else 0.0


class PeerProcess:
    """The peer's process: one JSON line in, one out."""

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        command = [python, str(WORKER), "answer", *arguments]
        # Our threads' wait policy (app/cli/main.py) is not meant for llama.cpp's.
        own = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, env=own)
        self._usage = psutil.Process(self._process.pid)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises FloeError: the process ended instead of answering."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise FloeError(
                "llama.cpp stopped", f"Its process ended with {self._process.wait()}.", "Measure without --peer."
            )
        return json.loads(line)

    def cpu_seconds(self) -> float:
        times = self._usage.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


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
    worker = PeerProcess(python, [str(threads), str(prompt + _ANSWER), str(widths.vocabulary), *files])
    try:
        worker.ask({})
        yield [LlamaCpp(worker, {layers: recipes[kind, layers] for layers in LAYERS}, kind, version) for kind in KINDS]
    finally:
        worker.close()


def _recipes(widths: PeerSizes) -> dict[tuple[str, int], Recipe]:
    return {(kind, layers): Recipe(kind, widths, layers) for kind in KINDS for layers in LAYERS}


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
    w = recipe.widths
    wanted = {
        "layers": recipe.layers,
        "tensors": recipe.tensors(),
        "hidden": w.hidden,
        "neurons": w.neurons,
        "heads": w.heads,
        "kv_heads": w.kv_heads,
        "vocabulary": w.vocabulary,
        "experts": w.experts,
        "top_k": w.top_k,
    }
    with private_file.replacing(file, private_file.SHARED) as partial:
        command = [python, str(WORKER), "make", str(partial)]
        made = subprocess.run(command, input=json.dumps(wanted), capture_output=True, text=True, check=False)
        if made.returncode:
            raise FloeError(f"{file.name} for llama.cpp cannot be made", _last(made.stderr), "Measure without --peer.")


def _last(text: str) -> str:
    """The last line of an interpreter's error output."""
    return " ".join(text.strip().splitlines()[-_CAUSE_LINES:]) or "It printed nothing."
