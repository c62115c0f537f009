"""What a pack is compared with: its 16-bit source, or itself with nothing left out, for which no source is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...models.checkpoint import Checkpoint
from ...models.errors import PackError
from ...models.packing import logits_cache
from ..decoder.decoders import FusedDecoder
from ..decoder.finite_check import first_nonfinite
from ..loader import LoadedModel
from ..quality_presets import Preset
from .source_model import SourceModel, identify
from .told import Told

NO_SPARSITY = Preset("No sparsity")


class Reference(Protocol):
    """Gives the logits that are aimed at."""

    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """ids (N, T) -> logits of the last `keep` positions, (N, keep, V) float32."""
        ...


@dataclass(frozen=True, slots=True)
class SourceReference:
    """The source's logits, from the cache if possible; the model is built when first needed.

    Attributes:
        identity: of its weights, see `identify`.
    """

    checkpoint: Checkpoint
    identity: str
    told: Told

    @classmethod
    def of(cls, checkpoint: Checkpoint, loaded: LoadedModel, told: Told) -> SourceReference:
        """That of a pack. A folder of another name is noted.

        Raises:
            UsageError: it is not the pack's source. CheckpointError: it cannot be read.
        """
        told.step("Comparing the pack with its source")
        identity = identify(checkpoint, loaded.packed)
        packed_from, called = loaded.packed.manifest.source.name, checkpoint.folder.resolve().name
        if called != packed_from:
            told.note(
                f"The pack was made from a folder called {packed_from}; {called} has the same embedding and norms."
            )
        return cls(checkpoint, identity, told)

    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """See `Reference`."""
        shape = (ids.shape[0], keep, self.checkpoint.config.vocab_size)
        key = logits_cache.key_of(self.identity, ids, keep)

        def compute() -> Tensor:
            return SourceModel(self.checkpoint, self.told.step).logits(ids, keep)

        return logits_cache.cached(key, shape, self.told.note, compute)


@dataclass(frozen=True, slots=True)
class PackReference:
    """A pack's own logits with nothing left out."""

    loaded: LoadedModel
    told: Told

    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """See `Reference`."""
        self.told.step("Nothing left out")
        return torch.stack([pack_logits(self.loaded, NO_SPARSITY, row[None], keep) for row in ids])


def use(loaded: LoadedModel, preset: Preset) -> None:
    """Compute with a preset from now on, and count nothing."""
    loaded.control.preset = preset
    loaded.control.counting = False


def pack_logits(loaded: LoadedModel, preset: Preset, ids: Tensor, keep: int, kv_bits: int | None = None) -> Tensor:
    """ids (1, T) -> logits of the last `keep` positions, (keep, V) float32 on the CPU.

    kv_bits: of stored keys and values; None: they are not stored.

    Raises:
        PackError: values that are not finite.
    """
    use(loaded, preset)
    decoder = loaded.decoder
    # transformers' own modules store keys and values as they compute them: without a store the same is computed.
    own = decoder if kv_bits is not None and isinstance(decoder, FusedDecoder) else None

    def forward() -> Tensor:
        with torch.inference_mode():
            return loaded.model(input_ids=ids.to(loaded.device), use_cache=False, logits_to_keep=keep).logits[0]

    logits = (forward() if own is None or kv_bits is None else own.read(ids[0].tolist(), keep, kv_bits)).float().cpu()
    if not bool(torch.isfinite(logits).all()):
        where = first_nonfinite(loaded.model, forward) if own is None else own.first_nonfinite(ids[0].tolist())
        raise PackError(
            f"The packed model at {loaded.packed.folder} computes values that are not finite",
            f"The first come from {where}.",
            "Pack the source checkpoint again, or restore a copy.",
        )
    return logits
