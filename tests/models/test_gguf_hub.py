"""GGUF files of a repository: which to take, their headers, and their tensors as a packer asks for them."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.setup.adding import lacks_head, source_of
from floe_chat.models.checking.repair import add_draft
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.errors import CheckpointError, FloeError, HubError, TryAgainError, UsageError
from floe_chat.models.gguf.shelf import GgufShelf
from floe_chat.models.hub import gguf_files, remote_gguf
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.places import look_up
from floe_chat.models.hub.remote_gguf import HubGgufShelf, described, remote
from floe_chat.models.hub.repository_files import RepoFile, is_wanted
from floe_chat.models.pack.manifest import DRAFT
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec, pack

from ..families import add_head, make, one_shard
from ..helpers import calibration_tokens, make_checkpoint
from .fakehub import ALWAYS, FakeHub, Fault
from .gguf.converting import convert
from .gguf.crafted import TEXT, Crafted, key, listed, number, tensor, text, word
from .gguf.vocabulary import byte_level

REPO = "floe/Tiny-GGUF"
FAST = Patience(piece=20_000, first_wait=0.01, longest_wait=0.05, sync=0.02, give_up=0.5)
HUGE = 1 << 60
LLAMA = word("general.architecture", "llama")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository as people fill one: a file of Q8_0, a split one of 16 bits in a folder, and what is no model."""
    folder = tmp_path_factory.mktemp("gguf")
    source = one_shard(make_checkpoint(folder / "made", hidden=32, intermediate=64, layers=4, dtype=torch.float16))
    published = folder / "published"
    (published / "F16").mkdir(parents=True)
    convert(source, published / "Tiny-Q8_0.gguf", "Q8_0")
    convert(source, published / "F16" / "Tiny-F16.gguf", "F16", parts=14)
    (published / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return published


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(remote_gguf, "STRETCH", 1)  # each layer by itself
    monkeypatch.setattr(remote_gguf, "_FIRST", 1000)
    with FakeHub({REPO: files}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        yield hub


def shelf_of(label: str, folder: Path) -> HubGgufShelf:
    shelf = remote(look_up(f"{REPO}:{label}")[0], folder, tuning=FAST)
    assert isinstance(shelf, HubGgufShelf)
    return shelf


def packed(shelf: GgufShelf, folder: Path) -> dict[str, str]:
    pack(Checkpoint(shelf), folder, PackSpec(), calibration_tokens(2), "tiny")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def stretches(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.gguf.*") if path.suffix not in (".part", ".journal"))


def _size(file: Path) -> int:
    """Bytes of a piece on the disk, which may have its last name by now."""
    with suppress(FileNotFoundError):
        return file.stat().st_size if file.suffix != ".journal" else 0
    return 0


@pytest.mark.parametrize("label", ["Q8_0", pytest.param("F16", marks=pytest.mark.thorough)])
def test_a_pack_from_the_hub_is_the_files(hub: FakeHub, files: Path, tmp_path: Path, label: str) -> None:
    """Bit for bit, of one file and of a split one, with two layers on the disk at most, and nothing fetched twice."""
    hub.faults += [
        Fault("GET /storage/.*", reset_after=3000, times=2),
        Fault("GET /floe/", status=429, headers={"Retry-After": "0"}),
        Fault("GET /storage/", status=403),
        Fault("GET /storage/", short=100),
    ]
    path = files / "Tiny-Q8_0.gguf" if label == "Q8_0" else min((files / "F16").iterdir())
    most, here = 0, tmp_path / "here"
    with shelf_of(label, here) as shelf:
        assert shelf.commit == hub.repositories[REPO].commit and shelf.name == f"{REPO}:{label}"
        read = shelf.download.wait

        def seen(file: str) -> Path:
            nonlocal most
            found = read(file)
            most = max(most, sum(map(_size, here.glob("*.gguf.*"))))
            return found

        shelf.download.wait = seen
        found = packed(shelf, tmp_path / "theirs")
        assert shelf.progress().state == "done" and stretches(here) == []
        assert 0 < most <= shelf.most_unread < sum(file.stat().st_size for file in files.rglob(f"*-{label}*.gguf")) / 2
    assert found == packed(GgufShelf(path, tmp_path / "made"), tmp_path / "ours")
    published = list(files.rglob(f"*-{label}*.gguf"))
    assert hub.sent(f"-{label}") <= sum(each.stat().st_size + 12_000 for each in published)  # headers come twice


def test_what_arrived_is_continued(hub: FakeHub, tmp_path: Path) -> None:
    with shelf_of("Q8_0", tmp_path) as shelf:
        first, second, *_ = _all(shelf)
        shelf.order([first, second])
        whole = shelf.download.wait(first).read_bytes()
        shelf.done(second)
    sent = hub.sent("/storage/")
    with shelf_of("Q8_0", tmp_path) as shelf:
        header = hub.sent("/storage/") - sent
        shelf.order([first])
        assert shelf.download.wait(first).read_bytes() == whole and hub.sent("/storage/") == sent + header
        (tmp_path / first).write_bytes(whole[:-1])
    with shelf_of("Q8_0", tmp_path) as shelf:
        shelf.order([first])
        assert shelf.download.wait(first).read_bytes() == whole


def _all(shelf: HubGgufShelf) -> list[str]:
    checkpoint = Checkpoint(shelf)
    return list(dict.fromkeys(file for name in checkpoint.places for file in checkpoint.files(name)))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("GET /storage/", times=ALWAYS, ignore_range=True), "serves no parts of files"),
        (Fault("GET /storage/", times=ALWAYS, total=7), "The wrong bytes"),
        (Fault("GET /floe/", times=ALWAYS, linked_size=7), "contradicts itself"),
        (Fault("GET /storage/", times=ALWAYS, status=416), "refuses"),
    ],
    ids=["no ranges", "another size", "another linked size", "416"],
)
def test_other_bytes_are_not_taken(hub: FakeHub, tmp_path: Path, fault: Fault, words: str) -> None:
    with shelf_of("Q8_0", tmp_path) as shelf:
        names = _all(shelf)
        hub.faults.append(fault)
        shelf.order(names)
        with pytest.raises(FloeError) as caught:
            shelf.download.wait(names[0])
        assert words in str(caught.value) and isinstance(caught.value, (HubError, TryAgainError))
        assert stretches(tmp_path) == []


def test_a_whole_file_in_the_users_cache_is_read_there(hub: FakeHub, files: Path, tmp_path: Path) -> None:
    repo = look_up(f"{REPO}:Q8_0")[0]
    snapshot = tmp_path / "home" / "hub" / "models--floe--Tiny-GGUF" / "snapshots" / repo.commit
    snapshot.mkdir(parents=True)
    content = (files / "Tiny-Q8_0.gguf").read_bytes()
    for stored, fetched in ((content, False), (content[:-1] + b"?", True)):
        (snapshot / "Tiny-Q8_0.gguf").write_bytes(stored)
        sent = hub.sent("/storage/")
        with remote(repo, tmp_path / f"here {fetched}", tuning=FAST) as shelf:
            checkpoint = Checkpoint(shelf)
            shelf.order(list(dict.fromkeys(file for name in checkpoint.places for file in checkpoint.files(name))))
            assert checkpoint.tensor("lm_head.weight").isfinite().all()
        assert (hub.sent("/storage/") > sent) == fetched
    assert (snapshot / "Tiny-Q8_0.gguf").read_bytes() != content


LIES: dict[str, tuple[Crafted, str]] = {
    "another format": (Crafted(magic=b"PK\3\4"), "not a GGUF file"),
    "many tensors": (Crafted(tensor_count=HUGE), "claims 1,152,921,504,606,846,976 tensors"),
    "a long text": (Crafted(keys=[LLAMA, key("x", TEXT, text("y", HUGE))]), "claims"),
    "a text behind the end": (Crafted(keys=[LLAMA, key("x", TEXT, text("y", 100_000))]), "is cut off"),
    "some texts too many": (Crafted(keys=[LLAMA, listed(TEXT, 1 << 20)]), "is cut off"),
    "a tensor beyond the file": (Crafted(tensors=[tensor("blk.0.ffn_up_exps.weight", (99, 99))]), "its header needs"),
    "a part of several": (Crafted(keys=[LLAMA, number("split.count", 3)]), "not part 1 of 1"),
}


@pytest.mark.parametrize(("crafted", "words"), LIES.values(), ids=LIES)
def test_a_lying_header_is_refused(
    crafted: Crafted, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lies").mkdir()
    path = crafted.write(tmp_path / "lies" / "lie-Q8_0.gguf")
    with FakeHub({REPO: path.parent}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        repo = look_up(REPO)[0]
        assert repo.gguf is not None
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError) as caught:
                described(repo, repo.gguf)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
        assert words in caught.value.cause and hub.sent("/storage/") <= path.stat().st_size


def test_what_is_asked_of_a_tensor_before_packing_is_bounded(hub: FakeHub, tmp_path: Path) -> None:
    with shelf_of("Q8_0", tmp_path) as shelf:
        large: Any = next(iter(shelf.gguf.tensors.values()))
        with pytest.raises(CheckpointError, match="cannot be read"):
            large.file.fill(large.start, memoryview(bytearray(2 << 20)))
        assert shelf.progress().files == ()


NAMES = [
    *("Qwen3-30B-A3B-Q8_0.gguf", "Qwen3-30B-A3B-Q6_K.gguf", "Qwen3-30B-A3B-Q4_K_M.gguf", "UD/Qwen3-UD-Q4_K_XL.gguf"),
    *("BF16/Qwen3-BF16-00001-of-00002.gguf", "BF16/Qwen3-BF16-00002-of-00002.gguf", "mmproj-BF16.gguf"),
    *("Qwen3-30B-A3B-IQ4_XS.gguf", "imatrix_unsloth.gguf", "Q5_K_M/Qwen3-Q5_K_M-00001-of-00002.gguf"),
    *("mixtral.Q3_K_S.gguf", "gpt-oss-mxfp4.gguf", "config.json", "model.gguf", "mtp-Q8_0.gguf"),
]


def listed_files(names: list[str]) -> list[RepoFile]:
    assert all(map(is_wanted, names))
    return [RepoFile(name, 1_000_000 * (len(names) - at), "0" * 64, large=True) for at, name in enumerate(names)]


def test_files_are_known_by_their_names() -> None:
    found = gguf_files.every(listed_files(NAMES))
    assert {one.label: len(one.files) for one in found} == {
        **dict.fromkeys(("Q8_0", "Q6_K", "Q4_K_M", "UD-Q4_K_XL", "IQ4_XS", "Q3_K_S", "MXFP4", "model"), 1),
        "BF16": 2,
    }
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)
    assert not is_wanted("../x.gguf") and not is_wanted("a/.b/x.gguf") and not is_wanted("/x.gguf")
    twice = gguf_files.every(listed_files(["a-Q4_0.gguf", "b-Q4_0.gguf"]))
    assert [one.label for one in twice] == ["a-Q4_0", "b-Q4_0"]


@pytest.mark.parametrize(
    ("names", "asked", "label"),
    [
        (NAMES, "q4_k_m", "Q4_K_M"),
        (NAMES, "Q4_K_XL", "UD-Q4_K_XL"),
        (NAMES, "Qwen3-30B-A3B-IQ4_XS.gguf", "IQ4_XS"),
        (NAMES, "", "Q6_K"),
        (["x-F16.gguf", "gpt-oss-mxfp4.gguf"], "", "MXFP4"),
        (["x-Q2_K.gguf", "x-UD-Q6_K_XL.gguf", "x-Q8_0.gguf"], "", "UD-Q6_K_XL"),
        (["x-IQ2_M.gguf", "x-IQ3_M.gguf", "x-F32.gguf"], "", "IQ2_M"),
        (["x-F32.gguf"], "", "F32"),
    ],
)
def test_one_is_chosen(names: list[str], asked: str, label: str) -> None:
    assert gguf_files.chosen(REPO, listed_files(names), asked).label == label


def test_one_that_is_not_there_is_refused_in_a_sentence(hub: FakeHub) -> None:
    with pytest.raises(UsageError) as caught:
        look_up(f"{REPO}:Q5_K_M")
    assert caught.value.title == f"{REPO} has no Q5_K_M"
    assert "F16 (" in caught.value.cause and "Q8_0 (" in caught.value.cause and "mmproj" not in caught.value.cause
    with pytest.raises(UsageError, match="no GGUF file of a model"):
        gguf_files.chosen(REPO, listed_files(["mmproj-F16.gguf"]))


def test_a_head_is_fetched_alone_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a pack of the hub's file that was made without it."""
    published, folder = tmp_path / "published", tmp_path / "tiny"
    published.mkdir()
    add_head(made := make("glm4_moe_lite", tmp_path / "source"))
    file = convert(one_shard(made), published / "Tiny-BF16.gguf", "BF16", tokenizer=partial(byte_level, pre="glm4"))
    monkeypatch.setattr(remote_gguf, "STRETCH", 1)
    monkeypatch.setattr(remote_gguf, "_FIRST", 1000)
    with FakeHub({REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        with shelf_of("BF16", tmp_path / "here") as shelf:
            spec = PackSpec(draft=False)
            manifest = pack(Checkpoint(shelf), folder, spec, calibration_tokens(2), "tiny")
            head = [tensor for name, tensor in shelf.gguf.tensors.items() if name.startswith("blk.3.")]
        begins = min(tensor.start for tensor in shelf.gguf.tensors.values())
        assert DRAFT not in manifest.beside and lacks_head(folder)
        sent = hub.sent("/storage/")
        with source_of(folder, manifest, None, head=True) as checkpoint:
            add_draft(checkpoint, folder, lambda _step, _share, _left: None)
        sent = hub.sent("/storage/") - sent
    assert sum(tensor.nbytes for tensor in head) <= sent <= sum(tensor.nbytes for tensor in head) + 2 * begins
    assert not lacks_head(folder) and PackedModel.open(folder).head() is not None
    fetched = (folder / DRAFT).read_bytes()
    add_draft(Checkpoint(GgufShelf(file, tmp_path / "made")), folder, lambda _step, _share, _left: None)
    assert (folder / DRAFT).read_bytes() == fetched, "as of the file itself"
