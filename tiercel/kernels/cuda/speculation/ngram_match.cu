// Drafts from the row's own text behind its last token. Behind: ngram_tiles.cuh, ngram_draft.cuh.
#include "speculation/ngram_draft.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) ngram_match(const Args a) {
  draft<MatchRule>(a);
}
