"""Which kernels a device gets, and what is said about it."""

from __future__ import annotations

import pytest
from floe_chat.kernels import backend
from floe_chat.kernels.cpu import native


def unavailable() -> native.Isa:
    """What happens where the library was not built."""
    raise native.NativeUnavailableError("it was not compiled")


def test_the_compiled_kernels_are_chosen_where_they_were_built() -> None:
    try:
        isa = native.isa()
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))
    chosen = backend.choose.__wrapped__("cpu")
    assert chosen.name == f"native {isa.name}"
    assert chosen.reason == isa.reason
    assert chosen.up_gemv is native.up_gemv


def test_without_them_the_reference_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOE_CPU_ISA", raising=False)
    monkeypatch.setattr(native, "isa", unavailable)
    chosen = backend.choose.__wrapped__("cpu")
    assert chosen.name == "reference"
    assert "it was not compiled" in chosen.reason


def test_an_instruction_set_that_was_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOE_CPU_ISA", "avx512")
    monkeypatch.setattr(native, "isa", unavailable)
    with pytest.raises(native.NativeUnavailableError):
        backend.choose.__wrapped__("cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="valid are cpu, cuda"):
        backend.choose("tpu")
