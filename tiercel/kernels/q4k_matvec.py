"""y = x W^T for up to 16 tokens and a K-quantised W, on tensor cores, read at the speed of memory.

One reader for every number of tokens: cuda/q4k_matvec.cu streams tiles of 16 rows through the
fragments of a 16 x 8 product whose columns are tokens. The order in which a row is summed depends
on its length alone, so a token's result has the same bits alone, in any batch of up to 16, at any
place in it, and from either layout of the weights. Weights become fp16 operands (exact integers for
Q4_K, 11 bits for Q6_K), sums are float32, d stays outside: nothing is rounded on the way.

Floor: the planes once. x is read by every CTA, from L2.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.kernels import rtc
from tiercel.kernels.q4k_repack import TILE_ROWS

MAX_TOKENS = 16
CAPABILITY = (8, 0)  # cp.async and m16n8k16
BLOCK = 256
SLICE_BLOCKS = 16  # SLICE of the kernel
_PARTS = 8  # of the order of sums; see the kernel
_TOKEN_CLASSES = (1, 4, 8, MAX_TOKENS)  # each has one launch
_SLOT_BYTES = {"Q4_K": 2304, "Q6_K": 3360}
ACTIVATIONS = ("", "silu", "gelu_tanh")  # by code of the kernel
OUT_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What a launch may take: multiprocessors, and bytes of shared memory of a CTA."""

    num_sms: int
    smem_bytes: int


H200 = DeviceLimits(132, 227 << 10)


@dataclass(frozen=True, slots=True)
class Launch:
    """What may be chosen for a shape; whatever it is, the result has the same bits.

    Attributes:
        tiles: of 16 rows that a warp multiplies together.
        groups: of warps in a CTA, each on tiles of its own.
        stages: units (of all `tiles`) of a warp in flight.
        early: of them, those asked for before x.
        buffers: of sums, of a group.
        ahead: steps of a group over its tiles that are asked into the L2 before their turn.
        ctas: resident on an SM, for the registers.
    """

    tiles: int = 1
    groups: int = 1
    stages: int = 1
    early: int = 1
    buffers: int = 1
    ahead: int = 0
    ctas: int = 1


# (type, tokens) -> best first; those that do not fit are passed over.
_LAUNCHES = {
    ("Q4_K", 1): (Launch(1, 2, 2, 1, 2), Launch(1, 1, 2, 1, 2)),
    ("Q4_K", 4): (Launch(1, 2, 3, 1, 2), Launch(1, 2, 2, 1, 2)),
    ("Q4_K", 8): (Launch(1, 2, 2, 1, 2), Launch(1, 2, 2, 1, 1)),
    ("Q4_K", 16): (Launch(1, 2, 2, 1, 1),),
    ("Q6_K", 1): (Launch(1, 2, 2, 1, 2), Launch(1, 1, 2, 1, 2)),
    ("Q6_K", 4): (Launch(1, 1, 3, 1, 2),),
    ("Q6_K", 8): (Launch(1, 1, 3, 1, 2),),
    ("Q6_K", 16): (Launch(1, 2, 1, 1, 2), Launch(1, 2, 1, 1, 1)),
}
# The same for rows whose slices are split: 4096 x 12288, 8 tokens, Q6_K: 20.4 us, one group 28.6.
_SPLIT_LAUNCHES = {
    "Q4_K": (Launch(1, 2, 2, 2, 2), Launch(1, 2, 2, 1, 1)),
    "Q6_K": (Launch(1, 2, 2, 2, 2), Launch(1, 2, 1, 1, 2)),
}
_GATED = (Launch(2, 1, 2), Launch(2))
_FEW_TILES = Launch(1, 1, 3, 3, 1)  # no SM has two: 1024 x 4096 4.8 us with two groups, 3.5 so
_LARGE_TILES = 8  # tiles of an SM from which two small CTAs beat one


@dataclass(frozen=True, slots=True)
class Q4kMatvecConfig:
    """A launch for a shape.

    Attributes:
        launch: what was chosen.
        parts: warps that share a tile of 16 rows; decides the order of sums.
        is_split: slices of long rows go to CTAs of their own.
        grid: CTAs along the rows.
        smem_bytes: of a CTA.
        activation: "" or that of the first half of the rows, which gate the second.
    """

    launch: Launch
    parts: int
    is_split: bool
    grid: int
    smem_bytes: int
    activation: str = ""


def num_slices(in_features: int) -> int:
    """Slices of a row's sum."""
    return -(-in_features // (BLOCK * SLICE_BLOCKS))


@functools.cache
def token_class(
    tokens: int, type_name: str, limits: DeviceLimits = H200, activation: str = ""
) -> int:
    """The most tokens that share the launch of `tokens`; fewer where shared memory is short.

    More tokens than the largest class takes go in several launches.
    """
    least = Launch(tiles=2) if activation else Launch()
    fitting = [
        most
        for most in _TOKEN_CLASSES
        if smem_bytes(type_name, SLICE_BLOCKS, most, _PARTS, least) <= limits.smem_bytes
    ]
    return next((most for most in fitting if tokens <= most), fitting[-1])


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """What a CUDA device offers."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeviceLimits(num_sms, rtc.max_smem_bytes(device))


def can_gate(shape: tuple[int, int]) -> bool:
    """Whether the first half of the rows may gate the second: in whole tiles."""
    return shape[0] % (2 * TILE_ROWS) == 0


@functools.cache
def select_q4k_matvec(
    type_name: str,
    shape: tuple[int, int],
    tokens: int,
    limits: DeviceLimits = H200,
    activation: str = "",
) -> Q4kMatvecConfig:
    """Choose the launch. Pure: equal in every process, readable by a test.

    Whatever it chooses, the result has the same bits.

    Args:
        type_name: of the weights.
        shape: (rows, in) of W.
        tokens: at most `token_class(tokens, type_name, limits, activation)`.
        limits: of the device.
        activation: as in the config; the shape `can_gate`.
    """
    tokens = token_class(tokens, type_name, limits, activation)
    blocks, tiles = shape[1] // BLOCK, -(-shape[0] // TILE_ROWS)
    if tokens == 1 and type_name == "Q4_K" and blocks <= SLICE_BLOCKS:
        # 57 MB: 15.3 us, 16.2 with one CTA an SM; 14 MB: 6.1 us either way.
        is_large = tiles > _LARGE_TILES * limits.num_sms
        launches = [Launch(1, 1, 2, 2, 2, ctas=2)] if is_large else [Launch(1, 1, 2, 1, 2)]
    else:
        launches = [*_LAUNCHES[type_name, tokens]]
    if tiles <= limits.num_sms:
        launches = [_FEW_TILES, *launches]
    launches += [Launch(1, 1, 2), Launch()]
    split_launches = [*_SPLIT_LAUNCHES[type_name], *launches]
    if activation:
        launches = split_launches = [*_GATED]
    configs = [
        make_config(
            type_name, shape, tokens, launch, is_split=split, limits=limits, activation=activation
        )
        for split, tried in ((False, launches), (True, split_launches))
        for launch in tried
        if tiles % launch.tiles == 0
    ]
    return next(config for config in configs if config.smem_bytes <= limits.smem_bytes)


def make_config(
    type_name: str,
    shape: tuple[int, int],
    tokens: int,
    launch: Launch,
    *,
    is_split: bool,
    limits: DeviceLimits = H200,
    activation: str = "",
) -> Q4kMatvecConfig:
    """A launch for W (rows, in) and a class of tokens."""
    blocks, tiles = shape[1] // BLOCK, -(-shape[0] // TILE_ROWS)
    slices = num_slices(shape[1]) if is_split else 1
    # All CTAs at once on the device, or one for each group's tiles if those are fewer.
    at_once = max(1, limits.num_sms * launch.ctas // slices)
    grid = min(-(-tiles // (launch.groups * launch.tiles)), at_once)
    parts = _PARTS if blocks > _PARTS // 2 else _PARTS // 2
    units = min(blocks, SLICE_BLOCKS) if is_split else blocks
    smem = smem_bytes(type_name, units, tokens, parts, launch)
    return Q4kMatvecConfig(launch, parts, is_split, grid, smem, activation)


def smem_bytes(type_name: str, units: int, tokens: int, parts: int, launch: Launch) -> int:
    """Dynamic shared memory of a CTA: activations and means, sums of parts, rings.

    Args:
        type_name: of the weights.
        units: of a row that the CTA sums.
        tokens: rows of x.
        parts: see `Q4kMatvecConfig`.
        launch: the choice.
    """
    of_token, padding = (544, 128) if type_name == "Q4_K" else (512, 256)
    activations = units * (tokens * of_token + padding)
    sums = parts * _tiles_of_tokens(tokens) * 512
    ring = parts * launch.stages * launch.tiles * _SLOT_BYTES[type_name]
    return activations + launch.groups * (launch.buffers * sums + ring)


def _tiles_of_tokens(tokens: int) -> int:
    return -(-tokens // 8)


@functools.cache
def cuda_source(
    type_name: str,
    tokens: int,
    out_dtype: torch.dtype,
    config: Q4kMatvecConfig,
    *,
    in_file: bool,
) -> rtc.KernelSource:
    """The kernel as built for one kind of call."""
    launch = config.launch
    macros = (
        ("QTYPE", 4 if type_name == "Q4_K" else 6),
        ("NT", _tiles_of_tokens(tokens)),
        ("IN_FILE", int(in_file)),
        ("PARTS", config.parts),
        ("TILES", launch.tiles),
        ("GROUPS", launch.groups),
        ("STAGES", launch.stages),
        ("OUT", OUT_CODES[out_dtype]),
        ("IS_SPLIT", int(config.is_split)),
        ("EARLY", launch.early),
        ("BUFFERS", launch.buffers),
        ("AHEAD", launch.ahead),
        ("CTAS", launch.ctas),
        ("ACTIVATION", ACTIVATIONS.index(config.activation)),
    )
    return rtc.KernelSource("q4k_matvec", macros, ("q4k_units",))


@functools.cache  # every layer has the same few shapes
def load_q4k_matvec(
    type_name: str,
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    device: torch.device,
    *,
    in_file: bool,
    activation: str = "",
) -> None:
    """Load what `select_q4k_matvec` may choose for a matrix; call it before a graph is captured."""
    limits = device_limits(device)
    sources = {}
    classes = {token_class(most, type_name, limits, activation) for most in _TOKEN_CLASSES}
    for tokens in classes:
        config = select_q4k_matvec(type_name, shape, tokens, limits, activation)
        source = cuda_source(type_name, tokens, out_dtype, config, in_file=in_file)
        sources[source] = config.smem_bytes
    rtc.fill_cache(sources, rtc.device_arch(device))
    for source, smem in sources.items():
        rtc.load_kernel(source, device, smem)


class KernelPlanes(ctypes.Structure):
    """Planes of the kernels: addresses, passed by value."""

    _fields_ = (("planes", ctypes.c_void_p * 4),)

    @classmethod
    def of(cls, planes: Sequence[Tensor]) -> KernelPlanes:
        """Their addresses, in order."""
        result = cls()
        for place, plane in enumerate(planes):
            result.planes[place] = plane.data_ptr()
        return result


def launch_q4k_matvec(
    x: Tensor,
    planes: Sequence[Tensor],
    type_name: str,
    out: Tensor,
    partial: Tensor | None,
    tickets: Tensor | None,
    config: Q4kMatvecConfig,
    *,
    is_dependent: bool,
) -> None:
    """Enqueue on the current stream; the op has checked and allocated.

    Args:
        x: (tokens, in) float16, contiguous, of one `token_class`.
        planes: of W (rows, in) on x's device, contiguous, in their order; one in the file's layout.
        type_name: of W.
        out: (tokens, rows), or half of them where they are gated; float16, bfloat16 or float32,
            unit inner stride.
        partial: (slices, tokens, rows up to a multiple of 16) float32 where the config splits.
        tickets: (tiles,) int32 zeros where it splits; zeros again afterwards.
        config: from `select_q4k_matvec`.
        is_dependent: see `rtc.launch`.
    """
    tokens, in_features = x.shape
    in_file = len(planes) == 1
    rows = out.shape[1] * (2 if config.activation else 1)
    source = cuda_source(type_name, tokens, out.dtype, config, in_file=in_file)
    kernel = rtc.load_kernel(source, x.device, config.smem_bytes)
    arguments = [
        KernelPlanes.of(planes),
        rtc.pointer(x),
        rtc.pointer(out),
        ctypes.c_void_p(0) if partial is None else rtc.pointer(partial),
        ctypes.c_void_p(0) if tickets is None else rtc.pointer(tickets),
        *map(ctypes.c_int, (rows, in_features // BLOCK, tokens)),
        *map(ctypes.c_int, (x.stride(0), out.stride(0))),
    ]
    rtc.launch(
        kernel,
        config.grid,
        32 * config.parts * config.launch.groups,
        arguments,
        grid_y=num_slices(in_features) if config.is_split else 1,
        is_dependent=is_dependent,
    )
