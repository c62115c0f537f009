"""An answer of a model of Mixtral's width and depth in so much of the card's memory: tokens per second, first token,
and where a token's time goes.

The 32 layers are 4 different ones, again and again (their files are hard links), so RAM and its caches hold less than
they would of the real model; on the card each layer has rows of its own. The result says how many are different.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from floe_chat.engine.events import Sampling
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load

from ..engine.driver import silent
from . import wide_pack
from .same_tokens import VIRTUAL, memory
from .stages import Context

PROMPT, TOKENS, WARM, PROFILED = 512, 64, 16, 8
_WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")


def run(context: Context, gib: int) -> None:
    """Answer once, then look at some tokens with the profiler."""
    depth = wide_pack.DEPTH if context.real else wide_pack.LAYERS
    pack = wide_pack.made(context, depth)
    vram = gib << 30 if context.real else memory(pack, gib / 32)
    if context.real and torch.cuda.mem_get_info()[0] < vram:
        context.notes.append(f"The card has less than {gib} GiB free: all of it is used.")
    loaded, told = load(pack, None, "cuda" if context.real else VIRTUAL, silent, vram=vram)
    try:
        prompt = torch.randint(3, 500, (PROMPT if context.real else 32,)).tolist()
        first, tokens = answered(loaded, prompt, TOKENS if context.real else 8)
        later = median(tokens[min(WARM, len(tokens) // 2) :])
        stats = loaded.telemetry.stats(kv_bytes=0, vram_bytes=loaded.vram_bytes(), context_used=0, context_window=1)
        rows, moved = stats.rows, stats.bytes_per_token
        context.row(
            memory=f"{gib} GiB", tokens_s=1 / later, ms_a_token=1e3 * later, first_token_s=first,
            prompt=len(prompt), layers=depth, different=wide_pack.LAYERS,
            rows_there=None if rows is None else rows.ready, read_MB_a_token=(moved or 0) / 1e6,
            **(_profile(loaded, prompt, depth) if context.real else {}),
        )  # fmt: skip
        context.notes.append(told.reason)
        context.showed = f"{1 / later:.1f} tokens/s in {gib} GiB, the first one after {first:.2f} s"
    finally:
        loaded.close()


def answered(loaded: LoadedModel, prompt: list[int], tokens: int) -> tuple[float, list[float]]:
    """Seconds until the first token, and of each one after it, by the device's clock."""
    clock = loaded.telemetry.clock
    began = clock()
    loaded.telemetry.begin(1, len(prompt), began)
    times: list[float] = []
    for step in generate(
        loaded.decoder, KVCache(), prompt, Sampling(temperature=0), max_new_tokens=tokens, stop_ids=(),
        window=loaded.window, control=loaded.control, telemetry=loaded.telemetry,
    ):  # fmt: skip
        if step.token is not None:
            times.append(clock() if step.at is None else step.at)
    return times[0] - began, [after - before for before, after in pairwise(times)]


def _profile(loaded: LoadedModel, prompt: list[int], layers: int) -> dict[str, float]:
    """A token's milliseconds: of the GPU's kernels; and by layer, what the host does not wait and its thread's own."""
    from torch.profiler import ProfilerActivity, profile

    steps = generate(
        loaded.decoder, KVCache(), prompt, Sampling(temperature=0), max_new_tokens=PROFILED + WARM, stop_ids=(),
        window=loaded.window, control=loaded.control, telemetry=loaded.telemetry,
    )  # fmt: skip
    drawn = 0
    while drawn < WARM // 2:
        drawn += next(steps).token is not None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        torch.cuda.synchronize()
        began, used = time.perf_counter(), time.thread_time()
        for _ in range(PROFILED):
            next(steps)
        used, took = time.thread_time() - used, time.perf_counter() - began
        torch.cuda.synchronize()
    steps.close()
    events: Any = seen.key_averages()
    device = sum(event.self_device_time_total for event in events)
    waits = sum(event.self_cpu_time_total for event in events if event.key in _WAITS)
    scale = 1e3 / PROFILED
    return {
        "GPU_ms_a_token": device * 1e-6 * scale,
        "host_ms_a_layer": (took - waits * 1e-6) * scale / layers,
        "thread_ms_a_layer": used * scale / layers,
    }
