"""Bit packing and group scales, against the description of the format and against hqq."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from floe_chat.kernels.codes import (
    LARGEST_SCALE,
    WIDTHS,
    align,
    byte_below,
    dequantize,
    group_size,
    pack_codes,
    packed_bytes,
    scale_of_byte,
    unpack_codes,
    widened,
    zero_in_steps,
)
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.models.pack.packed_model import PackedLayer
from floe_chat.models.transformers_import import import_hqq

from .oracle import FORMS, Form, make_layer

LENGTHS = [1, 2, 3, 5, 37, 40, 64, 96, 127, 128, 130, 255, 256, 257, 320, 511, 512, 1025]
CODE_WIDTHS = [bits for bits in WIDTHS if bits != 16]


def random_codes(rows: int, length: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length * 16 + bits)
    return torch.randint(0, 1 << bits, (rows, length), generator=generator, dtype=torch.uint8)


def described_bytes(codes: list[int], bits: int) -> bytes:
    """One vector as the format describes it, one code at a time: in a chunk of s bytes, code i lies in byte i % s."""
    if bits == 3:
        blocks = [codes[start : start + 256] for start in range(0, len(codes), 256)]
        low = [described_bytes([code & 3 for code in block], 2) for block in blocks]
        high = [described_bytes([code >> 2 for code in block], 1) for block in blocks]
        return b"".join(a + b for a, b in zip(low, high, strict=True))
    out = bytearray()
    span = 64
    for start in range(0, len(codes), span):
        chunk = codes[start : start + span]
        size = -(-len(chunk) * bits // 8)
        packed = [0] * size
        for i, code in enumerate(chunk):
            packed[i % size] |= code << (bits * (i // size))
        out += bytes(packed)
    return bytes(out)


@pytest.mark.parametrize("bits", CODE_WIDTHS)
@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_are_those_that_the_format_describes_and_come_back(length: int, bits: int) -> None:
    codes = random_codes(3, length, bits)
    codes[2, ::2], codes[2, 1::2] = (1 << bits) - 1, 0  # nothing leaks into neighbours
    before = codes.clone()
    packed = pack_codes(codes, bits)
    assert [bytes(row.tolist()) for row in packed] == [described_bytes(row, bits) for row in codes.tolist()]
    assert packed.shape == (3, packed_bytes(length, bits)) and torch.equal(unpack_codes(packed, length, bits), codes)
    packed.fill_(0)
    assert torch.equal(codes, before)
    assert unpack_codes(pack_codes(codes[:0], bits), length, bits).shape == (0, length)


@pytest.mark.parametrize(
    ("codes", "bits"),
    [
        pytest.param(torch.full((1, 4), 4, dtype=torch.uint8), 2, id="code-too-large"),
        pytest.param(torch.full((1, 4), 8, dtype=torch.uint8), 3, id="code-too-large-3"),
        pytest.param(torch.zeros(4, dtype=torch.uint8), 2, id="one-dimension"),
        pytest.param(torch.zeros(1, 4, dtype=torch.int32), 2, id="int32"),
        pytest.param(torch.zeros(1, 4, dtype=torch.uint8), 5, id="5-bit"),
        pytest.param(torch.zeros(1, 4, dtype=torch.uint8), 16, id="16-bit"),
    ],
)
def test_codes_that_cannot_be_packed_are_refused(codes: torch.Tensor, bits: int) -> None:
    with pytest.raises(ValueError):
        pack_codes(codes, bits)


@pytest.mark.parametrize(
    ("packed", "bits"),
    [
        pytest.param(torch.zeros(1, 9, dtype=torch.uint8), 2, id="too-short"),
        pytest.param(torch.zeros(1, 11, dtype=torch.uint8), 2, id="too-long"),
        pytest.param(torch.zeros(10, dtype=torch.uint8), 2, id="one-dimension"),
        pytest.param(torch.zeros(1, 10), 2, id="float"),
        pytest.param(torch.zeros(1, 80, dtype=torch.uint8), 16, id="16-bit"),
    ],
)
def test_bytes_that_cannot_be_codes_are_refused(packed: torch.Tensor, bits: int) -> None:
    with pytest.raises(ValueError):
        unpack_codes(packed, 40, bits)


@pytest.mark.parametrize(("n", "group"), [(1, 1), (40, 40), (64, 64), (96, 48), (130, 26), (127, 1), (320, 64)])
def test_group_is_the_largest_divisor_up_to_64(n: int, group: int) -> None:
    assert group_size(n) == group


@pytest.mark.parametrize("bits", CODE_WIDTHS)
@pytest.mark.parametrize(("hidden", "group"), [(40, 1), (40, 20), (96, 32), (320, 64)])
def test_values_equal_hqq_bit_for_bit(hidden: int, group: int, bits: int) -> None:
    import_hqq()
    from hqq.core.quantize import Quantizer

    matrix = torch.randn(8, hidden, generator=torch.Generator().manual_seed(bits))
    quantized: tuple[Any, dict[str, Any]] = Quantizer.quantize(
        matrix, nbits=bits, group_size=group, axis=1, bitpack=False, compute_dtype=torch.float32, device="cpu"
    )
    codes, meta = quantized
    scale, zero = (meta[name].view(8, -1).half() for name in ("scale", "zero"))
    meta |= {"scale": scale.float().view(-1, 1), "zero": zero.float().view(-1, 1)}
    packed = pack_codes(codes.view(8, hidden).to(torch.uint8), bits)
    assert torch.equal(dequantize(packed, scale, zero, hidden, bits, torch.float32), Quantizer.dequantize(codes, meta))


@pytest.mark.parametrize("down", WIDTHS)
@pytest.mark.parametrize("gate", WIDTHS)
@pytest.mark.parametrize("hidden", [1, 40, 130])
def test_record_holds_gate_then_down_then_padding(hidden: int, gate: int, down: int) -> None:
    layout = RowLayout(VectorLayout(hidden, gate, 1), VectorLayout(hidden, down, 1), torch.float16)
    assert layout.nbytes == align(layout.other.nbytes + layout.down.nbytes) and layout.nbytes % 64 == 0
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randint(0, 255, (3, part.nbytes), generator=generator, dtype=torch.uint8)
        for part in (layout.other, layout.down)
    ]
    padding = torch.zeros(3, layout.nbytes - layout.other.nbytes - layout.down.nbytes, dtype=torch.uint8)
    assert torch.equal(layout.join(*parts), torch.cat([*parts, padding], dim=1))


@pytest.mark.parametrize(("bits", "group"), [(5, 1), (4, 7), (4, 0), (4, -1)], ids=str)
def test_layouts_that_cannot_be_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ValueError):
        VectorLayout(40, bits, group)


def test_scales_of_a_byte_are_steps_of_a_sixteenth() -> None:
    scales = scale_of_byte(torch.arange(256))
    assert float(scales[0]) == 2**-13 and float(scales[255]) == LARGEST_SCALE == 7.75
    steps = scales[1:] / scales[:-1]
    assert bool((steps > 1).all()) and float(steps.max()) == 1 + 1 / 16
    assert torch.equal(byte_below(scales), torch.arange(256).to(torch.int16))
    between = (scales[:-1] + scales[1:]) / 2
    assert torch.equal(byte_below(between), torch.arange(255).to(torch.int16))
    assert byte_below(torch.tensor([0.0, 1e-9, 1e4])).tolist() == [0, 0, 255]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zeros_of_a_byte_are_places_among_the_codes(bits: int) -> None:
    zeros = zero_in_steps(torch.linspace(-1, 2**bits + 1, 1000), bits)
    assert float(zeros.min()) == 0 and float(zeros.max()) == 2**bits * 255 / 256
    assert len(zeros.unique()) == 256


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_short_vectors_come_back(bits: int) -> None:
    layout = VectorLayout(130, bits, 26, short=True)
    assert layout.scale_dtype == (torch.uint8 if bits <= 4 else torch.float16) and layout.head % 4 == 0
    drawn = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (7, 130), dtype=torch.uint8, generator=drawn)
    scale, zero = widened(*layout.nearest(*torch.rand(2, 7, 5, generator=drawn)), bits)
    raw = layout.join(codes, scale.half(), zero.half())
    assert raw.shape == (7, layout.nbytes) and layout.nbytes == layout.head + packed_bytes(130, bits)
    assert layout.nbytes_apart == packed_bytes(130, bits) + 10 * layout.scale_bytes
    wide = VectorLayout(130, bits, 26)
    expected = wide.read(wide.join(codes, scale.half(), zero.half()), torch.bfloat16, torch.float32)
    assert torch.equal(layout.read(raw, torch.bfloat16, torch.float32), expected)
    if bits <= 4:
        for bad in ((scale * 1.01, zero), (scale, zero + 2**bits), (scale, -zero - 1)):
            with pytest.raises(ValueError, match="bytes cannot hold"):
                layout.stored(*(part.half() for part in bad))


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


def test_without_a_gate_a_record_is_its_down_column() -> None:
    nothing, down = VectorLayout(2688, 0, 64), VectorLayout(2688, 4, 64)
    layout = RowLayout(down, down, torch.bfloat16, "up", "relu2")
    assert layout == RowLayout(nothing, down, torch.bfloat16, "up", "relu2")
    assert layout.down_at == 0
    assert layout.nbytes == align(down.nbytes)
    with pytest.raises(ValueError, match="no gate in a silu"):
        RowLayout(nothing, down, torch.bfloat16)
    with pytest.raises(ValueError, match="a down column of 0 bits"):
        RowLayout(down, nothing, torch.bfloat16, "up", "relu2")
    with pytest.raises(ValueError, match="has no gate"):
        SignalLayout(down, torch.bfloat16, "gate", "relu2")


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
