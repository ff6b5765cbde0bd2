"""Digests of all cubins, to show that a change of the CUDA sources changes no machine code.

    python -m tests.kernels.cubin_digests --arch sm_80 --arch sm_90a --arch sm_120a OUT.json
    python -m tests.kernels.cubin_digests --compare BEFORE.json AFTER.json

Needs NVRTC, no GPU. OUT.json maps an architecture, and a kernel with its macros, to the SHA-256 of
its cubin. Both files must be made by the same compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.kernels.test_rtc import (
    LATENT_SOURCES,
    PACKED_SOURCES,
    SOURCES,
    STEP_SIZES,
    batch_step_source,
    gemm_cases,
    normed_sources,
    step_source,
)
from tiercel.kernels.attention import (
    decode_attention_split,
    rotary_kv_write,
    sparse_attention_blackwell,
)
from tiercel.kernels.block import block_scaled_gemm, linear_group
from tiercel.kernels.collectives.all_reduce import DTYPES as ALL_REDUCE_DTYPES
from tiercel.kernels.collectives.all_reduce import GATHER, all_reduce_source
from tiercel.kernels.fused import fused_layer_tail, mhc_mix_finish
from tiercel.kernels.fused.fused_layer_tail_geometry import ChainShape, ChainTypes, partition
from tiercel.kernels.moe import moe_experts_gemm, moe_experts_tiles
from tiercel.kernels.packed import packed_mmq
from tiercel.kernels.packed.packed_gemm import (
    TOKEN_CLASSES,
    Gate,
    gemm_source,
    image_source,
    make_config,
)
from tiercel.kernels.packed.packed_matvec import H200, DeviceLimits
from tiercel.kernels.packed.packed_norm import norm_source
from tiercel.kernels.runtime import rtc
from tiercel.kernels.speculation.ngram_index import ngram_index_source, select_ngram_index
from tiercel.kernels.speculation.ngram_launch import ngram_source, select_ngram
from tiercel.ops.act_mul import ACTIVATIONS

HOPPER = "sm_90a"
# Kernels of wgmma, TMA or clusters.
HOPPER_ONLY = (
    *("prefill_attention", "packed_gemm", "fused_decode_step", "fused_layer_tail"),
    "fused_batch_step",
    *("sparse_attention_decode", "sparse_attention_tiles", "indexer_scores", "indexer_select"),
    "moe_experts_gemm",
)
BLACKWELL = "sm_100a"
BLACKWELL_ONLY = ("block_scaled_gemm", "sparse_attention_blackwell")  # kernels of tcgen05
DTYPES = (torch.float16, torch.bfloat16)
EXPERTS = ((256, 4096, 2048), (384, 7168, 3072))  # and columns of w1, of w2: DeepSeek-V4 Flash, Pro
SMALL = DeviceLimits(46, 99 << 10)  # of GPUs that are not for data centres
CHAINS = [  # tokens, widths, matrices of Q6_K
    (8, ChainShape(4096, 4096, 12288, 0), ChainTypes(o=False, gate_up=False, down=False)),
    (16, ChainShape(4096, 4096, 12288, 0), ChainTypes(o=False, gate_up=False, down=True)),
    (8, ChainShape(4096, 4096, 12288, 5120, 1024), ChainTypes(False, False, True, v=True)),
    (16, ChainShape(4096, 4096, 12288, 5120, 1024), ChainTypes(False, False, True, v=True)),
    (16, ChainShape(4096, 4096, 12288, 6144), ChainTypes(True, True, True, qk=True, v=True)),
    (8, ChainShape(5120, 5120, 17408, 7168), ChainTypes(False, False, False)),
    (16, ChainShape(5120, 5120, 17408, 7168), ChainTypes(False, False, False)),
]


def decode_attention_sources() -> Iterator[rtc.KernelSource]:
    """Both kernels, for all numbers of rows and kinds of merges."""
    smem_limits = (decode_attention_split.H200_SMEM, 99 << 10)
    cases = itertools.product((64, 128, 256), DTYPES, (False, True))
    for head_dim, dtype, folds in cases:
        rows = (8, 16, 24, 32)
        configs = {
            decode_attention_split.select_decode_attention_split(head_dim, count, limit)
            for count, limit in itertools.product(rows, smem_limits)
        }
        merges = {
            decode_attention_split.select_merge(results, slots, 132, folds=folds)
            for results, slots in itertools.product((1 << 10, 1 << 15, 1 << 24), (2, 20, 90))
        }
        for config in sorted(configs, key=str):
            for block_size in (64, 128):
                yield decode_attention_split.attention_source(
                    head_dim, dtype, block_size, config, folds=folds
                )
            for merge in sorted(merges, key=str):
                yield decode_attention_split.merge_source(
                    head_dim, dtype, config, merge, folds=folds
                )


def fused_sources() -> Iterator[rtc.KernelSource]:
    """The step of a decoder, and its layers from one attention to the next."""
    for name in STEP_SIZES:
        yield step_source(name)
    yield from (step_source("qwen3-8b", ranks=ranks) for ranks in (2, 8))
    for tokens, shape, types in CHAINS:
        yield fused_layer_tail.cuda_source(tokens, partition(shape, types, 132))
    for tokens in (8, 16):
        yield batch_step_source(tokens)
    half = ChainShape(4096, 2048, 6144, 2560, 512)
    for tokens, ranks in ((8, 2), (16, 2), (16, 8)):
        types = ChainTypes(False, False, True, v=True)
        yield fused_layer_tail.cuda_source(tokens, partition(half, types, 132, ranks))


def mhc_sources() -> Iterator[rtc.KernelSource]:
    """The end of a mix, DeepSeek-V4 Flash and Pro."""
    for hidden, splits in ((4096, 32), (7168, 56)):
        yield mhc_mix_finish.cuda_source(hidden, splits, 32)


def packed_sources() -> Iterator[rtc.KernelSource]:
    """Products with quantised weights and what they need."""
    yield from PACKED_SOURCES
    for config, name in sorted(set(gemm_cases()), key=str):
        yield gemm_source(name, torch.float16, config)
    for order, tokens in itertools.product((4, 6, 32), TOKEN_CLASSES):
        yield image_source(order, tokens)
        yield norm_source(4096, tokens, (order,), has_update=True)
    for activation in ACTIVATIONS:
        config = make_config("Q4_K", TOKEN_CLASSES[0], 3, 1)
        yield gemm_source("Q4_K", torch.float16, config, Gate(activation, 6))
    yield from normed_sources()
    for name, in_file in itertools.product(("Q4_K", "Q6_K"), (False, True)):
        for tokens in packed_mmq.fitting_tiles(name, H200):
            config = packed_mmq.make_config(tokens)
            yield packed_mmq.quantise_source(tokens)
            yield packed_mmq.mmq_source(name, torch.float16, config, in_file=in_file)


def linear_group_sources() -> Iterator[rtc.KernelSource]:
    """Products of a group of matrices: each format and all, each input."""
    for kinds, given in itertools.product((1, 2, 3, 4, 6, 7), (0, 1, 2)):
        for columns in (1024, 4096):
            config = linear_group.select_linear_group(
                columns, [128], 1, kind_of_input=given, has_q8=kinds >= 4
            )
            yield linear_group.cuda_source(kinds, given, config)
            if kinds % 2:
                yield linear_group.cuda_source(kinds, given, config, has_half=True)


def blackwell_sources() -> Iterator[rtc.KernelSource]:
    """Kernels of tcgen05, in all their forms."""
    yield sparse_attention_blackwell.attention_source()
    for is_nvfp4, is_gate_up, is_float_out in itertools.product((False, True), repeat=3):
        yield block_scaled_gemm.gemm_source(
            is_nvfp4=is_nvfp4, is_gate_up=is_gate_up, is_float_out=is_float_out
        )


def ngram_sources() -> Iterator[rtc.KernelSource]:
    """Searches, and the index of one, for tokens and lengths of 4 and 8 bytes."""
    for token_bytes, length_bytes in itertools.product((4, 8), (4, 8)):
        for num_rows, room in ((8, 4096), (512, 65536)):
            for is_private in (False, True):
                config = select_ngram(num_rows, room, token_bytes, is_private=is_private)
                yield ngram_source("ngram_match", config, token_bytes, length_bytes)
                yield ngram_source("hybrid_mtp_ngram", config, token_bytes, length_bytes)
        for is_step, size in itertools.product((False, True), (3, 10)):
            config = select_ngram_index(is_step=is_step)
            yield ngram_index_source(config, token_bytes, length_bytes, size)


def moe_sources() -> Iterator[rtc.KernelSource]:
    """Experts of each type, for one token, and for many where shared memory is short."""
    for kind, (num_tokens, limits) in itertools.product(
        moe_experts_tiles.KINDS, ((1, H200), (4096, SMALL))
    ):
        experts, hidden, inter = EXPERTS[kind == "MXFP4"]
        shape = moe_experts_tiles.ExpertsShape(experts, hidden, inter, 6, kind, kind)
        config = moe_experts_tiles.select_tiles(shape, num_tokens, limits)
        assert config is not None
        totals = (1, 2) if kind == "NVFP4" else (0, 0)
        yield moe_experts_tiles.cuda_source(
            shape, config, torch.float32, totals, is_folded=num_tokens == 1
        )


def moe_gemm_sources() -> Iterator[rtc.KernelSource]:
    """Products of prompts with experts of each type, gate and up and down."""
    for kind in moe_experts_tiles.KINDS:
        _, hidden, inter = EXPERTS[kind == "MXFP4"]
        config = moe_experts_gemm.select_gemm(kind)
        for phase, shape in enumerate(((inter, hidden), (hidden, inter))):
            total = 2 * (kind == "NVFP4")
            yield moe_experts_gemm.gemm_source(phase, (kind, kind), shape, total, config)


def moe_token_sources() -> Iterator[rtc.KernelSource]:
    """What brings tokens to those products and back."""
    experts, hidden, _ = EXPERTS[0]
    yield moe_experts_gemm.table_source(experts, 128)
    for kind in moe_experts_tiles.KINDS:
        yield moe_experts_gemm.image_source(kind, hidden, 6)
    for dtype in (*DTYPES, torch.float32):
        yield moe_experts_gemm.sum_source(hidden, 6, dtype)


def all_sources() -> list[rtc.KernelSource]:
    """Each kernel in representative configurations."""
    sources = [
        *SOURCES,
        *LATENT_SOURCES,
        *packed_sources(),
        *decode_attention_sources(),
    ]
    sources += [
        rotary_kv_write.cuda_source(48, 8, head_dim, dtype, has_norms=has_norms)
        for head_dim, dtype in itertools.product(rotary_kv_write.HEAD_DIMS, DTYPES)
        for has_norms in (False, True)
    ]
    sources += [*fused_sources(), *ngram_sources()]
    for ranks, dtype in itertools.product((2, 4, 8), (*ALL_REDUCE_DTYPES, GATHER)):
        sources.append(all_reduce_source(ranks, dtype))
    sources += [*fused_sources(), *mhc_sources()]
    sources += [*linear_group_sources(), *ngram_sources()]
    sources += [*fused_sources(), *ngram_sources(), *moe_sources()]
    sources += [*moe_gemm_sources(), *moe_token_sources(), *blackwell_sources()]
    return list(dict.fromkeys(sources))


def label(source: rtc.KernelSource) -> str:
    """The kernel and its macros, in words."""
    return " ".join([source.name, *(f"{name}={value}" for name, value in source.macros)])


def is_for(source: rtc.KernelSource, arch: str) -> bool:
    """Whether an architecture has the instructions of a kernel."""
    if source.name in BLACKWELL_ONLY:
        return arch == BLACKWELL
    return arch == HOPPER or source.name not in HOPPER_ONLY


def digest_all(archs: list[str], only: str, keep: Path | None) -> dict[str, dict[str, str]]:
    """Compile for each architecture; `keep` is a folder for the cubins."""

    def digest(source: rtc.KernelSource, arch: str) -> str:
        cubin = rtc.compile_cubin(source, arch)
        if keep is not None:
            (keep / f"{label(source)} {arch}.cubin").write_bytes(cubin)
        return hashlib.sha256(cubin).hexdigest()

    digests: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for arch in archs:
            sources = [
                source for source in all_sources() if only in label(source) and is_for(source, arch)
            ]
            found = pool.map(digest, sources, itertools.repeat(arch))
            digests[arch] = dict(zip(map(label, sources), found, strict=True))
    return digests


def differences(before: Path, after: Path) -> list[str]:
    """What differs between two files, a line each."""
    first, second = (json.loads(path.read_text()) for path in (before, after))
    lines = []
    for arch in sorted({*first, *second}):
        old, new = first.get(arch, {}), second.get(arch, {})
        for kernel in sorted({*old, *new}):
            if kernel not in new or kernel not in old:
                lines.append(f"{arch} {kernel}: only in {before if kernel in old else after}")
            elif old[kernel] != new[kernel]:
                lines.append(f"{arch} {kernel}: differs")
    return lines


def main() -> int:
    """Write digests, or compare two files of them; 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="where to write the digests")
    parser.add_argument("--arch", action="append", help="for instance sm_90a, repeatable")
    parser.add_argument("--only", default="", help="compile what has this in its name or macros")
    parser.add_argument("--keep", type=Path, help="folder for the cubins themselves")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        lines = differences(*args.compare)
        count = sum(map(len, json.loads(args.compare[0].read_text()).values()))
        print(*lines, f"{len(lines)} of {count} cubins differ", sep="\n")
        return bool(lines)
    digests = digest_all(args.arch or [HOPPER], args.only, args.keep)
    args.out.write_text(json.dumps(digests, indent=1))
    print(*(f"{arch}: {len(kernels)} cubins" for arch, kernels in digests.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
