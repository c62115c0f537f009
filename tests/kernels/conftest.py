"""Every operation is tested on every backend that this machine has for the CPU."""

from __future__ import annotations

import pytest
from floe_chat import kernels
from floe_chat.kernels import backend
from floe_chat.kernels.cpu import native


@pytest.fixture(params=["reference", "native"])
def on_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `floe_chat.kernels` compute with one backend, whichever the machine would choose."""
    name: str = request.param
    if name == "native":
        try:
            native.isa()
        except native.NativeUnavailableError as error:
            pytest.skip(str(error))
    else:

        def unavailable() -> native.Isa:
            raise native.NativeUnavailableError("left out by the test")

        monkeypatch.setattr(native, "isa", unavailable)
        monkeypatch.setattr(kernels, "choose", backend.choose.__wrapped__)
    return name
