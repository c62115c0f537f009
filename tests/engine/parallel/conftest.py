"""Groups of processes, started once for all tests of a worker, and small models of three families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import EXACT

from ... import families
from ...helpers import make_pack
from .alone import Alone
from .processes import Processes

# By what is special: experts with biases; shared experts, groups of experts and layers without any.
FAMILIES = {
    "gpt_oss": {**families.MODELS["gpt_oss"], "num_local_experts": 6, "intermediate_size": 32},
    "deepseek_v2": {**families.MODELS["deepseek_v2"], "moe_intermediate_size": 24},
}


@pytest.fixture(scope="session")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Four processes."""
    started = Processes(4, tmp_path_factory.mktemp("four"), forked=True)
    yield started
    started.kill()


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model, and 16-bit packs of FAMILIES."""
    folder = tmp_path_factory.mktemp("families")
    found = {"demo": asset("demo", "packed")}
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in FAMILIES.items():
            patch.setitem(families.MODELS, name, sizes)
            make_pack(families.make(name, folder / name), folder / f"{name}-packed", EXACT)
            found[name] = folder / f"{name}-packed"
    return found


@pytest.fixture(scope="session")
def alone(packs: dict[str, Path]) -> dict[str, Alone]:
    return {name: Alone(pack) for name, pack in packs.items()}
