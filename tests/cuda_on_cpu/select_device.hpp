// What indexer_select_ptx.cuh gives, for one processor; behind cluster_device.hpp.
DEV u32 take_shared(u32 address, u32 x) {
  const u32 old = load_word(address);
  store_word(address, old + x);
  return old;
}
DEV void or_shared(u32 address, u32 x) { store_word(address, load_word(address) | x); }
