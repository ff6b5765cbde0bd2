// ngram_match: drafts from the row's own text after its last token. Layouts: `Args` of
// ngram_tiles.cuh.
#include "speculation/ngram_draft.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_match(const Args a) {
  draft<MatchRule>(a);
}
