"""What only a card shows, in 40 seconds: a question a row, and what to do where the answer is no.

Each question stands by itself: one that fails, or ends in an exception, does not keep the next ones from being asked.
To add one: a function of the context that returns its answer and what was seen, and a line in `QUESTIONS`.
"""

from __future__ import annotations

import gc
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from floe_chat.engine import quality_presets
from floe_chat.engine.bench.kernels.gpu_expert import Stopwatch
from floe_chat.engine.decoder import graphs
from floe_chat.engine.decoder.decoders import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.loader import load
from floe_chat.engine.offload.links.pinning import Pinned
from floe_chat.kernels import backend
from floe_chat.models.catalog import asset

from ..engine.driver import silent
from ..helpers import relative_rms
from ..kernels.attending import EPS, Case, a_token, limit, truth
from .stages import Context

Answer = tuple[bool, str]
_CARD = torch.device("cuda")
_CONTEXT = 8192


def run(context: Context) -> None:
    """Ask everything; without a card only what stands in for one can answer."""
    if not context.real:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    failed: list[str] = []
    for name, ask, on_card, otherwise in QUESTIONS:
        if on_card and not context.real:
            continue
        began = time.perf_counter()
        try:
            ok, seen = ask(context)
        except Exception as error:  # noqa: BLE001 -- what a card raises is the answer
            ok, seen = False, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        context.row(question=name, ok=ok, s=time.perf_counter() - began, seen=seen)
        if not ok:
            failed.append(name)
            context.notes.append(f"{name}: {otherwise}")
    asked = len(context.rows)
    context.showed = f"{asked - len(failed)} of {asked} answers are yes"
    if failed:
        context.showed += f"; no: {', '.join(failed)} (what to do is below)"


def _warm(_context: Context) -> Answer:
    """Clocks and link wake up, so that no later stage times an idle card."""
    x = torch.randn(4096, 4096, device=_CARD, dtype=torch.float16)
    block = torch.empty(64 << 20, dtype=torch.uint8).pin_memory()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        torch.mm(x, x)
        block.to(_CARD, non_blocking=True)
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return free > total / 2, f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _triton(context: Context) -> Answer:
    """Triton compiles its part of the driver, a launcher and a kernel, which needs gcc and Python.h."""
    began = time.perf_counter()
    failed = backend.failure("cuda" if context.real else "cpu")
    return not failed, f"{failed or 'a small kernel gave the right result'}, after {time.perf_counter() - began:.1f} s"


def _attends(context: Context) -> Answer:
    """Attention of one token over 8,192, at the width of Qwen3-30B-A3B, against the formula in float64."""
    kernels: Any = importlib.import_module("floe_chat.kernels.triton")
    case = Case(32, 4, 128, normed="head", dtype=torch.bfloat16, stored=torch.bfloat16)
    if not context.real:
        case = replace(case, queries=4, keys=2, dim=12, dtype=torch.float32)
    token = a_token(case, _CONTEXT - 1 if context.real else 20)
    expected, _ = truth(case, token)
    device, heads = _CARD if context.real else torch.device("cpu"), case.heads()
    moved = {name: None if (w := getattr(heads, name)) is None else w.to(device) for name in ("q_norm", "k_norm")}
    there, heads = token.on(device), replace(heads, **moved)
    given = there.qkv, there.rope, there.kept(), 1, heads, EPS
    far = relative_rms(kernels.attend_one(*given).cpu(), expected)
    right, seen = far <= limit(case), f"{far:.1e} from the formula"
    if not context.real:
        return right, seen
    seconds = median(Stopwatch().seconds(lambda _run: kernels.attend_one(*given), 50, 5))
    read = token.entries[1].nbytes
    return right, f"{seen}; {read / seconds / 1e9:.0f} GB/s, {seconds * 1e6:.0f} us with its launches"


def _again(_context: Context) -> Answer:
    """A graph ends, and another one is captured in the same memory and computes the same."""
    w, x = torch.randn(64, 2048, device=_CARD), torch.randn(1, 2048, device=_CARD)
    expected, far = F.linear(x, w), 0.0
    for _ in range(3):
        graph = graphs.capture(lambda: (F.linear(x, w),), _CARD)
        graph.outputs[0].zero_()
        graph.replay()
        graph.wait()
        far = max(far, float((graph.outputs[0] - expected).abs().max()))
        del graph
    return far < 1e-2, f"three captures, {far:.1e} apart at most"


def _refused(_context: Context) -> Answer:
    """After a capture that the driver refuses, the next one works and memory can be freed."""
    x = torch.ones(4, device=_CARD)
    try:
        graphs.capture(lambda: (torch.tensor([float(x.sum().item())], device=_CARD),), _CARD)
    except Exception as error:  # noqa: BLE001 -- torch's releases raise different classes
        why = type(error).__name__
    else:
        return False, "a wait inside a capture was not refused"
    graph = graphs.capture(lambda: (x + 1,), _CARD)
    graph.replay()
    graph.wait()
    torch.cuda.empty_cache()
    return bool((graph.outputs[0] == 2).all()), f"refused with {why}, then captured"


def _workspaces(_context: Context) -> Answer:
    """What twelve captures leave behind: torch keeps one workspace of cuBLAS for each stream."""
    w, x = torch.randn(64, 2048, device=_CARD), torch.randn(1, 2048, device=_CARD)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(12):
        graphs.capture(lambda: (F.linear(x, w),), _CARD)
    gc.collect()
    torch.cuda.empty_cache()
    left = (torch.cuda.memory_reserved() - before) >> 20
    return left <= 100, f"{left} MiB stay"


def _registered(context: Context) -> Answer:
    """Pinning a private mapping of a file, as safetensors makes it."""
    with tempfile.NamedTemporaryFile(dir=context.folder) as file:
        file.write(os.urandom(1 << 20) * 1024)
        file.flush()
        data = torch.from_file(file.name, shared=False, size=1 << 30, dtype=torch.uint8)
        began = time.perf_counter()
        pinned = Pinned([data], _CARD)
        took = time.perf_counter() - began
        same = bool((data[::4097].to(_CARD).cpu() == data[::4097]).all())
        read_only = pinned.read_only
        pinned.release()
    return same, f"{1 / took:.1f} GiB/s, {'read-only' if read_only else 'writable: the driver copied each page'}"


def _models(context: Context) -> Answer:
    """Two models one after the other, every preset in each: all tokens by graphs, and the memory comes back."""
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if context.real else (0, 0)
    declined: list[str] = []
    for number in (1, 2):
        loaded, _ = load(asset("demo/packed"), None, "cuda" if context.real else "cpu", silent)
        decoder = loaded.decoder
        assert isinstance(decoder, FusedDecoder)
        for name in quality_presets.available(loaded.packed.manifest):
            loaded.control.preset = quality_presets.get(name, loaded.packed.manifest)
            kv = KVCache()
            for token in (1, 5):
                decoder.forward([token], kv)
                kv.computed([token], loaded.control.preset)
            ways: Any = decoder.way
            one: Any = getattr(ways, "_token", None)
            if context.real and (one is None or one.declined):
                declined.append(f"model {number}, {name}: {one.declined if one else ways.how}")
        loaded.close()
        del loaded, decoder
        gc.collect()
    if not context.real:
        return True, "opened and closed twice"
    torch.cuda.empty_cache()
    left, cached = (torch.cuda.memory_allocated() - before[0]) >> 20, (torch.cuda.memory_reserved() - before[1]) >> 20
    seen = f"{left} MiB stay allocated, {cached} MiB reserved"
    return not declined and left < 64 and cached < 160, "; ".join([*declined[:3], seen])


def _library(_context: Context) -> Answer:
    """The compiled library is the one of these headers."""
    importlib.import_module("floe_chat.kernels.cpu")
    cpu = backend.choose("cpu")
    return cpu.name != "reference", f"{cpu.name}: {cpu.reason}"


QUESTIONS: tuple[tuple[str, Callable[[Context], Answer], bool, str], ...] = (
    ("is the C++ library there", _library, False, "carry kernels/cpu/_floe.so, or nothing can be offloaded"),
    ("is the card free and awake", _warm, True, "end what else uses the card (nvidia-smi); figures are worth less"),
    ("does Triton run", _triton, False, "all runs by plain torch: run gpu-tests only, and see the reason"),
    ("does a graph follow a graph", _again, True, "engine/decoder/graphs.py: run graphs and tokens, and no figures"),
    ("is a refused capture survived", _refused, True, "engine/decoder/graphs.py, `_stop_allocating`"),
    ("do captures leave little behind", _workspaces, True, "engine/decoder/graphs.py, `_streams`; plans are too full"),
    ("are rows pinned as they are mapped", _registered, True, "engine/offload/links/pinning.py; rows are staged"),
    ("does attention read 8,192 tokens", _attends, False, "kernels/triton/attend.py: answers are wrong; no figures"),
    ("do two models run by graphs", _models, False, "the reason is in the row; run graphs and tokens, and no figures"),
)
"""Name, function, whether only a card can answer, and what follows from a no."""
