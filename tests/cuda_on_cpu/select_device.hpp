// What indexer_select_ptx.cuh gives, for one processor; behind cluster_device.hpp.
DEV u32 take_shared(u32 address, u32 x) {
  const u32 old = load_shared<u32>(address);
  store_shared<u32>(address, old + x);
  return old;
}
DEV void or_shared(u32 address, u32 x) { store_shared<u32>(address, load_shared<u32>(address) | x); }
