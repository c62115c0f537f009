"""The wizard, driven by keys against a fake hub over real HTTP."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups, Survey
from floe_chat.app.setup.wish import unfinished
from floe_chat.app.widgets.setup.progress import ProgressStep
from floe_chat.engine.machine.hardware import Hardware
from floe_chat.engine.planning.rates import WAITING
from floe_chat.models import catalog
from floe_chat.models.catalog_entry import OFFERED, CatalogEntry, ReadyPack
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel
from textual.pilot import Pilot

from ..models.fakehub import ALWAYS, FakeHub, Fault
from ..models.gguf.converting import convert
from .scripted import until, write
from .wizardry import IMPATIENT, REPO, ROOMY, around, entry_of, lines, paste, results, see, shown, slowly, surveyor


def wizard(setups: Setups, published: Path, **options: object) -> WizardScreen:
    given: dict[str, object] = {"entries": [entry_of(published)], "surveyor": surveyor(), **options}
    return WizardScreen(setups, **given)  # pyright: ignore[reportArgumentType]


async def to_choice(pilot: Pilot[int]) -> None:
    await see(pilot, "A test's processor", "Enter continues")
    await pilot.press("enter")
    await see(pilot, "Model and bits per weight", "Speed: ")


async def to_folder(pilot: Pilot[int]) -> None:
    """Through machine and model, taking what is recommended."""
    await to_choice(pilot)
    await pilot.press("f")
    await see(pilot, "Models folder", "are free")


async def to_progress(pilot: Pilot[int]) -> None:
    await to_choice(pilot)
    await pilot.press("enter")
    await see(pilot, "Download", "Pack", "Check")


async def test_terms_have_to_be_accepted_first(
    published: Path, tmp_path: Path, setups: Setups, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeHub({REPO: published}, gated=[REPO]) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        async with around(wizard(setups, published)) as pilot:
            await to_folder(pilot)
            await pilot.press("enter")
            await see(pilot, "requires you to accept its terms", f"{hub.url}/{REPO}", "forgotten when")
            for token, answer in (("hf_unknown", "does not know this token"), (hub.stranger, "has no access to")):
                await write(pilot, token)
                assert token not in shown(pilot) and "•" * len(token) in shown(pilot)
                await pilot.press("enter")
                await see(pilot, answer)
            paste(pilot, hub.token)
            await pilot.press("enter")
            await see(pilot, "tiny is ready")
        files = [path for path in tmp_path.rglob("*") if path.is_file()] + list(catalog.models_folder().rglob("*.json"))
        assert files and not any(hub.token.encode() in path.read_bytes() for path in files)


async def test_the_network_goes_and_comes_back(published: Path, hub: FakeHub, setups: Setups) -> None:
    hub.faults.append(Fault("GET /api/", portal=True))
    async with around(wizard(setups, published)) as pilot:
        await to_folder(pilot)
        await pilot.press("enter")
        await see(pilot, "Something else answered", "Enter tries again")
        gone = Fault("GET /storage/.*model-", times=ALWAYS, reset_after=100)
        hub.faults += [Fault("GET /storage/.*model-", times=2), gone]  # the headers come
        await pilot.press("enter")
        await see(pilot, "trying again", "Setting up tiny")
        gone.times = 0
        await see(pilot, "tiny is ready")
        assert results(pilot) == []


async def test_left_and_come_back_to(published: Path, hub: FakeHub, setups: Setups) -> None:
    slowly(hub)
    async with around(wizard(setups, published)) as pilot:
        await to_progress(pilot)
        await until(pilot, lambda: setups.words().startswith("tiny: "))
        await pilot.press("escape")
        await until(pilot, lambda: results(pilot) == [None])
        assert setups.busy
        pilot.app.open(wizard(setups, published))  # pyright: ignore[reportAttributeAccessIssue]
        await see(pilot, "Setting up tiny", "Space pauses")
        await pilot.press("space")
        await see(pilot, "tiny is paused", "Space continues")
        assert "paused" in setups.words()
        await pilot.press("space")
        await see(pilot, "Setting up tiny")
        await pilot.press("s")
        await see(pilot, "is stopped", "Enter continues")
        assert setups.words() == "" and not setups.busy
        hub.faults.clear()
        slowly(hub)
        await pilot.press("enter")
        await see(pilot, "Setting up tiny")
        await pilot.press("space")  # or it could be finished before the program has ended
        await see(pilot, "tiny is paused")
    setups.close()
    later = Setups(IMPATIENT)  # the program's next start
    hub.faults.clear()
    async with around(wizard(later, published)) as pilot:
        await see(pilot, "Unfinished setups", REPO, "so far", "Set up another model")
        await pilot.press("enter")
        await see(pilot, "tiny is ready")
    later.close()
    assert PackedModel.open(catalog.find("tiny"))


async def test_another_disk_where_this_one_is_too_small(
    published: Path, hub: FakeHub, setups: Setups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = tmp_path / "roomy disk"

    def room(folder: Path) -> int:
        return ROOMY if "roomy" in str(folder) else 1 << 20

    monkeypatch.setattr("floe_chat.models.hub.download.room", room)
    settings = tmp_path / "settings.toml"
    roomy.mkdir()
    (catalog.models_folder() / "other").mkdir(parents=True)
    (catalog.models_folder() / "other" / "manifest.json").write_text("{}")
    async with around(wizard(setups, published, surveyor=surveyor(disk=1 << 20), settings=settings)) as pilot:
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "more disk")
        await pilot.press("enter")
        await see(pilot, "too little")
        await pilot.press("enter")
        await see(pilot, "The disk is too small", "on another disk")
        await pilot.press("end", "ctrl+u")
        paste(pilot, f"{published}/config.json/x")
        await see(pilot, "is a file")
        await pilot.press("ctrl+u")
        paste(pilot, "/proc/nope")
        await pilot.press("enter")
        await see(pilot, "This folder cannot be used", "is not on a disk")
        await pilot.press("ctrl+u")
        paste(pilot, str(roomy / "models"))
        await see(pilot, "429 GB are free.", "1 model stays in")
        await pilot.press("enter")
        await see(pilot, "tiny is ready")
    assert (roomy / "models" / "tiny" / "manifest.json").exists() and str(roomy / "models") in settings.read_text()


async def test_another_folder_is_kept_when_the_setup_begins(
    published: Path, hub: FakeHub, setups: Setups, tmp_path: Path
) -> None:
    hub.faults.append(Fault("GET /api/", portal=True))
    settings, before = tmp_path / "settings.toml", catalog.models_folder()
    async with around(wizard(setups, published, settings=settings)) as pilot:
        await to_folder(pilot)
        await pilot.press("end", "ctrl+u")
        paste(pilot, str(tmp_path / "elsewhere"))
        await pilot.press("enter")
        await see(pilot, "Something else answered", "Enter tries again")
        assert catalog.models_folder() == tmp_path / "elsewhere"
        await pilot.press("escape", "escape", "escape", "escape")
        await until(pilot, lambda: results(pilot) == [None])
    assert not settings.exists() and catalog.models_folder() == before


async def test_what_is_measured_again_is_said(published: Path, setups: Setups) -> None:
    seen = {
        "rows 4 bit": "Measuring how fast the CPU computes with quantized weights. This takes a few seconds",
        f"{WAITING}: other programs keep 1.3 cores busy": "Waiting for a quiet moment: other programs keep 1.3 cores",
        "memory read, again: other programs were busy": "Measuring how fast memory is read again: other programs were",
    }
    go_on = {report: threading.Event() for report in seen}

    def slowly_measured(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
        for report, shown_then in go_on.items():
            told(report)
            assert shown_then.wait(60)
        return surveyor()(told, again=again)

    async with around(wizard(setups, published, surveyor=slowly_measured)) as pilot:
        for report, said in seen.items():
            await see(pilot, said)
            go_on[report].set()
        await see(pilot, "Enter continues")
        await pilot.press("escape")
        await until(pilot, lambda: results(pilot) == [None])


async def test_nothing_fits(published: Path, setups: Setups) -> None:
    async with around(wizard(setups, published, surveyor=surveyor(ram=1 << 20))) as pilot:
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "more memory")
        assert "●" not in shown(pilot).split("recommended bits.")[1]
        await pilot.press("enter")
        await see(pilot, "does not fit this machine", "Press Ctrl+D for the demo model")
        await pilot.press("escape")
        await see(pilot, "This machine")
        await pilot.press("escape")
        await until(pilot, lambda: results(pilot) == [None])


async def test_what_fails_can_be_chosen_anew(published: Path, hub: FakeHub, setups: Setups) -> None:
    hub.faults.append(Fault("GET /storage/.*model-00002", times=ALWAYS, flip=True))
    async with around(wizard(setups, published)) as pilot:
        await to_progress(pilot)
        await see(pilot, "arrived damaged", "What to do", "R tries again")
        assert setups.words() == "tiny: the setup failed"
        first, page = setups.setup, pilot.app.screen.query_one(ProgressStep)
        await pilot.press("r")
        # The words of the first failure may still be on the screen while the second try begins.
        await until(pilot, lambda: setups.setup is not first and page.setup is not first and page.state == "failed")
        await see(pilot, "Continuing the interrupted pack", "arrived damaged")
        await pilot.press("c")
        await see(pilot, "recommended", "Speed: ")
        await pilot.press("down", "enter")
        await see(pilot, "Models folder", "The unfinished setup of tiny with other settings will be deleted")
        hub.faults.clear()
        await pilot.press("enter")
        await see(pilot, "tiny is ready")
    widths = PackedModel.open(catalog.find("tiny")).manifest.widths
    assert (widths.up, widths.gate, widths.down) != (4, 4, 4)


async def test_any_model_by_id_folder_or_file(published: Path, hub: FakeHub, setups: Setups, tmp_path: Path) -> None:
    file = convert(published, tmp_path / "tiny.gguf", "Q4_0")
    async with around(wizard(setups, published, entries=[])) as pilot:
        await see(pilot, "Enter continues")
        await pilot.press("enter")
        await see(pilot, "Another model")
        for named, words in (
            ("no such model", "There is no model 'no such model'"),
            ("floe/absent", "There is no model floe/absent"),
        ):
            await pilot.press("end", "enter")
            await see(pilot, "Enter looks it up")
            assert shown(pilot).count("Esc") == 1
            paste(pilot, named)
            await pilot.press("enter")
            await see(pilot, words)
            await pilot.press("escape")
            await see(pilot, "Enter sets it up")
        for named, words in (
            (REPO, "Download: "),
            (str(published), "Disk: pack"),
            (str(file), "Q8_0 or F16 keeps"),
        ):
            await pilot.press("end", "enter")
            await see(pilot, "Enter looks it up")
            paste(pilot, named)
            await pilot.press("enter")
            await see(pilot, "● 3/4/4", words)


async def test_nothing_essential_is_cut_off(published: Path, hub: FakeHub, setups: Setups) -> None:
    slowly(hub)
    long = dataclasses.replace(entry_of(published, "z\x1b[31m-model-whose-name-is-long", REPO), gated=True)
    async with around(wizard(setups, published, entries=[entry_of(published), long]), (60, 20)) as pilot:
        await see(pilot, "read at 33.1 GB/s", "no GPU", "Enter continues", "Ctrl+D demo model", "Ctrl+Q quit")
        await pilot.press("enter")
        await see(pilot, "3/4/4", "words a minute", "Disk: ", "Enter sets it up", "B all bits", "Ctrl+D demo model")
        assert "4/4/8" not in shown(pilot)
        await pilot.press("b")
        await see(pilot, "4/4/8", "● 3/4/4")
        await pilot.press("b")
        assert "\x1b" not in "".join(lines(pilot))
        await pilot.press("end", "up")
        await see(pilot, "asks you to accept terms on the hub first; that needs an account")
        await pilot.press("home", "f")
        await see(pilot, "Models folder", "are free", "Enter continues", "Ctrl+D demo model")
        await pilot.press("enter")
        await see(pilot, "Download", "Pack", "Check", "now", "at the peak", "free", "Space pauses", "Ctrl+D demo model")
        await pilot.press("space")
        await see(pilot, "is paused")


# The wizard offers a GGUF file first where it is worth its download; the original weights are a key away


async def test_a_gguf_file_of_the_hub_is_the_first_line(
    published: Path, setups: Setups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    for label in (OFFERED, "Q2_K"):
        convert(published, tmp_path / "files" / f"tiny-{label}.gguf", "Q4_0", stated=OFFERED)
    listed = dataclasses.replace(entry_of(published), gguf=PACK)
    with FakeHub({PACK: tmp_path / "files", REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        async with around(wizard(setups, published, entries=[listed])) as pilot:
            await to_choice(pilot)
            await pilot.press("b")
            own = [line for line in lines(pilot) if "3/4/4" in line and "very" in line]
            assert [("●" in line, OFFERED in line) for line in own[:2]] == [(True, True), (False, False)]
            await see(pilot, f"Its weights are {OFFERED}", "counted in", f"Download of {PACK}")
            await pilot.press("down")
            await see(pilot, "at once")
            assert OFFERED not in shown(pilot).split("Speed: ")[1]
            await pilot.press("up", "enter")
            await see(pilot, "tiny is ready")
        assert Manifest.read(catalog.find("tiny")).source.name == f"{PACK}:{OFFERED}"
        assert hub.sent("model-") == 0


# The wizard offers a ready pack first; packing the model here is a key away


PACK = "floe/tiny-floe"


@pytest.fixture
def hub(tiny_pack: Path, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub({PACK: tiny_pack, REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


def entry(published: Path, place: str = PACK) -> CatalogEntry:
    return dataclasses.replace(entry_of(published), ready=ReadyPack(place, 12_300_000_000, 3, 4, 4, 4))


def offering(setups: Setups, published: Path, place: str = PACK) -> WizardScreen:
    return WizardScreen(setups, entries=[entry(published, place)], surveyor=surveyor())


async def test_two_keys_from_the_plan_to_the_chat(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(offering(setups, published)) as pilot:
        await to_choice(pilot)
        await see(pilot, "ready pack, 12.3 GB", "nothing has to be packed", "packs them here", "Enter sets it up")
        await pilot.press("enter")
        await see(pilot, "tiny is ready", "Enter chats with it", "A pack by floe, which says", "no presets of its own")
        assert " Pack " not in shown(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: results(pilot) == ["tiny"])
    assert hub.sent("model-0") == 0 and unfinished() == []
    assert (catalog.find("tiny") / "manifest.json").exists()


@pytest.mark.thorough
async def test_packing_it_here_is_the_next_line(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(offering(setups, published), (60, 24)) as pilot:
        await to_choice(pilot)
        await see(pilot, "12.3 GB")
        await pilot.press("down")
        await see(pilot, "Download: ")
        await pilot.press("enter")
        await see(pilot, "tiny is ready")
    assert Manifest.read(catalog.find("tiny")).source.name == REPO


async def test_a_pack_that_is_gone_leaves_the_other_way(published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(offering(setups, published, "floe/gone")) as pilot:
        await to_choice(pilot)
        await pilot.press("enter")
        await see(pilot, "There is no model floe/gone", "Enter tries again")
        await pilot.press("escape")
        await see(pilot, "Model and bits per weight", "Speed: ")
    async with around(offering(setups, published, REPO)) as pilot:
        await to_choice(pilot)
        await pilot.press("enter")
        await see(pilot, f"{REPO} is no pack", "Go back")
        assert setups.setup is None


async def test_a_pack_that_is_typed(tiny_pack: Path, published: Path, hub: FakeHub, setups: Setups) -> None:
    async with around(offering(setups, published)) as pilot:
        await to_choice(pilot)
        await pilot.press("end", "enter")
        await see(pilot, "Enter looks it up")
        paste(pilot, str(tiny_pack))
        await pilot.press("enter")
        await see(pilot, "made from", "It has no presets of its own", "ready pack, 2", "Enter sets it up")
        assert "packs them here" not in shown(pilot)
        await pilot.press("enter")
        await see(pilot, "is ready and checked", "Enter chats with it")
        await pilot.press("enter")
        await until(pilot, lambda: bool(results(pilot)))
        folder = catalog.models_folder() / results(pilot)[0]
        assert (folder / "manifest.json").read_bytes() == (tiny_pack / "manifest.json").read_bytes()
