"""Every operation is tested on every backend that this machine has."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from floe_chat.kernels import operations
from floe_chat.kernels.cpu import build, native

from .oracle import INTERPRETED, Size, Subject


@pytest.fixture(scope="session", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Build the library where the package was installed without it."""
    try:
        native.library_path()
    except native.NativeUnavailableError:
        path = tmp_path_factory.mktemp("native") / "libfloe.so"
        try:
            build.build(path)
        except FileNotFoundError as error:
            pytest.skip(str(error))  # no compiler either: plain torch is what such a machine runs
        os.environ["FLOE_CPU_LIBRARY"] = str(path)


@pytest.fixture(params=native.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has, by name."""
    try:
        yield native.select_isa(request.param).name
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))  # this CPU lacks it
    finally:
        native.select_isa(None)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what no result may contain: NaN, or a far too large index."""
    plain = torch.empty

    def empty(*arguments: Any, **options: Any) -> torch.Tensor:
        made = plain(*arguments, **options)
        if made.is_meta or not made.numel():
            return made
        return made.fill_(float("nan") if made.is_floating_point() else 0x5A if made.itemsize == 1 else 1 << 20)

    monkeypatch.setattr(torch, "empty", empty)


if INTERPRETED:
    # It replaces all of Triton's language at each call of a function and puts it back after a launch: half of the time.
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda _scope: None  # pyright: ignore
    # It computes whether integers overflow, a third of the time, and without "debug" drops the answer.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@pytest.fixture(autouse=INTERPRETED)
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is a loop of Python's there: four slices of an expert's neurons show what sixteen do."""
    monkeypatch.setattr("floe_chat.kernels.triton.launch.WAVES", 4)


@pytest.fixture(params=["reference", "native"])
def on_backend(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """The reference, one instruction set's code or the machine's own ("native"), or Triton's; on poisoned memory."""
    yield from subject(request.param, request)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Subject, Size]]:
    """A backend, and the size that it computes."""
    for one in subject(request.param[0], request):
        yield one, request.param[1]


def subject(name: str, request: pytest.FixtureRequest) -> Iterator[Subject]:
    request.getfixturevalue("poisoned")
    if name == "reference":
        request.getfixturevalue("no_library")
        yield Subject(name, operations)
    elif name == "triton":
        triton: Any = pytest.importorskip("floe_chat.kernels.triton")
        # The smallest blocks there are.
        request.getfixturevalue("monkeypatch").setattr(triton.dense, "SCRATCH", 1)
        yield Subject(name, triton, torch.device("cpu" if INTERPRETED else "cuda"))
    else:
        try:
            native.select_isa(None if name == "native" else name)
        except native.NativeUnavailableError as error:
            pytest.skip(str(error))  # this CPU lacks it, or nothing was compiled
        yield Subject(name, native)
        native.select_isa(None)
