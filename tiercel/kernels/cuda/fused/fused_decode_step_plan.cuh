// fused_decode_step: which rows and columns of a matrix each warp multiplies. Macros from
// kernels/fused/fused_decode_step_geometry.py; it says how they are chosen.
//
// A row has blocks of 256 columns, two lanes a block; rows that are no multiple of 256 have blocks of
// 128, a lane each. `across` warps share a row, each with a slice of its blocks; `times` slices follow
// each other (then a warp keeps its rows). A unit is `tile` rows of a slice. A slot of a group's ring
// holds a unit for each of its warps; slots of a part (32 or 64 rows) go to the groups in turn.
#pragma once

#include "fused/fused_decode_step_ptx.cuh"

#define WARPS (GROUPS * GROUP_WARPS)
#define CONSUMERS (32 * WARPS)
#define THREADS (CONSUMERS + 32 * GROUPS)  // one producer warp a group
#define Q_ROWS (KV_HEADS * SHARERS * HEADS * HEAD)
#define KV_ROWS (KV_HEADS * HEAD)
#define OWN_Q (Q_ROWS / CTAS)  // rows of q of a CTA
#define OWN_KV (KV_ROWS / CTAS)
#define OWN_ROWS (OWN_Q + 2 * OWN_KV)

enum Kind { QKV, O_PROJ, GATEUP, DOWN };

DEV constexpr int log2_of(int power) {  // of 1 to 16
  return (power > 1) + (power > 2) + (power > 4) + (power > 8);
}
struct Plan {
  int lanes, blocks, across, times, tile, rows;  // lanes: of a block; rows: of a part, unused for QKV
  int least, extra;                       // blocks of a slice; slices with one more
  int side, side_log;                     // warps of a group that share a row
  int step;                               // rows of a slot
  int turn, turn_log;                     // groups that slots go round
};
DEV constexpr Plan make_plan(int columns, int across, int times, int tile, int rows) {
  const int lanes = columns % 256 ? 1 : 2, blocks = columns / (128 * lanes);
  const int side = across < GROUP_WARPS ? across : GROUP_WARPS, turn = GROUPS * side / across;
  const int slices = across * times;
  return {lanes, blocks, across, times, tile, rows, blocks / slices, blocks % slices, side,
          log2_of(side), tile * (GROUP_WARPS / side), turn, log2_of(turn)};
}
constexpr Plan PLAN_QKV = make_plan(HIDDEN, QKV_ACROSS, 1, QKV_TILE, 0);
constexpr Plan PLAN_O = make_plan(Q_ROWS, O_ACROSS, 1, O_TILE, 32);
constexpr Plan PLAN_GATEUP = make_plan(HIDDEN, GATEUP_ACROSS, 1, GATEUP_TILE, 64);
constexpr Plan PLAN_DOWN = make_plan(INNER, DOWN_ACROSS, DOWN_TIMES, DOWN_TILE, 32);
// Whether every unit is one row of 16 blocks: then nothing about units is computed.
DEV constexpr bool is_whole(const Plan& p) {
  return p.lanes == 2 && p.across == 1 && p.tile == 1 && p.least == 16 && p.extra == 0;
}
constexpr bool WHOLE = is_whole(PLAN_QKV) && is_whole(PLAN_O) && is_whole(PLAN_GATEUP) &&
                       is_whole(PLAN_DOWN) && OWN_Q % 4 == 0 && OWN_KV % 4 == 0;
DEV Plan plan_of(int kind) {
  constexpr Plan qkv = PLAN_QKV, o = PLAN_O, gateup = PLAN_GATEUP, down = PLAN_DOWN;  // for nvcc
  return kind == QKV ? qkv : kind == O_PROJ ? o : kind == GATEUP ? gateup : down;
}
DEV int first_block(const Plan& p, int slice) {
  return WHOLE ? 16 * slice : slice * p.least + (slice < p.extra ? slice : p.extra);
}
DEV int part_rows(const Plan& p, int kind, int part) {
  return kind != QKV ? p.rows : part ? OWN_KV : OWN_Q;
}

// Slots of one group of warps in a part.
struct Deal {
  int rows, step, first, turn, count;
  DEV int left(int it) const { return rows - (first + turn * it) * step; }
  DEV int rows_of(int it) const { return left(it) < step ? left(it) : step; }
};
DEV Deal make_deal(const Plan& p, int kind, int part, int group) {
  constexpr int Q_SLOTS = (OWN_Q + PLAN_QKV.step - 1) / PLAN_QKV.step;
  constexpr int KV_SLOTS = (OWN_KV + PLAN_QKV.step - 1) / PLAN_QKV.step;
  const int rows = part_rows(p, kind, part);
  const int slots = kind == QKV ? (part ? KV_SLOTS : Q_SLOTS) : (rows + p.step - 1) / p.step;
  // All parts are dealt as one list: each goes on where the one before ended.
  const int before = kind != QKV ? part * slots : part ? Q_SLOTS + (part - 1) * KV_SLOTS : 0;
  const int own = group >> (log2_of(GROUPS) - p.turn_log);
  const int first = (own - before) & (p.turn - 1);
  const int count = slots > first ? ((slots - first - 1) >> p.turn_log) + 1 : 0;
  return {rows, p.step, first, p.turn, count};
}
constexpr int DOWN_COLUMNS =
    128 * PLAN_DOWN.lanes * (PLAN_DOWN.least + (PLAN_DOWN.extra > 0)) * PLAN_DOWN.across;
DEV constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int MOST_COLUMNS = most(most(HIDDEN, Q_ROWS), most(DOWN_COLUMNS, 128));
// Of two tokens, what `Acts` reads of scales and sums: bytes of a plane, and planes of a token.
constexpr int PLANE = MOST_COLUMNS / 8, TERM_PLANES = 3;
// Blocks of a row that a group's warps have in slice `time`, and those of the warps before one.
struct Width { int first, all, before, own; };
DEV Width make_width(const Plan& p, int time, int group, int warp) {
  if (WHOLE) return {16 * time, 16, 0, 16};
  const int from = time * p.across + ((GROUP_WARPS * group) & (p.across - 1));
  const int mine = from + (warp & (p.side - 1)), first = first_block(p, from);
  const int at = first_block(p, mine);
  return {at, first_block(p, from + p.side) - first, at - first, first_block(p, mine + 1) - at};
}
