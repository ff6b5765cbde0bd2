// What all_reduce_ptx.cuh and attention_ptx.cuh give a kernel that several ranks run together, for one processor; behind
// peers_device.hpp. Who may start when: run_ranks.cpp.
#undef blockIdx
#undef THREADS
#define THREADS (32 * WARPS)
#define blockIdx (Index{places_of_ctas[current->cta].block})

struct PlaceOfCta { int rank, launch, block; };
static List<PlaceOfCta> places_of_ctas;
static List<u32> ended;  // launches of each rank that have ended
DEV void launch_dependents() {}
DEV void wait_for_inputs() {
  const PlaceOfCta& own = places_of_ctas[current->cta];
  if (ended[own.rank] < (u32)own.launch) wait_while(ended[own.rank], own.launch - 1);
}
DEV void unpack(u32 both, float& low, float& high) {
  low = of_16((u16)both), high = of_16((u16)(both >> 16));
}
static List<float> shared_floats;  // 32 of each CTA
#define SHARED_FLOATS(name, count) float* name = &shared_floats[32 * current->cta]
DEV void give_up() { fail("a wait was given up"); }
