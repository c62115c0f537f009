"""tokenizer.json of a stranger, of every kind of model: valid ones that do something else, changed values, bytes. Some
are made of a vocabulary in tiktoken's form, as of a repository that has no other.

Each is opened as a chat does, and encodes, counts, decodes and spells; some answers are held to a form with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from floe_chat.models.catalog import asset
from floe_chat.models.errors import FloeError
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import Repo
from floe_chat.models.hub.repository_files import RepoFile
from floe_chat.models.tokenizer.chat_process import ChatProcess, Fitted, encode
from floe_chat.models.tokenizer.tiktoken import WAYS
from floe_chat.models.visible import visible
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..models.chat_families import CHATML, write_family
from ..models.test_tiktoken import vocabulary, written
from . import _hostile, _hostile_chat

_TEXTS = ("hi", "Where are rows kept?\n", "<|im_end|>", "</s>", "éß漢🎉", "a\0\x1b[2J", "\ud800", "", " ", "a" * 3_000)
_LETTERS = "abcdefghijklmnopqrstuvwxyz .?"


def good(scratch: Path) -> None:
    """The demo's tokenizer, those of some families, and small ones of the other kinds of models."""
    _hostile_chat.run_one_process()
    for name, write in _WRITERS.items():
        folder = scratch / "good" / name
        folder.mkdir(parents=True)
        write(folder)
        assert _asked(Random(0), folder) != "refused", name
    for name in WAYS:
        folder = scratch / "good" / name
        folder.mkdir()
        (folder / name).write_bytes(written(vocabulary()))
        settings = {"added_tokens_decoder": {"901": {"content": "<|end|>"}}, "chat_template": CHATML}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|end|>"}))
        assert _published(folder) and _asked(Random(0), folder) != "refused", name
        (folder / "tokenizer.json").unlink()


def _demo(folder: Path) -> None:
    packed = asset("demo", "packed")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(packed / name, folder / name)


def _family(name: str) -> Callable[[Path], None]:
    return lambda folder: write_family(folder, name) and None


def _small(model: Callable[[], Any], decoder: Any = None, splitter: Any = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tokenizer: Any = Tokenizer(model())
        tokenizer.decoder = decoder or decoders.Fuse()
        if splitter is not None:
            tokenizer.pre_tokenizer = splitter
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
        added = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))

    return write


def _vocabulary(*more: str) -> dict[str, int]:
    pieces = ["<unk>", *more, *_LETTERS, "▁", "th", "the", "##e", "\n"]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_WRITERS: dict[str, Callable[[Path], None]] = {
    "demo": _demo,
    **{name: _family(name) for name in ("qwen3_moe", "mixtral", "gpt_oss")},
    "pieces": _small(
        lambda: models.BPE(
            vocab=_vocabulary(*_BYTES), merges=[("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        ),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "unigram": _small(
        lambda: models.Unigram([(piece, -float(number)) for piece, number in _vocabulary().items()], 0, False),
        decoders.Metaspace(),
    ),
    "words": _small(lambda: models.WordLevel(_vocabulary(), "<unk>"), splitter=pre_tokenizers.Whitespace()),
    "word pieces": _small(
        lambda: models.WordPiece(_vocabulary(), unk_token="<unk>"),
        decoders.WordPiece(),
        pre_tokenizers.BertPreTokenizer(),
    ),
}


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    folder = scratch / "attempt"
    shutil.rmtree(folder, ignore_errors=True)
    file = rng.choice(sorted(WAYS) if rng.random() < 0.4 else sorted(_WRITERS))
    shutil.copytree(scratch / "good" / file, folder)
    if file in WAYS:
        if rng.random() < 0.7:
            (folder / file).write_bytes(_lines(rng, (folder / file).read_bytes()))
        else:
            settings = json.loads((folder / "tokenizer_config.json").read_bytes())
            named = settings["added_tokens_decoder"]
            named |= {str(rng.choice(_IDS)): {"content": rng.choice(_SPECIAL)} for _ in range(3)}
            settings = _hostile.text(rng, settings) if rng.random() < 0.5 else json.dumps(settings).encode()
            (folder / "tokenizer_config.json").write_bytes(settings)
        return _asked(rng, folder) if _published(folder) else "refused"
    path = folder / "tokenizer.json"
    good_fields = json.loads(path.read_text(encoding="utf-8"))
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            content = json.dumps(_hostile_chat.tokenizer(rng, good_fields)).encode()
        case 4:
            content = _hostile.damaged(rng, path.read_bytes())
        case 5:
            content = path.read_bytes()
            _beside(rng, folder)
        case _:
            content = _hostile.text(rng, _parts_first(rng, good_fields))
    path.write_bytes(content)
    return _asked(rng, folder)


def _lines(rng: Random, good: bytes) -> bytes:
    """A vocabulary in tiktoken's form: lines of it that lie, one of too many tokens, or bytes."""
    match rng.randrange(12):
        case 0:
            return _hostile.damaged(rng, good)
        case 1:
            some = b"", b"\n" * (1 << 20), b"A\n" * (1 << 20), b"\xef\xbb\xbf" + good, good.decode().encode("utf-16")
            return rng.choice((*some, good.replace(b"\n", b"\r\n"), good.replace(b"\n", b"\r"), good.strip(), good * 2))
        case 2:  # all pieces of a text: each can be merged of any two that are it
            text, longest = rng.randbytes(rng.choice((30, 300, 700))), rng.choice((2, 20, 256))
            pieces = {text[at : at + size] for size in range(2, longest + 1) for at in range(len(text) - size + 1)}
            every = [bytes([byte]) for byte in range(256)] + sorted(pieces, key=len)
            return written({piece: rank for rank, piece in enumerate(every)})
        case _:
            pass
    lines = good.splitlines()
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(lines))
        token, rank = lines[at].partition(b" ")[::2]
        match rng.randrange(6):
            case 0:
                del lines[at]
            case 1:
                lines[at] = rng.choice(lines)
            case 2:
                lines.insert(at, lines.pop())
            case 3:  # a special token's own name
                lines.append(base64.b64encode(rng.choice(_SPECIAL).encode(errors="replace")) + b" %d" % len(lines))
            case 4:
                lines[at] = token + b" " + rng.choice((b"-1", b"1e9", b"%d" % 2**70, b"9" * 5000, b"1_0", b"", b"\xb2"))
            case _:
                wrong = b"!!!!", b"YQ=", b"\xff\xfe", b"", b"====", b"A" * (1 << 24), b"a " * (1 << 21), token.lower()
                lines[at] = rng.choice(wrong) + b" " + rank
    return b"\n".join(lines)


_SPECIAL = "<|end|>", "<|reserved_token_3|>", "<|eos|>", "a", "", " ", "Ġthe", "\ud800", "x" * 5000, "\x1b[2J"
_IDS = (*range(899, 912), 0, 7, 1108, -1, "²", "٣", "9" * 5000, 1 << 40)


def _published(folder: Path) -> bool:
    """Whether a tokenizer.json is made, as of a repository on a hub; all its files have been fetched."""
    repo = Repo("somebody/model", "http://127.0.0.1:9", None)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    repo.files = tuple(RepoFile(name, (folder / name).stat().st_size, has, True) for name, has in digests.items())
    with HubShelf(repo, folder) as shelf:
        try:
            return shelf.small("tokenizer.json") is not None
        except FloeError as error:
            _hostile_chat.check(error)
            return False


def _parts_first(rng: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """The same with a part of its vocabulary, most of the time: else changes hardly ever meet anything else."""
    model = dict(fields["model"])
    if rng.random() < 0.8:
        for name in ("vocab", "merges"):
            if isinstance(some := model.get(name), dict):
                model[name] = dict(list(some.items())[:40])
            elif some:
                model[name] = some[:20]
    return {**fields, "model": model}


def _beside(rng: Random, folder: Path) -> None:
    """Another file of the folder, with the tokenizer as it was."""
    name = rng.choice(("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>", "lstrip": False}, "eos_token_id": [2, 3]}
    path = folder / name
    path.write_bytes(_hostile.text(rng, json.loads(path.read_text()) if path.exists() else settings))


def _asked(rng: Random, folder: Path) -> str:
    try:
        if rng.random() < 0.05:
            encode(folder, rng.choice(_TEXTS))
        chat = ChatProcess(folder)
    except FloeError as error:
        _hostile_chat.check(error)
        return "refused"
    failed = 0
    try:
        for turn in (_prompts, _counts, _reads, _spells, _holds):
            try:
                turn(rng, chat)
            except FloeError as error:
                _hostile_chat.check(error)
                failed += 1
    finally:
        chat.close()
    return "failed" if failed else "answered"


def _prompts(rng: Random, chat: ChatProcess) -> None:
    begun = rng.choice(("", "", rng.choice(_TEXTS)))
    found = chat.fit([{"role": "user", "content": rng.choice(_TEXTS)}], 4096, begun, begin=1)
    if isinstance(found, Fitted):
        assert found.ids and 0 <= min(found.ids) <= max(found.ids) <= chat.largest[0]


def _counts(rng: Random, chat: ChatProcess) -> None:
    assert chat.count(rng.choice(_TEXTS)) >= 0


def _reads(rng: Random, chat: ChatProcess) -> None:
    """Tokens of an answer, of which a model may have more than its tokenizer."""
    for last in (False, True):
        ids = [rng.randrange(min(chat.largest[0], 1 << 20) + 20) for _ in range(rng.randrange(12))]
        pushed = chat.push(ids, last=last, request=1)
        for part in pushed.parts:
            for text in (part.text, part.name, part.trouble):
                assert text == visible(text), ascii(text[:100])


def _spells(rng: Random, chat: ChatProcess) -> None:
    ids = [rng.randrange(min(chat.largest[0], 1 << 20) + 20) for _ in range(5)]
    assert len(chat.spelled([*ids, chat.largest[0]])) == 6


def _holds(rng: Random, chat: ChatProcess) -> None:
    tools = {"listed": [], "choice": "auto", "named": "", "parallel": True, "strict": []}
    schema = rng.choice(('{"type": "object"}', '{"enum": ["a", "the"]}', '{"type": "string", "maxLength": 9}'))
    size = min(chat.largest[0], 1 << 20) + rng.choice((1, 1, 64))
    talk = [{"role": "user", "content": "hi", "thought": "", "calls": [], "answers": ""}]
    found = chat.whole(talk, 4096, tools, schema, size, begin=2)
    if not isinstance(found, Fitted):
        return
    drawn = None
    for _ in range(6):
        mask = chat.allowed(drawn, 2)
        may = [token for token in range(size) if mask[token >> 3] >> (token & 7) & 1]
        if not may or drawn in chat.stop_ids:
            break
        drawn = rng.choice(may)
