"""The link to a GPU: its order and its waits beside a stand-in for torch.cuda; its bytes where there is a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.links.compiled_cuda import CompiledCudaLink, open_cuda_link
from floe_chat.engine.offload.links.cuda_link import CudaLink
from floe_chat.engine.offload.links.pinning import Pinned
from floe_chat.engine.offload.links.threaded_link import LANES
from floe_chat.engine.offload.links.transfer import Kind, Link, MeasuredLink
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.kernels import operations as kernels
from floe_chat.models.checkpoint import read_config
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from .driver import answer, silent
from .fake_cuda import FakeCuda
from .moving import NBYTES, SENTINEL, SLOTS, Sender, compute_with, until


@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
def test_the_cuda_link_moves_rows_through_its_lanes(
    zero_copy: bool, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    held = Pinned([source], torch.device("cpu")) if zero_copy else None
    link: Link = CudaLink(torch.device("cpu"), NBYTES, chunk=7, zero_copy=zero_copy, pinned=held)
    sender = Sender(source, target)
    transfers = [sender.make(count, urgent=bool(count % 2)) for count in (1, 50, 7, 60)]
    for transfer in transfers:
        link.submit(transfer)
    with cuda.running():
        for transfer in transfers:
            link.wait(transfer)
            assert sender.there(transfer)
    assert sender.untouched(sender.free)
    assert len(cuda.streams) == 2 and [s.behind for s in cuda.streams] == [[cuda.compute]] * 2
    assert [(tensor is target, stream) for tensor, stream in cuda.kept] == [(True, s) for s in cuda.streams]
    assert {event.stream for event in cuda.recorded} == set(cuda.streams) and not cuda.current
    assert len(set(map(id, cuda.recorded))) == LANES and len(cuda.recorded) == 1 + 8 + 1 + 9
    other = Sender(source, torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8))
    again = other.make(3)
    link.submit(again)  # into another pool
    with cuda.running():
        link.wait(again)
        link.close()
    assert other.there(again) and len(cuda.kept) == 4 and cuda.kept[-1][0] is other.target
    assert link.bytes_moved == 121 * NBYTES and not cuda.registered


def test_the_compute_stream_waits_and_the_host_does_not(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    urgent, prefetch = sender.make(25, urgent=True), sender.make(10)
    link.submit(urgent)
    link.submit(prefetch)
    waited = link.wait(urgent)
    assert cuda.compute.behind == cuda.recorded[:3] and not any(event.query() for event in cuda.recorded)
    assert urgent.done and link.finished() == [urgent]
    assert not prefetch.done and link.queued_bytes() == 35 * NBYTES  # nothing has landed
    with cuda.running():
        link.drain()
    assert prefetch.done and link.finished() == [prefetch] and link.bytes_moved == 35 * NBYTES
    assert waited >= 0.25 and link.wait(prefetch) == 0.0  # the stream's quarter of a second is told once
    link.close()


def test_the_compute_stream_cannot_pass_a_chunk_that_is_still_being_packed(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernels.choose("cpu")
    returned: list[bool] = []

    def packing(rows: Any, expert: int, neurons: Tensor, out: Tensor) -> None:
        chosen.gather_rows(rows, expert, neurons, out)
        if neurons.numel() == 5:  # the last chunk of two
            waiter.start()
            waiter.join(0.05)
            returned.append(not waiter.is_alive())

    compute_with(replace(chosen, gather_rows=packing), monkeypatch)
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    transfer = sender.make(15)
    waiter = threading.Thread(target=link.wait, args=(transfer,))
    link.submit(transfer)
    until(lambda: bool(returned))
    waiter.join()
    assert returned == [False] and cuda.compute.behind == cuda.recorded and len(cuda.recorded) == 2
    with cuda.running():
        link.close()


def test_reading_in_place_needs_pinned_rows_and_kernels(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, zero_copy=True), Sender(source, target)
    with pytest.raises(ValueError, match="pin it"):
        link.submit(sender.make(1))
    link.close()
    compute_with(replace(kernels.choose("cpu"), name="reference", reason="an old card"), monkeypatch)
    with pytest.raises(ValueError, match="an old card"):
        CudaLink(torch.device("cpu"), NBYTES, zero_copy=True)


def test_rows_stay_pinned_until_no_kernel_reads_them(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    held = Pinned([source], torch.device("cpu"))
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10, zero_copy=True, pinned=held), Sender(source, target)
    transfer = sender.make(30)
    link.submit(transfer)
    link.wait(transfer)  # the compute stream is behind the kernels that read; they have not run
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and cuda.registered and not cuda.recorded[-1].query()
    with cuda.running():
        closer.join()
    assert not cuda.registered and sender.there(transfer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
@pytest.mark.parametrize("streams", [0, 1, 2, 4], ids=lambda streams: f"{streams} streams" if streams else "compiled")
def test_a_gpu_reads_what_was_waited_for(streams: int, zero_copy: bool) -> None:
    source = torch.randint(0, 256, (4000, 4608), dtype=torch.uint8).pin_memory()
    target = torch.full((3000, 4608), SENTINEL, dtype=torch.uint8, device="cuda")
    device = torch.device("cuda")
    link: MeasuredLink
    if streams:
        link = CudaLink(device, 4608, chunk=64, streams=streams, zero_copy=zero_copy)
    else:
        link = open_cuda_link(device, 4608, chunk=64, zero_copy=zero_copy)
        assert isinstance(link, CompiledCudaLink)
    sender = Sender(source, target, streams)
    for _ in range(200):
        prefetch, urgent = sender.make(700), sender.make(500, urgent=True)
        link.submit(prefetch)
        link.submit(urgent)
        for transfer in (urgent, prefetch):
            link.wait(transfer)
            got = target[torch.from_numpy(transfer.slots).to("cuda", torch.int64)]  # on the compute stream, at once
            assert torch.equal(got.cpu(), source[torch.from_numpy(transfer.index)])
            sender.free = transfer.slots.tolist() + sender.free
    link.drain()
    assert len(link.finished()) == 400 and link.bytes_moved == 200 * 1200 * 4608 and link.busy_s > 0
    link.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_answer_on_a_gpu_is_the_same_by_either_kind_of_transfer(tiny_pack: Path) -> None:
    packed = PackedModel.open(tiny_pack)
    layers = [packed.layer(index) for index in range(2)]
    needs = Needs.of(packed.manifest, layers, read_config(tiny_pack), 2)
    prompt = [1, *[40 + n % 200 for n in range(60)]]
    found: list[tuple[Tensor, list[int]]] = []
    kinds: tuple[Kind, ...] = ("staged", "in place")
    for kind in kinds:
        # The CPU's share and what is fetched ahead follow the clock, and sums their order; a transfer changes neither.
        parts = Parts(cpu=False, predictor="none", transfer=kind, mix=needs.every("pool"))
        loaded, told = load(tiny_pack, None, "cuda", silent, vram=needs.least(), parts=parts, library=True)
        assert loaded.offload is not None and f"rows are {'staged' if kind == 'staged' else 'read'}" in told.reason
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([prompt], device="cuda")).logits[0]
        found.append((logits.cpu(), answer(loaded, prompt, max_new_tokens=24).tokens))
        assert loaded.offload.moved()[0] > 0
        loaded.close()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
