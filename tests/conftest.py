"""Fixtures that many tests share. Every test runs with data, cache and configuration folders of its own."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from .forking import Nursery

# Looking for garbage among what is imported and collected, which all stays, took a quarter of that time.
gc.disable()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read when torch is imported: what tests compute is so small that sharing it out costs more than it gains.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
# With it each worker, and each process that tests start, would compile and instrument our files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A suite's files take less than a gigabyte, and a disk takes minutes to make and delete them.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and min(shutil.disk_usage(_MEMORY).free, psutil.virtual_memory().available) > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_xdist_auto_num_workers() -> int:
    """More workers than cores: tests of screens and downloads wait for much of their time."""
    return 3 * (psutil.cpu_count(logical=False) or 2) // 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test, not a fixed sample of them")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        os.environ["FLOE_TEST_ALL"] = "1"  # see `covering.py`


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Leave out what only `make test-all` runs, before an item is made of it.

    Of a test's cases stay those that bring a value of some axis (a size, an instruction set, a family) for the first
    time: each value is tried, not each combination. Of a test marked `some(N)`, whose cases other tests have too, stay
    N of these.
    """
    yield
    cases = metafunc._calls  # pyright: ignore[reportPrivateUsage]
    if metafunc.config.getoption("--all") or not cases:
        return
    seen: set[tuple[object, ...]] = set()
    kept: list[Any] = []
    for case in cases:
        values = {(axis, *_named(value)) for axis, value in case.params.items()}
        if not values <= seen and not any(mark.name == "thorough" for mark in case.marks):
            kept.append(case)
            seen |= values
    for most in (mark.args[0] for mark in metafunc.definition.iter_markers("some") if mark.args[0] < len(kept)):
        kept = [kept[number * len(kept) // most] for number in range(most)]
    cases[:] = kept or cases[:1]  # without any, pytest would make a test without arguments


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests for `make test-all`, and begin with the longest: begun last, one keeps one worker busy alone."""
    if not config.getoption("--all"):
        left = [item for item in items if item.get_closest_marker("thorough") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("thorough") is None]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """As many threads of torch's after a test as before: sums depend on that, and some tests set it."""
    torch, modules = sys.modules.get("torch"), len(sys.modules)
    before = torch and torch.get_num_threads()
    done = yield
    if len(sys.modules) > modules + 200:
        gc.freeze()  # as `pytest_collection_finish` does; what transformers has is imported by the first test with it
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)
    return done


def _named(value: object) -> tuple[type, object]:
    """What tells a case's value from another. Its text would take seconds: some are tensors, or megabytes."""
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not in what was imported: it took a third of the screens' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """Frozen, what libraries hold would be reported as leaks at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def few_tokens() -> Iterator[None]:
    """What is packed is calibrated on 1,024 tokens of a text, the least allowed: models of tests need no more."""
    from floe_chat.models.packing import calibration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "TEXT_SHAPE", (4, 256))
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_tokenizers() -> Iterator[None]:
    """Tokenizers' processes start by a fork, see forking.py."""
    from floe_chat.models.tokenizer import chat_process

    if sys.platform != "linux":
        yield
        return
    nursery = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        forking = SimpleNamespace(Popen=nursery.fork, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
        patch.setattr(chat_process, "subprocess", forking)
        yield
    nursery.close()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that do not exist yet; numbered here, since pytest looks through all of them each time."""
    base = tmp_path_factory.mktemp("homes")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_folders(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, so that no test reads or writes the user's own files."""
    home = next(homes)
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture
def every_case(request: pytest.FixtureRequest) -> bool:
    """Whether a test that loops over cases takes all of them, not a sample."""
    return bool(request.config.getoption("--all"))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels' library is not there; what was chosen meanwhile is forgotten afterwards."""
    from floe_chat.kernels import backend
    from floe_chat.kernels.cpu import binding

    def missing() -> Path:
        raise binding.NativeUnavailableError("it was not compiled")

    def forget() -> None:
        backend.choose.cache_clear()
        binding.library.cache_clear()

    forget()
    monkeypatch.delenv("FLOE_CPU_ISA", raising=False)
    monkeypatch.setattr(binding, "library_path", missing)
    yield
    forget()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Mixtral in bfloat16, in several shards."""
    from .helpers import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def tiny_pack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_checkpoint` with 2-bit up and 4-bit rows."""
    from floe_chat.models.packing.pack import PackSpec

    from .helpers import make_pack

    folder = tmp_path_factory.mktemp("packed") / "tiny"
    make_pack(tiny_checkpoint, folder, PackSpec())
    return folder


@pytest.fixture(scope="session")
def exact_pack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_checkpoint` with every weight at the source's 16 bit."""
    from floe_chat.models.packing.pack import EXACT

    from .helpers import make_pack

    folder = tmp_path_factory.mktemp("packed") / "tiny-exact"
    make_pack(tiny_checkpoint, folder, EXACT)
    return folder
