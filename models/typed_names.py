"""Model names as people type them: hub addresses, parts of names, misspellings. Pure text, no disk and no network."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from .errors import UsageError

_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LEAST = 2  # letters and digits of a part of a name
_LONGEST = 400  # characters of a name or an address; what is longer is a pasted text
_ALIKE = 0.6  # of difflib's ratio, from which on a name is offered instead of a misspelled one
_PAGES = {"datasets": "a data set", "spaces": "a space", "collections": "a collection", "papers": "a paper"}
_HUBS = ("huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn")  # whose models are asked of the user's hub
_VIEWS = ("tree", "blob", "resolve", "raw", "commit")


@dataclass(frozen=True, slots=True)
class NamedRepo:
    """A repository on the hub.

    Attributes:
        id: owner/name. commit: "" for its main revision. file: which of its GGUF files, "" where that is not said.
    """

    id: str
    commit: str = ""
    file: str = ""


def hub_repo(text: str) -> NamedRepo | None:
    """The repository that an id (owner/name) or the address of a page or file of it names; None for anything else.

    Addresses of huggingface.co, hf.co and mirrors are understood with or without https://, with /tree/main, /blob/...
    and the like behind them. Whatever host they name, the hub that is asked is the one of HF_ENDPOINT. Behind either,
    ":Q4_K_M" names a GGUF file, as llama.cpp and Ollama write it.

    Raises:
        UsageError: the address of something else on a hub, or of a revision other than main.
    """
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    before, _, file = text.rpartition(":")
    if "/" in before.rpartition("://")[2] and re.fullmatch(r"[\w.+-]+", file, re.ASCII):
        found = hub_repo(before)
        return None if found is None else replace(found, file=file)
    if _ID.fullmatch(text) and "." not in text.partition("/")[0]:
        return NamedRepo(text)
    if not re.match(r"(https?|hf)://|git@|(www\.)?(huggingface\.co|hf\.co|hf-mirror\.com)/", text, re.IGNORECASE):
        return NamedRepo(text) if _ID.fullmatch(text) and not text.startswith(".") else None
    return _of_address(text)


def _of_address(text: str) -> NamedRepo:
    address = re.sub(r"^git@([^:/]+):", r"https://\1/", text)
    address = re.sub(r"^hf://", "https://hf.co/", address, flags=re.IGNORECASE)
    try:
        parts = [
            unquote(part) for part in urlsplit(address if "://" in address else f"https://{address}").path.split("/")
        ]
    except ValueError:
        parts = []
    parts = [part for part in parts if part]
    if parts and parts[0] in _PAGES:
        raise UsageError(
            f"{text} is not a model", f"It is the address of {_PAGES[parts[0]]}.", "Give the address of a model's page."
        )
    if len(parts) > 2 and parts[0] == "models":
        del parts[0]
    name = "/".join(parts[:2]).removesuffix(".git")
    if len(parts) < 2 or not _ID.fullmatch(name):
        raise UsageError(
            f"{text} is not the address of a model",
            "",
            "Copy the address of the model's page, such as https://huggingface.co/allenai/OLMoE-1B-7B-0924-Instruct",
        )
    revision = parts[3] if len(parts) > 3 and parts[2] in _VIEWS else "main"
    file = parts[-1] if len(parts) > 4 and parts[-1].lower().endswith(".gguf") else ""
    if revision == "main":
        return NamedRepo(name, file=file)
    if re.fullmatch("[0-9a-f]{40}", revision):
        return NamedRepo(name, revision, file)
    raise UsageError(
        f"{text} is not the main revision",
        f"It is the revision {revision}; floe-chat sets up main, or a commit by all 40 digits of its hash.",
        f"Give {name}, or the address of a commit.",
    )


def other_address(text: str, hub: str) -> str | None:
    """The address of a model on another host than the user's hub, without what follows a "?"; None for anything else.

    It is that of a repository on another mirror, https://HOST/owner/name, or of a folder on any web server, in which
    case it ends with "/".

    Args:
        hub: the address of the user's hub, "" for the usual one. With one by http, others may be so too.

    Raises:
        UsageError: it is not encrypted, though it leaves this machine, or holds a password.
    """
    text = text.strip()
    if len(text) > _LONGEST or not re.match("https?://", text, re.IGNORECASE):
        return None
    try:
        parts, port = urlsplit(text), urlsplit(text).port
        host, ours = (parts.hostname or "").lower(), (urlsplit(hub).hostname, urlsplit(hub).port)
    except ValueError:
        return None
    if not re.fullmatch(r"[a-z0-9.-]+|[0-9a-f:]+", host) or host.removeprefix("www.") in _HUBS or (host, port) == ours:
        return None
    if parts.username is not None:
        raise UsageError("An address with a password is not used", "It would be saved.", "Leave the password out.")
    here = host in ("localhost", "::1") or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host)
    if parts.scheme.lower() == "http" and not here and not hub.lower().startswith("http:"):
        raise UsageError(f"{text} is not encrypted", "Others on the way could read and change it.", "Use https://.")
    named = [part for part in parts.path.split("/") if part]
    folder = parts.path.endswith("/") or len(named) != 2
    if named[-1:] == ["manifest.json"]:
        named, folder = named[:-1], True
    elif len(named) > 2 and named[2] in _VIEWS:
        named, folder = named[:2], False
    origin = f"{parts.scheme.lower()}://{parts.netloc.lower()}"
    return "/".join([origin, *named, *([""] if folder else [])])


def matches(text: str, names: Iterable[str]) -> list[str]:
    """The names that `text` can mean, in their order: that name itself in any spelling, else those that begin with it,
    else those that contain it, else those whose words begin with its words ("qwen3 thinking"). Case and signs between
    letters do not count: "Mixtral 8x7B" is mixtral-8x7b.
    """
    wanted = _letters(text)
    known = {name: _letters(name) for name in names}
    if len(wanted) < _LEAST:
        return [name for name in known if name == text]
    for same in (str.__eq__, str.startswith, str.__contains__):
        if found := [name for name, letters in known.items() if same(letters, wanted)]:
            return found
    return [name for name in known if _begin(_words(text), _words(name))]


def _begin(wanted: Sequence[str], words: Sequence[str]) -> bool:
    """Whether each of the wanted words, in this order, is the beginning of a word."""
    left = iter(words)
    return bool(wanted) and all(any(word.startswith(one) for word in left) for one in wanted)


def similar(text: str, names: Sequence[str]) -> str | None:
    """The name that `text` is probably a misspelling of; None if none is close. Parts of names count: "mixtrl"."""
    wanted = _letters(text)[:_LONGEST]
    best, ratio = None, _ALIKE
    for name in names:
        letters = _letters(name)
        for candidate in (letters, letters[: len(wanted)]):
            alike = difflib.SequenceMatcher(None, wanted, candidate).ratio()
            # A part has to be closer than the whole: four letters of six are easily alike.
            if alike > ratio + (0.15 if candidate != letters else 0):
                best, ratio = name, alike
    return best if len(wanted) >= _LEAST else None


def did_you_mean(text: str, names: Sequence[str]) -> str:
    """A sentence that offers the closest name, or ""."""
    close = similar(text, names)
    return f"Did you mean {close}?" if close else ""


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())
