"""Which kernels a device gets, and what is said about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import floe_chat.kernels
import pytest
import torch
from floe_chat.kernels import backend, maker
from floe_chat.kernels.cpu import native
from torch import Tensor


def test_the_compiled_kernels_are_chosen_where_they_were_built() -> None:
    try:
        isa = native.isa()
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))
    chosen = backend.choose.__wrapped__("cpu")
    assert chosen.name == f"native {isa.name}"
    assert chosen.reason == isa.reason
    assert chosen.signal_gemv is native.signal_gemv


@pytest.mark.usefixtures("no_library")
def test_without_them_the_reference_runs_and_says_why() -> None:
    chosen = backend.choose.__wrapped__("cpu")
    assert chosen.name == "reference"
    assert "it was not compiled" in chosen.reason


@pytest.mark.usefixtures("no_library")
def test_an_instruction_set_that_was_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_CPU_ISA", "avx512")
    with pytest.raises(native.NativeUnavailableError):
        backend.choose.__wrapped__("cpu")


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], failure: str = "") -> None:
    """torch sees CUDA devices of these compute capabilities, on which a first kernel fails so."""
    monkeypatch.setattr(backend, "_cuda", backend._cuda.__wrapped__)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(backend, "failure", {f"cuda:{at}": failure for at in range(len(capabilities))}.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)


def test_gpus_that_triton_supports_get_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("floe_chat.kernels.triton")
    pretend_gpus(monkeypatch, (8, 6))
    chosen = backend.choose.__wrapped__("cuda")
    assert chosen.name == "triton" and chosen.moe_step is kernels.moe_step
    assert "8.6" in chosen.reason


def test_cards_of_amd_get_the_same_kernels_which_nobody_has_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("floe_chat.kernels.triton")
    pretend_gpus(monkeypatch, (11, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = SimpleNamespace(gcnArchName="gfx1100:sramecc-:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: found}.__getitem__)
    chosen = backend.choose.__wrapped__("cuda")
    assert chosen.name == "triton" and "gfx1100, untested" in chosen.reason and chosen.experts_swiglu is None


@pytest.mark.parametrize(("name", "found"), [("cuda", ""), ("hip", ""), ("xpu", "Intel"), ("none", "without CUDA")])
def test_the_makers_of_cards_that_are_used(name: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, each, "7.0" if each == name else None)
    assert (found in maker.without()) and bool(found) == bool(maker.without())
    assert maker.has_ptx() == (name in ("cuda", "none")) and maker.is_amd() == (name == "hip")


def test_each_gpu_gets_what_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("floe_chat.kernels.triton")
    pretend_gpus(monkeypatch, (8, 6), (7, 0), (9, 0), (7, 5))
    chosen = [
        backend.choose.__wrapped__(device) for device in ("cuda", "cuda:0", torch.device("cuda", 1), "cuda:2", "cuda:3")
    ]
    assert [one.name for one in chosen] == ["triton", "triton", "reference", "triton", "triton"]
    assert [one.device for one in chosen] == ["cuda:0", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    for at_once in ([one.experts_swiglu for one in chosen], [one.expert_at_once for one in chosen]):
        assert [one is not None for one in at_once] == [one.grouped for one in chosen]
    assert [one.grouped for one in chosen] == [True, True, False, True, False]
    assert "7.5 or newer" in chosen[2].reason and "7.0" in chosen[2].reason
    for absent in ("cuda:4", "cuda:-1", "cuda:x"):
        with pytest.raises(ValueError, match="torch sees 4"):
            backend.choose.__wrapped__(absent)


def test_without_triton_a_gpu_gets_the_reference_and_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, (8, 6))
    monkeypatch.delattr(floe_chat.kernels, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "floe_chat.kernels.triton", None)
    chosen = backend.choose.__wrapped__("cuda")
    assert chosen.name == "reference"
    assert "Triton cannot be imported" in chosen.reason


def test_where_a_first_kernel_cannot_be_compiled_a_gpu_gets_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("floe_chat.kernels.triton")
    pretend_gpus(monkeypatch, (8, 6), failure="Failed to find C compiler.")
    chosen = backend.choose.__wrapped__("cuda")
    assert chosen.name == "reference" and chosen.reason.endswith("do not run here: Failed to find C compiler.")
    assert backend.foreseen(0) == ("triton", "Triton kernels for compute capability 8.6")


def test_a_first_kernel_is_compared_and_its_failure_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("floe_chat.kernels.triton")

    def with_kernel(scatter: Callable[[Tensor, Tensor, Tensor], object]) -> str:
        monkeypatch.setattr(kernels, "pool_scatter", scatter)
        return backend.failure("cpu")

    def out_of(error: Exception) -> Callable[[Tensor, Tensor, Tensor], object]:
        def scatter(*_: Tensor) -> None:
            raise error

        return scatter

    assert with_kernel(lambda pool, slots, records: pool.index_copy_(0, slots, records)) == ""
    assert "wrong" in with_kernel(lambda pool, _slots, records: pool.copy_(records))
    assert with_kernel(out_of(RuntimeError("Failed to find C compiler.\nmore"))) == "Failed to find C compiler."
    assert with_kernel(out_of(KeyError())) == "KeyError"
    with pytest.raises(torch.OutOfMemoryError):
        with_kernel(out_of(torch.OutOfMemoryError("CUDA out of memory")))


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="valid are cpu, cuda and cuda:N"):
        backend.choose("tpu")
