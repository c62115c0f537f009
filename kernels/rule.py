"""What a token may skip, as one record: a pack's manifest stores it, a screen edits it, the kernels receive it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

MOST_MULTIPLE = 4.0
MOST_EASE = 1000.0  # largest factor of thresholds: none may become infinite, which means "left out"
NEVER = -1.0  # the limit of an expert that no rule leaves out, whole or in part


@dataclass(frozen=True, slots=True)
class Rule:
    """What a token may skip. Shares are of an expert's neurons, on text like the calibration's.

    Attributes:
        sparsity: share that is skipped by the signal's magnitude, |up · x| (FloE eq. 6) or |silu(gate · x)|. product:
            share whose down half is skipped, by |silu(gate · x) up · x|.
        drop, major: the router's weight for an expert, relative to the mean of those it chose for the token, below
            which the expert is skipped, or only its major half computed (DualSparse-MoE section 4).
        weighed: whether thresholds rise as that weight falls. A neuron adds weight · silu(gate · x) (up · x) down to y,
            so its worth depends as much on the weight as on its own values: the same loss then takes fewer rows
            (tests/bench/LOG.md). Shares are then of the values times that weight.
        alpha: how far from the best rejected score an absent expert may be replaced, and a resident one may replace it
            (importance-driven scheduling section 5.1); 0 replaces none.
        layers: factors of these four shares in each layer, since some layers tolerate more than others
            (DualSparse-MoE figure 12); empty: all have the same shares.
        late: share of the active neurons, the weakest, that may be skipped while their rows are not on the device
            (CORM); 0 waits for every row. So an answer is never worse than at `lateness`, however slow the link is.
    """

    sparsity: float = 0.0
    product: float = 0.0
    drop: float = 0.0
    major: float = 0.0
    weighed: bool = False
    alpha: float = 0.0
    late: float = 0.0
    layers: tuple[float, ...] = ()

    def at(self, layer: int) -> Rule:
        """The rule of one layer."""
        if not self.layers:
            return self
        sparsity, product, drop, major = (
            min(1.0, share * self.layers[layer]) for share in (self.sparsity, self.product, self.drop, self.major)
        )
        return replace(self, sparsity=sparsity, product=product, drop=drop, major=major, layers=())

    @property
    def wrong(self) -> str:
        """The first field with an invalid value, whatever its type; "" if all are valid."""
        for field in fields(self):
            value = getattr(self, field.name)
            match field.name:
                case "weighed":
                    good = type(value) is bool
                case "layers":
                    good = type(value) is tuple and all(_within(one, MOST_MULTIPLE) for one in value)
                case _:
                    good = _within(value, 1)
            if not good:
                return field.name
        return ""

    @property
    def parts(self) -> int:
        """Into how many parts experts are divided: 2 if a token may use only the major half."""
        return 2 if self.major > self.drop else 1

    @property
    def drops(self) -> bool:
        """Whether experts, or halves of them, may be left out by the router's weight."""
        return self.drop > 0 or self.major > 0

    def least(self) -> list[float]:
        """The weights, relative to their mean, below which each part of an expert is left out."""
        return [self.drop, max(self.drop, self.major)][: self.parts]

    @property
    def lateness(self) -> float:
        """The share of neurons, by the signal, below which an absent row may be skipped."""
        return 1 - (1 - self.sparsity) * (1 - self.late)


def _within(value: object, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most  # pyright: ignore[reportOperatorIssue]


NOTHING = Rule()
"""Skips nothing."""

LATE = 0.25
"""The share of active neurons that a lenient rule may skip. Without a bound an active row that is absent is as likely
the strongest as the weakest, and 5 % of them cost 0.3 nats a token (tests/bench/LOG.md)."""
