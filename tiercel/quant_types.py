"""Storage types of weights as data: blocks of the file, and the planes that GPU kernels read.

A GGML type packs a row of weights into blocks of `block_weights` weights and `block_bytes` bytes.
Rows are whole blocks, so a tensor of shape (out, in) in layout FILE is one plane `data` of (out, in
/ block_weights * block_bytes) bytes, exactly as the file stores it. The float types have a block of
one weight. The byte-level meaning of each block is described in `ops/dequantize_torch.py`.

In layout SOA the fields of the blocks are in planes of their own, in the order in which the tensor
cores of a GPU take them. Each plane is (tiles, groups, 16 * bytes of a group) for tiles of 16 rows,
the last filled up with zeros. A group is one block of 256 weights or four of 32, the last of a row
filled up with zeros. `PLANES` has the bytes of a block that a plane holds and how the 16 rows of a
tile share its last axis; `ops/packed_repack.py` goes from one layout to the other.

In layout STEP a matrix of Q4_K or Q6_K is a part of the weights of the fused decode step,
`weights`; `table` (slices of columns, rows, 4) int32 says where each row is, see
`kernels/fused/fused_decode_step_rows.py`.

Layout BLOCKS has the planes of a block format as safetensors files store them, for a matrix
or a stack (..., out, in). Two E2M1 values share a byte, the even column in bits 0 to 3:

    FP8_BLOCK  q (..., out, in) E4M3; scale (..., ceil(out / b0), ceil(in / b1)) E8M0 or float32
    MXFP4      q (..., out, in / 2) of E2M1; scale (..., out, in / 32) E8M0
    NVFP4      q (..., out, in / 2) of E2M1; scale (..., out, in / 16) E4M3; global_scale (...)
               float32, a factor, or instead divisor (...) float32

Free of PyTorch, so that a file can be inspected without it; `quant.py` has the tensors.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct


class QuantType(Enum):
    """A storage type of weights; the value is (GGML id, weights per block, bytes per block)."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    BF16 = (30, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    IQ2_XXS = (16, 256, 66)
    MXFP4 = (39, 32, 17)
    # Formats without a GGML id: negative, unique numbers.
    FP8_BLOCK = (-1, 1, 1)  # E4M3; the scales of its blocks are beside it
    NVFP4 = (-2, 16, 9)  # E2M1 and an E4M3 scale; a scale of the matrix is beside it
    # Storage types: of tensors in a file that are planes of weights, or integers.
    F8_E4M3 = (-3, 1, 1)
    F8_E8M0 = (-4, 1, 1)
    U8 = (-5, 1, 1)
    I8 = (24, 1, 1)
    I32 = (26, 1, 4)
    I64 = (27, 1, 8)

    @property
    def ggml_id(self) -> int:
        """The number that a GGUF file stores; negative where the format has none."""
        return self.value[0]

    @property
    def block_weights(self) -> int:
        """Weights in one block; 1 for the float and storage types."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.value[2]

    @property
    def is_float(self) -> bool:
        """Whether a weight is stored as a plain float of 16 or 32 bits."""
        return self.name in ("F32", "F16", "BF16")

    @property
    def is_storage(self) -> bool:
        """Whether only tensors of a file have this type: weights never do."""
        return self.name in ("F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64")

    @property
    def is_ggml(self) -> bool:
        """Whether GGUF files store weights of this type, as blocks of layout FILE."""
        return self.ggml_id >= 0 and not self.is_storage

    @property
    def group_blocks(self) -> int:
        """Blocks of a row that are neighbours in layout SOA."""
        return 4 if self.block_weights == 32 else 1

    def num_groups(self, in_features: int) -> int:
        """Groups of a row in layout SOA; the last may be filled up with zeros."""
        return -(-in_features // (self.block_weights * self.group_blocks))

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one row of `in_features` weights, which must be whole blocks."""
        return in_features // self.block_weights * self.block_bytes


GGML_TYPES = {qtype.ggml_id: qtype for qtype in QuantType if qtype.ggml_id >= 0}


class Layout(Enum):
    """The order of a tensor's planes in memory."""

    FILE = "file"  # one plane `data`: the bytes of the file
    SOA = "soa"  # the planes of `PLANES`, in tiles of 16 rows
    STEP = "step"  # rows among the weights of the fused decode step, and a table of where
    BLOCKS = "blocks"  # the planes of a block format: `q`, `scale` and those of a matrix
    TILES = "tiles"  # stacks: the planes of the file in units of 16 rows, see `quant_tiles.py`


FP4_GROUPS = {QuantType.MXFP4: 32, QuantType.NVFP4: 16}  # columns of a scale in layout BLOCKS
# Cache entries in 8 bits: channels of a latent vector and of an index key with one scale, and what
# the number of scale bytes of a vector is a multiple of.
KV_GROUP, INDEX_GROUP, SCALE_PAD = 64, 32, 8
TILE_ROWS = 16  # output rows of a tensor-core tile, and of a tile of layout SOA


class Plane(Struct, frozen=True):
    """Bytes [start, start + size) of each block, as a plane of layout SOA.

    Those of a group, block after block, are pieces in the order (outer, pieces, inner), or (pieces,
    inner, outer) if they are woven. In a tile of one group column the rows 0..7 come before rows
    8..15; within each half the order is (pieces, row, outer, inner): where a row's bytes of a piece
    are 64, the 32 lanes of a warp (4 * row + outer) read one piece as 512 bytes in turn.
    """

    name: str
    start: int
    size: int
    outer: int = 1
    pieces: int = 1
    inner: int = 1
    is_woven: bool = False


_D, _DM = Plane("d", 0, 2), Plane("dm", 0, 4)
_HEADER = Plane("header", 0, 16)
PLANES = {
    QuantType.Q4_0: (Plane("qs", 2, 16, 4, 1, 4, is_woven=True), _D),
    QuantType.Q4_1: (Plane("qs", 4, 16, 4, 1, 4, is_woven=True), _DM),
    QuantType.Q5_0: (Plane("qs", 6, 16, 4, 1, 4, is_woven=True), Plane("qh", 2, 4), _D),
    QuantType.Q5_1: (Plane("qs", 8, 16, 4, 1, 4, is_woven=True), Plane("qh", 4, 4), _DM),
    QuantType.Q8_0: (Plane("qs", 2, 32, 4, 2, 4, is_woven=True), _D),
    QuantType.Q2_K: (Plane("qs", 16, 64), Plane("scales", 0, 16), Plane("dm", 80, 4)),
    QuantType.Q3_K: (
        Plane("qs", 32, 64),
        Plane("hmask", 0, 32),
        Plane("scales", 96, 12),
        Plane("d", 108, 2),
    ),
    QuantType.Q4_K: (Plane("qs", 16, 128, 4, 2, 1), _HEADER),
    QuantType.Q5_K: (
        Plane("qs", 48, 128, 4, 2, 4, is_woven=True),
        Plane("qh", 16, 32),
        _HEADER,
    ),
    QuantType.Q6_K: (
        Plane("ql", 0, 128, 2, 2, 2),
        Plane("qh", 128, 64),
        Plane("scales", 192, 16),
        Plane("d", 208, 2),
    ),
    QuantType.IQ4_NL: (Plane("qs", 2, 16, 4, 1, 4, is_woven=True), _D),
    QuantType.IQ4_XS: (Plane("qs", 8, 128, 4, 2, 4, is_woven=True), Plane("header", 0, 8)),
}

# Magnitudes of 8 weights by their index in IQ2_XXS: two bits each of a little-endian u16, the first
# weight lowest, 0 for 8, 1 for 25 and 2 for 43. Source: iq2xxs_grid of ggml (ggml-common.h).
IQ2_XXS_GRID = bytes.fromhex(
    "00000200050008000a00110014002000220028002a00410044005000580061006400800082008a00a2000101"
    "0401100115014001840198010002020222028202010404041004210424044004420448046004810484049004"
    "a404000502050805200546056905800591050906100640068406a40600080508080814082808410844085008"
    "5208880804094009020a140a01100410101021104010601084109010951000110811201150115a1180112412"
    "451200140814201425144914801418156215001616160118041810184018811800190519a019511a00200220"
    "0a2044206120802082202921482100220222012404241024402456240025412564259026082820289428442a"
    "0140044010401840214024404040484056406040814084409040004120416141804185410142104248425642"
    "684200440844204480449944124524450046014804481048404845480049584961498249454a904a00500850"
    "1150195020508050885004514251a4519152905492540a550156545600581158195864584059085a04601060"
    "406068600061556118626062006405641065126584654268008002800a804180828004811881408111820184"
    "0484108415844084608400854685948509864086608602880489118a0490109024904090a190169180914592"
    "00942294449451958198209902a050a085a009a100a218a450a804a9"
)
