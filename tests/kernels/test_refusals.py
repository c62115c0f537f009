"""Arguments that do not fit are refused with a ValueError, whatever is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.backend import choose
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import LinearWeights
from torch import Tensor

from .oracle import each, make_layer

pytestmark = pytest.mark.usefixtures("on_backend")

LAYER = make_layer((3, 7, 40, 20), (2, 4, 4))
WIDE = make_layer((3, 7, 40, 20), (16, 16, 16))
OTHER = make_layer((3, 5, 40, 20), (2, 4, 4))
LINEAR = LinearWeights(LAYER.stored.layout.vector, LAYER.stored.q[0], LAYER.stored.scale[0], LAYER.stored.zero[0])
X = torch.ones(2, 40)
CALLS = Calls(torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([0.5, 0.5]))
ACTIVE = Active(torch.tensor([0, 2, 3]), torch.tensor([6, 0, 6]), torch.ones(3))

BAD_X = [
    pytest.param(torch.ones(40), id="x-flat"),
    pytest.param(torch.ones(1, 2, 40), id="x-three-dimensions"),
    pytest.param(torch.ones(2, 39), id="x-narrow"),
    pytest.param(torch.ones(2, 40, dtype=torch.int64), id="x-int"),
    pytest.param(torch.ones(1, 40), id="x-has-no-such-token"),
]
BAD_CALLS = [
    pytest.param(replace(CALLS, tokens=torch.tensor([0, 2])), id="token-too-large"),
    pytest.param(replace(CALLS, tokens=torch.tensor([0, -1])), id="token-negative"),
    pytest.param(replace(CALLS, experts=torch.tensor([0, 3])), id="expert-too-large"),
    pytest.param(replace(CALLS, experts=torch.tensor([-1, 0])), id="expert-negative"),
    pytest.param(replace(CALLS, tokens=torch.tensor([0])), id="fewer-tokens"),
    pytest.param(replace(CALLS, weights=torch.tensor([0.5])), id="fewer-weights"),
    pytest.param(replace(CALLS, experts=torch.tensor([0.0, 1.0])), id="float-experts"),
    pytest.param(Calls(*(t.view(1, 2) for t in (CALLS.tokens, CALLS.experts, CALLS.weights))), id="two-dimensional"),
]
BAD_ACTIVE = [
    pytest.param(replace(ACTIVE, neurons=torch.tensor([6, 0, 7])), id="neuron-too-large"),
    pytest.param(replace(ACTIVE, neurons=torch.tensor([6, 0, -1])), id="neuron-negative"),
    pytest.param(replace(ACTIVE, neurons=torch.tensor([6, 6, 0])), id="neuron-twice"),
    pytest.param(replace(ACTIVE, neurons=torch.tensor([6.0, 0.0, 6.0])), id="float-neurons"),
    pytest.param(replace(ACTIVE, values=torch.ones(2)), id="fewer-values"),
    pytest.param(replace(ACTIVE, values=torch.ones(3, dtype=torch.bfloat16)), id="values-of-another-dtype"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([0, 3])), id="fewer-offsets"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([0, 4, 3])), id="falling-offsets"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([1, 2, 3])), id="offsets-from-1"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([0, 2, 2])), id="offsets-too-short"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([0.0, 2.0, 3.0])), id="float-offsets"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor(0)), id="scalar-offsets"),
    pytest.param(replace(ACTIVE, offsets=torch.tensor([[0, 2, 3]])), id="two-dimensional-offsets"),
]


@pytest.mark.parametrize("x", BAD_X)
def test_up_gemv_refuses_x(x: Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.signal_gemv(x, LAYER.stored, CALLS, torch.zeros(2))


@pytest.mark.parametrize("calls", BAD_CALLS)
def test_up_gemv_refuses_calls(calls: Calls) -> None:
    with pytest.raises(ValueError):
        kernels.signal_gemv(X, LAYER.stored, calls, torch.zeros(calls.experts.shape))


@pytest.mark.parametrize("thresholds", [torch.zeros(1), torch.zeros(3), torch.zeros(2, 1), torch.tensor(0.0)], ids=str)
def test_up_gemv_refuses_thresholds(thresholds: Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.signal_gemv(X, LAYER.stored, CALLS, thresholds)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"q": LAYER.stored.q[:, :, :-1]}, id="short-rows"),
        pytest.param({"q": LAYER.stored.q[0]}, id="two-dimensional"),
        pytest.param({"scale": LAYER.stored.scale[:, :, :1]}, id="fewer-scales"),
        pytest.param({"scale": LAYER.stored.scale[:, :5]}, id="scales-of-fewer-neurons"),
        pytest.param(
            {name: torch.ones(3, 7, 4, dtype=torch.float16) for name in ("scale", "zero")}, id="groups-of-another-size"
        ),
    ],
)
def test_up_gemv_refuses_weights_that_do_not_fit_their_layout(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        kernels.signal_gemv(X, replace(LAYER.stored, **changes), CALLS, torch.zeros(2))


@pytest.mark.parametrize("x", BAD_X)
def test_sparse_swiglu_refuses_x(x: Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.sparse_swiglu(x, LAYER.rows, CALLS, ACTIVE)


@pytest.mark.parametrize("calls", BAD_CALLS)
def test_sparse_swiglu_refuses_calls(calls: Calls) -> None:
    with pytest.raises(ValueError):
        kernels.sparse_swiglu(X, LAYER.rows, calls, ACTIVE)


@pytest.mark.parametrize("active", BAD_ACTIVE)
def test_sparse_swiglu_refuses_active(active: Active) -> None:
    with pytest.raises(ValueError):
        kernels.sparse_swiglu(X, LAYER.rows, CALLS, active)


@pytest.mark.parametrize("layer", [LAYER, WIDE], ids=["4-bit", "16-bit"])
def test_sparse_swiglu_refuses_records_that_do_not_fit_their_layout(layer: Any) -> None:
    with pytest.raises(ValueError, match=r"^rows\.data must be"):
        replace(layer.rows, data=layer.rows.data[:, :, :-16].contiguous())


@pytest.mark.parametrize("expert", [-1, 3, 1 << 40])
def test_expert_swiglu_refuses_experts(expert: int) -> None:
    with pytest.raises(ValueError):
        kernels.expert_swiglu(X, LAYER.stored, LAYER.rows, expert, each(X, 0.0))


def test_expert_swiglu_refuses_thresholds_of_other_tokens() -> None:
    with pytest.raises(ValueError, match=r"^thresholds must be"):
        kernels.expert_swiglu(X, LAYER.stored, LAYER.rows, 0, each(X[1:], 0.0))
    with pytest.raises(ValueError, match=r"^down_thresholds must be"):
        kernels.expert_swiglu(X, LAYER.stored, LAYER.rows, 0, each(X, 0.0), each(X[1:], 0.0))


@pytest.mark.parametrize("x", BAD_X[:-1])
def test_expert_swiglu_refuses_x(x: Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.expert_swiglu(x, LAYER.stored, LAYER.rows, 0, each(x, 0.0))


def test_expert_swiglu_refuses_up_and_rows_of_different_neuron_counts() -> None:
    with pytest.raises(ValueError):
        kernels.expert_swiglu(X, OTHER.stored, LAYER.rows, 0, each(X, 0.0))


def test_sparse_swiglu_refuses_down_thresholds() -> None:
    with pytest.raises(ValueError):
        kernels.sparse_swiglu(X, LAYER.rows, CALLS, ACTIVE, torch.zeros(3))


@pytest.mark.parametrize("calls", BAD_CALLS)
def test_moe_step_refuses_calls(calls: Calls) -> None:
    with pytest.raises(ValueError):
        kernels.moe_step(X, LAYER.stored, LAYER.rows, calls, torch.zeros(calls.experts.shape))


def test_moe_step_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError):
        kernels.moe_step(X, OTHER.stored, LAYER.rows, CALLS, torch.zeros(2))
    with pytest.raises(ValueError):
        kernels.moe_step(X, LAYER.stored, LAYER.rows, CALLS, torch.zeros(3))
    with pytest.raises(ValueError):
        kernels.moe_step(X, LAYER.stored, LAYER.rows, CALLS, torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize("x", BAD_X[:-1])
def test_linear_refuses_x(x: Tensor) -> None:
    with pytest.raises(ValueError):
        kernels.linear(x, LINEAR)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"q": LINEAR.q[:, :-1]}, id="short-rows"),
        pytest.param({"q": LINEAR.q[0]}, id="one-row"),
        pytest.param({"scale": LINEAR.scale[:, :1]}, id="fewer-scales"),
        pytest.param({"zero": LINEAR.zero[:5]}, id="zeros-of-fewer-rows"),
    ],
)
def test_linear_refuses_weights_that_do_not_fit_their_layout(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        kernels.linear(X, replace(LINEAR, **changes))


@pytest.mark.parametrize("device", ["mps", "xpu", "", "CPU"])
def test_devices_without_kernels_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="cpu, cuda"):
        choose(device)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA"):
        choose.__wrapped__("cuda")


def test_backend_says_why_it_was_chosen() -> None:
    backend = choose("cpu")
    assert backend.name and backend.device == "cpu" and len(backend.reason) > 10
