"""The experts of one layer, as a pack holds them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels.weights import ExpertRows, SignalWeights


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The experts of one layer.

    Attributes:
        signal, rows: of its E experts.
        thresholds: (E, Q) float32, |signal| at Q evenly spaced quantiles 0..1, times the router's relative weight where
            the manifest says so; all NEVER (kernels/rule.py) of an expert that is always computed whole.
        products: the same of |silu(gate · x) up · x|. down_bias: (E, H) float32, added whatever is skipped.
        plain: like thresholds, of |signal| alone and each expert by itself (FloE eq. 6); None in packs of before.
        whole: whether no neuron may be skipped (`Manifest.whole`).
    """

    signal: SignalWeights
    rows: ExpertRows
    thresholds: Tensor
    products: Tensor
    down_bias: Tensor | None = None
    plain: Tensor | None = None
    whole: bool = False

    def there(self, device: str, *, up: bool = True, rows: bool = True) -> PackedLayer:
        """The same layer on a device, with or without its up projections and rows."""
        if device == "cpu":
            return self
        ups = self.signal.mapped(lambda part: part.to(device)) if up else self.signal
        own = replace(self.rows, data=self.rows.data.to(device)) if rows else self.rows
        bias, plain = (None if part is None else part.to(device) for part in (self.down_bias, self.plain))
        return PackedLayer(ups, own, self.thresholds.to(device), self.products.to(device), bias, plain, self.whole)

    def halved(self) -> PackedLayer:
        """The same layer with expert e split into two with half as many neurons: 2e, the major half, and 2e + 1
        (DualSparse-MoE).

        Neurons are stored by falling importance, so halves are views. The number of neurons has to be even.
        """
        experts, neurons = self.signal.q.shape[:2]

        def half(part: Tensor) -> Tensor:
            return part.view(2 * experts, neurons // 2, *part.shape[2:])

        thresholds, products = (table.repeat_interleave(2, 0) for table in (self.thresholds, self.products))
        rows = ExpertRows(self.rows.layout, half(self.rows.data))
        plain = None if self.plain is None else self.plain.repeat_interleave(2, 0)
        return PackedLayer(self.signal.mapped(half), rows, thresholds, products, plain=plain, whole=self.whole)
