"""Chats that go on after a restart: the same answers, and files that are bad, gone, too many or unwanted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from floe_chat.engine import session, state_folder
from floe_chat.engine.decoder import fused_pass, kv_stores, state_files
from floe_chat.engine.decoder.kv_cache import Held, Parked
from floe_chat.engine.decoder.state_files import LEAST
from floe_chat.engine.events import Advanced, Failed, Finished, Load, Loaded, Sampling, Unload, Unloaded
from floe_chat.engine.state_folder import files, states_folder
from floe_chat.models import private_file, sealed_tensors
from floe_chat.models.packing.pack import EXACT
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import families
from ..helpers import make_pack
from .driver import DEADLINE_S, Engine, asking
from .offloading import needs_of

CHAT, ROOM = 7, 1 << 30
TEXT = [3 + 7 * at % 241 for at in range(LEAST + 60)]


def ask(engine: Engine, prompt: Sequence[int], chat: int = CHAT, seed: int | None = None) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were not computed."""
    request = len(engine.seen) + 1
    asked = replace(asking(request, prompt), conversation=chat, stop_ids=(2,))
    engine.send(replace(asked, sampling=Sampling(temperature=0, seed=seed)))
    end = engine.end_of(request)
    assert isinstance(end, Finished), end
    return engine.tokens_of(request), end.stats.reused_tokens


class Start:
    """One start of the program, which ends as the program does, but waits for all that is written."""

    def __init__(
        self,
        pack: Path,
        states: int = ROOM,
        kv_bits: str = "auto",
        preset: str | None = None,
        device: str = "cpu",
        vram: int | None = None,
    ) -> None:
        self._load = Load(str(pack), preset, device, vram, Advanced(kv_bits=kv_bits), parked=0, states=states)
        self._engine = Engine()

    def __enter__(self) -> Engine:
        self._engine.__enter__()
        self._engine.send(self._load)
        assert isinstance(self._engine.until((Loaded, Failed)), Loaded), self._engine.seen
        return self._engine

    def __exit__(self, *error: object) -> None:
        self._engine.__exit__(*error)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOMENT_S", DEADLINE_S)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def pack(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("kept")
            made[family] = folder / "pack"
            make_pack(families.make(family, folder / "source"), made[family], EXACT)
        return made[family]

    return pack


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("family", "kv_bits"),
    [
        ("qwen3_moe", "16"),
        ("qwen3_moe", "8"),
        ("deepseek_v3", "auto"),
        ("gemma4_text", "auto"),
        ("phimoe", "auto"),
        pytest.param("qwen3_5_moe_text", "16", marks=pytest.mark.thorough),  # states, as the next one has
        ("lfm2_moe", "8"),
    ],
)
def test_a_chat_goes_on_after_a_restart_as_without(
    packs: Callable[[str], Path], family: str, kv_bits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next question, and another one in the place of the last: both find what a running program has."""
    monkeypatch.setattr(kv_stores, "BLOCK", 8)
    monkeypatch.setattr(fused_pass, "SLACK", 256)
    pack = packs(family)
    for edited in (False, True):
        with Start(pack, 0, kv_bits) as engine:
            first, reused = ask(engine, TEXT)
            after = [*(TEXT[:-2] if edited else [*TEXT, *first]), 9, 8, 7]
            wanted = ask(engine, after)
        assert reused == 0 and len({*first}) > 3 and not files()
        with Start(pack, kv_bits=kv_bits) as engine:
            assert ask(engine, TEXT) == (first, 0)
        with Start(pack, kv_bits=kv_bits) as engine:
            assert ask(engine, after) == wanted
            assert wanted[1] >= LEAST
            assert ask(engine, [5, 6, 7], chat=CHAT + 1)[1] == 0
        (file,) = files()
        assert file.stat().st_mode & 0o777 == 0o600
        state_folder.delete(files())


@pytest.fixture
def pack(packs: Callable[[str], Path]) -> Path:
    return packs("qwen3_moe")


@pytest.mark.some(1)
@pytest.mark.parametrize("device", ["throttled:1gb", "sim:3060,sim:3060"])
def test_a_chat_goes_on_where_a_device_holds_a_part_of_the_model(pack: Path, device: str) -> None:
    needs = needs_of(pack, 4, 16, 700)

    def start(states: int) -> Start:
        return Start(pack, states, "16", device=device, vram=needs.least() + 40 * needs.row)

    with start(0) as engine:
        first, _ = ask(engine, TEXT)
        wanted = ask(engine, [*TEXT, *first, 9])
    with start(ROOM) as engine:
        assert ask(engine, TEXT) == (first, 0)
    with start(ROOM) as engine:
        assert ask(engine, [*TEXT, *first, 9]) == wanted
        assert wanted[1] >= len(TEXT)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[str]:
    """The name of each file, once it is there."""
    save, names = state_files._save, SimpleQueue[str]()  # pyright: ignore[reportPrivateUsage]

    def saved(file: Path, parked: Parked) -> None:
        save(file, parked)
        names.put(file.name)

    monkeypatch.setattr(state_files, "_save", saved)
    return names


def test_a_chat_is_written_when_it_is_left_in_silence_and_with_its_model(
    pack: Path, written: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Start(pack) as engine:
        ask(engine, TEXT)
        ask(engine, TEXT[1:], chat=8)
        assert written.get(timeout=DEADLINE_S).startswith(f"{CHAT}.")
        engine.send(Unload())
        engine.until(Unloaded)
        assert written.get(timeout=DEADLINE_S).startswith("8.")
    monkeypatch.setattr(session, "KEPT_AFTER_S", 0.0)
    with Start(pack) as engine:
        ask(engine, TEXT[2:], chat=9)
        assert written.get(timeout=DEADLINE_S).startswith("9.")
    assert written.empty(), "nothing is written twice"


def test_what_is_not_worth_a_file_or_not_saved_has_none(pack: Path) -> None:
    with Start(pack) as engine:
        ask(engine, TEXT[:100])
        ask(engine, TEXT, chat=0)
    assert not files()


@dataclass
class Good:
    """Files after a chat was left, and its next answer without them."""

    files: dict[str, bytes]
    prompt: list[int]
    answer: list[int]


@pytest.fixture(scope="module")
def good(packs: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Good:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(session, "MOMENT_S", DEADLINE_S)
        with Start(packs("qwen3_moe")) as engine:
            said, _ = ask(engine, TEXT)
        made = {file.name: file.read_bytes() for file in states_folder().iterdir()}
        with Start(packs("qwen3_moe"), 0) as engine:
            return Good(made, [*TEXT, *said], ask(engine, [*TEXT, *said])[0])


def bit(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)


def told(file: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> None:
    """Another program changes it, and seals nothing."""
    with safe_open(file, "pt") as opened:
        said = opened.metadata()
    tensors = load_file(file)
    change(tensors, said)
    save_file(tensors, file, said)


def longer(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    tensors["tokens"] = torch.tensor(TEXT * 2)


def not_numbers(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    tensors["entries.1"][3] = torch.nan


def other_type(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    tensors["entries.0"] = tensors["entries.0"].double()


def other_shape(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    tensors["entries.0"] = tensors["entries.0"][:9].clone()


def no_layer(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    del tensors["entries.2"]


def many(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    said["how"] = said["how"].replace(f",{len(tensors['tokens'])}]]", ",999999999999]]")
    assert "999999999999" in said["how"]


def no_words(tensors: dict[str, Tensor], said: dict[str, str]) -> None:
    del said["how"]


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


BAD: dict[str, tuple[Callable[[Path], object], bool]] = {
    "cut off": (lambda file: os.truncate(file, file.stat().st_size // 2), True),
    "empty": (lambda file: os.truncate(file, 0), True),
    "a header that never ends": (lambda file: file.write_bytes(b"\xff" * 64), True),
    **{f"a bit at {place}": (partial(bit, place=place), True) for place in (0.0, 0.003, 0.02, 0.3, 0.7, 0.999)},
    **{
        change.__name__: (partial(told, change=change), True)
        for change in (longer, not_numbers, other_type, other_shape, no_layer, many, no_words)
    },
    "from elsewhere": (lambda file: (states_folder() / "key").write_bytes(bytes(32)), True),
    "a link": (linked, False),
    "a pipe": (piped, True),
    "others may write it": (lambda file: file.chmod(0o666), False),
    "too large": (lambda file: os.truncate(file, ROOM + 1), True),
}


@pytest.mark.some(6)
@pytest.mark.parametrize(("spoil", "deleted"), BAD.values(), ids=BAD)
def test_a_bad_file_is_read_again_and_nothing_is_lost(
    pack: Path, good: Good, spoil: Callable[[Path], object], deleted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for name, content in good.files.items():
        private_file.make_folder(states_folder())
        private_file.replace(states_folder() / name, content)
    (file,) = files()
    spoil(file)
    with Start(pack) as engine:
        assert ask(engine, good.prompt) == (good.answer, 0)
        assert "read again" in caplog.text and deleted != os.path.lexists(file)
    assert file in files() and file.is_file() and not file.is_symlink(), "the next one took its place"


def test_a_file_that_fits_no_layer_is_refused_though_it_is_sealed(
    pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def halves(held: Held) -> Held:
        return replace(held, entries=[one[: len(one) // 2] for one in held.entries])

    def saved(file: Path, own: Parked) -> None:
        save(file, replace(own, held=halves(own.held)))

    save = state_files._save  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(state_files, "_save", saved)
    for _ in range(2):
        with Start(pack) as engine:
            assert ask(engine, TEXT)[1] == 0
    assert "does not fit" in caplog.text


def test_states_serve_their_pack_preset_form_and_chat_alone(packs: Callable[[str], Path], pack: Path) -> None:
    with Start(pack, preset="Balanced") as engine:
        said, _ = ask(engine, TEXT)
    after = [*TEXT, *said, 5]
    for other in (
        Start(packs("lfm2_moe")),
        Start(pack, preset="Exact"),
        Start(pack, kv_bits="8", preset="Balanced"),
    ):
        with other as engine:
            assert ask(engine, after)[1] == 0
            assert ask(engine, TEXT[3:], chat=8)[1] == 0
    with Start(pack, preset="Fast") as engine:
        assert ask(engine, after)[1] >= len(TEXT), "a finer preset's do, as in a running program"


def test_the_files_used_longest_ago_give_way(pack: Path) -> None:
    with Start(pack) as engine:
        ask(engine, TEXT)
    (first,) = files()
    most = int(3.5 * first.stat().st_size)
    for chat in (8, 9, CHAT, 10):
        with Start(pack, most) as engine:
            assert ask(engine, [*TEXT, 5], chat)[1] == (len(TEXT) if chat == CHAT else 0)
    assert [int(file.name.split(".")[0]) for file in files()] == [9, CHAT, 10]
    with Start(pack, first.stat().st_size // 2) as engine:
        ask(engine, TEXT, chat=11)
    assert [int(file.name.split(".")[0]) for file in files()] == [9, CHAT, 10], "it is larger than all may be"


def test_a_full_disk_means_that_nothing_is_kept(
    pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_tensors: object, file: Path, _said: object) -> None:
        file.write_bytes(b"some")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(sealed_tensors, "save_file", full)
    with Start(pack) as engine:
        ask(engine, TEXT)
    assert "are not kept" in caplog.text and [file.name for file in states_folder().iterdir()] == ["key"]


def test_of_a_deleted_chat_nothing_is_written_any_more(pack: Path, written: SimpleQueue[str]) -> None:
    with Start(pack) as engine:
        ask(engine, TEXT)
        ask(engine, TEXT[1:], chat=8)
        written.get(timeout=DEADLINE_S)
        for chat in (CHAT, 8):
            state_folder.forget(chat)
        assert not files()
    assert not files()
    with Start(pack) as engine:
        ask(engine, TEXT)  # its deletion was undone
    assert len(files()) == 1
    state_folder.forget_pack(pack)
    assert not files()
