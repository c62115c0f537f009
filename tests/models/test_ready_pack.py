"""Ready packs are strangers': what is wrong shows before anything large is fetched; and the model card of one's own."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from floe_chat.kernels.rule import Rule
from floe_chat.models import catalog
from floe_chat.models.catalog import source
from floe_chat.models.checking.verify import damages
from floe_chat.models.errors import FloeError, HubError, PackError, UsageError
from floe_chat.models.hub.model_card import card
from floe_chat.models.hub.places import PackServer, look_up
from floe_chat.models.hub.ready_pack import Offer, check_config, in_folder
from floe_chat.models.pack.manifest import DRAFT, FILE_NAME, FileEntry, Manifest, PackSource, TunedPreset
from floe_chat.models.typed_names import other_address

from ..helpers import edit_json, explained, run_cli
from .fakehub import FakeHub, Fault

PACK = "floe/tiny-floe"
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def folder(tiny_pack: Path, tmp_path: Path) -> Path:
    """A pack that may be changed, with what a repository has beside it."""
    copied = Path(shutil.copytree(tiny_pack, tmp_path / "published"))
    (copied / "README.md").write_text("# Tiny")
    (copied / ".gitattributes").write_text("*.safetensors filter=lfs")
    (copied / "evil.py").write_text("raise SystemExit")
    return copied


@pytest.fixture
def serve(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], FakeHub]]:
    """Starts a hub that serves it as it is by then."""
    hubs: list[FakeHub] = []

    def start() -> FakeHub:
        hub = FakeHub({PACK: folder}).__enter__()
        hub.used_by(monkeypatch, tmp_path / "home")
        hubs.append(hub)
        return hub

    yield start
    for hub in hubs:
        hub.__exit__()


def test_it_is_found_out_by_small_requests(folder: Path, serve: Callable[[], FakeHub]) -> None:
    hub = serve()
    repo, offer = look_up(PACK)
    assert offer is not None and offer.manifest == Manifest.read(folder)
    assert offer.content == (folder / FILE_NAME).read_bytes()
    check_config(PACK, offer, repo.read("config.json") or b"")
    assert [request.path.rpartition("/")[2] for request in hub.requests if request.status == 200] == [
        "main",
        FILE_NAME,
        "config.json",
    ]
    assert not {"README.md", "evil.py", FILE_NAME} & offer.files.keys()
    named = offer.described(PACK, "floe", repo.commit)
    assert (named.up, named.dense, named.by, named.digest) == (3, 4, "floe", offer.digest)
    assert offer.bytes == sum((folder / name).stat().st_size for name in (*offer.files, FILE_NAME))


def renamed(name: str) -> Change:
    """A file of the manifest is listed by another name as well."""
    return lambda fields: fields["files"].update({name: fields["files"]["config.json"]})


def resized(name: str, by: int) -> Change:
    return lambda fields: fields["files"][name].update(size=fields["files"][name]["size"] + by)


def crowded(fields: dict[str, Any]) -> None:
    fields["files"] |= {f"layer_{number:06d}.safetensors": fields["files"]["config.json"] for number in range(50_000)}


def noted(fields: dict[str, Any]) -> None:
    fields.setdefault("beside", {})["frontier.json"] = {"size": 1, "sha256": "0" * 64}


HOSTILE: dict[str, tuple[Change, str]] = {
    "newer": (lambda fields: fields.update(version=10), "version 10; this program reads"),
    "mixed": (lambda fields: fields.update(version=4), "no longer supports"),
    "folder": (renamed("a/b.json"), "file name"),
    "above": (renamed("../b.json"), "file name"),
    "absolute": (renamed("/etc/passwd"), "file name"),
    "drive": (renamed("C:b.json"), "file name"),
    "control": (renamed("\x1b[2J.json"), "is not a file of a pack"),
    "code": (renamed("evil.py"), "'evil.py' is not a file of a pack"),
    "manifest": (renamed(FILE_NAME), "is not a file of a pack"),
    "marker": (renamed("packing.json"), "is not a file of a pack"),
    "larger": (resized("layer_01.safetensors", 64), "its manifest states"),
    "smaller": (resized("tokenizer.json", -1), "its manifest states"),
    "huge": (resized("layer_01.safetensors", 1 << 50), "which no such file can have"),
    "dense": (resized("dense.safetensors", 1 << 45), "which no such file can have"),
    "negative": (resized("dense.safetensors", -(1 << 40)), "which no such file can have"),
    "hash": (lambda fields: fields["files"]["layer_00.safetensors"].update(sha256="0" * 64), "another sha256"),
    "no hash": (lambda fields: fields["files"]["layer_00.safetensors"].update(sha256="x"), "is not one"),
    "unlisted": (noted, "is missing"),
    "many": (crowded, "the entries of 2 layers"),
    "layers": (lambda fields: fields["architecture"].update(layers=3_000_000), "its sizes"),
    "experts": (lambda fields: fields["architecture"].update(experts=8), "which no such file can have"),
}


LISTED = ("its manifest states", "another sha256", "is missing")  # what only a listing shows


@pytest.mark.some(12)
@pytest.mark.parametrize("what", HOSTILE)
def test_what_it_says_is_checked_before_anything_large_is_read(
    folder: Path, serve: Callable[[], FakeHub], what: str
) -> None:
    change, said = HOSTILE[what]
    edit_json(folder / FILE_NAME, change)
    hub = serve()
    with pytest.raises(PackError) as caught:
        look_up(PACK)
    assert said in caught.value.cause and "\x1b" not in str(caught.value) and caught.value.hint, caught.value
    if said not in LISTED:
        with pytest.raises(PackError) as caught:
            PackServer(f"{hub.url}/plain/{PACK}/")
        assert said in caught.value.cause
    assert not any(request.storage for request in hub.requests)


def test_missing_files_and_a_missing_manifest_are_told(folder: Path, serve: Callable[[], FakeHub]) -> None:
    (folder / "layer_01.safetensors").rename(folder.parent / "layer")
    serve()
    with pytest.raises(PackError, match="cannot be used") as caught:
        look_up(PACK)
    assert caught.value.cause == "layer_01.safetensors is missing."
    for path in folder.glob("*.safetensors"):
        path.unlink()
    serve()
    with pytest.raises(PackError) as caught:
        look_up(PACK)
    assert "is missing" in caught.value.cause
    (folder.parent / "layer").rename(folder / "layer_01.safetensors")
    (folder / FILE_NAME).unlink()
    for name in ("dense", "profile"):
        (folder / f"{name}.safetensors").touch()
    serve()
    with pytest.raises(PackError) as caught:
        look_up(PACK)
    assert caught.value.cause == "It has no manifest.json."


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b"null"], ids=range(5))
def test_another_manifest_makes_no_pack(
    folder: Path, serve: Callable[[], FakeHub], content: bytes, tiny_checkpoint: Path
) -> None:
    (folder / FILE_NAME).write_bytes(content)
    hub = serve()
    with pytest.raises(PackError, match="damaged"):  # its other files are those of a pack
        look_up(PACK)
    with pytest.raises(HubError, match="There is no pack at"):
        look_up(f"{hub.url.replace('127.0.0.1', 'localhost')}/plain/{PACK}/")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    serve()
    with pytest.raises(HubError) as neither:
        look_up(PACK)
    assert "no *.safetensors files, and its manifest.json is not that of a pack" in neither.value.cause
    shutil.copytree(tiny_checkpoint, folder, dirs_exist_ok=True)
    serve()
    assert look_up(PACK)[1] is None


def test_a_repository_of_neither_kind(folder: Path, serve: Callable[[], FakeHub]) -> None:
    for path in folder.iterdir():
        if path.name != "README.md":
            path.unlink()
    serve()
    with pytest.raises(HubError) as caught:
        look_up(PACK)
    assert caught.value.cause == "It has neither *.safetensors nor *.gguf files, nor the manifest.json of a pack."


def test_a_manifest_of_100_mb_is_not_read(folder: Path, serve: Callable[[], FakeHub]) -> None:
    with (folder / FILE_NAME).open("r+b") as file:
        file.truncate(100 << 20)
    hub = serve()
    with pytest.raises(PackError) as caught:
        look_up(PACK)
    assert "manifest.json has 105 MB" in caught.value.cause and hub.sent(FILE_NAME) == 0
    with pytest.raises(PackError) as caught:
        PackServer(f"{hub.url}/plain/{PACK}/")
    assert "more than 16 MB" in caught.value.cause and hub.sent(FILE_NAME) <= 17 << 20


def test_config_json_is_compared(folder: Path) -> None:
    content = (folder / FILE_NAME).read_bytes()
    edit_json(folder / "config.json", lambda fields: fields.update(num_experts_per_tok=1))
    config = (folder / "config.json").read_bytes()
    offer = Offer(Manifest.parse(content, folder), content)
    with pytest.raises(PackError, match="cannot be used") as caught:
        check_config(PACK, offer, config)
    assert "another sha256" in caught.value.cause
    offer.manifest.files["config.json"] = FileEntry(len(config), hashlib.sha256(config).hexdigest())
    with pytest.raises(PackError) as caught:
        check_config(PACK, offer, config)
    assert "describe models of different sizes" in caught.value.cause


@pytest.mark.parametrize("what", ["pipe", "device", "loop", "gone", "folder", "shorter"])
def test_a_folder_is_looked_at_before_it_is_copied(folder: Path, what: str) -> None:
    assert in_folder(folder) is not None
    for name in ("layer_01.safetensors", FILE_NAME):
        file = folder / name
        content = file.read_bytes()
        file.unlink()
        match what:
            case "pipe":
                os.mkfifo(file)
            case "device":
                file.symlink_to("/dev/zero")
            case "loop":
                file.symlink_to(name)
            case "folder":
                file.mkdir()
            case "shorter":
                file.write_bytes(content[:-2])
            case _:
                pass
        with pytest.raises(PackError, match=r"cannot be used|damaged") as caught:
            in_folder(folder)
        assert name in caught.value.cause
        file.rmdir() if what == "folder" else file.unlink(missing_ok=True)
        file.write_bytes(content)


def test_mirrors_and_web_servers(folder: Path, serve: Callable[[], FakeHub], monkeypatch: pytest.MonkeyPatch) -> None:
    hub = serve()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    for address in (f"{hub.url}/{PACK}", f"{hub.url}/plain/{PACK}/", f"{hub.url}/plain/{PACK}/manifest.json"):
        place = source(address).place
        repo, offer = look_up(place)
        assert offer is not None and repo.token is None
        check_config(place, offer, repo.read("config.json") or b"")
    assert {request.token for request in hub.requests} == {None}
    with pytest.raises(HubError, match="There is no pack at") as caught:
        look_up(f"{hub.url}/floe/absent")
    assert "does not serve manifest.json" in caught.value.cause
    hub.faults.append(Fault("GET /plain/.*manifest", status=500, times=3))
    with pytest.raises(FloeError, match="has a problem"):
        look_up(f"{hub.url}/plain/{PACK}/")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("https://packs.example.org/some/pack/", "https://packs.example.org/some/pack/"),
        ("https://packs.example.org/deep/er/pack?x=1#y", "https://packs.example.org/deep/er/pack/"),
        ("https://mirror.example.org:8443/owner/name", "https://mirror.example.org:8443/owner/name"),
        ("https://mirror.example.org/owner/name/tree/main", "https://mirror.example.org/owner/name"),
        ("https://packs.example.org/manifest.json", "https://packs.example.org/"),
        ("http://localhost:8000/pack/", "http://localhost:8000/pack/"),
        ("https://huggingface.co/owner/name", None),
        ("https://www.hf.co/owner/name", None),
        ("https://hub.example.org/owner/name", None),
        ("owner/name", None),
        ("git@example.org:owner/name", None),
        ("https://[", None),
        ("https://a\x1b/owner/name", None),
        ("file:///etc/passwd", None),
    ],
)
def test_addresses_of_other_hosts(text: str, address: str | None) -> None:
    assert other_address(text, "https://hub.example.org") == address


def test_a_listed_models_name_on_another_host_is_the_listed_model_unless_it_is_a_folder() -> None:
    olmoe = "allenai/OLMoE-1B-7B-0924-Instruct"
    assert source(f"https://example.org/{olmoe}").repo == olmoe
    assert source(f"https://example.org/{olmoe}/").repo == f"https://example.org/{olmoe}/"
    assert source("https://example.org/some/Mixtral-floe").repo == "https://example.org/some/Mixtral-floe"
    assert source("me/Mixtral-8x7B-4bit-floe").repo == "me/Mixtral-8x7B-4bit-floe"


@pytest.mark.parametrize("text", ["http://packs.example.org/pack/", "https://me:secret@packs.example.org/pack/"])
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        other_address(text, "")
    assert other_address("http://packs.example.org/pack/", "http://hub.example.org")


def front_matter(text: str) -> dict[str, Any]:
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    ("source", "licence", "base"),
    [
        (PackSource("mistralai/Mixtral-8x7B-Instruct-v0.1", "0" * 40, True), "apache-2.0", True),
        (PackSource("deepseek-ai/DeepSeek-V2-Lite-Chat", "0" * 40, True), "other", True),
        (PackSource("someone/else", "0" * 40, True), "other", True),
        (PackSource("someone/else", None, True), "other", False),
        (PackSource('x"\n---\nlicense: mit', None, True), "other", False),
        (PackSource("](javascript:alert(1)) <script>|`", "0" * 40, True), "other", False),
    ],
    ids=range(6),
)
def test_what_a_hub_reads(tiny_pack: Path, tmp_path: Path, source: PackSource, licence: str, base: bool) -> None:
    dataclasses.replace(Manifest.read(tiny_pack), source=source).write(tmp_path)
    manifest = Manifest.read(tmp_path)
    text = card(manifest, "tiny")
    fields = front_matter(text)
    assert fields["license"] == licence and fields["library_name"] == "floe-chat"
    assert fields["pipeline_tag"] == "text-generation" and "mixtral" in fields["tags"]
    assert (fields.get("base_model"), fields.get("base_model_relation")) == (
        (source.name, "quantized") if base else (None, None)
    )
    assert ("fill in: that of the base model" in text) == (licence == "other")
    body = text.split("---\n", 2)[2]
    assert "<script>" not in body and "](javascript" not in body


def test_figures_are_those_of_the_pack(tiny_pack: Path) -> None:
    manifest = Manifest.read(tiny_pack)
    text = card(manifest, "tiny")
    assert "up 3, gate and down 4, attention 4 bits" in text and "2 layers with 4 experts, 2 for each token" in text
    assert f"{manifest.calibration.tokens:,} tokens" in text and "version 7" in text
    assert "were not measured on this model" in text and "drafting head" not in text
    beside = {DRAFT: FileEntry(1, "0" * 64)}
    assert f"update floe-chat if it says that `{DRAFT}`" in card(dataclasses.replace(manifest, beside=beside), "tiny")
    rule = TunedPreset("Balanced", Rule(0.4), 0.0123, 250_000, "a text", 4096, "pack")
    tuned = card(dataclasses.replace(manifest, tuned=(rule,)), "tiny")
    assert "| Balanced | 0.012 | the pack with nothing left out | 250 kB | a text, 4,096 tokens |" in tuned


def test_the_command(tiny_pack: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_pack, catalog.models_folder() / "tiny"))
    shown = run_cli("models", "card", "tiny")
    assert shown.code == 0 and front_matter(shown.out)["license"] == "other"
    assert f"hf upload OWNER/NAME {folder} ." in shown.err and "fill in" in shown.err
    saved = run_cli("models", "card", "tiny", "--save")
    assert saved.code == 0 and (folder / "README.md").read_text() == shown.out and saved.out == ""

    def silent(_step: str, _share: float) -> None:
        """Nobody looks on."""

    assert damages(folder, Manifest.read(folder), silent) == []
    (folder / "README.md").write_text("mine")
    assert "is there already" in explained(run_cli("models", "card", "tiny", "--save"), 2)
    assert (folder / "README.md").read_text() == "mine"
    assert run_cli("models", "card", "tiny", "--save", "--force").code == 0
    assert run_cli("models", "card", "tiny", "--output", str(tmp_path / "card.md")).code == 0
    assert (tmp_path / "card.md").read_text() == shown.out == (folder / "README.md").read_text()
    for output in (str(tmp_path), str(tmp_path / "absent" / "card.md")):
        explained(run_cli("models", "card", "tiny", "--output", output), 2)
    explained(run_cli("models", "card", "absent"), 2)
    assert run_cli("models", "remove", "tiny", "--yes").code == 0 and not folder.exists()
