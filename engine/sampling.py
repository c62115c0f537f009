"""Drawing the next token from a model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import sampling as reference
from ..kernels.cpu import native, native_ends
from ..kernels.sampling import Filters
from ..models.errors import UsageError
from .events import Sampling

_AT_ONCE = 64  # numbers that the generator is asked for: a call for one takes as long


def check(sampling: Sampling) -> None:
    """Raises UsageError: a value outside its range."""
    for name, value, good, valid in (
        ("temperature", sampling.temperature, 0 <= sampling.temperature <= 5, "0 (greedy) to 5"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 up to 1 (off)"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 (off) to 1"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0 < sampling.repetition_penalty <= 10,
            "above 0 to 10",
        ),
        ("seed", sampling.seed, sampling.seed is None or 0 <= sampling.seed < 1 << 63, "0 to 2^63 - 1"),
    ):
        if not good:
            raise UsageError(f"{name} cannot be {value}", "", f"Valid is {valid}.")


class Sampler:
    """Draws tokens for one answer; the same seed, prompt and model draw the same tokens.

    Attributes:
        filters: how; the same for each token.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        check(sampling)
        greedy = sampling.temperature < 1e-6  # colder, the likeliest token has all of the probability anyway
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
            ValueError: logits that nothing can be drawn from.
        """
        row = logits[0].float().cpu().contiguous()
        token = self._draw(row, self.filters, self.uniforms(1)[0], self.seen(len(row)))
        self.took([token])
        return token

    def uniforms(self, count: int) -> list[float]:
        """The numbers from [0, 1) that the next so many tokens are drawn by."""
        while len(self._ahead) < count:
            self._ahead += torch.rand(_AT_ONCE, dtype=torch.float64, generator=self._generator).tolist()
        return self._ahead[:count]

    def seen(self, vocabulary: int) -> Tensor | None:
        """(V,) uint8, 1 for each token that is there already; None where that does not matter."""
        if self.filters.penalty == 1:
            return None
        return torch.zeros(vocabulary, dtype=torch.uint8).index_fill_(0, torch.tensor(self._ids), 1)

    def took(self, tokens: Sequence[int]) -> None:
        """These were drawn, by this or by somebody else who was given its numbers."""
        del self._ahead[: len(tokens)]
        self._ids += tokens
