"""Which torch makes an idle GPU work, and by which command: on made-up systems, drivers and environments."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.machine import hardware, torch_build
from floe_chat.engine.machine.gpus import Gpu

from .fake_nvml import device, library

PYTHON = "/opt/venv/bin/python"
INDEX = "https://download.pytorch.org/whl/"


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plain environment on Linux, with pip and a torch for the CPU alone."""
    a_torch(monkeypatch, "2.13.0+cpu", None)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", PYTHON)
    has_pip(monkeypatch, there=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def a_torch(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, *, works: bool = False) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)


def has_pip(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    def find(name: str) -> str | None:
        return name if there else None

    monkeypatch.setattr(importlib.util, "find_spec", find)


def a_card(cuda: int | None = 13000, capability: tuple[int, int] = (8, 6)) -> Any:
    return library([device(capability=capability)], cuda=cuda)


def command(said: str) -> str:
    return said.split("`")[1]


def test_one_sentence_names_cause_card_and_command() -> None:
    assert torch_build.remedy(a_card()) == (
        "This torch (2.13.0+cpu) is built without CUDA; to use the NVIDIA GeForce RTX 3090, quit floe-chat and run "
        f"`{PYTHON} -m pip install torch==2.13.0+cu130 --index-url {INDEX}cu130`."
    )


@pytest.mark.parametrize(
    ("cuda", "capability", "index", "driver"),
    [
        (13020, (8, 6), "cu130", ""),
        (13000, (12, 0), "cu130", ""),
        (12080, (8, 6), "cu126", ""),
        (12000, (7, 5), "cu126", ""),
        (12080, (12, 0), "cu130", "580"),  # cu126 has no code for it
        (11080, (8, 6), "cu126", "528"),
        (None, (8, 6), "cu126", ""),
    ],
)
def test_the_build_is_one_that_driver_and_card_run(
    cuda: int | None, capability: tuple[int, int], index: str, driver: str
) -> None:
    said = torch_build.remedy(a_card(cuda, capability))
    assert command(said).endswith(f"torch==2.13.0+{index} --index-url {INDEX}{index}")
    assert ("update the driver to" in said) == bool(driver) and driver in said


def test_windows_gets_a_line_for_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(sys, "executable", r"C:\floe\Scripts\python.exe")
    assert command(torch_build.remedy(a_card())).startswith(r"C:\floe\Scripts\python.exe -m pip install torch==")
    monkeypatch.setattr(sys, "executable", r"C:\Program Files\floe\python.exe")
    assert command(torch_build.remedy(a_card())).startswith(r'& "C:\Program Files\floe\python.exe" -m pip install ')


def test_environments_without_pip_have_commands_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_pip(monkeypatch, there=False)
    wanted = f"uv pip install --python {PYTHON} torch==2.13.0+cu130 --index-url {INDEX}cu130"
    assert command(torch_build.remedy(a_card())) == wanted
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "floe-chat-next"))
    (tmp_path / "floe-chat-next").mkdir()
    (tmp_path / "floe-chat-next" / "pipx_metadata.json").write_text("{}")
    wanted = f"pipx runpip floe-chat-next install torch==2.13.0+cu130 --index-url {INDEX}cu130"
    assert command(torch_build.remedy(a_card())) == wanted


def test_a_torch_that_is_too_new_for_the_driver_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    a_torch(monkeypatch, "2.13.0+cu130", "13.0")
    said = torch_build.remedy(a_card(12040))
    assert "needs a driver for CUDA 13.0" in said and "torch==2.13.0+cu126" in said
    assert torch_build.remedy(a_card(13000)) == ""  # something else is wrong


@pytest.mark.parametrize(
    "known",
    [library([], starts=False), library([]), a_card(capability=(6, 1))],
    ids=["no driver", "no card", "too old"],
)
def test_without_a_card_that_our_kernels_run_on_nothing_is_said(known: Any) -> None:
    assert torch_build.remedy(known) == ""


def test_a_mac_a_hidden_card_and_a_torch_that_works_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert torch_build.remedy(a_card()) == ""
    with monkeypatch.context() as mac:
        mac.setattr(platform, "system", lambda: "Darwin")
        assert torch_build.remedy(a_card()) == ""
    a_torch(monkeypatch, "2.13.0+cu130", "13.0", works=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert torch_build.remedy(a_card()) == ""


def test_what_triton_compiles_with_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fresh system has a driver, and neither a compiler nor Python's headers: the first prompt failed there."""
    a_torch(monkeypatch, "2.13.0+cu130", "13.0", works=True)
    cards, there = [Gpu("Test card", "8.6", 12 << 30, None, 0)], {"gcc": "/usr/bin/gcc"}
    schemes = sysconfig.get_scheme_names()
    monkeypatch.setattr(torch_build.gpus, "of_torch", lambda: (tuple(cards), ""))
    monkeypatch.setattr(shutil, "which", there.get)
    monkeypatch.setattr(sysconfig, "get_paths", {key: {"include": str(tmp_path)} for key in schemes}.get)
    monkeypatch.delenv("CC", raising=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    said = torch_build.remedy(a_card())
    assert "Python.h" in said and "C compiler" not in said and command(said) == f"sudo apt install {version}"
    (tmp_path / "Python.h").touch()
    assert torch_build.remedy(a_card()) == ""
    there.clear()
    assert "finds no C compiler;" in torch_build.remedy(a_card())
    (tmp_path / "Python.h").unlink()
    assert command(torch_build.remedy(a_card())) == f"sudo apt install gcc {version}"
    there["dnf"] = "/usr/bin/dnf"
    assert command(torch_build.remedy(a_card())) == "sudo dnf install gcc python3-devel"
    monkeypatch.setenv("CC", "/opt/cc")
    assert command(torch_build.remedy(a_card())) == "sudo dnf install python3-devel"
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    assert torch_build.remedy(a_card()) == ""
    monkeypatch.setattr(importlib.util, "find_spec", {"pip": "pip"}.get)
    assert command(torch_build.remedy(a_card())).endswith("-m pip install triton-windows")
    cards[0] = replace(cards[0], capability="7.0")
    assert torch_build.remedy(a_card()) == ""  # it would not run there


def test_the_probe_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", a_card())
    found = hardware.probe(tmp_path)
    assert found.remedy == torch_build.remedy(a_card()) and found.gpu_reason == "this torch is built without CUDA"
