"""Drawing the next token from a model's logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import sampling as reference
from ..kernels.cpu import native, native_ends
from ..kernels.sampling import Filters
from .events import Chance, Extras, Sampling
from .ranges import check

Allowed = Callable[[int | None], bytes]
"""After the token drawn last, None at first: a bit for each token that may come next, the first token's the lowest."""

_AT_ONCE = 64  # random numbers drawn per call: a call for one takes as long


class Sampler:
    """Draws tokens for one answer; the same seed, prompt and model draw the same tokens.

    Attributes:
        filters: how; the same for each token. alone: whether it must see each token's logits itself.
        chances: of the tokens drawn, in order, if the extras ask for them, until somebody takes them.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], extras: Extras | None = None, allowed: Allowed | None = None
    ) -> None:
        check(sampling)
        self._extras, self._allowed, self._last = extras or Extras(), allowed, None
        self.alone = allowed is not None or self._extras != Extras()
        self._counts = Counter[int]()
        self.chances: list[Chance] = []
        greedy = sampling.temperature < 1e-6  # below this the likeliest token has all of the probability anyway
        self.filters = Filters(
            0.0 if greedy else float(sampling.temperature),
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
        )
        self._ids = list(prompt)
        self._ahead: list[float] = []
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        try:
            native.isa()
        except native.NativeUnavailableError:
            self._draw = reference.draw
        else:
            self._draw = native_ends.draw

    def draw(self, logits: Tensor) -> int:
        """The next token. logits: (1, V).

        Raises:
            NotNumbersError: logits that nothing can be drawn from.
        """
        row = logits[0].float().cpu().contiguous()
        if self.alone:
            return self._draw_alone(row)
        token = self._draw(row, self.filters, self.uniforms(1)[0], self.seen(len(row)))
        self.took([token])
        return token

    def _draw_alone(self, row: Tensor) -> int:
        """`draw` with extras. row: (V,)."""
        extras, changed = self._extras, row.clone()
        if self._counts:
            ids, times = torch.tensor(list(self._counts)), torch.tensor(list(self._counts.values()), dtype=row.dtype)
            changed[ids] -= extras.presence_penalty + extras.frequency_penalty * times
        if extras.bias:
            ids, added = (torch.tensor(part) for part in zip(*extras.bias, strict=True))
            changed.index_add_(0, ids, added.to(row.dtype))
        if self._allowed is not None:
            bits = torch.frombuffer(bytearray(self._allowed(self._last)), dtype=torch.uint8)
            open_to = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: len(row)].bool()
            changed[: len(open_to)].masked_fill_(~open_to, -torch.inf)
            changed[len(open_to) :] = -torch.inf
        token = self._last = self._draw(changed, self.filters, self.uniforms(1)[0], self.seen(len(row)))
        self.took([token])
        self._counts[token] += 1
        if extras.likeliest is not None:
            chances = row.log_softmax(0)
            best = chances.topk(min(extras.likeliest, len(row)))
            likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.chances.append(Chance(float(chances[token]), tuple(likeliest)))
        return token

    def uniforms(self, count: int) -> list[float]:
        """Numbers from [0, 1) for drawing this many next tokens."""
        while len(self._ahead) < count:
            self._ahead += torch.rand(_AT_ONCE, dtype=torch.float64, generator=self._generator).tolist()
        return self._ahead[:count]

    def seen(self, vocabulary: int) -> Tensor | None:
        """(V,) uint8, 1 for each token in the text so far; None if that does not matter."""
        if self.filters.penalty == 1:
            return None
        return torch.zeros(vocabulary, dtype=torch.uint8).index_fill_(0, torch.tensor(self._ids), 1)

    def took(self, tokens: Sequence[int]) -> None:
        """Record drawn tokens, by this sampler or with its numbers."""
        del self._ahead[: len(tokens)]
        self._ids += tokens
