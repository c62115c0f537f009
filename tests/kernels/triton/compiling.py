"""Compiles, without a GPU, exactly what the operations launch, and finds what each kernel needs.

A case is SIGNAL/OTHER/DOWN-DTYPE[-OPTION], for example 2/4/4-bfloat16-all or, for x of 8 bits, 2/4/4-bfloat16-coarse;
or attend-DTYPE, state-DTYPE or latent-DTYPE, with -few for the first kind of model alone, or -plain for a latent
vector where no tensor cores are used.
With -many, the experts of a whole prompt instead of a token's; with -alone one expert of them, with -each by itself.
Tensors have full Mixtral size but are never touched, and launches are recorded instead of run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args
from unittest import mock

import torch
import triton
from floe_chat.kernels import triton as kernels
from floe_chat.kernels.activation import Activation
from floe_chat.kernels.entries import CODES
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.listed import Listing, Portion, Total
from floe_chat.kernels.mixers.convolution import Convolution
from floe_chat.kernels.mixers.delta import Delta
from floe_chat.kernels.mixers.grouped import Heads, KeptTokens
from floe_chat.kernels.mixers.latent import Latent
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.step import ExpertLayer, Router
from floe_chat.kernels.triton import attend, dense, launch, operations, recur, sparse, vectors
from floe_chat.kernels.triton.vectors import record_vectors
from floe_chat.kernels.types import Active, Calls, Limits
from floe_chat.kernels.weights import ExpertRows, LinearWeights, Norm, Projection, SignalWeights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

EXPERTS, F = 8, 14336
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
RULE = Rule(drop=0.4, major=0.8, weighed=True)
TYPES = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
Launch = tuple[Any, list[Any], dict[str, Any]]


@dataclass(frozen=True)
class Need:
    """What one compiled kernel takes: registers per thread, bytes of local memory (spills), bytes of shared memory.

    And what it loads from memory: instructions of 16 bytes, and of 4.
    """

    kernel: str
    capability: int
    registers: int
    local: int
    shared: int
    wide_loads: int
    narrow_loads: int
    cubin: bytes = field(repr=False)

    @cached_property
    def executed(self) -> tuple[list[str], int]:
        """The instructions of its innermost loop, the longest one of several, as the GPU executes them, none where it
        has no loop; and how many barriers there are in all of it.
        """
        return executed(self.cubin)


class Recorder:
    """Stands in for a kernel and keeps the arguments and options of its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*arguments: Any, **options: Any) -> None:
            self._launches.append((self._kernel, list(arguments), options))

        return record


def recorded(case: str) -> list[Launch]:
    """The launches of a case."""
    launches: list[Launch] = []

    def cores(_device: torch.device, dtype: torch.dtype) -> bool:
        return dtype.itemsize == 2 and "plain" not in case

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launch, "check_device"))
        patches.enter_context(mock.patch.object(attend, "splits_of", return_value=64 if "latent" in case else 32))
        patches.enter_context(mock.patch.object(launch, "cores", cores))
        for module in (launch, operations, sparse, dense, attend, recur):
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stand_in = Recorder(getattr(module, name), launches)
                patches.enter_context(mock.patch.object(module, name, stand_in))
        call_operations(case, launches)
    return launches


def launched(case: str) -> list[str]:
    """What a case launches, in order: kernels, and with the options -step and -listed torch's operations."""
    return [kernel if isinstance(kernel, str) else kernel.fn.__name__ for kernel, _, _ in recorded(case)]


class Launches(TorchDispatchMode):
    """Notes torch's operations that launch something among launches of kernels."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, aliases = func._schema.name, [one.alias_info for one in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if not view and not name.startswith("aten::empty"):
            self._launches.append((name, [], {}))
        return func(*args, **(kwargs or {}))


def call_operations(case: str, launches: list[Launch]) -> None:
    """Call what the case is about; nothing is computed."""
    widths, kind, *options = case.split("-")
    dtype: torch.dtype = getattr(torch, kind)
    if widths == "attend":
        call_attention(dtype, few="few" in options)
        return
    if widths == "state":
        call_states(dtype)
        return
    if widths == "latent":
        call_latent(dtype, few="few" in options)
        return
    float16 = torch.float16 if dtype == torch.float16 else torch.bfloat16
    hidden, group = (130, 26) if "general" in options else (4096, 16 if "group16" in options else 64)
    short = "wide" not in options
    own, other, down = (VectorLayout(hidden, int(bits), group, short) for bits in widths.split("/"))
    signal = "gate" if "gate" in options else "up"
    biased = "clamped" in options
    activation = max(ACTIVATIONS, key=options.count)  # the first one, silu, where none is named
    layout = RowLayout(other, down, float16, signal, activation, biased)
    signal_layout = SignalLayout(own, float16, signal, activation)
    scales = [torch.empty(EXPERTS, F, own.groups, dtype=own.scale_dtype) for _ in range(2)]
    bias = torch.empty(EXPERTS, F) if biased else None
    stored = SignalWeights(signal_layout, untouched(EXPERTS, F, signal_layout.row_bytes), *scales, bias=bias)
    rows = ExpertRows(layout, untouched(EXPERTS, F, layout.nbytes))
    x, pair, limits = torch.empty(1, hidden, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    calls = Calls(pair, pair, torch.zeros(2))
    index = torch.zeros(10, dtype=torch.int64)
    tables = Limits(torch.empty(2 * EXPERTS), torch.empty(2 * EXPERTS), torch.empty(2 * EXPERTS))
    chosen, scores = torch.zeros(1, 2, dtype=torch.int64), torch.empty(1, 2, dtype=dtype)
    selecting = ExpertLayer(stored, rows, replace(tables, late=None, least=torch.empty(2, dtype=torch.float64)), RULE)
    lists = [torch.zeros(2 * F, dtype=torch.int32) for _ in range(2)]
    offsets, values = torch.zeros(3, dtype=torch.int64), torch.empty(2 * F, dtype=dtype)
    total = Total(torch.empty(1, hidden, dtype=dtype), torch.zeros(1, dtype=torch.int64))
    if "listed" in options:
        with Launches(launches):
            kernels.list_active(x, stored, calls, limits, Listing(values, offsets, lists[0], values))
            kernels.add_listed(x, rows, calls, values, Portion(offsets, *lists), limits, total, first=True)
        return
    if "many" in options:
        count = 512
        many = Calls(torch.arange(count) // 2, torch.arange(count) % EXPERTS, torch.zeros(count, dtype=dtype))
        tokens, every = torch.empty(count // 2, hidden, dtype=dtype), torch.zeros(count)
        with Launches(launches) if "step" in options else nullcontext():
            if "each" in options:
                kernels.expert_swiglu(tokens[:1], stored, rows, 1, every[:1])
                return
            if "alone" in options:
                one = stored.one(0), ExpertRows(layout, rows.data[:1])
                kernels.expert_at_once(tokens, *one, every[: len(tokens)])
                return
            kernels.experts_swiglu(tokens, stored, rows, many, every, every)
        return
    if "step" in options:
        with Launches(launches):
            kernels.experts_step(x, selecting, chosen, scores, x, 22)
        return
    kernels.moe_step(x, stored, rows, calls, limits, x_bits=8 if "coarse" in options else 22)
    if "all" not in options:
        return
    router = Router(torch.empty(128, hidden, dtype=dtype), 8, norm_topk_prob=True)
    kernels.route(x, router)
    kernels.route(x, replace(router, kind="sigmoid", precise=True, correction=torch.empty(128), scale=2.5))
    kernels.select(chosen, scores, tables, RULE)
    active = Active(torch.tensor([0, 5, 10]), index, torch.zeros(10, dtype=dtype))
    kernels.sparse_swiglu(x, rows, calls, active, limits)
    kernels.list_active(x, stored, calls, limits, Listing(values, offsets, lists[0], values))
    for first in (True, False):
        kernels.add_listed(x, rows, calls, values, Portion(offsets, *lists), limits, total, first=first)
    kernels.gather_rows(rows, 0, index, untouched(10, layout.nbytes))
    kernels.pool_scatter(rows.data[0], index, untouched(10, layout.nbytes))
    for in_place in (False, True):
        kernels.land(untouched(448 + 50 * layout.nbytes), 50, 448, layout.nbytes, in_place=in_place)
    kernels.experts_step(x, selecting, chosen, scores, x, 22)
    scratch = torch.empty(64, hidden, dtype=dtype)
    for vector in record_vectors(layout, rows.data):
        dense.unpack(rows.data, rows.data, rows.data, vector, 0, 64, scratch)
    vector = VectorLayout(hidden, 8, group)
    parts = [torch.empty(hidden, vector.groups, dtype=torch.float16) for _ in range(2)]
    given = x, LinearWeights(vector, untouched(hidden, hidden), *parts)
    for matrix, of in ((weight := torch.empty(2 * hidden, hidden, dtype=dtype), x), (weight.mT[:, :128], x[:, :128])):
        kernels.plain(of, matrix)
    kernels.linear(*given)
    kernels.linear_joined(*given, 22, (Norm(x[0]), 1e-6), x, x)


def call_attention(dtype: torch.dtype, *, few: bool) -> None:
    """Attention of heads like Mixtral's, OLMoE's and Qwen3's, with entries as codes, of their dtype and in float16; of
    Gemma 4's two kinds; and of Qwen3.5's. `few`: of the first alone.
    """
    plain = Heads(32, 8, 128, 0.1, cache_dtype=dtype)
    gemma = Heads(16, 8, 256, 1.0, 1024, cache_dtype=dtype, v_normed=True)
    gated = Heads(16, 2, 256, 0.1, cache_dtype=dtype, gated=True)
    several = (
        (replace(plain, cache_dtype=CODES), 0),
        (plain, 0),
        (replace(plain, num_heads=16, num_kv_heads=16), 16),
        (replace(plain, num_heads=16, num_kv_heads=16, cache_dtype=CODES), 16),
        (replace(plain, num_kv_heads=4, window=4096, cache_dtype=torch.float16), 1),
        (gemma, 1),
        (replace(gemma, num_kv_heads=2, head_dim=512, window=None, keys_alone=True, rope_at=512), 1),
        (replace(gemma, num_kv_heads=2, head_dim=512, window=None, keys_alone=True, cache_dtype=CODES), 1),
        (gated, 1),
        (replace(gated, cache_dtype=CODES), 1),
    )
    for heads, normed in several[: 1 if few else None]:
        weight = torch.empty(normed * heads.head_dim, dtype=dtype) if normed else None
        qkv, rope = torch.empty(1, heads.sizes[0], dtype=dtype), torch.empty(3 * 512, dtype=dtype)
        own = rope if heads.v_normed else rope[: 2 * heads.head_dim].view(2, -1)
        kernels.attend_one(qkv, own, kept(), 3, replace(heads, q_norm=weight, k_norm=weight), 1e-5)


def call_states(dtype: torch.dtype) -> None:
    """Delta rules like Qwen3-Next's, and a convolution like LFM2's."""
    conv, sizes = torch.empty(4, 8192, dtype=dtype), torch.empty(32)
    delta = Delta(32, 16, 128, 128, conv, sizes, sizes, torch.empty(128), 1e-6, Projection(sizes))
    kernels.delta_one(torch.empty(1, 12288, dtype=dtype), torch.empty(1, 64, dtype=dtype), kept(ring=5), 3, delta)
    short = Convolution(torch.empty(3, 2048, dtype=dtype))
    kernels.convolve_one(torch.empty(1, 6144, dtype=dtype), kept(), 3, short)


def call_latent(dtype: torch.dtype, *, few: bool) -> None:
    """Attention like GLM-4.7-Flash's and DeepSeek-V2-Lite's. `few`: like the first's alone."""
    for count, still, value, bits in ((20, 192, 256, 4), (16, 128, 128, 8))[: 1 if few else None]:
        heads = Heads(count, 1, 512 + 64, 0.1, cache_dtype=dtype, inside=512)
        vector, rows = VectorLayout(512, bits, 64), count * (still + value)
        scales = [torch.empty(rows, 8, dtype=torch.float16) for _ in range(2)]
        made = Projection(LinearWeights(vector, untouched(rows, 64 * bits), *scales))
        latent = Latent(heads, still, 64, value, torch.empty(512, dtype=dtype), 1e-6, made)
        asked, given = (torch.empty(1, size, dtype=dtype) for size in (count * (still + 64), 512 + 64))
        kernels.latent_one(asked, given, torch.empty(2, 64, dtype=dtype), kept(), 3, latent)


def kept(ring: int = 2) -> KeptTokens:
    """Addresses that nobody goes to."""
    return KeptTokens(torch.zeros(32, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), ring=ring)


def untouched(*shape: int) -> Tensor:
    """Bytes that take no memory until they are used."""
    return torch.empty(shape, dtype=torch.uint8)


def sources(case: str, names: Collection[str] | None = None) -> Iterator[tuple[ASTSource, dict[str, Any]]]:
    """Every different kernel of a case, and with which options it is launched; with `names` each of these once."""
    seen: set[str] = set()
    for kernel, arguments, options in recorded(case):
        if names is not None and (kernel.fn.__name__ not in names or kernel.fn.__name__ in seen):
            continue
        seen.add(kernel.fn.__name__)
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for place, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                attributes[place,] = [["tt.divisibility", 16]]  # as torch allocates
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        key = repr((kernel.fn.__name__, signature, constants, options))
        if key in seen:
            continue
        seen.add(key)
        yield ASTSource(kernel, signature, constants, attributes), options


@contextmanager
def without_ptx() -> Generator[None]:
    """Inside, vectors are described as for cards of another maker; they are kept elsewhere."""
    described = [each for each in vars(vectors).values() if hasattr(each, "cache_clear")]
    with mock.patch.object(vectors, "_ptx", return_value=False):
        for each in described:
            each.cache_clear()
        yield
    for each in described:
        each.cache_clear()


def compiled_for_amd(
    case: str, architecture: str, names: Collection[str] | None = None
) -> Iterator[tuple[str, int, int]]:
    """Of every different kernel of a case, its name, registers that it spills to memory, and bytes of shared memory."""
    target = GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32)
    with (
        without_ptx(),
        mock.patch.multiple(launch, GEMV_ROWS=launch.AMDS_ROWS, PRODUCT_ROWS=launch.AMDS_ROWS),
    ):
        for source, options in sources(case, names):
            binary: Any = triton.compile(source, target=target, options=options)
            spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", binary.asm["amdgcn"])
            yield source.fn.__name__, sum(map(int, spilled)), binary.metadata.shared


def compiled(case: str, capabilities: list[int], names: Collection[str] | None = None) -> Iterator[Need]:
    """Every different kernel of a case, for every capability; with `names` each of these once."""
    for source, options in sources(case, names):
        for capability in capabilities:
            binary: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            registers, local = resources(binary.asm["cubin"])
            wide, narrow = (
                len(re.findall(rf"ld\.global\S*{kind} {{", binary.asm["ptx"]))
                for kind in (r"\.v4\.b32", r"(?<!v4)\.b32")
            )
            shared = binary.metadata.shared
            yield Need(source.fn.__name__, capability, registers, local, shared, wide, narrow, binary.asm["cubin"])


def executed(cubin: bytes) -> tuple[list[str], int]:
    """The instructions of the innermost loop, the longest one of several, and how many barriers there are."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[range] = []
    for line in printed_by(knobs.nvidia.nvdisasm.path, "-c", cubin=cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1])
            back = re.search(r"BRA\b.*(\.L_x_\d+)", found[1])
            if back and labels.get(back[1], len(instructions)) < len(instructions) - 1:
                loops.append(range(labels[back[1]], len(instructions)))
    inner = [loop for loop in loops if not any(one != loop and set(one) <= set(loop) for one in loops)]
    longest = max(inner, key=len, default=range(0))
    return instructions[longest.start : longest.stop], sum("BAR.SYNC" in one for one in instructions)


def printed_by(*command: str, cubin: bytes) -> str:
    """What a tool of the CUDA toolkit prints of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory per thread, which the compiler spills to."""
    text = printed_by(knobs.nvidia.cuobjdump.path, "-res-usage", cubin=cubin)
    found = {name: max(map(int, re.findall(rf"{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    return found["REG"], max(found["STACK"], found["LOCAL"])
