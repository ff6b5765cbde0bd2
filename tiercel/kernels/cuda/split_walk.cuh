// A walk over the units of one CTA and their tiles (split_attention.cu).
//
// With FOLDS, all splits of a tile of rows are one CTA's wherever lengths allow it at 1 / SLACK of a
// share: such rows have no partial results. Without, a launch may have the heads of a split side by
// side, as they are in the cache, in place of the splits of a head. Macros: TILE, NR, FOLDS.
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

struct Walk {
  Request of;
  int total;        // places
  int most, full;   // places of a share; the same of all, or 0
  int place, stop;  // of the unit, or of its rows if they are whole, and where the share ends
  int request, table_row, row_tiles, split;
  int kv_head, row_tile;  // of the unit
  int begin, end, tile;   // tiles of the unit, and the one at hand
  bool is_whole;          // no rows of this request are shared

  DEV void enter(const Lengths& lengths) {  // a request
    of.load(request, lengths.cu_seqlens, lengths.seq_lens, lengths.window);
    row_tiles = (of.queries * lengths.group + ROWS - 1) / ROWS;
  }
  DEV int first_tile() const { return of.low / TILE; }
  DEV int last_tile() const { return (of.seq_len - 1) / TILE; }  // one without keys, too
  DEV int first_split() const { return split_of(of.low); }
  DEV int last_split() const { return split_of(max(of.seq_len - 1, 0)); }
  DEV int tiles() const { return last_tile() - first_tile() + 1; }
  DEV int places(const Lengths& lengths) const {
    return tiles() * row_tiles * lengths.kv_heads;
  }
  // Places of request first + lane; without a branch, so that several loads are under way at once.
  DEV int places_of(const Lengths& lengths, int first) {
    const int wanted = first + (threadIdx.x & 31);
    request = min(wanted, lengths.reqs - 1);
    enter(lengths);
    return wanted < lengths.reqs ? places(lengths) : 0;
  }
  DEV void enter_split(int at) {
    split = at;
    begin = max(split_start(split) / TILE, first_tile());
    end = min(split_start(split + 1) / TILE, last_tile() + 1);
    tile = begin;
  }
  DEV void enter_rows() { enter_split(first_split()); }
  DEV void enter_next_split() {
    const int key = end * TILE;
    const int keys = key < FINE_END ? FINE_KEYS : key < MIDDLE_END ? MIDDLE_KEYS : COARSE_KEYS;
    ++split;
    tile = begin = end;
    end = min(begin + keys / TILE, last_tile() + 1);
  }
  // Whether as much for a CTA is little more than its fair share.
  DEV static bool fits(int wanted, int fair) {
    return (i64)wanted * SLACK <= (i64)fair * (SLACK + 1);
  }
  // Whether tiles of rows fill shares well.
  DEV bool fits_whole() const {
    return FOLDS && fits((most + tiles() - 1) / tiles() * tiles(), most);
  }
  // Where a share begins. Shares of whole tiles, if they cost little, often end with rows, and leave
  // nothing to the last CTAs, which begin late.
  DEV int border(int share) const {
    return full ? min(full * share, total) : (int)((i64)total * share / gridDim.x);
  }
  // The share that has the unit at a place.
  DEV int share_of(int at) const {
    return full ? at / full : (int)(((i64)(at + 1) * gridDim.x - 1) / total);
  }
  // Counts places.
  DEV void measure(const Lengths& lengths) {
    total = 0;
    for (int first = 0; first < lengths.reqs; first += 128) {
#pragma unroll
      for (int i = 0; i < 128; i += 32) total += places_of(lengths, first + i);
    }
    total = __reduce_add_sync(~0u, total);
    const int shares = gridDim.x;
    most = (total + shares - 1) / shares;
    full = most == 1 || fits(most * shares, total) ? most : 0;  // a share in use is never empty
  }
  // Goes to the request of a place below the total; where that begins.
  DEV int find_request(const Lengths& lengths, int at) {
    const int lane = threadIdx.x & 31;
    int base = 0;
    for (int first = 0; first < lengths.reqs; first += 32) {
      int upto = places_of(lengths, first);
      const int of_warp = __reduce_add_sync(~0u, upto);
      if (base + of_warp > at) {
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
          const int other = __shfl_up_sync(~0u, upto, step);
          if (lane >= step) upto += other;
        }
        const int found = __ffs(__ballot_sync(~0u, base + upto > at)) - 1;
        const int before = __shfl_sync(~0u, upto, max(found - 1, 0));
        if (found) base += before;
        request = first + found;
        break;
      }
      base += of_warp;
    }
    enter(lengths);
    is_whole = fits_whole();
    return base;
  }
  // Goes to the tile of rows of a place; where that begins.
  DEV int find_rows(const Lengths& lengths, int at) {
    return enter_rows_of(find_request(lengths, at), at);
  }
  // The same for a place of this request, which begins at `base`.
  DEV int enter_rows_of(int base, int at) {
    const int rows = (at - base) / tiles();
    kv_head = rows / row_tiles, row_tile = rows - kv_head * row_tiles;
    enter_rows();
    return base + rows * tiles();
  }
  // The first split of the rows at hand that begins `offset` places behind them or later.
  DEV int split_behind(int offset) const {
    const int at = split_of((first_tile() + offset) * TILE);
    return at + (offset > 0 && split_start(at) / TILE < first_tile() + offset);
  }
  // The first unit of a share.
  DEV void start(const Lengths& lengths, int share) {
    const int lane_row = lengths.rows[min(threadIdx.x & 31, lengths.reqs - 1)];  // beside lengths
    measure(lengths);
    const int from = border(share);
    place = stop = border(share + 1);
    if (from >= stop) return;
    const int base = find_request(lengths, from);
    find_table(lengths, lane_row);
    if (lengths.has_heads_inside() ? find_unit(lengths, base, from) : find_split(lengths, base, from))
      next_request(lengths);
  }
  // The first unit of this request, which begins at `base`, at a place or later; whether all of them
  // are before it.
  DEV bool find_unit(const Lengths& lengths, int base, int at) {
    const int units = row_tiles * lengths.kv_heads;  // of a split
    enter_split(split_of((first_tile() + (at - base) / units) * TILE));
    const int begins = base + (begin - first_tile()) * units, tiles = end - begin;
    const int unit = (at - begins + tiles - 1) / tiles;
    place = begins + unit * tiles;
    kv_head = unit / row_tiles, row_tile = unit - kv_head * row_tiles;
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
  DEV void find_table(const Lengths& lengths, int lane_row) {
    table_row = request < 32 ? __shfl_sync(~0u, lane_row, request) : lengths.rows[request];
  }
  DEV bool is_over() const { return place >= stop; }
  DEV bool is_first() const { return tile == begin; }
  DEV bool is_last() const { return tile + 1 == end; }
  DEV bool begins_rows() const { return begin == first_tile(); }
  DEV bool ends_rows() const { return end > last_tile(); }
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
