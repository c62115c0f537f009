"""A machine, models, a setup and chats that are made up: what the scenes show, and always the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from floe_chat.app.history import AnswerStats, ChatSetup, Conversation, Message, Tree
from floe_chat.app.settings.servers import SavedServer
from floe_chat.app.setup.flow import Setup as RunningSetup
from floe_chat.app.setup.flow import SetupProgress
from floe_chat.app.setup.setups import Survey
from floe_chat.app.setup.wish import Wish
from floe_chat.app.widgets.setup.models import KnownModels, Model
from floe_chat.engine.machine.hardware import Hardware
from floe_chat.engine.planning import machine
from floe_chat.engine.planning.rates import Measured
from floe_chat.models import catalog
from floe_chat.models.errors import AccessError, FloeError
from floe_chat.models.hub.fetch_progress import DownloadProgress
from floe_chat.models.published import PUBLISHED

MODELS = Path("/srv/models")
HARDWARE = Hardware(
    system="Linux",
    wsl=False,
    cpu="Ryzen 5 5600",
    cores_physical=6,
    cores_usable=6,
    cpu_isa="avx2",
    ram_total=34_200_000_000,
    ram_available=27_900_000_000,
    ram_limit=None,
    pinnable=None,
    gpus=(),
    gpu_reason="no driver is loaded",
    disk_folder=str(MODELS),
    disk_free=412_000_000_000,
    torch_version="2.13.0",
    torch_threads=6,
    sources={},
)
_RATES = {"memory read": 33.1e9, "rows 4 bit": 14e9, "disk read": 1.2e9}
LAB = SavedServer("lab", "http://10.0.0.7:8000/v1")
WISH = Wish("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b-instruct", home=MODELS)
# Fixed, so that a model more in the list changes no scene.
_LISTED = (
    "qwen3-30b-a3b-instruct-2507",
    "qwen3-coder-30b-a3b-instruct",
    "qwen3-30b-a3b-thinking-2507",
    "olmoe-1b-7b-instruct",
    "mixtral-8x7b-instruct",
    "mixtral-8x22b-instruct",
)
ENTRIES = tuple(entry for entry in PUBLISHED if entry.name in _LISTED)


def survey(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
    told(HARDWARE)
    return Survey(HARDWARE, machine.here(HARDWARE, Measured(_RATES, {}, "2026-11-21")), _RATES)


def ask_for_terms(_wanted: Wish, _token: str | None = None) -> Any:
    raise AccessError(
        "Mixtral-8x7B-Instruct-v0.1 requires you to accept its terms",
        "The hub does not know who you are.",
        "Accept the terms at https://huggingface.co/mistralai/Mixtral-8x7B-Instruct-v0.1, then give a token.",
    )


def progress(state: str) -> SetupProgress:
    gone = {"working": 0.21, "paused": 0.21, "failed": 0.21, "done": 1.0}[state]
    fetching = "done" if state == "done" else "paused" if state == "paused" else "fetching"
    total = 93_400_000_000
    download = DownloadProgress(fetching, round(total * min(1.0, gone * 1.3)), total, 41e6, 1680.0, ())
    step = "Done" if state == "done" else "Packing layer 7 of 32"
    left = None if state == "done" else 2520.0
    notices = (
        ("model-00003-of-00019.safetensors arrived damaged and is downloaded again.",) if state == "working" else ()
    )
    return SetupProgress(cast(Any, state), step, gone, left, download, notices, 37_400_000_000)


class _Setup:
    """A setup that stands still."""

    def __init__(self, now: SetupProgress) -> None:
        self.wish, self._now = WISH, now
        self.claims: list[str] = []
        self.error = None
        if now.state == "failed":
            self.error = FloeError(
                "The disk is full", "No space left on device.", "Free some of it; what is done is kept."
            )

    def progress(self) -> SetupProgress:
        return self._now

    def cancel(self) -> None:
        """Nothing runs."""


def running(now: SetupProgress) -> RunningSetup:
    return cast(RunningSetup, _Setup(now))


_BITS = "at 3/4/4 bits per weight (up 3, gate and down 4, attention 4)"
FOUND = KnownModels(
    (
        Model("installed", catalog.DEMO, 31_900_000, "built in, 4/4/4 bits", "It is part of floe-chat."),
        Model("installed", "olmoe", 4_310_000_000, "3/4/4 bits", f"Packed {_BITS}. Folder: {MODELS / 'olmoe'}"),
        Model("installed", "broken", 812_000, "", "manifest.json ends too early.", "broken is incomplete"),
        Model("unfinished", WISH.name, 12_300_000_000, "so far", f"{WISH.model} {_BITS}. Saved in {WISH.folder}"),
        Model("server", LAB.name, 0, LAB.url, "Your questions are sent there. Its only model answers.", server=LAB),
        Model(
            "available",
            "mixtral-8x22b-instruct",
            281_000_000_000,
            "141 B parameters",
            "Setting it up downloads 281 GB.",
        ),
    ),
    HARDWARE.disk_free,
    MODELS,
)


def _tree(title: str, question: str, answer: str, at: int) -> Tree:
    """A chat of one exchange at a moment, in seconds since 1970."""
    kept = AnswerStats(42, 58.9, 0.12, "stop")
    asked = Message(1, 0, None, 0, "user", question, "complete", at * 1000, "", "", None, (), 1, 1)
    told = Message(2, 0, 1, 1, "assistant", answer, "complete", at * 1000, "demo", "Fast", kept, (), 1, 1)
    return Tree(Conversation(0, 0, title, at * 1000, at * 1000, ChatSetup("demo", "Fast"), 2), (asked, told))


TREES = (
    _tree("", "What is an expert?", "One of several small networks in each layer.", 1_794_000_000),
    _tree("Sea ice", "Why do floes move?", "Floes drift with the wind and the currents.", 1_794_500_000),
)
