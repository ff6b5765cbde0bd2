// Writes down the walk of each CTA of decode_attention_split.cu, a line a unit.
#include "attention/decode_attention_walk.cuh"

#define COLUMNS 9
extern "C" __global__ void walk_units(const int* rows, const int* cu_seqlens, const int* seq_lens,
                                      int* units,  // (CTAs, most, COLUMNS)
                                      int most, int reqs, int kv_heads, int group, int window,
                                      int heads_inside) {
  const Lengths lengths{rows, cu_seqlens, seq_lens, reqs, kv_heads, group, window, heads_inside};
  Walk at;
  at.start(lengths, blockIdx.x);
  bool has_queries = false;
  for (int count = 0, walked = 0; !at.is_over(); at.advance(lengths)) {
    if (at.is_first()) walked = 0, has_queries = at.has_new_queries(lengths);
    ++walked;
    if (!at.is_last() || threadIdx.x) continue;
    if (count == most) return fail("a walk without an end");
    const int known = at.begins_rows() | at.ends_rows() << 1 | at.begins_group() << 2 |
                      at.ends_group() << 3 | at.is_in_first_group() << 4 | at.ends_share() << 5 |
                      at.is_whole << 6 | has_queries << 7;
    int* unit = units + (blockIdx.x * most + count++) * COLUMNS;
    const int line[] = {at.request, at.table_row, at.kv_head, at.row_tile, at.split,
                        at.begin,   at.end,       walked,     known};
    for (int i = 0; i < COLUMNS; ++i) unit[i] = line[i];
  }
}
