"""What comes before the layers and after them on a card; after them as one CUDA graph where each layer is one.

The last norm, the head and the copy of the logits are some five launches of torch's. Captured, they are one, and the
host waits for the logits once: in pinned memory, where it reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ....kernels.step import capped
from ....kernels.weights import Norm
from ...outcomes import brief
from ..graphs import Captured, capture, pinned
from ..layers import embedded
from ..quantized_linear import through

_log = logging.getLogger("floe_chat.engine")


@dataclass(frozen=True, slots=True)
class Ends:
    """What comes before the layers and after them.

    Attributes:
        embedding: (V, H). rope: (2, D), or (numbers,) of several kinds of heads, of a token's position, which whoever
            runs it writes. norm: the last one, with its eps. head: to V logits. scale: of the embedding. cap: of
            logits, see `ModelEnds`.
    """

    embedding: Tensor
    rope: Tensor
    norm: Norm
    eps: float
    head: nn.Module
    scale: float = 1.0
    cap: float | None = None

    def stream(self, tokens: Tensor) -> Tensor:
        """Tokens (T,) -> (T, H) before the first layer."""
        return embedded(tokens, self.embedding, self.scale)

    def logits(self, last: Tensor) -> Tensor:
        """(T, H) after the last layer -> (T, V) float32."""
        return capped(through(self.head, last, norm=(self.norm, self.eps)).float(), self.cap)

    def pinned_logits(self, tokens: int = 1) -> Tensor:
        """Where the host reads those of so many tokens, (T, V) float32."""
        return pinned(tokens, len(self.embedding), dtype=torch.float32, device=self.embedding.device)


class CardHead:
    """The work after the last layer, for one token on one card.

    Attributes:
        declined: why torch's operations do it; "" if a graph does.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends, self._logits = ends, ends.pinned_logits()
        self._captured: Captured | None = None
        self.declined = ""

    def capture(self, last: Callable[[], Tensor]) -> None:
        """Work behind the layer whose stream this gives, (1, H)."""
        self._captured, self._last = None, last

        def work() -> tuple[Tensor, ...]:
            self._logits.copy_(self._ends.logits(last()), non_blocking=True)
            return ()

        try:
            self._captured, self.declined = capture(work, self._ends.embedding.device), ""
        # Whatever a driver or a compiler of kernels raises: torch's operations compute the same.
        except Exception as error:  # noqa: BLE001
            self.declined = f"they could not be captured: {brief(error)}"
            _log.warning("the norm and the head are launched one by one, because %s", self.declined)

    def run(self) -> Tensor:
        """The logits (1, V), which the next token overwrites. Waits once, or leaves that to whoever reads them."""
        captured = self._captured
        if captured is None:
            return self._ends.logits(self._last())
        captured.replay()
        captured.wait()
        return self._logits
