// What counters_ptx.cuh gives, for one processor; behind device.hpp.
DEV void wait_for_count(const u32* p, u32 n) {
  while (*p < n) give_way();
}
DEV void add_release(u32* p, u32 v) { *p += v, ++events; }
