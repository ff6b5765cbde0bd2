// What all_reduce_ptx.cuh and attention_ptx.cuh give a kernel that several ranks run together, for one processor; behind
// q4k_device.hpp. A store to another rank arrives late, its words in any order; two under way to the same place end the
// run. Who may start when: run_ranks.cpp.
#undef blockIdx
#undef THREADS
#define THREADS (32 * WARPS)
#define blockIdx (Index{places_of_ctas[current->cta].block})

struct PlaceOfCta { int rank, launch, block; };
static std::vector<PlaceOfCta> places_of_ctas;
static std::vector<u32> ended;  // launches of each rank that have ended
DEV void let_dependents_start() {}
DEV void wait_for_predecessor() {
  const PlaceOfCta& own = places_of_ctas[current->cta];
  if (ended[own.rank] < (u32)own.launch) wait_while(ended[own.rank], own.launch - 1);
}
DEV void unpack(u32 both, float& low, float& high) {
  low = of_16((u16)both), high = of_16((u16)(both >> 16));
}
DEV void give_up() { fail("a wait was given up"); }

struct Words { u64 first, second; };
static std::map<u64*, u64> stores;  // under way
DEV void store_word(u64* to, u64 v) {
  if (!stores.emplace(to, v).second) fail("a store overtakes another to the same place");
}
DEV void store_words(void* p, Words v) {
  if ((u64)p % 16) fail("alignment of a store");
  store_word((u64*)p, v.first), store_word((u64*)p + 1, v.second);
}
DEV Words load_words(const void* p) {
  give_way();
  if ((u64)p % 16) fail("alignment of a load");
  return {((const u64*)p)[0], ((const u64*)p)[1]};
}
