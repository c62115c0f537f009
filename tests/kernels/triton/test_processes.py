"""The Triton kernels without a GPU: run under the interpreter, and compiled for every supported GPU.

The former in a process of its own, since Triton decides at import whether it interprets.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from floe_chat.engine.offload.cards import ALONE_LAUNCHES, GROUPED_LAUNCHES, LAUNCHES, STREAMED_LAUNCHES
from floe_chat.engine.planning.measured_figures import figures
from floe_chat.kernels.triton import launch

from ...engine.fake_card import REFUSED

if TYPE_CHECKING:
    from .compiling import Need

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not made for this platform"),
    pytest.mark.timeout(3600),  # every case under the interpreter
]
HERE = Path(__file__).parent
SHARED_TESTS = "operations", "attend", "latent_one", "state_one", "select", "listed"  # with the CPU's kernels
# Of tests that take seconds under the interpreter, the cases of `make test`, none of one; of all others, all.
SAMPLE = {
    "a_token_is_the_cpus": "nothing",
    "a_token_with_rows_in_a_pool": "with_all_alone",
    "moe_step_is_both": "4_8_2-torch.float32 or 8_3_16",
    "sparse_swiglu_is": "2_2_3-torch.float32_22_None or 4_8_2-torch.float16 or 8_3_16 or 16_16_8",
    "reaches_its_own_token": "gelu",
    "both_sides_of_their_limits": "limited or clamped or relu2",
    "nothing_to_do": "3_7_40_20",
    "reads_and_writes_the_entries": "plain or all-of-odd or gated-window or sinks-window or olmoe or codes-gemma",
    "a_tile_may_be": "odd",
    "definition_and_writes_its_entry_alone": "small or least or odd or plain-half",
    "after_the_other_are_the_definition": "odd or least or every or convolution",
    "not_a_number_is_seen": "float32 or small",
    "what_is_listed_is": "1_1_1_1 or 3_7_40_20",
    "parts_of_a_step": "1_1_1_1 or 3_7_40_20",
    "a_step_is_the_formula": "odd",
    "a_step_that_selects": "all",
    "of_a_step_are_each": "columns",
    "joined_with_its_neighbours": "640-rms-dtype1 or 640-layer or 17-64-rms or 5-130 or 4-64",
    "all_experts_at_once_are": "odd or bfloat16",
}
# Instructions of capability 8.6 for a code of so many bits, all in the loop counted, with x of 15 and of 8 bits.
MOST_FOR_A_CODE = {"15": {2: 1.45, 3: 1.85, 4: 1.4, 8: 1.15}, "8": {2: 1.15, 3: 1.6, 4: 1.1, 8: 0.9}}
MOST_FOR_A_DOWN_CODE = {2: 3.7, 3: 4.3, 4: 4.25, 8: 5.45}
# What `make test` compiles of these cases; of others one form of each kernel.
ALONE = {
    "latent-bfloat16-few": {"latent_kernel"},
    "state-float16": {"convolve_kernel"},
    "3/4/4-bfloat16-many": {"grouped_product_kernel"},
    "2/4/4-bfloat16": {"gemv_kernel", "down_kernel"},
    "attend-bfloat16-few-plain": {"attend_kernel"},
}
# Kibibytes of shared memory that one block may have.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.fixture(autouse=True)
def on_poisoned_memory() -> None:
    """None of these: what is compiled has the size of a whole model, and is never touched."""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles as it does for a person, into a folder of the test's."""
    for name in [name for name in os.environ if name.startswith("TRITON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


def test_releases_of_triton_before_3_9_could_compile_it() -> None:
    # To them, the field of a constexpr record is a plain number, which these functions refuse.
    sources = (HERE.parents[2] / "kernels" / "triton").glob("*.py")
    found = [re.findall(r"(?:static_range|multiple_of)\(.*\b[A-Z]\.\w+.*", path.read_text("utf-8")) for path in sources]
    assert found and not any(found), found


@pytest.mark.slow
def test_the_operations_are_right_under_the_interpreter(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    every = ["--all"] if pytestconfig.getoption("--all") else []
    chosen = "triton" + "".join(f" and (not {test} or {cases})" for test, cases in ({} if every else SAMPLE).items())
    files = [str(HERE), *(str(HERE.parent / f"test_{name}.py") for name in SHARED_TESTS)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    ran = subprocess.run(  # -P keeps our folder `kernels` off its path
        [sys.executable, "-P", "-m", "pytest", *files, *every, "-k", chosen, "-q", "-p", "no:cacheprovider"],
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


def test_a_layers_experts_take_five_launches() -> None:
    """A launch in a graph that waits for the one before costs about 2 us, as much as reading 2 MB on an RTX 4090."""
    from . import compiling

    kernels = ["begin_kernel", "gemv_kernel", "product_kernel", "down_kernel", "combine_kernel"]
    assert compiling.launched("3/4/4-bfloat16-step") == kernels and len(kernels) == LAUNCHES["experts_step"]
    listed = compiling.launched("3/4/4-bfloat16-listed")
    assert len(listed) == LAUNCHES["list_active"] + LAUNCHES["add_listed"], listed


def test_a_prompts_experts_take_as_many_launches_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    from . import compiling

    found = compiling.launched("3/4/4-bfloat16-many-step")
    assert len(found) == GROUPED_LAUNCHES
    assert len(compiling.launched("3/4/4-bfloat16-many-alone-step")) == STREAMED_LAUNCHES
    assert not [name for name in found if name.removeprefix("aten::").startswith(REFUSED)]
    monkeypatch.setattr(compiling, "EXPERTS", 128)
    assert compiling.launched("3/4/4-bfloat16-many-step") == found
    monkeypatch.setattr(compiling, "F", 64)  # in one block; torch's products are computed
    assert len(compiling.launched("3/4/4-bfloat16-many-each-step")) == ALONE_LAUNCHES


@pytest.mark.parametrize(
    ("case", "capabilities"),
    [  # each GPU of `SHARED` at least once
        pytest.param("3/4/4-bfloat16-all", "86", id="default widths", marks=pytest.mark.slow),
        pytest.param("3/4/4-bfloat16-all", "75 80 89 90 100", id="default widths, others", marks=pytest.mark.thorough),
        pytest.param("4/2/2-bfloat16-coarse", "86", id="x of 8 bits", marks=pytest.mark.thorough),
        pytest.param("2/3/3-bfloat16-coarse", "86", id="x of 8 bits, others", marks=pytest.mark.thorough),
        pytest.param("2/8/8-float16", "86", id="8-bit rows", marks=pytest.mark.thorough),
        pytest.param("2/4/4-float16", "80", id="float16", marks=pytest.mark.thorough),
        pytest.param("2/4/4-float32", "75", id="float32", marks=pytest.mark.thorough),
        pytest.param("3/3/2-bfloat16", "120", id="3 bit, 2-bit down", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-wide", "86", id="float16 scales", marks=pytest.mark.thorough),
        pytest.param("4/2/3-float16", "75", id="4-bit up, 2-bit gate, 3-bit down", marks=pytest.mark.thorough),
        pytest.param("8/8/8-bfloat16", "86", id="8 bit", marks=pytest.mark.thorough),
        pytest.param("16/16/16-bfloat16", "75", id="bfloat16 weights", marks=pytest.mark.thorough),
        pytest.param("16/16/16-float16", "75", id="float16 weights", marks=pytest.mark.thorough),
        pytest.param("2/4/3-bfloat16-group16", "86", id="groups of 16", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-gate", "86", id="gate as the signal", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-gate-clamped", "80", id="clamped, with biases", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-gate-gelu", "89", id="gelu", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-limited", "86", id="limited", marks=pytest.mark.thorough),
        pytest.param("3/0/4-bfloat16-relu2", "80", id="without a gate", marks=pytest.mark.thorough),
        pytest.param("2/4/3-bfloat16-general", "86", id="general path", marks=pytest.mark.thorough),
        pytest.param("3/16/8-float16-general", "75", id="general path, other widths", marks=pytest.mark.thorough),
        pytest.param("3/4/4-bfloat16-many", "86", id="a prompt's experts"),
        pytest.param("3/4/4-bfloat16-alone-many", "80 86 89 90 120", id="one expert's", marks=pytest.mark.thorough),
        pytest.param("2/4/3-float16-many", "80 89 90 100 120", id="a prompt's, others", marks=pytest.mark.thorough),
        pytest.param("4/8/16-bfloat16-gate-clamped-wide-many", "86", id="their biases", marks=pytest.mark.thorough),
        pytest.param("3/0/4-bfloat16-relu2-many", "86", id="a prompt's, without a gate", marks=pytest.mark.thorough),
        pytest.param("2/4/3-bfloat16-group16-many", "86", id="a prompt's, small groups", marks=pytest.mark.thorough),
        pytest.param("2/4/4-float32-plain-many", "86", id="a prompt's, float32", marks=pytest.mark.thorough),
        pytest.param("2/4/3-bfloat16-general-many", "86", id="a prompt's, odd", marks=pytest.mark.thorough),
        pytest.param("attend-bfloat16", "80 86 89 90 100 120", id="attention", marks=pytest.mark.thorough),
        pytest.param("attend-bfloat16-few", "86", id="attention of codes"),
        pytest.param("attend-float16", "86 89", id="attention in float16", marks=pytest.mark.thorough),
        pytest.param("attend-float16-few-plain", "75", id="attention on older cards", marks=pytest.mark.thorough),
        pytest.param("state-bfloat16", "86", id="states"),
        pytest.param("state-float16", "75 80 89 90 100 120", id="states in float16"),
        pytest.param("attend-float32", "75 90", id="attention in float32", marks=pytest.mark.thorough),
        pytest.param("latent-bfloat16-few", "89", id="a latent vector"),
        pytest.param("latent-bfloat16", "89", id="latent vectors of two sizes", marks=pytest.mark.thorough),
        pytest.param("latent-float16", "80 86 90 100 120", id="latent, other GPUs", marks=pytest.mark.thorough),
        pytest.param("latent-float16-plain", "75", id="without tensor cores", marks=pytest.mark.thorough),
        pytest.param("latent-float32-plain", "75 86", id="a latent vector in float32", marks=pytest.mark.thorough),
    ],
)
def test_what_is_launched_compiles_without_spills(
    case: str, capabilities: str, compiler: None, every_case: bool
) -> None:
    from . import compiling

    expected = {"spread_kernel", "gemv_kernel", "product_kernel", "down_kernel", "combine_kernel"}
    if "general" in case or "group16" in case:  # x as it is
        expected -= {"spread_kernel"}
    if case.startswith("16/16/16"):
        expected ^= {"spread_kernel", "spread_pairs_kernel"}
    if case.startswith("attend"):
        expected = {"attend_kernel", "join_kernel"}
    if case.startswith("state"):
        expected = {"delta_kernel", "convolve_kernel"}
    if case.startswith("latent"):
        expected = {"spread_kernel", "gemv_kernel", "down_kernel", "latent_kernel", "join_kernel"}
    if case.endswith("many"):
        expected = {"grouped_product_kernel", "grouped_down_kernel"}
        expected |= set() if "alone" in case else {"grouped_sum_kernel"}
    if case.endswith("all"):
        expected |= {"begin_kernel", "copy_kernel", "land_kernel", "select_kernel", "unpack_kernel"}
        expected |= {"compact_kernel", "plain_kernel", "choose_kernel", "spread_normed_kernel"}
    assert set(compiling.launched(case)) == expected
    names = None if every_case else ALONE.get(case, expected)
    needs = list(compiling.compiled(case, [int(capability) for capability in capabilities.split()], names))
    for capability in map(int, capabilities.split()):
        mine = [need for need in needs if need.capability == capability]
        if case.startswith("attend") and capability == 86:
            check_attention(case, [need.executed[0] for need in mine if need.kernel == "attend_kernel"])
        assert {need.kernel for need in mine} == (names or expected)
        assert all(need.local == 0 for need in mine), mine
        assert all(need.shared <= SHARED[capability] * 1024 for need in mine), mine
        assert all(need.registers <= 255 for need in mine), mine
        if case == "3/4/4-bfloat16-many":  # 64 codes of a thread: tensor cores are the limit, 16 cycles a product
            loop = next(need.executed[0] for need in mine if need.kernel == "grouped_product_kernel")
            assert sum("HMMA" in one for one in loop) == 64 and len(loop) <= 800
            assert sum("LDG.E.U8" in one for one in loop) <= 4
        if not {"general", "group16", "many"} & set(case.split("-")):
            # 16 bytes a thread is what makes them run at memory speed; the others are neurons, slots, limits, units,
            # and for each of down's records its factor, place, scale, zero and high bits.
            narrow = {"gemv_kernel": 12, "product_kernel": 12, "down_kernel": 17}
            streaming = [need for need in mine if need.kernel in narrow]
            assert all(need.wide_loads and need.narrow_loads <= narrow[need.kernel] for need in streaming), streaming
            if capability == 86 and "/" in case:
                check_instructions(case, mine)
                check_down(case, mine)
            landing = [need for need in mine if need.kernel == "land_kernel"]
            assert all(need.wide_loads >= need.narrow_loads for need in landing), landing


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        pytest.param("2/4/4-bfloat16", "gfx1100", id="gfx1100"),
        pytest.param("attend-bfloat16-few-plain", "gfx1100", id="attention"),
        pytest.param("3/4/4-bfloat16-all", "gfx1100", id="all kernels", marks=pytest.mark.thorough),
        pytest.param("4/4/4-float16-all", "gfx1201", id="gfx1201", marks=pytest.mark.thorough),
        pytest.param("2/4/4-bfloat16-all", "gfx942", id="waves of 64", marks=pytest.mark.thorough),
        pytest.param("8/8/8-float16", "gfx1100", id="8 bits", marks=pytest.mark.thorough),
        pytest.param("state-bfloat16", "gfx1100", id="states", marks=pytest.mark.thorough),
        pytest.param("latent-bfloat16-few-plain", "gfx1100", id="latent vectors", marks=pytest.mark.thorough),
        pytest.param("latent-bfloat16-plain", "gfx942", id="latent, waves of 64", marks=pytest.mark.thorough),
    ],
)
def test_what_is_launched_on_amds_cards_compiles_without_spills(
    case: str, architecture: str, compiler: None, every_case: bool
) -> None:
    from . import compiling

    names = None if every_case else ALONE[case]
    found = list(compiling.compiled_for_amd(case, architecture, names))
    kernels = {kernel for kernel, *_ in found}
    assert len(kernels) >= 2 if names is None else kernels == names
    assert all(spilled == 0 and shared <= 64 * 1024 for _, spilled, shared in found), found


def check_instructions(case: str, needs: Sequence[Need]) -> None:
    """Memory, and not instructions, is the limit of every GeForce: none reads more than 8 bytes for each multiprocessor
    and clock; and plans count with what these kernels can read.
    """
    widths = dict(zip(("signal", "product", "down"), map(int, case.partition("-")[0].split("/")), strict=True))
    places: dict[Any, str] = {"signal": "gemv_kernel", "product": "product_kernel"}
    codes = launch.GEMV_ROWS * launch.CHUNKS * 64 // 128  # of a thread, in each turn of the loop
    for kind, kernel in places.items():
        bits = widths[kind]
        found = next((need.executed[0] for need in needs if bits not in (0, 16) and need.kernel == kernel), None)
        if found is None:
            continue
        assert len(found) / codes <= MOST_FOR_A_CODE["8" if "coarse" in case else "15"][bits], (kind, len(found))
        read = codes * (bits / 8 + 2 * (1 if bits <= 4 and "wide" not in case else 2) / 64)
        able = 4 * 32 * read / len(found)  # four instructions a clock, of 32 threads each
        assert able >= 16, (kind, able)
        if not {"coarse", "float32", "wide"} & set(case.split("-")):
            assert able == pytest.approx(figures().card_bytes[kind][bits], rel=0.06), (kind, bits, able)


def check_attention(case: str, loops: list[list[str]]) -> None:
    """Tensor cores multiply all entries but those of another 16-bit type, and leave the limit to memory."""
    multiplied = [loop for loop in loops if any("HMMA" in one for one in loop)]
    assert len(multiplied) == (0 if case.endswith("32") else len(loops) - (case == "attend-bfloat16"))
    for loop in multiplied:
        read = sum(int(bits) // 8 for one in loop for bits in re.findall(r"LDG\S*\.(64|128)", one))  # of a thread
        assert 4 * 32 * read / len(loop) >= 16  # bytes a clock, of four instructions of 32 threads
        assert sum("SHFL" in one for one in loop) <= 20  # by sums alone 256


def check_down(case: str, needs: Sequence[Need]) -> None:
    """Sums of down columns: a thread loads each scale and each zero once, and there is next to nothing to wait for."""
    bits = int(case.partition("-")[0].split("/")[2])
    down = next(need for need in needs if need.kernel == "down_kernel")
    loop, barriers = down.executed
    assert barriers <= (3 if bits < 4 else 1), barriers
    if bits == 16:
        return
    records = 4  # of a thread, in each turn of the loop
    codes = records * 4 * (32 // bits if bits != 3 else 16)
    kind = r"LDG\.E\.U8" if bits <= 4 and "wide" not in case else r"LDG\.E\.U16"
    assert sum(re.search(kind, one) is not None for one in loop) == 2 * records
    assert len(loop) / codes <= MOST_FOR_A_DOWN_CODE[bits], len(loop)
    if "wide" not in case:
        able = 4 * 32 * codes * (bits / 8 + 2 * (1 if bits <= 4 else 2) / 64) / len(loop)
        assert able >= 16 or bits < 4, able
        assert able == pytest.approx(figures().card_bytes["down"][bits], rel=0.06), able
