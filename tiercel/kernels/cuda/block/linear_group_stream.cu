// linear_group_stream: what linear_group.cu does, by one CTA a multiprocessor whose weights come
// through a ring in shared memory. Host side, floor: kernels/block/linear_group_stream.py.
//
// A CTA owns as many bytes of the matrices as every other: a run of rows of each that it has a part
// of. PARTS warps share the columns of a tile (linear_group_tiles.cuh) and add their sums in order, as
// in linear_group.cu, so bits are the same; TILES tiles are a block. A stage of the ring has a unit of
// 128 bytes a row for each warp: PARTS units of the block's rows. PRODUCERS more warps request them, a
// row a lane (a warp's bulk copies are made one by one), with at most AHEAD stages on their way: what is
// requested after them, x, waits behind no more bytes than the memory's latency needs, while the ring
// holds what arrives before x is there.
//
// A second group may follow, whose x is a result of the first (NEXT_PARTS > 0): each CTA counts when
// it has finished, and waits until all have counted (a cooperative launch). Its weights come
// meanwhile.
//
// Macros: IS_BF16 (1), HALF_X, KINDS (1: FP8 in blocks of 128 columns, 2: bfloat16,
// added), PARTS, TILES, STAGES (of the
// ring), AHEAD, CTAS (an SM, for the registers), BULK_X (x of
// the first group comes by bulk copies), INPUT (0: x as it is, 1: normed, 2: heads rotated back, and groups); NEXT_KINDS,
// NEXT_PARTS and NEXT_INPUT of a second group, 0 parts for none.
#define CONSUMERS (PARTS * TILES)
#define PRODUCERS 4
#define WARPS (CONSUMERS + PRODUCERS)
#define X_WARPS CONSUMERS
#define MEET_AT_X meet_consumers
#include "include/barrier_ptx.cuh"
DEV void meet_consumers() { bar_sync(15, 32 * CONSUMERS); }
#include "block/linear_group_tiles.cuh"
#include "include/copy_ptx.cuh"
#include "include/counters_ptx.cuh"
#include "include/mbarrier_ptx.cuh"

#define COUNTED 0  // tickets: CTAs that have finished the first group, and that have left
#define GONE 1
static_assert(STAGES <= 16 && AHEAD >= 1, "ring");

template <int KINDS_, int PARTS_, int INPUT_, bool BULK_> struct Work {
  static constexpr bool BULK = BULK_;
  static constexpr int FORMATS = KINDS_, SHARED = PARTS_, GIVEN = INPUT_;  // SHARED: warps of a tile
  static constexpr int BLOCK = CONSUMERS / PARTS_;                          // tiles
  static constexpr u32 PITCH = PARTS_ * 128 + 64;  // of a stage's rows: no bank conflicts
  static constexpr u32 BYTES = 16 * BLOCK * PITCH;  // of a stage
};
typedef Work<KINDS, PARTS, INPUT, BULK_X> First;
#if NEXT_PARTS
// Bulk copies do not see what other CTAs of this launch write.
typedef Work<NEXT_KINDS, NEXT_PARTS, NEXT_INPUT, false> Next;
constexpr u32 STAGE = First::BYTES > Next::BYTES ? First::BYTES : Next::BYTES;
constexpr bool HAS_NORM = INPUT == NORMED || NEXT_INPUT == NORMED;
#else
constexpr u32 STAGE = First::BYTES;
constexpr bool HAS_NORM = INPUT == NORMED;
#endif

// Shared memory: mbarriers (full, empty, of x), the ring, two buffers of sums, weights of a norm, x.
struct Memory {
  u32 full, empty, has_x, ring;  // of mbarriers, the ring
  float *sums, *norm_weight;
  u8* x;
  DEV Memory(u8* at, int most_columns) {
    full = shared_address(at), empty = full + 128, has_x = full + 256, ring = full + 384;
    sums = (float*)(at + 384 + STAGES * STAGE);
    norm_weight = sums + CONSUMERS * 2 * 128;
    x = (u8*)(norm_weight + (HAS_NORM ? most_columns : 0));
  }
};

DEV int units_of(const Matrix& m, int columns) { return columns / (m.kind == BF16 ? 64 : 128); }
// Calls visit(matrix, first row, end) for each run of this CTA's rows that have one part of x. Rows of
// a pair are those of gate.
template <class W, class Visit> DEV void each_run(const Group& group, int columns, Visit visit) {
  const u32 cta = blockIdx.x, start = group.each * cta + min(cta, group.more);
  const u32 stop = start + group.each + (cta < group.more);
  for (int i = 0; i < group.count; ++i) {
    const Matrix& m = group.matrices[i];
    const u32 row_units = units_of(m, columns) * (m.is_pair ? 2 : 1);
    // The rows whose first unit is one of this CTA's.
    const u32 before = start > m.first_unit ? (start - m.first_unit + row_units - 1) / row_units : 0;
    const u32 until = stop > m.first_unit ? (stop - m.first_unit + row_units - 1) / row_units : 0;
    const int end = min((int)until, m.rows);
    for (int first = min((int)before, m.rows), next; first < end; first = next) {
      next = W::GIVEN == ROTATED ? min(end, (first / m.group_rows + 1) * m.group_rows) : end;
      visit(m, first, next);
    }
  }
}

// ---- the warps that request weights
struct Producer {
  int slot = 0, seen = 0;    // places of the next stage, and of the first that is on its way
  u32 turn = 1, turn_seen = 0;  // parities: a new mbarrier's phase before the first has passed
  int on_the_way = 0;

  DEV void wait_for_slot(const Memory& memory) {
    if (on_the_way == AHEAD) {
      mbar_wait(memory.full + 8 * seen, turn_seen);
      if (++seen == STAGES) seen = 0, turn_seen ^= 1;
    } else {
      ++on_the_way;
    }
    mbar_wait(memory.empty + 8 * slot, turn);
  }
  template <class W> DEV void run(const Memory& memory, const Group& group, int columns) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 - CONSUMERS;
    each_run<W>(group, columns, [&](const Matrix& m, int first, int end) {
      const int tile_rows = rows_of_tile(m), units = units_of(m, columns);
      for (int base = first; base < end; base += W::BLOCK * tile_rows)
        for (int unit = 0; unit < units; unit += W::SHARED) {
          const u32 full = memory.full + 8 * slot, bytes = 128 * min(W::SHARED, units - unit);
          wait_for_slot(memory);
          // Rows of this warp, each twice in a pair: PRODUCERS is a factor of 8.
          const int most = min(W::BLOCK * tile_rows, end - base) - own + PRODUCERS - 1;
          if (lane == 0) mbar_expect(full, most / PRODUCERS * (16 / tile_rows) * bytes);
          __syncwarp();
#pragma unroll
          for (int i = lane; i < 16 * W::BLOCK / PRODUCERS; i += 32) {
            const int place = PRODUCERS * i + own;  // of a row in the stage
            const int row = base + place / 16 * tile_rows + place % tile_rows;
            const i64 from = row + (m.is_pair && place % 16 >= 8 ? m.rows : 0);
            if (row < end)
              load_once(memory.ring + slot * STAGE + place * W::PITCH,
                        m.weights + from * m.row_bytes + 128 * unit, bytes, full);
          }
          if (++slot == STAGES) slot = 0, turn ^= 1;
        }
    });
  }
};

// ---- the warps that multiply
DEV const u8* scales_of(const Matrix& m, int row) {
  return m.scales + (i64)(row / m.scale_rows) * m.scale_stride * (m.is_wide_scale ? 4 : 1);
}
// Scales of a CTA's rows into the L1, ahead of the weights; of more than 8 rows of them the first.
template <class W> DEV void touch_scales(const Group& group, int columns) {
  each_run<W>(group, columns, [&](const Matrix& m, int first, int end) {
    if (m.kind != FP8) return;
    const int bytes = columns / 128 * (m.is_wide_scale ? 4 : 1);
    for (int half = 0; half < (m.is_pair ? 2 : 1); ++half) {
      const int row = half * m.rows + first + threadIdx.x / 32 % 8 * m.scale_rows;
      const u8* scales = scales_of(m, min(row, half * m.rows + end - 1));
      for (int at = threadIdx.x % 32 * 32; at < bytes; at += 1024) load_read_only_byte(scales + at);
    }
  });
}
// Runs of 8 channels of x in shared memory that rotate, from `first_column` of x on.
template <class Visit> DEV void each_rotated(const Input& in, int first_column, Visit visit) {
  const int runs = in.columns / 8;
  for (int i = threadIdx.x; i < in.num_tokens * runs; i += 32 * CONSUMERS) {
    const int token = i / runs, own = 8 * (i - token * runs), column = first_column + own;
    const int channel = column % in.head - (in.head - in.rotary);
    if (channel >= 0) visit(token, own, column, channel);
  }
}
// Columns of x to shared memory, a row a copy; then normed or rotated where they are.
template <int GIVEN>
DEV void copy_x(const Input& in, const Memory& memory, int first_column, u32 turn) {
  const u32 row_bytes = 2 * in.columns;
  if ((int)threadIdx.x < in.num_tokens) *peak_of(in, memory.x, threadIdx.x) = 0;
  if (threadIdx.x == 0) {
    mbar_expect(memory.has_x, in.num_tokens * row_bytes);
    for (int token = 0; token < in.num_tokens; ++token)
      copy_bulk(shared_address(memory.x + token * row_of_x(in.columns)),
                in.x + token * in.stride + first_column, row_bytes, memory.has_x);
  }
  const bool has_angles = GIVEN == ROTATED && in.table;
  if (has_angles)  // into the L1 meanwhile
    each_rotated(in, first_column, [&](int token, int, int, int channel) {
      const float* angles = in.table + position_of(in, token) * in.rotary + channel / 2;
      load_read_only<u32>(angles), load_read_only<u32>(angles + in.rotary / 2);
    });
  mbar_wait(memory.has_x, turn);
  if (has_angles)
    each_rotated(in, first_column, [&](int token, int own, int column, int) {
      uint4* at = (uint4*)(memory.x + token * row_of_x(in.columns) + 2 * own);
      *at = rotate_back(*at, in, column, token);
    });
  if (GIVEN == NORMED) meet_consumers(), norm_rows(in, memory.norm_weight, memory.x);
  meet_consumers();
}

struct Consumer {
  int slot = 0, buffer = 0;
  u32 turn = 0, turn_of_x = 0;

  template <class W, int KIND>
  DEV void multiply(const Memory& memory, const Matrix& m, const Input& in, int first, int end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = warp % W::SHARED, own = warp / W::SHARED;
    const int units = in.columns / Shape<KIND>::COLUMNS, tile_rows = rows_of_tile(m);
    for (int base = first; base < end; base += W::BLOCK * tile_rows) {
      const int row = base + own * tile_rows, last = min(end, row + tile_rows) - 1;
      const u8* scales[2];
      if (KIND == FP8) {
        const int mine = row + lane / 4;
        scales[0] = scales_of(m, min(mine, last));
        scales[1] = scales_of(m, m.is_pair ? min(mine, last) + m.rows : min(mine + 8, last));
      }
      float sums[4] = {};
      for (int at = part; at - part < units; at += W::SHARED) {
        const bool is_mine = at < units && row < end;
        Unit unit;
        if (KIND == FP8 && is_mine) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            unit.scales[half].x = m.is_wide_scale ? load_read_only<u32>(scales[half] + 4 * at)
                                                  : load_read_only_byte(scales[half] + at);
        }
        mbar_wait(memory.full + 8 * slot, turn);
        if (is_mine) {
          const u32 from = memory.ring + slot * STAGE + (16 * own + lane / 4) * W::PITCH + 128 * part;
#pragma unroll
          for (int i = 0; i < 4; ++i)
            unit.weights[i / 2][i % 2] =
                load_shared<uint4>(from + i / 2 * 8 * W::PITCH + 64 * (i % 2) + 16 * (lane % 4));
          multiply_unit<KIND>(sums, m, unit, in, memory.x, at);
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(memory.empty + 8 * slot);
        if (++slot == STAGES) slot = 0, turn ^= 1;
      }
      if constexpr (W::SHARED > 1) {
        // Two buffers in turn: one barrier a tile.
        float* at = memory.sums + ((buffer * CONSUMERS + warp) * 32 + lane) * 4;
        buffer ^= 1;
        *(float4*)at = make_float4(sums[0], sums[1], sums[2], sums[3]);
        bar_sync(1 + own, 32 * W::SHARED);
        if (part || row >= end) continue;
#pragma unroll
        for (int other = 1; other < W::SHARED; ++other) {
          const float4 v = *(const float4*)(at + other * 128);
          sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w;
        }
      }
      if constexpr (is_half<KIND>()) scale_sums(in, memory.x, sums);
      store_tile(m, in, row, end, sums);
    }
  }
  // What this CTA has of a group; x is there after the wait.
  template <class W, class Wait>
  DEV void run(const Memory& memory, const Group& group, const Input& in, Wait wait) {
    if constexpr (W::GIVEN == NORMED) {
      for (int i = threadIdx.x; i < in.columns; i += 32 * CONSUMERS)
        copy4(shared_address(memory.norm_weight + i), in.norm_weight + i);
      copy_commit();
    }
    wait();
    copy_wait<0>();
    int staged = -1;
    each_run<W>(group, in.columns, [&](const Matrix& m, int first, int end) {
      const int column = W::GIVEN == ROTATED ? first / m.group_rows * in.columns : 0;
      const bool has_half = HALF_X && m.kind == FP8;
      if (2 * column + has_half != staged) {
        if (staged >= 0) fence_shared_writes(), meet_consumers();
        if constexpr (W::BULK)
          copy_x<W::GIVEN>(in, memory, column, turn_of_x), turn_of_x ^= 1;
        else
          stage_x<W::GIVEN>(in, memory.norm_weight, memory.x, column);
        if (has_half) halve_x(in, memory.x);
        staged = 2 * column + has_half;
      }
      if constexpr (W::FORMATS & 1)
        if (m.kind == FP8) multiply<W, FP8>(memory, m, in, first, end);
      if constexpr (W::FORMATS & 2)
        if (m.kind == BF16) multiply<W, BF16>(memory, m, in, first, end);
    });
  }
};

struct AfterPredecessor {
  DEV void operator()() const { wait_for_inputs(); }
};
#if NEXT_PARTS
struct AfterAllCtas {
  u32* tickets;
  DEV void operator()() const {
    if (threadIdx.x == 0) wait_for_count(tickets + COUNTED, gridDim.x);
    meet_consumers();
  }
};
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS)
    linear_group_stream(const __grid_constant__ Group group, const __grid_constant__ Input in
#if NEXT_PARTS
                        , const __grid_constant__ Group next, const __grid_constant__ Input next_in,
                        u32* tickets  // zeros, and zeros again at the end
#endif
    ) {
  launch_dependents();
  SHARED_MEMORY(bytes);
#if NEXT_PARTS
  const Memory memory(bytes, max(in.columns, next_in.columns));
#else
  const Memory memory(bytes, in.columns);
#endif
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot)
      mbar_init(memory.full + 8 * slot, PRODUCERS), mbar_init(memory.empty + 8 * slot, CONSUMERS);
    mbar_init(memory.has_x, 1);
    mbar_fence();
  }
  __syncthreads();
  if (threadIdx.x / 32 >= CONSUMERS) {
    Producer producer;
    producer.run<First>(memory, group, in.columns);
#if NEXT_PARTS
    producer.run<Next>(memory, next, next_in.columns);
#endif
    return;
  }
  Consumer consumer;
  touch_scales<First>(group, in.columns);
#if NEXT_PARTS
  touch_scales<Next>(next, next_in.columns);
#endif
  consumer.run<First>(memory, group, in, AfterPredecessor());
#if NEXT_PARTS
  meet_consumers();  // results are written, and x has been read
  if (threadIdx.x == 0) {
    __threadfence();
    add_release(tickets + COUNTED, 1);
  }
  consumer.run<Next>(memory, next, next_in, AfterAllCtas{tickets});
  if (threadIdx.x == 0 && atomicInc(tickets + GONE, gridDim.x - 1) == gridDim.x - 1)
    tickets[COUNTED] = 0;
#endif
}
