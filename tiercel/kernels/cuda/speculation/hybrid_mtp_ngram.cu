// hybrid_mtp_ngram: drafts from the row's own text after those of an MTP head. Layouts: `Args` of
// ngram_tiles.cuh.
//
// A row that may take more drafts (A) gives back one token of the reserve and holds `lens` tokens;
// other rows hold theirs and give nothing back. So the weight is lens - A.
#include "speculation/ngram_draft.cuh"

struct HybridRule {
  static constexpr bool IS_PRIVATE = false; // the budget reads the lengths of all rows
  static __device__ __forceinline__ Share read(const Args& a, int row) {
    const int ready = a.lens[row];
    const long long to_limit = (long long)a.max_dec[row] - (long long)a.steps[row] - 1;
    const long long limit = (long long)a.max_drafts - ready + 1;
    Share share;
    share.want = clamp(limit < to_limit ? limit : to_limit, 0, a.draft_room);
    share.is_active = a.decoder[row] > 0;
    share.drafts = ready != 0 && share.want > 0;
    share.base = ready;
    share.weight = ready - share.drafts;
    return share;
  }
  static __device__ __forceinline__ void write(const Args& a, int row, const Share& share,
                                               int count) {
    if (count) a.lens[row] = share.base + count;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) hybrid_mtp_ngram(const Args a) {
  draft<HybridRule>(a);
}
