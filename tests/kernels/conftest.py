"""Every operation is tested on every backend that this machine has for the CPU."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from floe_chat.kernels.cpu import build, native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With FLOE_TEST_EVERY=n only every n-th case of each test runs, its first one in any case."""
    every, seen = int(os.environ.get("FLOE_TEST_EVERY", "1")), Counter[str]()
    kept: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % every == 0:
            kept.append(item)
        seen[test] += 1
    items[:] = kept


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


@pytest.fixture(params=["reference", "native"])
def on_backend(request: pytest.FixtureRequest) -> str:
    """Makes `floe_chat.kernels` compute with one backend, whichever the machine would choose."""
    name: str = request.param
    if name == "native":
        try:
            native.isa()
        except native.NativeUnavailableError as error:
            pytest.skip(str(error))
    else:
        request.getfixturevalue("no_library")
    return name
