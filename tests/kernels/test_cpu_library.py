"""The compiled library in processes: after a fork, told by the environment, and what it says of itself."""

from __future__ import annotations

import os

import pytest
import torch
from floe_chat.kernels.cpu import binding, native

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the other process is forked")
def test_works_after_a_fork() -> None:
    data = torch.arange(1 << 22, dtype=torch.uint8)
    before = native.read(data)
    if (child := os.fork()) == 0:
        # Whatever happens here, pytest must not go on in two processes.
        try:
            os._exit(0 if native.read(data) == before else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert native.read(data) == before


def test_an_instruction_set_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_CPU_LIBRARY", str(native.library_path()))
    try:
        monkeypatch.setenv("FLOE_CPU_ISA", "portable")
        binding.library.cache_clear()
        assert native.isa().name == "portable"
        monkeypatch.setenv("FLOE_CPU_ISA", "sse9")
        binding.library.cache_clear()
        with pytest.raises(binding.NativeUnavailableError, match="valid are avx512, avx2, portable"):
            native.isa()
    finally:
        monkeypatch.undo()
        binding.library.cache_clear()
        native.select_isa(None)


def test_reason_is_on_record() -> None:
    chosen = native.isa()
    assert chosen.name in native.ISAS
    if "FLOE_CPU_ISA" in os.environ:
        assert chosen.reason == "it was asked for"
    else:
        assert "this CPU" in chosen.reason or "x86" in chosen.reason


def test_hugepages_are_asked_for_without_harm() -> None:
    data = torch.zeros(1 << 22, dtype=torch.uint8)
    native.advise_hugepages(data)
    assert not data.any()
