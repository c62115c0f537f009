"""The link to a GPU, where there is one: its bytes, and the answers that come over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.links.cuda_link import open_cuda_link
from floe_chat.engine.offload.links.transfer import Kind
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning.memory_plan import Needs
from floe_chat.models.checkpoint import read_config
from floe_chat.models.pack.packed_model import PackedModel
from torch import Tensor

from .driver import answer, silent
from .moving import SENTINEL, Sender


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
def test_a_gpu_reads_what_was_waited_for(zero_copy: bool) -> None:
    source = torch.randint(0, 256, (4000, 4608), dtype=torch.uint8).pin_memory()
    target = torch.full((3000, 4608), SENTINEL, dtype=torch.uint8, device="cuda")
    device = torch.device("cuda")
    link = open_cuda_link(device, 4608, chunk=64, zero_copy=zero_copy)
    sender = Sender(source, target)
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
