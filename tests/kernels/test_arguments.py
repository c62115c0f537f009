"""Every tensor that an operation takes, of another type, shape, device or with other strides, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu import native, native_pool
from floe_chat.kernels.layouts import RowLayout, VectorLayout
from floe_chat.kernels.offload.pool import EvictionRule, Means
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows, LinearWeights, SignalWeights
from torch import Tensor

from .oracle import make_layer
from .plain_pool import CompiledTable, StepTable
from .plain_pool import landing as plain_landing

LAYER = make_layer((3, 7, 40, 20), (2, 4, 4))
UP, ROWS = LAYER.stored, LAYER.rows
LINEAR = LinearWeights(UP.layout.vector, UP.q[0], UP.scale[0], UP.zero[0])
NBYTES = ROWS.layout.nbytes


def operands() -> dict[str, Tensor]:
    """Every tensor that changes from call to call, by the name that messages give it."""
    return {
        "x": torch.ones(2, 40),
        "tokens": torch.tensor([0, 1]),
        "experts": torch.tensor([2, 0]),
        "weights": torch.tensor([0.5, 0.5]),
        "offsets": torch.tensor([0, 2, 3]),
        "neurons": torch.tensor([6, 0, 6]),
        "values": torch.ones(3),
        "thresholds": torch.zeros(2),
        "down_thresholds": torch.zeros(2),
        "slots": torch.tensor([3, 1, 2]),
        "pool": torch.zeros(5, NBYTES, dtype=torch.uint8),
        "records": torch.zeros(3, NBYTES, dtype=torch.uint8),
        "out": torch.zeros(3, NBYTES, dtype=torch.uint8),
    }


def calls(given: dict[str, Tensor]) -> Calls:
    return Calls(given["tokens"], given["experts"], given["weights"])


def active(given: dict[str, Tensor]) -> Active:
    return Active(given["offsets"], given["neurons"], given["values"])


@dataclass(frozen=True)
class Operation:
    """`run(module, operands, weights)`: with the public functions, or those of the binding."""

    name: str
    takes: tuple[str, ...]
    run: Callable[[Any, dict[str, Tensor]], object]

    def __str__(self) -> str:
        return self.name


_CALLS = "tokens", "experts", "weights"
OPERATIONS = [
    Operation(
        "signal_gemv", ("x", *_CALLS, "thresholds"), lambda m, g: m.signal_gemv(g["x"], UP, calls(g), g["thresholds"])
    ),
    Operation(
        "sparse_swiglu",
        ("x", *_CALLS, "offsets", "neurons", "values", "down_thresholds"),
        lambda m, g: m.sparse_swiglu(g["x"], ROWS, calls(g), active(g), g["down_thresholds"]),
    ),
    Operation(
        "moe_step",
        ("x", *_CALLS, "thresholds", "down_thresholds"),
        lambda m, g: m.moe_step(g["x"], UP, ROWS, calls(g), g["thresholds"], g["down_thresholds"]),
    ),
    Operation(
        "expert_swiglu",
        ("x", "thresholds", "down_thresholds"),
        lambda m, g: m.expert_swiglu(g["x"], UP, ROWS, 1, g["thresholds"], g["down_thresholds"]),
    ),
    Operation("linear", ("x",), lambda m, g: m.linear(g["x"], LINEAR)),
    Operation("gather_rows", ("neurons", "out"), lambda m, g: m.gather_rows(ROWS, 1, g["neurons"], g["out"])),
    Operation(
        "pool_scatter",
        ("pool", "slots", "records"),
        lambda m, g: m.pool_scatter(g["pool"], g["slots"], g["records"]),
    ),
]
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "another type": lambda t: t.to(torch.int32),
    "complex": lambda t: t.to(torch.complex64),
    "one more dimension": lambda t: t[None],
    "fewer": lambda t: t[:-1] if t.ndim == 1 else t[:, :-1].contiguous(),
    "flat": lambda t: t.flatten() if t.ndim > 1 else t.sum(),
    "another device": lambda t: t.to("meta"),
}
CASES = [
    pytest.param(operation, name, id=f"{operation}-{name}") for operation in OPERATIONS for name in operation.takes
]
NARROW = "sparse_swiglu", "neurons", "another type"  # is taken: a list of neurons may be of 32 bits
# Another tensor is to blame then.
EXCUSED = ("expert_swiglu", "x", "fewer"), ("gather_rows", "neurons", "fewer"), NARROW


def refused(operation: Operation, module: Any, given: dict[str, Tensor]) -> str:
    """The refusal's words, or "" where there was none."""
    try:
        operation.run(module, given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize(("operation", "name"), CASES)
def test_every_operation_refuses_every_wrong_tensor(operation: Operation, name: str) -> None:
    given = operands()
    operation.run(kernels, given)  # as it is, it is taken
    before = {other: tensor.clone() for other, tensor in given.items()}
    for wrong in WRONG:
        if (operation.name, name, wrong) not in EXCUSED:
            words = refused(operation, kernels, given | {name: WRONG[wrong](given[name])})
            assert words and ("must be" in words or wrong == "another device"), f"{wrong}: {words}"
    for other, tensor in given.items():
        assert torch.equal(tensor, before[other])


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_so_does_the_binding_that_the_engine_calls(operation: Operation, name: str) -> None:
    given = operands()
    operation.run(native, given)
    for wrong in WRONG:
        if (operation.name, name, wrong) == NARROW:
            continue
        words = refused(operation, native, given | {name: WRONG[wrong](given[name])})
        assert "must be" in words or "take tensors on cpu" in words, f"{wrong}: {words}"


@pytest.mark.parametrize("part", ["q", "scale", "zero"])
@pytest.mark.parametrize("weights", [UP, LINEAR], ids=["up", "linear"])
def test_weights_of_another_type_or_shape_are_never_put_together(
    weights: SignalWeights | LinearWeights, part: str
) -> None:
    good: Tensor = getattr(weights, part)
    others = [good.float(), good.view(torch.uint8)[..., :0], good[..., :-1], good[None], good[0], good[:-1]]
    if part == "q":
        others = [*others[:-1], good.to(torch.int16)]  # fewer rows are the scales' fault
    else:
        others += [good.view(torch.uint8), good.view(torch.bfloat16)]
    for wrong in others:
        with pytest.raises(ValueError, match=rf"^(signal|weights)\.{part} must be"):
            replace(weights, **{part: wrong})


def test_records_wider_than_their_layout_or_of_other_dimensions_are_refused() -> None:
    for wrong in (torch.zeros(3, 7, NBYTES + 64), torch.zeros(3, 7, 2, NBYTES), torch.zeros(7, NBYTES)):
        with pytest.raises(ValueError, match=rf"^rows\.data must be uint8 of shape \(E, F, {NBYTES}\)"):
            ExpertRows(ROWS.layout, wrong.byte())
    with pytest.raises(ValueError, match=r"^rows\.data"):
        ExpertRows(ROWS.layout, torch.zeros(3, 7, NBYTES))


def test_layouts_that_no_kernel_reads_are_refused() -> None:
    half = VectorLayout(40, 4, 20)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        RowLayout(half, half, torch.float32)
    with pytest.raises(ValueError, match="a row of 40"):
        RowLayout(half, VectorLayout(60, 4, 20), torch.float16)
    for n in (0, -40):
        with pytest.raises(ValueError, match="does not divide"):
            VectorLayout(n, 4, 20)


def strided(tensor: Tensor) -> Tensor:
    """The same values with room between them."""
    return tensor.repeat_interleave(2, 0)[::2]


def elsewhere(weights: Any) -> Any:
    parts = {name: getattr(weights, name) for name in ("q", "scale", "zero", "data") if hasattr(weights, name)}
    return replace(weights, **{name: part.to("meta") for name, part in parts.items()})


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("module", [kernels, native], ids=["public", "binding"])
def test_weights_elsewhere_or_with_other_strides_are_refused(module: Any) -> None:
    given = operands()
    x, which, found, limits = given["x"], calls(given), active(given), given["thresholds"]
    bad_up = [elsewhere(UP), replace(UP, q=strided(UP.q)), replace(UP, scale=strided(UP.scale))]
    bad_rows = [elsewhere(ROWS), replace(ROWS, data=strided(ROWS.data))]
    for up in bad_up:
        for operation, rest in (
            (module.signal_gemv, (which, limits)),
            (module.moe_step, (ROWS, which, limits)),
            (module.expert_swiglu, (ROWS, 0, limits)),
        ):
            with pytest.raises(ValueError, match=r"^signal\.(q|scale|zero) must be contiguous"):
                operation(x, up, *rest)
    for rows in bad_rows:
        with pytest.raises(ValueError, match=r"^rows\.(data|slots) must be contiguous"):
            module.sparse_swiglu(x, rows, which, found)
        with pytest.raises(ValueError, match=r"^rows\.(data|slots) must be contiguous"):
            module.moe_step(x, UP, rows, which, limits)
    for rows in bad_rows:
        with pytest.raises(ValueError, match=r"^rows\.data must be contiguous"):
            module.expert_swiglu(x, UP, rows, 0, limits)
    with pytest.raises(ValueError, match=r"^rows\.data must be contiguous"):
        module.gather_rows(bad_rows[1], 0, given["neurons"], given["out"])
    for weights in (elsewhere(LINEAR), replace(LINEAR, zero=strided(LINEAR.zero))):
        with pytest.raises(ValueError, match=r"^weights\.(q|zero) must be contiguous"):
            module.linear(x, weights)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize(
    ("on_backend", "module"),
    [
        pytest.param("reference", kernels, id="reference"),
        pytest.param("native", kernels, id="public"),
        pytest.param("native", native, id="binding"),
    ],
    indirect=["on_backend"],
)
def test_what_is_copied_onto_itself_is_refused(module: Any) -> None:
    data = torch.arange(6 * NBYTES).byte().view(1, 6, NBYTES)
    before = data.clone()
    with pytest.raises(ValueError, match="out must not share memory with rows"):
        module.gather_rows(ExpertRows(ROWS.layout, data), 0, torch.tensor([0, 1]), data[0, 1:3])
    with pytest.raises(ValueError, match="pool must not share memory with records"):
        module.pool_scatter(data[0], torch.tensor([0, 1]), data[0, 1:3])
    with pytest.raises(ValueError, match="a slot is written twice"):
        module.pool_scatter(data[0], torch.tensor([4, 1, 4]), torch.zeros(3, NBYTES).byte())
    assert torch.equal(data, before)


@pytest.mark.usefixtures("on_backend")
@pytest.mark.parametrize("expert", [-1, 3, 1 << 64, (1 << 64) + 1, 1.0, "1"], ids=str)
@pytest.mark.parametrize("module", [kernels, native], ids=["public", "binding"])
def test_experts_that_are_no_index_are_refused(module: Any, expert: Any) -> None:
    given = operands()
    with pytest.raises(ValueError, match="expert index out of range"):
        module.gather_rows(ROWS, expert, given["neurons"], given["out"])
    with pytest.raises(ValueError, match="expert index out of range"):
        module.expert_swiglu(given["x"], UP, ROWS, expert, given["thresholds"])


@pytest.mark.usefixtures("on_backend")
def test_a_refusal_names_what_it_expected_and_what_it_got() -> None:
    given = operands()
    with pytest.raises(ValueError) as error:
        kernels.moe_step(given["x"], UP, ROWS, calls(given), given["thresholds"].half()[:1])
    assert str(error.value) == (
        "thresholds must be float32 or bfloat16 or float16 or float64 of shape (2,) on cpu, not float16 of shape (1,) "
        "on cpu"
    )


RULE = EvictionRule(
    by_score=True,
    marks_use=False,
    sample=3,
    bar=0.3,
    smallest_window=4,
    prefetch_worth=0.4,
    turn=0.5,
    use_rate=0.02,
    largest_growth=3.0,
    score_rate=0.3,
    habit_rate=0.01,
)


def means(layers: int, experts: int, neurons: int) -> Means:
    shape = layers, experts
    return Means(np.ones(shape), np.ones(shape), np.ones((layers, experts * neurons), np.float32), np.ones(shape))


TABLES = pytest.mark.parametrize("kind", [StepTable, CompiledTable], ids=["numpy", "compiled"])


@TABLES
def test_a_pool_refuses_what_its_tables_cannot_take(kind: type[StepTable]) -> None:
    for shape in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, -3), (1 << 20, 1 << 10, 1 << 10)):
        with pytest.raises(ValueError, match="a pool"):
            kind(*shape, RULE, means(1, 2, 3))
    with pytest.raises(ValueError, match="raw must be"):
        kind(1, 2, 3, RULE, means(1, 2, 4))
    with pytest.raises(ValueError, match="growth must be"):
        kind(1, 2, 3, RULE, replace(means(1, 2, 3), growth=np.ones((1, 2), np.float32)))
    for changes in (
        {"sample": 0},
        {"sample": 1 << 31},
        {"bar": 1.0},
        {"prefetch_worth": float("nan")},
        {"prefetch_worth": float("inf")},
        {"turn": 1e300},
        {"score_rate": float("nan")},
        {"bar": float("nan")},
        {"smallest_window": 0},
        {"use_rate": 1.0},
        {"largest_growth": float("nan")},
    ):
        with pytest.raises(ValueError, match="must"):
            replace(RULE, **changes)


@TABLES
def test_a_pool_refuses_calls_and_nothing_has_changed(kind: type[StepTable]) -> None:
    table = kind(2, 2, 4, RULE, means(2, 2, 4))
    table.resize(5)
    table.reserve(0, np.array([1, 2]), urgent=True)
    before = [table.slots.copy(), table.states.copy(), table.counters.copy(), table.free.copy()]
    one, none = np.array([0]), np.zeros(0, np.int64)
    narrow: Any = np.array([0, 1], np.int32)
    for refused in (
        lambda: table.visit(-1),
        lambda: table.visit(-(1 << 40)),
        lambda: table.keep(2, none, narrow[:0], 8),
        lambda: table.keep(0, none, narrow[:0], 0),
        lambda: table.keep(0, none, narrow[:0], 1 - (1 << 64)),
        lambda: table.keep(0, one, narrow[:1], 8),
        lambda: table.keep(0, one, narrow, 8),
        lambda: table.keep(0, one, one, 8),
        lambda: table.resize(-1),
        lambda: table.resize(1 << 40),
        lambda: table.reserve(2, one, urgent=True),
        lambda: table.reserve(-1, one, urgent=True),
        lambda: table.reserve(1 << 64, one, urgent=True),
        lambda: table.reserve(0, narrow[:1], urgent=True),
        lambda: table.reserve(0, one[None], urgent=True),
        lambda: table.reserve(0, np.array([8]), urgent=True),
        lambda: table.settle(one, arrived=True),
        lambda: table.settle(np.array([[0]], np.int32), arrived=True),
        lambda: table.settle(np.array([5], np.int32), arrived=True),
        lambda: table.locate(-1, one, np.array([0, 1]), one, 4),
        lambda: table.locate(2, one, np.array([0, 1]), one, 4),
        lambda: table.locate(0, one, np.array([0, 1]), one, 0),
        lambda: table.locate(0, one, np.array([0, 1]), one, 1 << 64),
        lambda: table.locate(0, one, np.array([0]), one, 4),
        lambda: table.locate(0, one, np.array([[0, 1]]), one, 4),
        lambda: table.locate(0, one, narrow, one, 4),
        lambda: table.locate(0, one, np.array([0, 2]), one, 4),
        lambda: table.locate(0, none, np.array([0]), one, 4),
    ):
        with pytest.raises(ValueError):
            refused()
    for now, then in zip([table.slots, table.states, table.counters, table.free], before, strict=True):
        np.testing.assert_array_equal(now, then)
    assert table.visit(1 << 40).size == 3, "as many as there are"
    table.release()
    assert table.visit(0).size == table.keep(0, none, narrow[:0], 1 << 64).size == 0, "no part of it is that small"


def test_transfers_that_do_not_fit_are_refused() -> None:
    rows, slots = np.array([0, 1, 2]), np.array([0, 1, 2], np.int32)
    for land in (plain_landing, native_pool.landing):
        assert land(rows, slots, 3, 3).tolist() == [0, 1, 2]
        far = np.array([(1 << 31) - 1, 0, 5], np.int32)
        assert land(rows, far, 3, (1 << 63) - 1).tolist() == far.tolist()
        for arguments in (
            (rows, slots[:2], 3, 3),
            (rows[:2], slots, 3, 3),
            (rows, slots.astype(np.int64), 3, 3),
            (rows, slots, 2, 3),
            (rows, slots, 3, 2),
            (rows, slots, 3, 1 << 64),
            (rows, slots, -1, 3),
            (rows, np.array([0, 1, 1], np.int32), 3, 3),
            (rows, far[[0, 1, 0]], 3, (1 << 63) - 1),
        ):
            with pytest.raises(ValueError):
                land(*arguments)  # pyright: ignore[reportArgumentType]
