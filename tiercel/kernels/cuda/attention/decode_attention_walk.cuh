// decode_attention: the order in which one CTA visits its units of work and their tiles
// (decode_attention_split.cu).
//
// With FOLDS, one CTA has all splits of a tile of rows wherever lengths allow it at 1 / SLACK of a
// share. Rows of one CTA have no partial results. Without FOLDS, a launch may have the heads of a
// split side by side, as they are in the cache, in place of the splits of a head. Macros: TILE, NR,
// FOLDS.
#pragma once

#include "attention/decode_attention_splits.cuh"

#define SLACK 24       // 264 CTAs in use of 256 are 1 / 32
#define ROWS (8 * NR)  // of a tile

struct Lengths {
  const int* rows;
  const int* cu_seqlens;
  const int* seq_lens;
  int reqs, kv_heads, group, window;
  int heads_inside;  // of splits; else splits are inside of heads
  DEV bool has_heads_inside() const { return !FOLDS && heads_inside; }
};

// a / b for a >= 0, b > 0 and a result below 2**20: a third of the time of a division.
DEV int quotient(int a, int b) {
  const int q = (int)((float)a * rcp_approx((float)b)), rest = a - q * b;
  return rest < 0 ? q - 1 : rest < b ? q : q + 1;
}

struct Walk {
  Request of;
  int total;          // places
  int upto, of_lane;  // places before the next lane's first request; requests of a lane
  int most, full;     // places of a share; the same of all, or 0
  int least, more;    // else: places of a share, rounded down, and the remainder of all
  int place, stop;  // of the unit, or of its rows if they are whole, and where the share ends
  int request, table_row, row_tiles, split;
  int kv_head, row_tile;  // of the unit
  int begin, end, tile;   // tiles of the unit, and the one at hand
  bool is_whole;          // no rows of this request are shared

  DEV void enter(const Lengths& lengths) {  // a request
    of.load(request, lengths.cu_seqlens, lengths.seq_lens, lengths.window);
    row_tiles = (u32)(of.queries * lengths.group + ROWS - 1) / ROWS;
  }
  DEV int first_tile() const { return (u32)of.low / TILE; }
  DEV int last_tile() const { return (u32)max(of.seq_len - 1, 0) / TILE; }  // one without keys, too
  DEV int first_split() const { return split_of(of.low); }
  DEV int last_split() const { return split_of(max(of.seq_len - 1, 0)); }
  DEV int tiles() const { return last_tile() - first_tile() + 1; }
  DEV int places(const Lengths& lengths) const {
    return tiles() * row_tiles * lengths.kv_heads;
  }
  DEV void enter_split(int at) {
    split = at;
    begin = max(split_start(split) / TILE, first_tile());
    end = min(split_start(split + 1) / TILE, last_tile() + 1);
    tile = begin;
  }
  DEV void enter_rows() {
    split = first_split();
    tile = begin = first_tile();
    const int keys = keys_of_split(of.low);
    end = min(((of.low & -keys) + keys) / TILE, last_tile() + 1);
  }
  DEV void enter_next_split() {
    ++split;
    tile = begin = end;
    end = min(begin + keys_of_split(end * TILE) / TILE, last_tile() + 1);
  }
  // Whether as much for a CTA is little more than its fair share.
  DEV static bool fits(int wanted, int fair) {
    return (u32)wanted * SLACK <= (u32)fair * (SLACK + 1);
  }
  // Whether tiles of rows fill shares well.
  DEV bool fits_whole() const {
    return FOLDS && fits(quotient(most + tiles() - 1, tiles()) * tiles(), most);
  }
  // Where a share begins. Shares of whole tiles, if they cost little, often end with rows, and
  // leave nothing to the last CTAs, which begin late.
  DEV int border(int share) const {
    return full ? min(full * share, total) : least * share + quotient(more * share, gridDim.x);
  }
  // The share that has the unit at a place.
  DEV int share_of(int at) const {
    if (full) return quotient(at, full);
    int share = (int)((float)at * gridDim.x * rcp_approx((float)total));
    while (border(share) > at) --share;
    while (border(share + 1) <= at) ++share;
    return share;
  }
  // Counts places: a lane those of neighbouring requests.
  DEV void measure(const Lengths& lengths) {
    const int lane = threadIdx.x & 31;
    of_lane = (u32)(lengths.reqs + 31) / 32;
    upto = 0;
#pragma unroll 1
    for (int i = 0; i < of_lane; ++i) {
      request = min(lane * of_lane + i, lengths.reqs - 1);
      enter(lengths);
      upto += lane * of_lane + i < lengths.reqs ? places(lengths) : 0;
    }
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    total = __shfl_sync(~0u, upto, 31);
    const int shares = gridDim.x;
    least = quotient(total, shares);
    more = total - least * shares;
    most = least + (more > 0);
    full = most == 1 || fits(most * shares, total) ? most : 0;  // a share in use is never empty
  }
  // Goes to the request of a place below the total; where that begins.
  DEV int find_request(const Lengths& lengths, int at) {
    const int found = __ffs(__ballot_sync(~0u, upto > at)) - 1;
    int base = __shfl_sync(~0u, upto, max(found - 1, 0));
    if (found == 0) base = 0;
    request = found * of_lane;
    enter(lengths);
    for (int next; (next = base + places(lengths)) <= at; enter(lengths)) base = next, ++request;
    is_whole = fits_whole();
    return base;
  }
  // Goes to the tile of rows of a place; where that begins.
  DEV int find_rows(const Lengths& lengths, int at) {
    return enter_rows_of(find_request(lengths, at), at);
  }
  // The same for a place of this request, which begins at `base`.
  DEV int enter_rows_of(int base, int at) {
    const int rows = quotient(at - base, tiles());
    kv_head = row_tiles == 1 ? rows : quotient(rows, row_tiles);
    row_tile = rows - kv_head * row_tiles;
    enter_rows();
    return base + rows * tiles();
  }
  // The first split of the current rows that begins at least `offset` places after their start.
  DEV int split_behind(int offset) const {
    const int key = (first_tile() + offset) * TILE;
    return split_of(key) + (offset > 0 && (key & (keys_of_split(key) - 1)) > 0);
  }
  // The first unit of a share.
  DEV void start(const Lengths& lengths, int share) {
    measure(lengths);
    const int from = border(share);
    place = stop = border(share + 1);
    if (from >= stop) return;
    const int base = find_request(lengths, from);
    table_row = lengths.rows[request];
    if (lengths.has_heads_inside() ? find_unit(lengths, base, from) : find_split(lengths, base, from))
      next_request(lengths);
  }
  // The first unit of this request, which begins at `base`, at a place or later; whether all of
  // them are before it.
  DEV bool find_unit(const Lengths& lengths, int base, int at) {
    const int units = row_tiles * lengths.kv_heads;  // of a split
    enter_split(split_of((first_tile() + quotient(at - base, units)) * TILE));
    const int begins = base + (begin - first_tile()) * units, tiles = end - begin;
    const int unit = quotient(at - begins + tiles - 1, tiles);
    place = begins + unit * tiles;
    kv_head = row_tiles == 1 ? unit : quotient(unit, row_tiles);
    row_tile = unit - kv_head * row_tiles;
    return unit == units && next_split();
  }
  DEV bool find_split(const Lengths& lengths, int base, int at) {
    place = enter_rows_of(base, at);
    const int offset = at - place;
    if (offset == 0) return false;
    const int behind = split_behind(offset);
    if (!is_whole && behind <= last_split()) {
      enter_split(behind);
      place += begin - first_tile();
      return false;
    }
    place += tiles();
    return next_rows(lengths);
  }
  // Whether the place of a split has a sum that a row is made of: of the rows at hand, which begin
  // at `base` and are not one CTA's. Of the first CTA, that is all of its whole groups in the place
  // of the last one's last split, and its splits of the next one in the place of the last one; of
  // others, groups whose first split they have, as far as they have them, and single splits before.
  DEV bool is_held(int base, int at) const {
    const int first = first_split(), last = last_split();
    if (at < first || at > last) return false;
    auto share = [&](int split) {
      return share_of(base + max(split_start(split) / TILE - first_tile(), 0));
    };
    const int own = share(at), end = min(at | (GROUP - 1), last);
    if (own == share_of(base) && at == end && at < last)
      return share(min((at + 1) | (GROUP - 1), last)) != own;
    const bool is_cut = at == last || share(at + 1) != own;
    return at == end || is_cut ||
           (own != share_of(base) && share(max(at & -GROUP, first)) != own);
  }
  DEV bool is_over() const { return place >= stop; }
  DEV bool is_first() const { return tile == begin; }
  DEV bool is_last() const { return tile + 1 == end; }
  DEV bool begins_rows() const { return begin == first_tile(); }
  DEV bool ends_rows() const { return end > last_tile(); }
  DEV bool begins_group() const { return split % GROUP == 0 || begins_rows(); }
  DEV bool ends_group() const { return split % GROUP == GROUP - 1 || ends_rows(); }
  DEV bool is_in_first_group() const { return split / GROUP == first_split() / GROUP; }
  DEV bool ends_share() const { return !is_whole && place + end - begin >= stop; }
  // Whether other queries are needed than for the tile before.
  DEV bool has_new_queries(const Lengths& lengths) const {
    return is_first() && (begins_rows() || lengths.has_heads_inside());
  }
  DEV void advance(const Lengths& lengths) {
    if (++tile < end) return;
    if (lengths.has_heads_inside() ? leave_unit(lengths) : leave_split(lengths))
      next_request(lengths);
  }
  // The next unit, or true where the next request has it.
  DEV bool leave_unit(const Lengths& lengths) {
    place += end - begin;
    tile = begin;
    if (++row_tile < row_tiles) return false;
    row_tile = 0;
    return ++kv_head == lengths.kv_heads && next_split();
  }
  DEV bool next_split() {
    kv_head = 0;
    if (ends_rows()) return !is_over();
    enter_next_split();
    return false;
  }
  DEV bool leave_split(const Lengths& lengths) {
    if (!is_whole) place += end - begin;
    if (!ends_rows()) {
      enter_next_split();
      return false;
    }
    if (is_whole) place += tiles();
    return next_rows(lengths);
  }
  // The same for the next tile of rows.
  DEV bool next_rows(const Lengths& lengths) {
    enter_rows();
    if (++row_tile < row_tiles) return false;
    row_tile = 0;
    if (++kv_head < lengths.kv_heads || is_over()) return false;
    kv_head = 0;
    return true;
  }
  DEV void next_request(const Lengths& lengths) {
    do ++request, enter(lengths);
    while (places(lengths) == 0);
    table_row = lengths.rows[request];
    is_whole = fits_whole();
    enter_rows();
  }
};
