"""Experts of every form: which projection is the signal, the activation, biases; at widths of gpt-oss and odd ones."""

from __future__ import annotations

import pytest
import torch
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import RowLayout, VectorLayout
from floe_chat.models.pack.packed_model import PackedLayer

from ..covering import covering
from ..helpers import relative_rms
from .oracle import FORMS, Form, make_calls, make_layer, make_x, signal_values, swiglu, threshold_between

SIZES = [(3, 37, 96, 32), (2, 9, 2880, 64), (2, 150, 320, 32), (2, 7, 130, 26), (1, 5, 40, 1)]
WIDTHS = [(3, 4, 2), (4, 3, 4), (2, 8, 3), (16, 16, 16)]


@pytest.mark.usefixtures("two_threads")
@covering({"isa": native.ISAS, "form": FORMS, "size": SIZES}, {"widths": WIDTHS, "bits": [22, 15], "keep": [1.0, 0.3]})
def test_a_step_is_the_formula(
    isa: str, form: Form, size: tuple[int, int, int, int], widths: tuple[int, int, int], bits: int, keep: float
) -> None:
    layer, x = make_layer(size, widths, form), make_x(3, size[2], torch.float32) / size[2] ** 0.5
    calls = make_calls([2, 0, 0], [size[0] - 1, 0, size[0] // 2])
    values = signal_values(layer, x, calls)
    limits = [threshold_between(v, keep) for v in values]
    kept = [(v.abs() >= limit).nonzero().squeeze(1) for v, limit in zip(values, limits, strict=True)]
    truth = swiglu(layer, x, calls, kept, [v[mine] for v, mine in zip(values, kept, strict=True)])
    torch.full(x.shape, torch.nan)  # freed memory that the output may get
    y, counts = native.moe_step(x, layer.stored, layer.rows, calls, torch.tensor(limits), x_bits=bits)
    unsure = [
        int(((v.abs() - limit).abs() <= 3e-4 * v.abs().max()).sum()) for v, limit in zip(values, limits, strict=True)
    ]
    if bits == 22 or not any(unsure) or keep == 1.0:
        assert counts[:, 0].tolist() == [mine.numel() for mine in kept]
        assert not y[1].any() and relative_rms(y, truth) <= (1e-5 if bits == 22 else 5e-4)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_parts_of_a_layer_keep_their_biases(form: Form) -> None:
    layer = make_layer((3, 8, 40, 20), (4, 4, 4), form)
    stored, table = layer.stored, torch.zeros(3, 5)
    one, halves = stored.one(2), PackedLayer(stored, layer.rows, table, table).halved().signal
    assert torch.equal(one.dense(0, torch.float32), stored.dense(2, torch.float32))
    assert torch.equal(halves.dense(3, torch.float32), stored.dense(1, torch.float32)[4:])
    if stored.bias is None:
        assert one.bias is None and halves.bias is None
    else:
        assert one.bias is not None and halves.bias is not None
        assert torch.equal(one.bias[0], stored.bias[2]) and torch.equal(halves.bias[3], stored.bias[1, 4:])
        plain = make_layer((3, 8, 40, 20), (4, 4, 4), Form(short=form.short)).stored
        assert stored.nbytes == plain.nbytes + stored.bias.nbytes


def test_a_record_holds_its_bias() -> None:
    vector = VectorLayout(2880, 4, 64)
    plain, biased = (RowLayout(vector, vector, torch.bfloat16, "gate", "clamped", which) for which in (False, True))
    assert plain.nbytes == biased.nbytes == 3264  # it fits where records are padded anyway
    raw, biases = torch.randint(0, 256, (2, 5, vector.nbytes), dtype=torch.uint8), torch.randn(5)
    records = biased.join(raw[0], raw[1], biases)
    found = biased.read_bias(records, torch.float32)
    assert found is not None and torch.equal(found, biases) and plain.read_bias(records, torch.float32) is None
    assert torch.equal(records[:, : vector.nbytes], raw[0])
    assert torch.equal(records[:, biased.down_at :][:, : vector.nbytes], raw[1])
    for layout, given in ((plain, biases), (biased, None)):
        with pytest.raises(ValueError, match="biases"):
            layout.join(raw[0], raw[1], given)
