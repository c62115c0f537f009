"""The models that a server offers, and which of them answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ....models.errors import UsageError
from ....models.private_file import loads
from ....models.visible import as_name
from .address import Address
from .stream import is_count

MOST_LIST = 8 << 20  # bytes of a list of models; those of large hosts have some hundred KB
_SHOWN = 8
_MAKERS = {
    "llamacpp": "llama-server",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "library": "Ollama",
    "floe-chat": "floe-chat",
}


@dataclass(frozen=True, slots=True)
class Offered:
    """A model of a server's list. `window`: tokens of context, 0 if it does not say. `maker`: whose server it is, by
    what it says of itself: "vLLM", or "".
    """

    id: str
    window: int = 0
    maker: str = ""

    @property
    def name(self) -> str:
        """The id, safe to show."""
        return as_name(self.id)


def offered(body: bytes) -> list[Offered]:
    """The models in the answer to GET /models. Raises ValueError: it is no list of models."""
    found: Any = loads(body)
    listed = found.get("data") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it has no list of models")
    return [_one(entry) for entry in listed if isinstance(entry, dict) and _is_id(entry.get("id"))]


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1000


def _one(entry: dict[str, Any]) -> Offered:
    meta = entry.get("meta")
    meta = meta if isinstance(meta, dict) else {}
    # vLLM and SGLang; llama-server: what it was started with. What a model was trained with is no limit of a server.
    given = (entry.get("context_length"), entry.get("max_model_len"), meta.get("n_ctx"))
    window = next((count for count in given if is_count(count) and count), 0)
    return Offered(entry["id"], window, _MAKERS.get(str(entry.get("owned_by", "")), ""))


def choose(models: Sequence[Offered], wanted: str | None, address: Address) -> Offered:
    """The model called `wanted`, or by a part of its name that no other has; without a wish the only one there is.
    An empty list does not refuse a wish.

    Raises:
        UsageError: there is none, or there are several.
    """
    names = ", ".join(model.name for model in models[:_SHOWN]) + (", …" if len(models) > _SHOWN else "")
    if not models and wanted is not None:
        return Offered(wanted)  # some servers load what is asked for, and list what is loaded
    if not models:
        hint = "Load one there, or name one: --model NAME."
        raise UsageError(f"{address.host} offers no model", "Its list of models is empty.", hint)
    if wanted is None and len(models) == 1:
        return models[0]
    if wanted is None:
        cause = f"It offers {names}."
        raise UsageError(f"{address.host} offers {len(models)} models", cause, "Choose one: --model NAME")
    found = [model for model in models if model.id == wanted]
    found = found or [model for model in models if wanted.lower() in model.id.lower()]
    if len(found) != 1:
        what = f"has no model {as_name(wanted)}" if not found else f"has {len(found)} models {as_name(wanted)}"
        raise UsageError(f"{address.host} {what}", f"It offers {names}.", "Give one of these names: --model NAME")
    return found[0]
