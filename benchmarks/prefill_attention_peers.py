"""The best peer's times on the shapes of multi-item prefill attention, measured once on an H200.

FlashInfer 0.7.2.post1, bf16, 32 query and 8 key/value heads of 128, pages of 16, prefix cached, one
layer: the fastest of its variants with the right result (multi-item prefill by FA2 and FA3, with
and without delimiters; one sequence per item on shared prefix pages by FA2 and FA3). Driver 580,
CUDA 13.0, torch 2.11.
"""

# (prefix, items) -> microseconds at items of 16, 32 and 128 tokens, of 1 and of 4 requests.
ITEM_LENS = (16, 32, 128)
BEST_US = {
    (512, 64): {1: (39, 76, 195), 4: (150, 276, 864)},
    (512, 128): {1: (85, 144, 451), 4: (283, 545, 1705)},
    (512, 512): {1: (277, 542, 1731), 4: (1149, 2071, 6356)},
    (2048, 64): {1: (97, 221, 575), 4: (417, 781, 2559)},
    (2048, 128): {1: (222, 432, 1276), 4: (792, 1614, 4744)},
    (2048, 512): {1: (868, 1484, 4655), 4: (3264, 6062, 19230)},
    (8192, 64): {1: (301, 556, 2143), 4: (1177, 2417, 8658)},
    (8192, 128): {1: (565, 1135, 4215), 4: (2398, 5024, 16868)},
    (8192, 512): {1: (2291, 4668, 16742), 4: (9395, 19332, 67769)},
}
