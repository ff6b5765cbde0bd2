"""CUDA C++ at run time: sources compile as designed, and include what they name."""

import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from benchmarks.model_shapes import SHAPES, decoder_shape, step_types
from tests.fused_decode_step_model import shape_of_ranks
from tiercel.errors import InternalError
from tiercel.kernels.attention import (
    indexer_scores,
    indexer_select,
    rotary_kv_write,
    sparse_attention_decode,
    sparse_attention_tiles,
)
from tiercel.kernels.attention.prefill_attention import cuda_source, select_prefill_attention
from tiercel.kernels.block import linear_group
from tiercel.kernels.collectives.all_reduce import GATHER, all_reduce_source, norm_warps
from tiercel.kernels.fused import (
    fused_batch_step,
    fused_decode_step,
    fused_layer_tail,
    mhc_mix_finish,
)
from tiercel.kernels.fused.fused_batch_step_geometry import Heads, join_layers
from tiercel.kernels.fused.fused_decode_step_geometry import (
    make_geometry,
    make_mask,
    refuse_shape,
)
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape, ChainTypes, partition
from tiercel.kernels.packed.packed_dequantize import dequantize_source
from tiercel.kernels.packed.packed_gemm import (
    TOKEN_CLASSES,
    Gate,
    gemm_source,
    image_source,
    make_config,
    most_groups,
    select_packed_gemm,
)
from tiercel.kernels.packed.packed_matvec import cuda_source as cuda_source_packed
from tiercel.kernels.packed.packed_matvec import select_packed_matvec
from tiercel.kernels.packed.packed_norm import norm_source
from tiercel.kernels.packed.packed_types import UNIT_TYPES, tail_groups
from tiercel.kernels.runtime import rtc
from tiercel.ops.packed_gemm import TYPES
from tiercel.quant_types import QuantType

ARCH = "sm_90a"
# Sources tell sm_90 and newer from older ones, no more.
ELSEWHERE = ["sm_80", "sm_89", "sm_100a", "sm_120a"]


def mia_source(variant="plain", dtype=torch.bfloat16, group=4, block_size=64, *, is_part=False):
    longest = 4096 if variant == "fast" else 100
    config = select_prefill_attention(dtype, 128, group, block_size, 0, 0.0, longest, (9, 0))
    assert config.variant == variant
    return cuda_source(config, dtype, group, block_size, is_part=is_part)


SOURCES = [
    mia_source(),
    mia_source("fast"),
    mia_source("fast", torch.float16),
    mia_source("plain", group=1, block_size=16),
    mia_source("fast", group=8, block_size=128),
    mia_source(is_part=True),
    mia_source("fast", is_part=True),
]


STEP_SIZES = [name for name in SHAPES if refuse_shape(decoder_shape(name)) is None]


def step_source(name, mixture="", ranks=1, tokens=1):
    """The kernel of whole decode steps of a published model; mixture: else the usual one."""
    types = step_types(name, mixture or SHAPES[name].mixture)
    masks = [make_mask(layer) for layer in types]
    shape, arch = shape_of_ranks(decoder_shape(name), ranks), SHAPES[name].arch
    geometry = make_geometry(shape, masks)
    return fused_decode_step.cuda_source(
        geometry,
        has_qk_norm=arch in ("qwen3", "gemma3"),
        has_bias=arch == "qwen2",
        tokens=tokens,
    )


COMPILED = {}  # cubins by source and architecture: half of the cases share one


def compile_here(source, folder, arch=ARCH):
    """A cubin, compiled once."""
    if (source, arch) not in COMPILED:
        COMPILED[source, arch] = compile_anew(source, folder, arch)
    return COMPILED[source, arch]


def compile_anew(source, folder, arch):
    """By NVRTC where it is installed, else by nvcc, else skip and say so."""
    try:
        return rtc.compile_cubin(source, arch)
    except InternalError as error:
        if "cannot be compiled" not in str(error):
            raise
        reason = str(error)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip(f"neither NVRTC nor nvcc: {reason}")
    root, cubin = Path(str(files("tiercel.kernels") / "cuda")), folder / "out.cubin"
    options = ["-std=c++17", f"-arch={arch}", f"-I{root}"]
    options += [f"-D{name}={value}" for name, value in source.macros]
    path = root / rtc.source_path(source.name)
    command = [nvcc, "-cubin", *options, "-o", str(cubin), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return cubin.read_bytes()


def find_tool(name):
    """A disassembler from PATH or from the Triton wheel, else skip."""
    triton = pytest.importorskip("triton")
    own = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    tool = shutil.which(name) or (str(own) if own.exists() else None)
    if tool is None:
        pytest.skip(f"no {name}: the compiled code is not inspected")
    return tool


def ask(cubin, folder, tool, *options):
    """What a disassembler says of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [find_tool(tool), *options, str(path)]
    environment = {
        **os.environ,
        "PATH": f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def check_no_spills(source, folder):
    """A kernel keeps all it holds in registers."""
    usage = ask(compile_here(source, folder), folder, "cuobjdump", "--dump-resource-usage")
    assert re.search(r"STACK:0\b.* LOCAL:0\b", usage)


def registers_of(cubin, folder):
    usage = ask(cubin, folder, "cuobjdump", "--dump-resource-usage")
    return int(re.search(r"REG:(\d+)", usage)[1])


def packed_sources(name):
    """Kernels of a type in both layouts: for one token and 16, for rows split, cut and not."""
    sizes = (1024, 4096, 12288) if name in ("Q4_K", "Q6_K") else (12288,)
    in_step = UNIT_TYPES[name].in_step
    if not in_step and QuantType[name].block_weights == 32:
        sizes = (576,)
    for in_file in (False,) if in_step else (False, True):
        for tokens in (1, 16):
            for columns in sizes:
                config = select_packed_matvec(name, (24576, columns), tokens)
                tail = tail_groups(columns)
                yield (
                    cuda_source_packed(name, tail, torch.float32, config, in_file=in_file),
                    config,
                )
        yield dequantize_source(name, torch.bfloat16, in_file=in_file), None


def has_fields(source):
    """Whether it reads a type that is neither Q4_K nor Q6_K, by packed_fields.cuh."""
    return dict(source.macros)["QTYPE"] not in (4, 6)


# One with 6 bits, means in blocks of 32, a table, and 3 bits. Emulation compiles all types.
USUAL_TYPES = {UNIT_TYPES[name].code for name in ("Q4_K", "Q6_K", "Q4_1", "IQ4_XS", "Q3_K")}


def is_rare(source, config):
    """Whether another one compiles much the same.

    By default some types' readers of planes for 16 tokens, the widest, and of Q4_K also that for
    one token, that of the file's layout, and what decodes.
    """
    macros = {*source.macros}
    if dict(source.macros)["QTYPE"] not in USUAL_TYPES:
        return True
    is_q4k, is_wide = ("QTYPE", 4) in macros, ("TOKENS", 16) in macros
    if config is None:
        return not is_q4k
    if ("IN_FILE", 1) in macros:
        return not (is_q4k and is_wide) or config.parts == 8
    is_widest = is_wide and (config.is_split or has_fields(source))
    return not (is_widest or (is_q4k and not is_wide and config.parts == 4))


def is_rare_elsewhere(source, arch):
    """By default Q4_K's planes, on what is older than Hopper and on what is newer."""
    macros = dict(source.macros)
    is_usual = macros["QTYPE"] == 4 and not macros["IN_FILE"] and "TOKENS" in macros
    return not is_usual or arch in ("sm_89", "sm_100a")


# DeepSeek-V4's attention and indexer: lists of all kinds, and all launches.
LATENT_KINDS = (((2, False), (1, False)), ((2, False),), ((0, True), (0, False)))
CLUSTERS = (1, 2, 8)
LATENT_SOURCES = [
    *(
        sparse_attention_decode.decode_source(sparse_attention_decode.LAUNCH, lists)
        for lists in LATENT_KINDS
    ),
    *(
        sparse_attention_tiles.tiles_source(cluster, lists)
        for cluster in CLUSTERS
        for lists in LATENT_KINDS
    ),
    *(indexer_scores.scores_source(d, is_long=True) for d in (torch.bfloat16, torch.float32)),
    *(
        indexer_select.select_source(indexer_select.select_indexer_select(entries), is_long=is_long)
        for entries, is_long in ((8192, False), (16384, True), (262144, True))
    ),
]
PRODUCTS = {"sparse_attention_decode": "HMMA", "sparse_attention_tiles": "HGMMA"}
PRODUCTS |= {"indexer_scores": "HGMMA"}


# By default one of each kernel: of tiles with a cluster, of selections the largest, with groups.
USUAL_LATENTS = [
    *(LATENT_SOURCES[0], LATENT_SOURCES[-1], LATENT_SOURCES[-5]),
    sparse_attention_tiles.tiles_source(CLUSTERS[-1], LATENT_KINDS[-1]),
]
LATENT_CASES = [
    pytest.param(source, marks=[pytest.mark.slow] * (source not in USUAL_LATENTS))
    for source in LATENT_SOURCES
]


@pytest.mark.parametrize("source", LATENT_CASES, ids=str)
def test_kernels_of_latents_hold_all_in_registers(source, tmp_path):
    check_no_spills(source, tmp_path)
    text = ask(compile_here(source, tmp_path), tmp_path, "nvdisasm", "-c")
    assert ("UCGABAR_ARV" in text) == (dict(source.macros)["CLUSTER"] > 1)  # meets its cluster
    assert "ACQBULK" in text  # waits for the kernel ahead
    assert "PREEXIT" in text  # lets the next one start
    if source.name in PRODUCTS:
        assert re.search(r"LDG\.E\.(NA\.)?128", text)
        assert "HMUL2.BF16" in text
        assert PRODUCTS[source.name] in text
        # Products of a warpgroup do not wait for each other.
        assert text.count("WARPGROUP.DEPBAR") <= 2


@pytest.mark.parametrize(
    ("hidden", "splits"),
    [
        (4096, 32),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((7168, 56), (4096, 4))),
    ],
)
def test_mhc_mix_finish_keeps_streams_in_registers(hidden, splits, tmp_path):
    check_no_spills(mhc_mix_finish.cuda_source(hidden, splits, 32), tmp_path)


PACKED_SOURCES = {source: config for name in UNIT_TYPES for source, config in packed_sources(name)}
# On Hopper, and elsewhere the widest of each type and layout and what decodes.
Q4K_CASES = [
    pytest.param(source, ARCH, marks=[pytest.mark.slow] * is_rare(source, config))
    for source, config in PACKED_SOURCES.items()
] + [
    pytest.param(
        source,
        arch,
        marks=[pytest.mark.slow] * is_rare_elsewhere(source, arch),
    )
    for source, config in PACKED_SOURCES.items()
    if ("IN_STEP", 0) in source.macros  # only Hopper has the fused decode step
    for arch in ELSEWHERE
    if config is None
    or (("TOKENS", 16) in source.macros and (config.is_split or ("TAIL", 2) in source.macros))
]


@pytest.mark.parametrize(("source", "arch"), Q4K_CASES, ids=str)
def test_q4k_kernels_compile_everywhere(source, arch, tmp_path):
    """Without spills worth the name on Hopper, products of tensor cores, 16-byte loads."""
    cubin = compile_here(source, tmp_path, arch)
    config = PACKED_SOURCES[source]
    if arch != ARCH or config is None:
        return
    threads = 32 * config.parts * config.groups * config.ctas
    assert registers_of(cubin, tmp_path) * threads <= 65536
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    assert "HMMA.16816.F32" in text
    assert "LDS.128" in text
    assert "ACQBULK" in text  # waits for the kernel ahead
    assert "PREEXIT" in text  # lets the next one start
    assert len(re.findall(r"\b(?:LDL|STL)", text)) <= 8
    if dict(source.macros)["IN_FILE"] == 0:
        assert "LDGSTS.E.BYPASS.128" in text


def gemm_cases():
    """What the matrices of an 8B model take, and the largest CTA of each number of tokens."""
    for qtype in TYPES[2:]:
        yield make_config(qtype.name, TOKEN_CLASSES[0], 3, 1), qtype.name
    for name in ("Q4_K", "Q6_K"):
        for tokens in TOKEN_CLASSES:
            yield make_config(name, tokens, most_groups(name, tokens), 1), name
            for shape in ((6144, 4096), (4096, 12288), (24576, 4096), (1024, 4096)):
                yield select_packed_gemm(name, shape, tokens), name


def normed_sources():
    """Products that norm the residual for two readers, readers, gated and not, and heads."""
    for name, (rows, columns) in (("Q4_K", (4096, 4096)), ("Q6_K", (4096, 12288))):
        for tokens in TOKEN_CLASSES[:2]:
            config = select_packed_gemm(name, (rows, columns), tokens)
            yield gemm_source(name, torch.float16, config, orders=(4, 6))
            yield gemm_source(name, torch.float16, config, is_scaled=True)
            yield gemm_source(name, torch.float16, config, Gate("silu", 6), is_scaled=True)
            config = select_packed_gemm(name, (rows, columns), tokens, head_dim=128)
            heads = (128, True, True)
            yield gemm_source(name, torch.float16, config, is_scaled=True, heads=heads)


# A product of each kind: one for two readers, and a gated reader.
@pytest.mark.parametrize("source", [*normed_sources()][:6:5], ids=str)
def test_norms_within_products_compile(source, tmp_path):
    text = ask(compile_here(source, tmp_path), tmp_path, "nvdisasm", "-c")
    assert len(re.findall(r"\b(?:LDL|STL)", text)) <= 8
    products = [line for line in text.splitlines() if "HGMMA" in line]
    assert sum("gsb0" in line for line in products) <= 16 / dict(source.macros)["STEPS"]


IMAGE_ORDERS = (4, 6, 32)  # of columns


def is_rare_gemm(config, name):
    """By default the largest CTA: of Q4_K and Q6_K for the most tokens, else for the fewest.

    And parts of a row once. Other types are read much as Q8_0.
    """
    if name not in ("Q4_K", "Q6_K"):
        return name != "Q8_0"
    is_largest = config.groups == most_groups(name, TOKEN_CLASSES[-1])
    is_split = name == "Q4_K" and config.splits == 6
    return config.tokens != TOKEN_CLASSES[-1] or not (is_largest or is_split)


GEMM_CASES = [
    pytest.param(config, name, marks=[pytest.mark.slow] * is_rare_gemm(config, name))
    for config, name in sorted(set(gemm_cases()), key=str)
]


@pytest.mark.parametrize(("config", "name"), GEMM_CASES, ids=str)
def test_q4k_gemm_compiles_as_designed(config, name, tmp_path):
    """No spill worth the name, and products that do not wait for each other."""
    cubin = compile_here(gemm_source(name, torch.float16, config), tmp_path)
    assert registers_of(cubin, tmp_path) * (128 * config.groups + 32) <= 65536
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    products = [line for line in text.splitlines() if "HGMMA" in line]
    assert len(products) == 16  # of a unit
    # Between units, of 128 tokens by three warpgroups: nvcc 14, NVRTC 2.
    assert len(re.findall(r"\b(?:LDL|STL)", text)) <= 16
    # One wait per so many products: more means that ptxas serialised them (C7515).
    assert sum("gsb0" in line for line in products) <= 16 / config.steps
    assert "UBLKCP" in text


# By default the fewest tokens and the most, of different orders.
USUAL_IMAGES = {(IMAGE_ORDERS[0], TOKEN_CLASSES[-1]), (IMAGE_ORDERS[-1], TOKEN_CLASSES[0])}
IMAGE_CASES = [
    pytest.param(
        order,
        tokens,
        marks=[pytest.mark.slow] * ((order, tokens) not in USUAL_IMAGES),
    )
    for order in IMAGE_ORDERS
    for tokens in TOKEN_CLASSES
]


@pytest.mark.parametrize(("order", "tokens"), IMAGE_CASES)
def test_images_of_tokens_compile(order, tokens, tmp_path):
    assert compile_here(image_source(order, tokens), tmp_path)
    for has_update in (False, True):
        norm = norm_source(4096, tokens, (order,), has_update=has_update)
        assert "STACK:0" in ask(compile_here(norm, tmp_path), tmp_path, "cuobjdump", "-res-usage")


# Another type, another group, and parts compile much as the first two.
SOURCE_CASES = [
    pytest.param(source, marks=[pytest.mark.slow] * (number > 1))
    for number, source in enumerate(SOURCES)
]


@pytest.mark.parametrize("source", SOURCE_CASES, ids=str)
def test_multi_item_attention_compiles_as_designed(source, tmp_path):
    """Registers as setmaxnreg wants them, no spill among products, and none waits for itself."""
    cubin = compile_here(source, tmp_path)
    # 65536 / 384 threads, in eights: setmaxnreg redistributes them.
    assert registers_of(cubin, tmp_path) == 168
    lines = ask(cubin, tmp_path, "nvdisasm", "-c").splitlines()
    products = [number for number, line in enumerate(lines) if "HGMMA" in line]
    assert len(products) >= 100
    # A tile's start and the producer may spill; the steps between the first product and the last
    # may not.
    steps = lines[products[0] : products[-1]]
    assert not [line for line in steps if re.search(r"\b(?:LDL|STL)", line)]
    # One wait per group of products: more means that ptxas serialised them (C7520).
    assert sum("gsb0" in lines[number] for number in products) <= len(products) / 5


# Accesses to local memory, a word or two of a thread where phases begin: what takes the registers
# (a second early unit; code that all matrices share) was measured to be 1 to 4% faster with them.
SPILLS = {"llama3-3b": 10, "qwen2.5-7b": 10, "qwen3-8b": 2}
SPILLS |= {"qwen2.5-0.5b": 70}  # of four types
SPILLS |= dict.fromkeys(("gemma3-270m", "gemma3-1b", "gemma3-4b", "gemma3-12b"), 10)
# The widest, and one that may spill: others have more room. Qwen3's is that of another mixture and
# of several GPUs too; Llama's and Qwen2's layers are Qwen3's without norms of heads.
USUAL_SIZES = {STEP_SIZES[-1], "qwen3-8b"}
STEP_CASES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL_SIZES)) for name in STEP_SIZES
]


@pytest.mark.parametrize("name", STEP_CASES)
def test_decode_step_compiles_as_designed(name, tmp_path):
    """640 threads an SM, and next to nothing in local memory: 60 bytes cost 17%."""
    check_step(step_source(name), SPILLS.get(name, 0), tmp_path)


# Other types' code, where units are whole rows and where they are several.
@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        pytest.param(name, mixture, marks=[pytest.mark.slow] * (name + mixture != "qwen3-8bIQ4_XS"))
        for name in ("qwen3-8b", "qwen3-4b", "llama3-1b", "gemma3-1b", "gemma3-4b", "gemma3-27b")
        for mixture in ("Q8_0", "Q4_0", "IQ4_XS")
        if name + mixture != "gemma3-1bIQ4_XS"  # whose attn_v is Q5_1
    ],
)
def test_decode_step_of_other_types_compiles_as_designed(name, mixture, tmp_path):
    check_step(step_source(name, mixture), 12, tmp_path)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.slow] * (ranks != 2))
        for name, ranks in (("qwen3-8b", 2), ("qwen3-8b", 8), ("llama3-70b", 4), ("llama3-8b", 4))
    ],
)
def test_decode_step_of_ranks_compiles_as_designed(name, ranks, tmp_path):
    """Sums of all ranks are polled together, in memory that other GPUs write."""
    source = step_source(name, ranks=ranks)
    check_step(source, 12, tmp_path)
    text = ask(compile_here(source, tmp_path), tmp_path, "nvdisasm", "-c")
    for instruction in ("ST", "LD"):
        found = re.findall(rf"\b{instruction}G?\.E\.64\.STRONG\.SYS", text)
        assert len(found) >= ranks - 1


# Of two tokens, whose codes take 64 registers: words that a phase loads again; none in Q4_K's loop.
PAIR_SPILLS = {"qwen3-8b": 24, "qwen3-0.6b": 24, "gemma3-27b": 100, "gemma3-1b": 140}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "qwen3-8b")) for n in STEP_SIZES]
)
def test_decode_step_of_pairs_compiles_as_designed(name, tmp_path):
    """Two rows of activations fit where one had scales and sums beside them."""
    check_step(step_source(name, tokens=2), PAIR_SPILLS.get(name, 100), tmp_path)


def check_step(source, spills, tmp_path):
    """Registers, spills and instructions of a kernel of whole steps."""
    cubin = compile_here(source, tmp_path)
    assert registers_of(cubin, tmp_path) * fused_decode_step.THREADS <= 65536
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    assert len(re.findall(r"\b(?:LDL|STL)", text)) <= spills
    for instruction in ("UBLKCP", "UTMALDG", "IDP.4A.", "HMMA.16816.F32", "USETMAXREG"):
        assert instruction in text


# By default each kind on Hopper, and one of them on what is older.
USUAL_ELSEWHERE = {(2, "sm_80")}
REDUCE_CASES = [
    pytest.param(
        ranks,
        dtype,
        arch,
        marks=[pytest.mark.slow] * (arch != ARCH and (ranks, arch) not in USUAL_ELSEWHERE),
    )
    for ranks, dtype in ((2, torch.bfloat16), (8, torch.float32), (4, GATHER))
    for arch in (ARCH, *ELSEWHERE)
]


@pytest.mark.parametrize(("ranks", "dtype", "arch"), REDUCE_CASES, ids=str)
def test_all_reduce_compiles_as_designed(ranks, dtype, arch, tmp_path):
    """Words of 8 bytes go in pairs, and nothing is spilled."""
    cubin = compile_here(all_reduce_source(ranks, dtype), tmp_path, arch)
    usage = ask(cubin, tmp_path, "cuobjdump", "--dump-resource-usage")
    assert re.search(r"STACK:0\b.* LOCAL:0\b", usage)
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    assert len(re.findall(r"ST\S*\.128\.STRONG\.SYS", text)) == 2 * (ranks - 1)
    assert len(re.findall(r"LD\S*\.128\.STRONG\.SYS", text)) == 2 * ranks
    assert ("ACQBULK" in text and "PREEXIT" in text) == (arch != "sm_80" and arch != "sm_89")


@pytest.mark.parametrize(
    ("ranks", "hidden"), [(2, 8192), pytest.param(8, 4096, marks=pytest.mark.slow)]
)
def test_a_sum_with_a_norm_spills_nothing(ranks, hidden, tmp_path):
    """A row of 8192 has 1024 threads, whose registers 8 ranks would not leave."""
    assert norm_warps(8192, torch.bfloat16, 8) == 0
    warps = norm_warps(hidden, torch.bfloat16, ranks)
    source = all_reduce_source(ranks, torch.bfloat16, warps, has_norm=True)
    check_no_spills(source, tmp_path)
    assert registers_of(compile_here(source, tmp_path), tmp_path) * 32 * warps <= 65536


# By default both sets of types once, the input that takes the most, and tiles that fill no CTA.
USUAL_GROUPS = {
    (linear_group.ROTATED, 7, 256),
    (linear_group.PLAIN, 3, 272),
}
# And the widest launch.
WIDEST_GROUP = (8192, 8)
GROUP_CASES = [
    pytest.param(
        *(given, kinds, tiles, columns, num_tokens),
        marks=[pytest.mark.slow]
        * ((given, kinds, tiles) not in USUAL_GROUPS or (columns, num_tokens) != WIDEST_GROUP),
    )
    for columns, num_tokens in ((4096, 1), WIDEST_GROUP)
    for given in (linear_group.PLAIN, linear_group.NORMED, linear_group.ROTATED)
    for kinds in (3, 7)
    for tiles in (256, 272, 512)
]


@pytest.mark.parametrize(("given", "kinds", "tiles", "columns", "num_tokens"), GROUP_CASES)
def test_linear_group_keeps_its_units_in_registers(
    given, kinds, tiles, columns, num_tokens, tmp_path
):
    """Of all warps, in each CTA of a multiprocessor."""
    config = linear_group.select_linear_group(
        columns, [tiles], num_tokens, kind_of_input=given, has_q8=kinds == 7
    )
    source = linear_group.cuda_source(kinds, given, config)
    cubin = compile_here(source, tmp_path)
    check_no_spills(source, tmp_path)
    threads = 32 * config.parts * config.tiles * config.ctas
    assert registers_of(cubin, tmp_path) * threads <= 65536


# The largest holds the most in registers.
@pytest.mark.parametrize(
    "head_dim",
    [
        pytest.param(
            head_dim, marks=[pytest.mark.slow] * (head_dim != max(rotary_kv_write.HEAD_DIMS))
        )
        for head_dim in rotary_kv_write.HEAD_DIMS
    ],
)
def test_rotary_kv_write_fits_beside_the_decode_chain(head_dim, tmp_path):
    """Whose threads leave 4096 registers of an SM."""
    source = rotary_kv_write.cuda_source(48, 8, head_dim, torch.float16, has_norms=True)
    check_no_spills(source, tmp_path)
    registers = registers_of(compile_here(source, tmp_path), tmp_path)
    assert registers * rotary_kv_write.THREADS <= 4096


@pytest.mark.parametrize(
    ("tokens", "is_six", "shape", "ranks"),
    [
        # The last layer of Qwen3-8B.
        pytest.param(8, False, ChainShape(4096, 4096, 12288, 0), 1, id="last"),
        pytest.param(
            *(16, True, ChainShape(4096, 4096, 12288, 5120, 1024), 1),
            marks=pytest.mark.slow,
            id="six",
        ),
        # Qwen3-14B.
        pytest.param(
            *(16, False, ChainShape(5120, 5120, 17408, 7168), 1), marks=pytest.mark.slow, id="wide"
        ),
        pytest.param(
            *(16, True, ChainShape(4096, 2048, 6144, 2560, 512), 2),
            marks=pytest.mark.slow,
            id="two_gpus",
        ),
        pytest.param(
            *(8, False, ChainShape(4096, 512, 1536, 768), 8),
            marks=pytest.mark.slow,
            id="eight_gpus",
        ),
    ],
)
def test_decode_chain_compiles_as_designed(tokens, is_six, shape, ranks, tmp_path):
    """640 threads an SM, and few spills; products and copies are those of the reader."""
    geometry = partition(shape, ChainTypes(False, False, is_six, False, is_six), 132, ranks)
    cubin = compile_here(fused_layer_tail.cuda_source(tokens, geometry), tmp_path)
    assert registers_of(cubin, tmp_path) * 640 <= 65536
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    assert len(re.findall(r"\b(?:LDL|STL)", text)) <= 32
    for instruction in ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "UBLKCP", "ACQBULK", "PREEXIT"):
        assert instruction in text


def batch_step_source(tokens):
    """All layers of Qwen3-8B in Q4_K_M in one launch."""
    shape, heads = ChainShape(4096, 4096, 12288, 5120, 1024), Heads(32, 8, 128, 128, 64, True)
    types = [ChainTypes(False, False, six, False, six) for six in (False, True, False)]
    geometry = join_layers([partition(shape, kind, 132) for kind in types], heads, 132)
    return fused_batch_step.cuda_source(tokens, geometry)


@pytest.mark.parametrize("tokens", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_batch_step_compiles_as_designed(tokens, tmp_path):
    """As the layer tail; no product reloads a spilled register."""
    cubin = compile_here(batch_step_source(tokens), tmp_path)
    assert registers_of(cubin, tmp_path) * 640 <= 65536
    text = ask(cubin, tmp_path, "nvdisasm", "-c")
    found = re.findall(r"\b(LDL|STL|HMMA|LDGSTS)", text)
    assert len([name for name in found if name in ("LDL", "STL")]) <= 32
    products = re.sub("(HMMA )+", "HMMA ", " ".join(found))
    assert not re.search(r"HMMA (?:LDL|STL)[ LDST]* HMMA", products)
    for instruction in ("LDGSTS.E.BYPASS.128", "UBLKCP", "ACQBULK", "PREEXIT"):
        assert instruction in text


def test_a_refused_source_shows_the_log():
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    source = rtc.KernelSource("prefill_attention", (("GROUP_HEADS", 4), ("IS_BF16", 1)))
    with pytest.raises(InternalError, match=r'(?s)for sm_90a.*identifier "PAGE" is undefined'):
        rtc.compile_cubin(source, ARCH)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    rtc._nvrtc.cache_clear()
    with pytest.raises(InternalError, match="cannot be compiled") as error:
        rtc.compile_cubin(mia_source(), ARCH)
    assert "cuda-bindings" in error.value.hint
    rtc._nvrtc.cache_clear()


# ---- files and what they include


def test_names_of_kernels_are_unique():
    kernels = [path.split("/")[-1] for path in rtc.source_files() if path.endswith(".cu")]
    assert len(set(kernels)) == len(kernels) > 10
    assert {f"{source.name}.cu" for source in [*SOURCES, *PACKED_SOURCES]} <= set(kernels)


def test_every_file_includes_what_it_names():
    """Whole: each header once, by its path, and braces that open in a file close in it."""
    for path in sorted(rtc.source_files()):
        text = rtc.read_source(path)
        code = re.sub(r"//.*", "", text)
        assert code.count("{") == code.count("}"), path
        assert ("#pragma once" in code) == path.endswith(".cuh"), path
        includes = re.findall(r"#include.*", code)
        assert all(re.fullmatch(r'#include "\w+/\w+\.cuh"', line) for line in includes), path
        assert len(set(includes)) == len(includes), path
        assert set(rtc.included_files(path)) < set(rtc.source_files()), path


def test_every_header_is_included():
    headers = {path for path in rtc.source_files() if path.endswith(".cuh")}
    kernels = [path for path in rtc.source_files() if path.endswith(".cu")]
    used = {header for path in kernels for header in rtc.included_files(path)}
    assert headers - used == {"include/editor_defaults.cuh"}


def test_a_missing_include_is_named(monkeypatch):
    monkeypatch.setattr(rtc, "read_source", lambda path: '#include "include/none.cuh"')
    with pytest.raises(InternalError, match=r"packed_ptx\.cuh includes 'include/none\.cuh'"):
        rtc.included_files.__wrapped__("packed/packed_ptx.cuh")
    with pytest.raises(InternalError, match=r"has no absent\.cu"):
        rtc.source_path("absent")
