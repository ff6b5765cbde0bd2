// What peers_ptx.cuh gives kernels that several GPUs run together, for one processor; behind device.hpp. A store to
// another rank arrives late, its words in any order; two under way to the same place end the run.
#include <map>
// The first CTAS are those of the first GPU.
#undef blockIdx
#define blockIdx (Index{current->cta % CTAS})

struct Words { u64 first, second; };
static std::map<u64*, u64> stores;  // under way
DEV void store_word(void* p, u64 v) {
  if ((u64)p % 8) fail("alignment of a store");
  if (!stores.emplace((u64*)p, v).second) fail("a store overtakes another to the same place");
}
DEV void store_words(void* p, Words v) {
  if ((u64)p % 16) fail("alignment of a store");
  store_word(p, v.first), store_word((u64*)p + 1, v.second);
}
DEV u64 load_word(const void* p) {
  give_way();
  if ((u64)p % 8) fail("alignment of a load");
  return *(const u64*)p;
}
DEV Words load_words(const void* p) {
  give_way();
  if ((u64)p % 16) fail("alignment of a load");
  return {((const u64*)p)[0], ((const u64*)p)[1]};
}
static void deliver_stores(Random& random) {
  for (int n = random() % (2 + stores.size() / 4); n > 0 && !stores.empty(); --n) {
    auto one = stores.begin();
    std::advance(one, random() % std::min<size_t>(stores.size(), 200));
    *one->first = one->second, stores.erase(one), ++events;
  }
}
