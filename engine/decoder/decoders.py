"""Which code computes the dense part of a forward pass: the fused pass (fused_pass.py), or transformers' own modules.

The latter are the reference for tests of the fused pass, and run where it declines; the reason is stored and shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...models.errors import FloeError, PackError
from ...models.families import family_of
from ...models.families.derived import Derived
from ..outcomes import explained
from ..sampling import Sampler
from . import finite_check
from .draft_assistant import DraftAssistant
from .draft_head import DraftHead
from .draft_model import DraftModel
from .fused_pass import FusedDecoder
from .kv_cache import KVCache, KVStore, LibraryStore
from .kv_stores import KvForm
from .layers import Unsupported
from .ways import Drawn

_log = logging.getLogger("floe_chat.engine")

_FEW = 16  # tokens that are computed one by one rather than with all before them
_TRIED = range(3, 3 + 2 * _FEW)  # ids
_ALIKE = 0.05  # relative difference of logits: what is left out of experts hangs on their last digits
_SAME = {torch.float32: 1e-3}  # relative difference of what two ways compute of dense layers; else:
_ROUNDED = 0.05  # that of numbers of 16 bits
_COMPARED, _SEES = range(3, 15), 4  # ids by which two ways are compared, and how many of them windowed layers see then

__all__ = ["Decoder", "FusedDecoder", "LibraryDecoder", "choose"]


class Decoder(Protocol):
    """Computes the next tokens of a sequence.

    Attributes:
        reason: in words, what computes the dense part and why. passed: is given the share of the layers that a part of
            a prompt has been through, after each of them; by some. head: what guesses further tokens, if anything does.
    """

    reason: str
    passed: Callable[[float], None] | None
    head: DraftHead | DraftAssistant | DraftModel | None
    device: torch.device

    def prepare(self) -> None:
        """Do now, once the experts are in place, what the first token would wait for."""
        ...

    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """Logits (1, V) after the last of `ids`, which follow what `kv` holds; their keys and values are added to it.

        The caller calls `kv.computed` once this has returned.
        """
        ...

    def several(
        self, token: int, kv: KVCache, sampler: Sampler, most: int, last: Sequence[int], guessed: Sequence[int] = ()
    ) -> Drawn | None:
        """Compute `token`, draw the next token, and repeat with that: 1 to `most` tokens, or up to one of `last`.

        Args:
            guessed: tokens that are likely next. Those that fit are computed with `token` in one pass, where that can
                be, up to the first that is not drawn: the same tokens are drawn as without.

        The caller calls `kv.computed` for `token` and for all drawn tokens but the last.

        Returns:
            None if only `forward` is available.

        Raises:
            Cancelled: the answer was stopped before the first.
        """
        ...

    def together(self, tokens: Sequence[int], kvs: Sequence[KVCache]) -> Tensor | None:
        """Logits (N, V) after a token of each of N texts, which follow what `kvs` hold, computed together; see
        `forward`. N is 4 at most. None if texts go through the model one by one.

        Raises:
            Cancelled: an answer was stopped; no text has the token then.
        """
        ...

    def beside(self) -> KVCache | None:
        """For a text that goes through the model together with the one in the usual place; None as `together`."""
        ...

    def store(self, kv: KVCache) -> KVStore | None:
        """Where a text's keys and values go, made now if they are nowhere yet; None: these cannot be put back."""
        ...

    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """In words, the first part of the model whose values are not finite for these tokens, computed again.

        Raises:
            Cancelled: the answer was stopped.
        """
        ...


class LibraryDecoder:
    """transformers' own forward pass."""

    def __init__(self, model: Any, reason: str = "dense layers in transformers") -> None:
        self.model, self.reason = model, reason
        self.passed: Callable[[float], None] | None = None
        self.head: DraftHead | DraftAssistant | DraftModel | None = None
        self.device: torch.device = model.get_input_embeddings().weight.device
        kinds = set(getattr(model.config, "layer_types", None) or ())
        self._recurrent = bool(kinds - {"full_attention", "sliding_attention"})
        self._derived = isinstance(family_of(model.config.model_type), Derived)
        rope: Any = getattr(model.config, "rope_parameters", None) or {}
        # With "longrope" a text beyond this length has other frequencies, from its first token on.
        self._short: int | None = (
            rope.get("original_max_position_embeddings") if rope.get("rope_type") == "longrope" else None
        )

    def prepare(self) -> None:
        """See `Decoder`: there is nothing."""

    @torch.inference_mode()
    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`."""
        if self._short is not None and kv.turn(len(ids), self._short):
            ids = [*kv.tokens, *ids]
            kv.store = None
        store = kv.store_of(LibraryStore, self._new_store)
        if self._derived and store.held and len(ids) > 1 and not self._continues:
            if len(ids) <= _FEW:
                return [self._pass([each], store) for each in ids][-1]
            ids, store = [*kv.tokens, *ids], self._new_store()
            kv.store = store
        return self._pass(ids, store)

    def _pass(self, ids: Sequence[int], store: LibraryStore) -> Tensor:
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        store.begin()
        found = self.model(input_ids=inputs, past_key_values=store.cache, use_cache=True, logits_to_keep=1)
        store.cache = found.past_key_values
        store.end(len(ids))
        return found.logits[:, -1]

    @cached_property
    def _continues(self) -> bool:
        """Whether the library's modules go on from what they keep with several tokens at once, which is tried: some
        then forget what came before.
        """
        whole, cut = self._new_store(), self._new_store()
        self._pass(_TRIED[:-_FEW], cut)
        wanted, found = self._pass(_TRIED, whole), self._pass(_TRIED[-_FEW:], cut)
        return float((found - wanted).norm() / wanted.norm()) < _ALIKE

    def _new_store(self) -> LibraryStore:
        if self._derived:
            return LibraryStore()
        from transformers import DynamicCache

        config = self.model.config if self._recurrent else None
        return LibraryStore(lambda: DynamicCache(config=config), stuck=self._recurrent)

    def several(
        self, token: int, kv: KVCache, sampler: Sampler, most: int, last: Sequence[int], guessed: Sequence[int] = ()
    ) -> None:
        """See `Decoder`: the library does not draw."""

    def together(self, tokens: Sequence[int], kvs: Sequence[KVCache]) -> None:
        """See `Decoder`: the library's passes are one text's here."""

    def beside(self) -> None:
        """See `Decoder`: as `together`."""

    def store(self, kv: KVCache) -> None:
        """See `Decoder`: the library's cache takes no copies."""

    @torch.inference_mode()
    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """See `Decoder`."""
        inputs = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return finite_check.first_nonfinite(self.model, lambda: self.model(input_ids=inputs, logits_to_keep=1))


def choose(model: Any, window: int, kv: KvForm | None = None) -> FusedDecoder | LibraryDecoder:
    """The fused pass of a transformers model, or the library's own with the reason why.

    Args:
        window: tokens of the longest chat. kv: how keys and values are stored; the library's have 16 bits.
    """
    try:
        decoder = FusedDecoder(model, window, kv)
        if isinstance(family_of(model.config.model_type), Derived):
            _prove(decoder, model, window)
    except Unsupported as declined:
        _log.info("no fused pass: %s", declined)
        own = LibraryDecoder(model, f"dense layers in transformers, because {declined}")
        if isinstance(family_of(model.config.model_type), Derived):
            with _without_experts(model):
                own.forward(_COMPARED, KVCache())
        return own
    return decoder


class _Echo(nn.Module):
    """In place of a layer's experts: keeps what they are given, and gives it back."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self.given = hidden.flatten(0, -2), index.flatten(0, -2), weights.flatten(0, -2)
        return hidden


@contextmanager
def _without_experts(model: Any) -> Generator[list[Any]]:
    """The blocks of a model, with an `_Echo` in place of each one's experts.

    Raises:
        PackError: modules fail that nobody has looked at, as they do where their configuration makes no sense.
    """
    blocks = family_of(model.config.model_type).blocks(model)
    experts = [block.experts for block in blocks]
    try:
        for block in blocks:
            block.experts = _Echo()
        yield blocks
    except (FloeError, Unsupported):
        raise
    except Exception as error:
        if explained(error) is not None:
            raise
        _log.warning("a pass without experts failed", exc_info=error)
        cause = f"Its configuration or its dense part makes no sense: {type(error).__name__}: {error}."
        hint = "Pack the source checkpoint again, or choose another model."
        raise PackError("The model cannot be computed", cause, hint) from error
    finally:
        for block, own in zip(blocks, experts, strict=True):
            block.experts = own


@torch.inference_mode()
def _prove(decoder: FusedDecoder, model: Any, window: int) -> None:
    """Compare the pass of a model whose record was read from its modules with the library's, layer by layer without
    experts' matrices, at the end of the longest text.

    Raises:
        Unsupported: they differ.
    """
    config, ids = model.config, list(_COMPARED)
    sees = getattr(config, "sliding_window", None)
    try:
        if sees is not None:
            config.sliding_window = _SEES
        with _without_experts(model) as blocks:
            start = max(0, window - len(ids))
            places = torch.arange(start, start + len(ids), device=decoder.device)[None]
            inputs = torch.tensor([ids], device=decoder.device)
            wanted = model(input_ids=inputs, position_ids=places, use_cache=False, logits_to_keep=1).logits[0]
            steps, logits = decoder.echoed(ids, start, _SEES)
            routed = [step for step in steps if step.routed]
            for index, (step, block) in enumerate(zip(routed, blocks, strict=True)):
                hidden, *choice = block.experts.given
                if _differ(step.hidden, hidden) or _differ(_weighed(*step.routed), _weighed(*choice), 0.2):
                    raise Unsupported(f"its layer {index} computes otherwise than floe-chat would")
            if _differ(logits, wanted):
                raise Unsupported("its output layer computes otherwise than floe-chat would")
    finally:
        if sees is not None:
            config.sliding_window = sees


def _differ(found: Tensor, wanted: Tensor, limit: float | None = None) -> bool:
    limit = _SAME.get(wanted.dtype, _ROUNDED) if limit is None else limit
    return not float((found.float() - wanted.float()).norm() / wanted.float().norm()) <= limit


def _weighed(index: Tensor, weights: Tensor) -> Tensor:
    """(T, E) of a choice, of as many experts as are chosen at all."""
    count = 4096
    return weights.new_zeros(len(index), count).scatter(1, index, weights).float()
