"""Vocabularies in tiktoken's form: made into tokenizer.json, they give the ids that its rule gives."""

from __future__ import annotations

import base64
import random
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from floe_chat.models.errors import CheckpointError
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.tokenizer.tiktoken import WAYS, tokenizer_json
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .fakehub import FakeHub

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")[:6000]
MORE = "I'LL don't 12345 678  \n\n\t x\r\n 你好，世界！ 漢字kanji ünïcode e\u0301 Ǆ 🙂🙂 ...\n  end"


def vocabulary() -> dict[bytes, int]:
    """Learned of the text, with ranks as a trainer orders them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT, MORE], trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    signs = {sign: byte for byte, sign in bytes_to_unicode().items()}
    words = sorted(made.get_vocab().items(), key=lambda item: item[1])
    return {bytes(signs[sign] for sign in word): rank for rank, (word, _) in enumerate(words)}


def written(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def by_the_rule(text: str, ranks: dict[bytes, int], split: str) -> list[int]:
    """tiktoken's: of each part, the neighbours are merged whose bytes have the lowest rank, the first if several."""
    found: list[int] = []
    for part in regex.findall(f"(?V1){split}", text):
        raw = part.encode()
        pieces = [raw] if raw in ranks else [raw[at : at + 1] for at in range(len(raw))]
        while True:
            pairs = [(ranks.get(one + two, 1 << 30), at) for at, (one, two) in enumerate(pairwise(pieces))]
            if not pairs or min(pairs)[0] == 1 << 30:
                break
            at = min(pairs)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        found += [ranks[piece] for piece in pieces]
    return found


@pytest.mark.parametrize("file", WAYS)
def test_texts_have_the_ids_of_the_rule(file: str) -> None:
    ranks, way = vocabulary(), WAYS[file]
    named = {"added_tokens_decoder": {str(len(ranks) + 1): {"content": "<|end|>"}, "7": {"content": "no special one"}}}
    made = Tokenizer.from_str(tokenizer_json(file, written(ranks), named).decode())
    drawn = random.Random(0)
    texts = [TEXT, MORE, *("".join(drawn.sample(TEXT + 9 * MORE, 400)) for _ in range(5))]
    for text in texts:
        ids = made.encode(text).ids
        composed = unicodedata.normalize("NFC", text) if way.composed else text
        assert ids == by_the_rule(composed, ranks, way.split)
        assert made.decode(ids) == composed
    assert made.token_to_id("<|end|>") == len(ranks) + 1 and made.get_vocab_size() == len(ranks) + len(way.specials)
    assert made.encode("a<|end|>").ids[-1] == len(ranks) + 1
    assert made.decode([len(ranks) + 1]) == ""


BYTES = written({bytes([byte]): byte for byte in range(256)})
DRAWN = random.Random(1).randbytes(200)
PIECES = dict.fromkeys(DRAWN[at : at + size] for size in range(2, 201) for at in range(201 - size))
EVERY = BYTES + b"".join(base64.b64encode(piece) + b" %d\n" % (256 + at) for at, piece in enumerate(PIECES))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BYTES.replace(b" 5\n", b" 6\n"), "line 6 has a token twice"),
        (BYTES[: BYTES.index(b" 200\n")], "line 201 is not a token"),
        (BYTES.replace(b" 3\n", b" x\n"), "line 4 is not a token"),
        (BYTES[: BYTES.index(b" 200\n") + 5], "it lacks 55 of the 256 bytes"),
        (BYTES + base64.b64encode(b"a" * 300) + b" 256\n", "more than 256 bytes"),
        (b"", "it lacks 256"),
        pytest.param(EVERY, "can be merged in more than", marks=pytest.mark.thorough),
        (BYTES + b"\n" * 9 + b"x " * 99 + b"256", "line 257 is not a token"),
    ],
    ids=range(8),
)
def test_what_is_no_vocabulary_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tokenizer_json("hy.tiktoken", content, {})


def test_of_a_hub_it_is_made_beside_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    ranks = vocabulary()
    (folder / "hy.tiktoken").write_bytes(written(ranks))
    with FakeHub({"some/model": folder}) as hub:
        hub.used_by(monkeypatch, tmp_path / "home")
        for name in ("fetched", "damaged"):
            (tmp_path / name).mkdir()
        with HubShelf(resolve("some/model"), tmp_path / "fetched") as shelf:
            path = shelf.small("tokenizer.json")
            assert path is not None and path == shelf.small("tokenizer.json")
            assert Tokenizer.from_file(str(path)).get_vocab_size() == len(ranks) + 210
            assert shelf.small("tiktoken.model") is None
    for name, content, said in (
        ("hy.tiktoken", "nonsense", "line 1"),
        ("tokenizer_config.json", "7", "no JSON object"),
    ):
        (folder / name).write_text(content)
        with FakeHub({"some/model": folder}) as hub:
            hub.used_by(monkeypatch, tmp_path / "home")
            shelf = HubShelf(resolve("some/model"), tmp_path / "damaged")
            with shelf, pytest.raises(CheckpointError, match=f"{name} of some/model cannot be used") as caught:
                shelf.small("tokenizer.json")
        assert said in caught.value.cause


def test_a_folder_with_such_a_vocabulary_alone_is_explained(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("")
    with pytest.raises(CheckpointError) as caught:
        read_tokens(tmp_path, "text")
    assert "hub id" in caught.value.hint
