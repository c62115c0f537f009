"""The link to a GPU: its order, waits and bytes beside a stand-in for the driver (fake_driver.cpp), and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.offload.links import cuda_link
from floe_chat.engine.offload.links.cuda_link import LANES, CardParts, CudaLink, head_of, open_cuda_link
from floe_chat.engine.offload.links.transfer import Kind, Transfer
from floe_chat.engine.offload.offload import Parts
from floe_chat.kernels.cpu import binding
from floe_chat.kernels.cpu.binding import array_of, codes, records
from floe_chat.models.errors import FloeError
from torch import Tensor

from .driver import answer, silent
from .moving import NBYTES, SENTINEL, SLOTS, Sender, until
from .offloading import needs_of
from .test_link import CONFIG

CPU = torch.device("cpu")
COPY, LAUNCH, RECORD, WAIT, SYNCHRONIZE = range(1, 6)
NAMES = (
    *("set_context", "push", "pop", "copy", "launch", "record", "query", "synchronize", "elapsed", "wait"),
    *("address", "text"),
)
OTHERS, OWN = 76, 77  # contexts: of the card that is current where links are used, and of theirs


class Card:
    """The stand-in, with two cards, and what links to the second one need. compute: its default stream."""

    def __init__(self, library: Any) -> None:
        self.library = library
        library.fake_reset()
        library.fake_card(OTHERS)
        self.compute: int = library.fake_card(OWN)
        library.fake_set_context(OTHERS)
        self.opened: list[CudaLink] = []
        self.kept: list[tuple[Tensor, object]] = []

    def parts(self, chunk: int, *, in_place: bool, stalls: int = 8) -> CardParts:
        fake, size = self.library, head_of(chunk) + (0 if in_place else chunk * NBYTES)
        addresses = {name: ctypes.cast(getattr(fake, f"fake_{name}"), ctypes.c_void_p).value for name in NAMES}
        streams, lanes, held = [fake.fake_stream(OWN) for _ in range(2)], list[Any](), list[object]()
        for i in range(LANES):
            here, there = (torch.full((size,), SENTINEL, dtype=torch.uint8) for _ in range(2))
            graph = fake.fake_graph(there.data_ptr(), chunk, head_of(chunk), NBYTES, int(in_place))
            handles = {"stream": streams[i % 2], "event": fake.fake_event(OWN), "fence": fake.fake_event(OWN)}
            lanes.append(records.lane(here=here, there=there.data_ptr(), scatter=graph, **handles))
            held += [here, there]
        pairs = np.array([[fake.fake_event(OWN), fake.fake_event(OWN)] for _ in range(stalls)], np.int64).reshape(-1, 2)
        return CardParts(records.driver(context=OWN, **addresses), lanes, pairs, 0, streams, held)

    def link(self, chunk: int = 10, *, in_place: bool = False, pinned: Any = None, stalls: int = 8) -> CudaLink:
        parts = self.parts(chunk, in_place=in_place, stalls=stalls)
        self.opened.append(CudaLink(CPU, NBYTES, parts, chunk=chunk, zero_copy=in_place, pinned=pinned))
        return self.opened[-1]

    def noted(self) -> list[tuple[int, int]]:
        count = self.library.fake_noted(0, None)
        found = np.zeros(count, np.int64)
        self.library.fake_noted(count, ctypes.c_void_p(found.ctypes.data))
        return [(int(what), int(where)) for what, where in found.reshape(-1, 2)]

    def calls(self, what: int) -> list[int]:
        return [where for each, where in self.noted() if each == what]

    def run(self, on: bool = True) -> None:
        self.library.fake_run(int(on))

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        self.run()
        yield
        self.run(False)

    def pin(self, tensor: Tensor) -> None:
        self.library.fake_pin(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def always(_tensor: Tensor) -> bool:
    return True


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs g++ on Linux")
    built = tmp_path_factory.mktemp("driver") / "driver.so"
    source = Path(__file__).parent / "fake_driver.cpp"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-pthread", "-o", built], check=True)
    made = ctypes.CDLL(str(built))
    for name in ("stream", "card", "event", "graph", "noted", "context"):
        getattr(made, f"fake_{name}").restype = ctypes.c_int64
    made.fake_graph.argtypes = [ctypes.c_int64] * 5
    made.fake_pin.argtypes = [ctypes.c_int64] * 2
    made.fake_fail.argtypes = [ctypes.c_int64] * 2
    made.fake_noted.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    return made


@pytest.fixture
def card(library: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card(library)

    def keep(tensor: Tensor, stream: object) -> None:
        made.kept.append((tensor, stream))

    monkeypatch.setattr(Tensor, "record_stream", keep)
    yield made
    made.run()
    for link in made.opened:
        link.close()
    assert library.fake_context() == OTHERS  # as the caller had it


@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in-place"])
def test_the_cuda_link_moves_rows_through_its_lanes(
    in_place: bool, card: Card, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", always)
    card.pin(source)
    link, sender = card.link(7, in_place=in_place), Sender(source, target)
    transfers = [sender.make(count, urgent=bool(count % 2)) for count in (1, 50, 7, 60)]
    for transfer in transfers:
        link.submit(transfer)
    streams = card.opened[0]._streams  # pyright: ignore[reportPrivateUsage]
    with card.running():
        for transfer in transfers:
            link.wait(transfer)
        link.drain()
        assert all(map(sender.there, transfers))
    assert sender.untouched(sender.free)
    chunks = 1 + 8 + 1 + 9
    assert len(card.calls(COPY)) == len(card.calls(LAUNCH)) == chunks
    assert [streams[(1 + i) % 2] for i in range(chunks)] == card.calls(COPY) == card.calls(LAUNCH)
    assert [(tensor is target, stream) for tensor, stream in card.kept] == [(True, s) for s in streams]
    other = Sender(source, torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8))
    again = other.make(3)
    link.submit(again)  # into another pool
    with card.running():
        link.wait(again)
        link.close()
    assert other.there(again) and len(card.kept) == 4 and card.kept[-1][0] is other.target
    assert link.bytes_moved == 121 * NBYTES and link.busy_s > 0


def test_a_new_target_is_written_to_behind_what_the_compute_stream_does(
    card: Card, source: Tensor, target: Tensor
) -> None:
    link, sender = card.link(), Sender(source, target)
    transfer = sender.make(10, urgent=True)
    link.submit(transfer)
    until(lambda: bool(card.calls(COPY)))
    first = [what for what, _ in card.noted()]
    assert first.index(WAIT) < first.index(COPY) and first.count(WAIT) == LANES
    link.submit(sender.make(10))  # into the same one: it does not wait for the compute stream
    with card.running():
        link.drain()
    assert len(card.calls(COPY)) == 2 and len(card.calls(WAIT)) == LANES


def test_the_compute_stream_waits_and_the_host_does_not(card: Card, source: Tensor, target: Tensor) -> None:
    link, sender = card.link(), Sender(source, target)
    urgent, prefetch = sender.make(25, urgent=True), sender.make(10)
    link.submit(urgent)
    link.submit(prefetch)
    before = len(card.calls(WAIT))
    assert link.wait(urgent) >= 0
    assert card.calls(WAIT)[before:] == [card.compute] * 3 and sender.untouched(urgent.slots.tolist())
    assert urgent.done and link.finished() == [urgent]
    assert not prefetch.done and link.queued_bytes() == 35 * NBYTES  # nothing has landed
    with card.running():
        link.drain()
        assert link.finished() == [prefetch] and prefetch.done and link.bytes_moved == 35 * NBYTES
        later = sender.make(1)
        link.submit(later)
        # The wait of the stream is reported once it is known: here 0.25 s for each event, as the stand-in counts.
        assert link.wait(later) >= 0.25 and link.wait(prefetch) == 0.0


def test_who_waits_sends_while_the_links_thread_waits_for_the_device(
    card: Card, source: Tensor, target: Tensor
) -> None:
    link, sender = card.link(), Sender(source, target)
    link.submit(sender.make(10))
    until(lambda: bool(card.calls(SYNCHRONIZE)))  # the thread's: nothing lands, and it does nothing more
    urgent, later = sender.make(25, urgent=True), sender.make(10)
    link.submit(urgent)
    link.submit(later)
    link.wait(urgent)
    assert len(card.calls(COPY)) == 1 + 3 and sender.untouched(urgent.slots.tolist())
    with card.running():
        link.drain()
    assert sender.there(urgent) and sender.there(later)


def test_a_lane_is_used_again_only_once_its_rows_have_landed(card: Card, source: Tensor, target: Tensor) -> None:
    link, sender = card.link(), Sender(source, target)
    transfer = sender.make(10 * (LANES + 3))
    link.submit(transfer)
    until(lambda: len(card.calls(COPY)) == LANES and bool(card.calls(SYNCHRONIZE)))
    assert len(card.calls(COPY)) == LANES
    with card.running():
        link.drain()
        assert sender.there(transfer) and len(card.calls(COPY)) == LANES + 3


def test_reading_in_place_needs_pinned_rows(
    card: Card, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, sender = card.link(in_place=True), Sender(source, target)
    with pytest.raises(ValueError, match="pin it"):
        link.submit(sender.make(1))
    monkeypatch.setattr(Tensor, "is_pinned", always)
    with pytest.raises(RuntimeError, match="DEVICE_FAILED"):  # torch says so, the driver does not
        link.submit(sender.make(1))
    assert not card.calls(COPY) and link.queued_bytes() == 0


def test_rows_stay_pinned_until_no_kernel_reads_them(
    card: Card, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []

    class Held:
        def release(self) -> None:
            released.append(int(sender.there(transfer)))

    monkeypatch.setattr(Tensor, "is_pinned", always)
    card.pin(source)
    link, sender = card.link(in_place=True, pinned=Held()), Sender(source, target)
    transfer = sender.make(30)
    link.submit(transfer)
    link.wait(transfer)  # the compute stream is behind the kernels that read; they have not run
    closer = threading.Thread(target=link.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive() and not released
    with card.running():
        closer.join()
    assert released == [1]


@pytest.mark.parametrize("what", [COPY, LAUNCH, RECORD, SYNCHRONIZE])
def test_a_failure_of_the_driver_reaches_whoever_waits_or_submits(
    what: int, card: Card, source: Tensor, target: Tensor
) -> None:
    link, sender = card.link(), Sender(source, target)
    lost, other = sender.make(10 * (LANES + 2), urgent=True), sender.make(5)
    # After the first chunk; a new target's fences are recorded before it.
    card.library.fake_fail(what, {RECORD: LANES + 1, SYNCHRONIZE: 0}.get(what, 1))

    def all_of_it() -> None:
        for transfer in (lost, other):
            link.submit(transfer)
        link.wait(lost)
        link.drain()

    for action in (all_of_it, lambda: link.submit(sender.make(1)), link.drain):
        with pytest.raises(RuntimeError, match="the card is gone"):
            action()
    assert not lost.done


def test_the_compute_streams_failure_is_told(card: Card, source: Tensor, target: Tensor) -> None:
    link, sender = card.link(), Sender(source, target)
    transfer = sender.make(5)
    link.submit(transfer)
    until(lambda: len(card.calls(LAUNCH)) == 1)
    card.library.fake_fail(WAIT, 0)
    for action in (lambda: link.wait(transfer), lambda: link.submit(sender.make(1))):
        with pytest.raises(RuntimeError, match="the card is gone"):
            action()


@pytest.mark.parametrize("seed", range(4))
def test_many_random_transfers(seed: int, card: Card, source: Tensor, target: Tensor) -> None:
    """Streams run now and then; what the compute stream would read behind a wait is always there."""
    sender = Sender(source, target, seed)
    random, link = sender.random, card.link((1, 7, 20, 64)[seed])
    under_way: list[Transfer] = []
    card.run()
    for turn in range(80):
        if random.random() < 0.6 and len(sender.free) > 60:
            under_way.append(sender.make(int(random.integers(0, 60)), urgent=bool(random.random() < 0.3)))
            link.submit(under_way[-1])
        elif under_way:
            wanted = under_way[int(random.integers(len(under_way)))]
            link.wait(wanted)
            assert wanted.done and sender.there(wanted)  # the streams run: behind the wait is now
        for transfer in link.finished():
            under_way.remove(transfer)
            sender.free = transfer.slots.tolist() + sender.free
        card.run(turn % 5 != 0)
        card.run()
    link.drain()
    assert link.queued_bytes() == 0


@pytest.mark.parametrize(
    "change", [{"head": 64}, {"head": 129}, {"lanes": None}, {"driver": None}, {"stall_count": -1}]
)
def test_lanes_that_do_not_fit_get_no_handle(change: dict[str, Any], card: Card) -> None:
    parts = card.parts(10, in_place=False)
    given = {"kind": codes.LINK_CUDA, "driver": parts.driver, "lanes": array_of(parts.lanes), "stalls": parts.stalls}
    given |= {"row_bytes": NBYTES, "chunk": 10, "stall_count": 8, "head": head_of(10), "compute": card.compute}
    config = records.link_config(**{**CONFIG, **given, **change})
    before = card.noted()
    assert binding.library().link_open(config) == codes.BAD_SHAPE and card.noted() == before


def test_a_compiled_call_meets_a_new_target_too(card: Card, source: Tensor, target: Tensor) -> None:
    link = card.link()
    handle, _, _ = link.ends(source, target)
    assert handle == link.handle and len(card.calls(WAIT)) == LANES and len(card.kept) == 2
    link.ends(source, target)
    assert len(card.calls(WAIT)) == LANES


def test_without_a_driver_no_link_is_made_and_it_says_why() -> None:
    with pytest.raises(FloeError, match="No rows can be sent to cpu") as refused:
        open_cuda_link(CPU, NBYTES, chunk=10)
    assert refused.value.cause == "cpu has no driver." and refused.value.hint and refused.value.exit_code == 1


def test_a_graph_that_cannot_be_captured_is_a_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([RuntimeError("CUDA error: operation not permitted.\nCompile with"), torch.OutOfMemoryError("full")])

    def parts(*_given: object, **_how: object) -> CardParts:
        raise next(errors)

    monkeypatch.setattr(cuda_link, "parts_on", parts)
    with pytest.raises(FloeError) as refused:
        open_cuda_link(CPU, NBYTES, chunk=10)
    assert refused.value.cause == "CUDA error: operation not permitted." and refused.value.hint
    with pytest.raises(torch.OutOfMemoryError):  # which the session explains
        open_cuda_link(CPU, NBYTES, chunk=10)


def test_the_drivers_functions_are_found_by_name() -> None:
    class Library:
        def __getattr__(self, name: str) -> Any:
            assert name.startswith("cu")
            return FUNCTION

        def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
            context._obj.value = 5
            return 0

    found = cuda_link.driver_of(Library())
    address = ctypes.cast(FUNCTION, ctypes.c_void_p).value
    assert found.context == 5 and all(getattr(found, name) == address for name in NAMES)


def test_amds_driver_has_the_same_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = pytest.importorskip("triton.backends.amd")
    header = Path(backends.__file__).with_name("include") / "hip" / "hip_runtime_api.h"
    declared = set(re.findall(r"^hipError_t (hip\w+)\(", header.read_text(encoding="utf-8"), re.MULTILINE))

    class Library:
        def __getattr__(self, name: str) -> Any:
            assert name in declared
            return FUNCTION

        def hipCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
            context._obj.value = 7
            return 0

    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert cuda_link.driver_of(Library()).context == 7


@ctypes.CFUNCTYPE(ctypes.c_int)
def FUNCTION() -> int:  # noqa: N802
    return 0


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
    needs = needs_of(tiny_pack)
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
