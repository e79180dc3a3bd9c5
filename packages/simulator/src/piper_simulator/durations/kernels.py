"""Compute how long the kernels of a step take.

Without a stack a kernel takes the larger of FLOPs at the reached peak and bytes at the reached bandwidth. A step takes
the sum of its kernels, which the host launches beside them (`piper_ir.fold.issue`).

With a stack (`piper_simulator.cluster.stacks`) the kind of kernel decides:

    matmul      2 M N K FLOPs / (peak x matmul_fraction x tiles / (waves x SMs)): pieces of the result of a size of
                TILES, as many at once as there are SMs, and a TAIL; K in whole steps of STEP (NVIDIA, Matrix
                Multiplication Background User's Guide: tile and wave quantization); slower where rows of its matrices
                are unaligned (`piper_simulator.durations.alignment`)
    attention   in 16 bit FLOPs / (peak x the fraction that the stack's kernel reaches forward or backward)
    the others  bytes at the part of the bandwidth that so many bytes reach (`memory_steps`); if the stack runs an
                operator as several kernels (`piper_simulator.durations.eager_launches`), each with its own bytes; loads
                of which each waits for the one before it, `load_s` each

Each is never shorter than its bytes or its FLOPs allow, nor than a start of `kernel_s` and after it its bytes at the
best part of the bandwidth, or its FLOPs. (The parts of the bandwidth that few bytes reach are another form of such a
start, so that the longer of both counts.)
Kernels that the device's table knows (`piper_simulator.cluster.kernel_table`) take the measured time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from piper_ir.ground.errors import ClusterError
from piper_ir.ground.sizes import bind
from piper_ir.ground.trace import Source
from piper_ir.program.program import Cost, Kernel, Step
from piper_simulator.cluster.device import FLOAT8, Device
from piper_simulator.cluster.kernel_table import SOURCES, Found, How
from piper_simulator.cluster.stacks import Stack
from piper_simulator.durations.alignment import aligned_part
from piper_simulator.durations.eager_launches import Launched, launched_by_torch
from piper_simulator.durations.software_kernels import FUSION, HALF, INSIDE, QUANTISERS, run_kernels

_AT_PEAK = frozenset({"matmul", "attention"})
TILES = ((128, 128), (128, 256), (256, 128))
"""The rows and columns of a result that an SM computes at once: cuBLAS's large tiles, of which the best counts."""
STEP = 32
"""The number of elements of K that a tile takes at once."""
TAIL = 0.3
"""The length of a product's tail, in waves: while its last tiles run, some SMs have none left.

It was chosen by published runs, of which 0.3 to 0.5 fit equally well.

Whole waves would make products that just fill them 5 to 10 % quicker than others, which published runs do not show:
models of 1.5B and 14.6B, whose products fill an A100's SMs, reach the rate of 6.2B and 28.3B (Zero Bubble pipelines).
"""
PART_S = 8e-6
"""The seconds of the host for a kernel that a module's call starts from C++: `launch_s` of eager torch's stacks."""
_RING = frozenset({"context_take", "context_merge"})
_PARTS = QUANTISERS | _RING
"""The operators that software starts within the call of a product or of attention: casts to float8, steps of a ring."""
NARROW, WIDE = 64, 128
"""The dimensions of a head for which kernels' factors of narrow heads are known, and their published fractions."""


@dataclass(frozen=True, slots=True)
class Took:
    """Hold the duration of a step of a chunk.

    Attributes:
        seconds: of its kernels, with their launches if the host is the device.
        source: that of its least trusted kernel.
        launch_s: seconds in which the host launches them beside the device.
        parts: seconds of its kernels by source.
    """

    seconds: float
    source: Source = "formula"
    parts: Mapping[How, float] = field(default_factory=dict)
    launch_s: float = 0.0


def step_took(device: Device, cost: Cost, step: Step) -> Took:
    """Return the duration of one step of a chunk, with its sources."""
    parts: dict[How, float] = {}
    if device.stack is not None:
        cost = Cost(tuple(run_kernels(device.stack, cost.kernels, step)), cost.seconds)
    for kernel in cost.kernels:
        took = kernel_seconds(device, kernel, step)
        parts[took.how] = parts.get(took.how, 0.0) + kernel.count * took.seconds
    seconds, launch_s = launched(device, sum(parts.values()), launch_count(device, cost))
    least: How = max(parts, key=[*SOURCES].index, default="formula")
    return Took(seconds, SOURCES[least], parts, launch_s)


def step_seconds(device: Device, cost: Cost, step: Step) -> float:
    """Return the seconds of one step of a chunk."""
    return step_took(device, cost, step).seconds


def launch_count(device: Device, cost: Cost) -> float:
    """Count the kernels that the host launches for a step of a chunk, a part of a call by its share of `launch_s`.

    A kernel that fills results is started by the call that allocates them, and a sum is a part of its product.
    """
    stack = device.stack
    if stack is None:
        return sum(k.count for k in cost.kernels)
    fused = {k.kind for k in cost.kernels if _one_for_all(stack, k)}
    launches = [
        (k, k.count * _launched(device, k).count)
        for k in cost.kernels
        if not _one_for_all(stack, k) and k.op not in INSIDE
    ]
    parts = _parts(launches)
    return len(fused) + sum(n for _, n in launches) - parts * (1 - part_of_call(device))


def _parts(launches: Sequence[tuple[Kernel, int]]) -> int:
    """Count the launches of a step that are parts of another one's call.

    Of the pieces of a ring attention all but the first are parts.
    """
    ops = {k.op for k, _ in launches}
    parts = sum(n for k, n in launches if k.op in _PARTS)
    pieces = sum(n for k, n in launches if k.kind == "attention")
    return parts if ops.isdisjoint(_RING) else parts + max(0, pieces - 1)


def part_of_call(device: Device) -> float:
    """Return the host's time for a kernel within a call, over `launch_s`: 1 if each kernel is a call of its own."""
    stack = device.stack
    if stack is None or stack.lowering == "torch" or device.launch_s <= PART_S:
        return 1.0
    return PART_S / device.launch_s


def _one_for_all(stack: Stack, kernel: Kernel) -> bool:
    """Return whether a stack runs all kernels of this kind in a step as one; the ones of a plan's fusions are known."""
    return kernel.kind in stack.fused and kernel.op != FUSION


def kernel_seconds(device: Device, kernel: Kernel, step: Step) -> Found:
    """Return the seconds of a kernel of a step on the device: from its table, else by formula."""

    def formula(k: Kernel) -> float:
        return plain(device, k) if device.stack is None else by_kind(device, k, step)

    return (
        device.kernel_table.find(kernel, formula)
        if device.kernels
        else Found(formula(kernel), "formula")
    )


def launched(device: Device, busy: float, kernels: float) -> tuple[float, float]:
    """Return the device's seconds for kernels that are `busy` seconds, and the host's seconds to launch them.

    A host that is the device itself launches them one after the other: then the first has both, and the second is 0.
    """
    launch_s = kernels * device.launch_s
    return (busy + launch_s, 0.0) if device.synchronous else (busy, launch_s)


def plain(device: Device, kernel: Kernel) -> float:
    """Return the seconds of a kernel on the device, without a stack."""
    return max(_computing(device, kernel), _moving(device, kernel))


def by_kind(device: Device, kernel: Kernel, step: Step) -> float:
    """Return the seconds of a kernel of a step on the device, with a stack."""
    computing = _computing(device, kernel)
    if kernel.kind == "matmul":
        computing = _product(device, kernel, computing / aligned_part(device, kernel, step))
    elif kernel.kind == "attention" and kernel.dtype in HALF:
        backward = step not in ("F", "R")
        computing *= device.matmul_fraction / _attention_fraction(device, kernel, backward)
    runs = _launched(device, kernel)
    moving = sum(
        n * b / (device.memory_bandwidth * memory_fraction(device, b)) for b, n in runs.moved
    )
    at_best = sum(n * b for b, n in runs.moved) / (device.memory_bandwidth * device.memory_fraction)
    waiting = runs.loads * device.load_s
    alone = device.stack is None or not _one_for_all(device.stack, kernel)
    starting = runs.count * device.kernel_s if alone else 0.0
    return max(moving, max(computing, at_best, waiting) + starting)


def _product(device: Device, kernel: Kernel, computing: float) -> float:
    """Return the seconds of a product: of its FLOPs in whole waves of tiles, and of the start and end of each wave.

    A convolution has no dimensions of a product, and counts by its FLOPs.
    """
    dims = tuple(bind(d, 0) for d in kernel.dims)
    if not dims:
        return computing
    seconds = computing / filled(dims, device.sms)
    if device.stack is None or not device.stack.tile_s or not device.sms:
        return seconds
    *batch, m, n, _ = dims
    waves = min(_waves(batch[0] if batch else 1, m, n, tile, device.sms) for tile in TILES)
    return seconds + waves * device.stack.tile_s


def _launched(device: Device, kernel: Kernel) -> Launched:
    """Return the kernels that the device's stack runs for one of a plan."""
    stack = device.stack
    counted = stack is not None and kernel.kind == "loss" and stack.loss_bytes
    if stack is not None and stack.lowering == "torch" and not counted:
        return launched_by_torch(kernel)
    return Launched(((bind(kernel.bytes, 0), 1),))


def filled(dims: tuple[int, ...], sms: int) -> float:
    """Return the part of the SMs' time that a product (M, N, K) or (batch, M, N, K) uses; 1 for unknown SMs."""
    *batch, m, n, k = dims
    if not sms or not m * n * k:
        return 1.0
    products = batch[0] if batch else 1
    waste = k / (ceil(k / STEP) * STEP)
    return (
        max(
            products * m * n / (_waves(products, m, n, tile, sms) * sms * tile[0] * tile[1])
            for tile in TILES
        )
        * waste
    )


def _waves(products: int, m: int, n: int, tile: tuple[int, int], sms: int) -> float:
    """Return how many waves the tiles of a product take, with their tail; at least one."""
    return max(1.0, products * ceil(m / tile[0]) * ceil(n / tile[1]) / sms + TAIL)


def memory_fraction(device: Device, nbytes: int) -> float:
    """Return the fraction of the memory's bandwidth that a kernel of so many bytes reaches."""
    return next((f for least, f in device.memory_steps if nbytes >= least), device.memory_fraction)


def _attention_fraction(device: Device, kernel: Kernel, backward: bool) -> float:
    """Return the fraction of the peak that attention reaches, less with few tokens in a row.

    If nothing is published about the kernel on this device, it counts as a matrix product.
    """
    stack = device.stack
    known = None if stack is None else stack.attention_fraction.get(device.generation)
    if stack is None or known is None:
        return device.matmul_fraction
    name = "attention_backward" if backward else "attention_forward"
    best = known[backward]
    if name in stack.constants:
        best = stack.constants[name].value * device.clock
    if len(kernel.dims) != 5:
        return best
    *_, keys, width = (bind(d, 0) for d in kernel.dims)
    if width > WIDE:
        best *= stack.attention_wide.get(device.generation, (1.0, 1.0))[backward]
    elif width < WIDE:
        lost = 1.0 - stack.attention_narrow.get(device.generation, (1.0, 1.0))[backward]
        best *= 1.0 - lost * min(1.0, (WIDE - width) / (WIDE - NARROW))
    return best * keys / (keys + stack.attention_tokens.get(device.generation, 0.0))


def is_guess(device: Device, kernel: Kernel) -> bool:
    """Return whether a kernel's duration rests on the rate of a dtype that the device does not know.

    For kernels that move bytes that matters only if the rate decides, since integers are added on every device.
    """
    if kernel.dtype in device.peak_flops:
        return False
    return kernel.kind in _AT_PEAK or _computing(device, kernel) > _moving(device, kernel)


def guessed_rates(device: Device, cost: Cost) -> tuple[str, ...]:
    """Return the dtypes of kernels whose rates on the device are guesses.

    Raises ClusterError for a product in float8 on a device without a rate for it: no other rate says how long it takes.
    """
    if FLOAT8 not in device.peak_flops and any(k.dtype == FLOAT8 for k in cost.kernels):
        known = ", ".join(device.peak_flops)
        raise ClusterError(
            f"{device.name} has no FLOP/s for float8, in which linear layers of this job multiply (Precision.float8); "
            f"it has {known}. Use another device, add float8 to peak_flops of a cluster file, or leave float8 out"
        )
    return tuple(k.dtype for k in cost.kernels if is_guess(device, k))


def lacks_number(device: Device, kernel: Kernel) -> bool:
    """Return whether the device's stack has no number for this kernel there, so that the rate of another one counts."""
    stack, attention = device.stack, kernel.kind == "attention" and kernel.dtype in HALF
    return attention and stack is not None and device.generation not in stack.attention_fraction


def _computing(device: Device, kernel: Kernel) -> float:
    fraction = device.product_fraction(kernel.dtype) if kernel.kind in _AT_PEAK else 1.0
    return bind(kernel.flops, 0) / (device.peak(kernel.dtype) * fraction)


def _moving(device: Device, kernel: Kernel) -> float:
    return bind(kernel.bytes, 0) / (device.memory_bandwidth * device.memory_fraction)
