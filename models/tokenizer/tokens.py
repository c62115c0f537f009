"""A model's tokenizer.json: text to token ids, and token ids to text as they come.

The file is an untrusted program for the tokenizers library. A bad one causes an exception, a panic of its Rust code, or
worse: `contained` turns the first two into a PackError, `chat_process.py` survives the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..errors import FloeError, PackError, verify_hint
from ..visible import visible
from .parts import Mark

_MOST_TEXT = 16_384, 1_024  # characters that decoded tokens may have: at all, and for each token
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CAUSE = 300  # characters of somebody else's error message


def _letters() -> dict[str, bytes]:
    """The letters that stand for bytes in byte-level vocabularies (GPT-2): of printable bytes their own, of the others
    those from 256 on, in order.
    """
    plain = {byte: byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = enumerate((byte for byte in range(256) if byte not in plain), 256)
    return {chr(letter): bytes([byte]) for letter, byte in (plain | dict(others)).items()}


_BYTES = _letters()


@contextmanager
def contained(title: str, folder: Path) -> Generator[None]:
    """Blames every failure inside on the files in `folder`.

    Raises:
        PackError: with this title, and what went wrong as its cause.
    """
    try:
        yield
    except (FloeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # tokenizers raises bare Exceptions, and a BaseException without a public type where its Rust code panics.
    except BaseException as error:
        cause = "It needs more memory than it may use." if isinstance(error, MemoryError) else first_line(error)
        raise PackError(title, cause, verify_hint(folder)) from error


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or else its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:_LONGEST_CAUSE] if lines else type(error).__name__


class Tokens:
    """A tokenizer as floe-chat uses it: it neither truncates nor pads a text, and adds no special tokens.

    Attributes:
        largest: the largest token id that it knows, and that token's text. special: ids of special tokens, by text.
        longest: characters of its longest token.

    Raises:
        PackError: no tokenizer.json in the folder, or one that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "tokenizer.json"
        with contained(f"The tokenizer at {folder} cannot be read", folder):
            if not path.is_file():  # not a pipe: reading one would block for ever
                raise FileNotFoundError("tokenizer.json is missing.")
            self._tokenizer = Tokenizer.from_file(str(path))
            # Settings in the file for other programs.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
            added = self._tokenizer.get_added_tokens_decoder()
            self._added = {token.content: number for number, token in added.items() if token.content}
            self.special = {token.content: number for number, token in added.items() if token.content and token.special}
            # Its state is JSON; that of the whole tokenizer would be megabytes.
            decoder = self._tokenizer.decoder
            self._of_bytes = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
            if not vocabulary:
                raise ValueError("It has no tokens.")
        text, number = max(vocabulary.items(), key=lambda item: item[1])
        self.largest = number, text
        self.longest = max(map(len, vocabulary))

    @property
    def added(self) -> Mapping[str, int]:
        """The ids of the added tokens by their texts, special ones among them."""
        return self._added

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, begun: bool = False) -> list[int]:
        """Token ids of a text; `begun`: with the tokens that the model's texts begin with.

        Raises:
            PackError: the tokenizer fails on it.
        """
        with contained(f"The tokenizer at {self._folder} fails", self._folder):
            return list(self._tokenizer.encode(text, add_special_tokens=begun).ids)

    def spelled(self, number: int) -> bytes:
        """What a token writes, which may be a part of a character; nothing for an id that is no token."""
        piece = self._tokenizer.id_to_token(number)
        if piece is None or piece in self._added:
            return (piece or "").encode("utf-8", "replace")
        if self._of_bytes:
            return b"".join(_BYTES.get(letter, letter.encode("utf-8", "replace")) for letter in piece)
        byte = _BYTE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode("utf-8", "replace")

    def defused(self, text: str) -> str:
        """`text` with every spelling of an added token ("</s>") broken up: no text can end a turn or open one."""
        for token in self._added:
            text = text.replace(token, token[0] + "\u200b" + token[1:] if len(token) > 1 else "")
        return text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text

    def decoder(self, marks: Collection[str] = ()) -> Detokenizer:
        """A new incremental decoder for one answer, which keeps the added tokens `marks`."""
        kept = {number: Mark(text) for text, number in self._added.items() if text in marks}
        return Detokenizer(self._tokenizer, self._folder, kept)


class Detokenizer:
    """Token ids to text, piece by piece: holds back bytes until a character is whole, and drops special tokens that are
    no marks.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path = Path(), marks: Mapping[int, Mark] | None = None) -> None:
        self._tokenizer, self._folder, self._marks = tokenizer, folder, marks or {}
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, ids: Sequence[int]) -> str:
        """The text completed by `ids`, with control characters made visible. Raises PackError as `pieces`."""
        return visible("".join(self.pieces(ids)))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text that each of `ids` completes, control characters among it; a mark is a `Mark`.

        Raises:
            PackError: the tokenizer fails, or turns a token into more text than any token has.
        """
        at_all, each = _MOST_TEXT
        most, pieces = at_all + each * len(ids), list[str]()
        title = f"The tokenizer at {self._folder} fails"
        with contained(title, self._folder):
            for token in ids:
                pieces.append(self._step(token))
                if (most := most - len(pieces[-1])) < 0:
                    raise ValueError(f"Token {token} becomes {len(pieces[-1]):,} characters.")
        return pieces

    def _step(self, token: int) -> str:
        if (mark := self._marks.get(token)) is not None:
            self._stream = DecodeStream(skip_special_tokens=True)
            return mark
        try:
            return self._stream.step(self._tokenizer, token) or ""
        # Bytes that form no character change what was decoded before them; the library gives up on such a stream
        # with a bare Exception.
        except Exception:  # noqa: BLE001
            self._stream = DecodeStream(skip_special_tokens=True)
            return "\ufffd" + (self._stream.step(self._tokenizer, token) or "")
