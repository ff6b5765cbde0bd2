// Macros of all kernels, for an editor: compile_flags.txt puts this file before each other file. A
// build does not use it: there Python gives each kernel its macros (KernelSource). An editor greys
// out the code of other values.
#pragma once

// ---- several families
#define CTAS 132
#define IS_BF16 0
#define STAGES 2
#define TOKENS 32

// ---- attention: prefill_attention.py, decode_attention_split.py, rotary_kv_write.py,
// sparse_attention_decode.py, indexer_scores.py, indexer_select.py
#define BATCH 16
#define BLOCK_SIZE 64
#define CAPACITY 12288
#define CLUSTER 8
#define COARSE_KEYS 512
#define COLUMNS 1
#define D 128
#define FAST_LOOP 1
#define FINE_END 2048
#define FINE_KEYS 128
#define FOLDS 1
#define GROUP_HEADS 4
#define HAS_GROUPS 1
#define HAS_NORMS 1
#define IMAGE 0
#define IS_LONG 0
#define IS_PART 0
#define KEPT 376
#define KIND0 2
#define KIND1 1
#define KV_HEADS 8
#define LONG0 0
#define LONG1 0
#define LONG_VISIBLE 1
#define MIDDLE_END 32768
#define MIDDLE_KEYS 256
#define MOST 262144
#define NR 1
#define NUM_HEADS 32
#define PAGE 64
#define QUERY 1
#define SHARED_SUMS 1
#define TILE 64
#define WARPS 8

// ---- packed: packed_matvec.py, packed_gemm.py, packed_norm.py, packed_mmq.py, packed_dequantize.py. Q3_K: the one
// type that each header of types without code of their own can be read with.
#define BUFFERS 2
#define EARLY 1
#define GATED 0
#define GROUPS 1
#define HAS_UPDATE 1
#define IN_FILE 0
#define IN_STEP 0
#define IS_GELU 0
#define IS_SPLIT 1
#define MEANS 0
#define NEXT 0
#define PREFETCH 0
#define ORDER 4
#define OUT 0
#define PARTS 8
#define QTYPE 3
#define RESIDUAL 0
#define SCALED 1
#define SECOND 6
#define SLOT 1760
#define SPLITS 1
#define STEPS 4
#define TAIL 0
#define WGS 3

// ---- block: linear_group.py, block_scaled_gemm.py
#define HALF_X 1
#define INPUT 0
#define IS_FLOAT_OUT 0
#define IS_GATE_UP 1
#define IS_NVFP4 1
#define KINDS 7
#define OCTETS 2
#define TILES 1

// ---- fused: fused_decode_step.py, fused_layer_tail.py, fused_batch_step.py
#define ANY_SIX 0
#define AHEAD 1
#define ATTENDED 2048
#define DOWN_ACROSS 1
#define DOWN_TILE 1
#define DOWN_TIMES 3
#define GATEUP_ACROSS 1
#define GATEUP_PARTS 3
#define GATEUP_TILE 1
#define GROUP_WARPS 4
#define HAS_BIAS 0
#define HAS_QK_NORM 1
#define HAS_UPDATE_NORMS 0
#define HEAD 128
#define HEADS 4
#define HIDDEN 2048
#define INNER 6144
#define IS_STEP 0
#define LAYERS 36
#define MAYBE_SIXES 0
#define MOST_TILES 64
#define O_ACROSS 1
#define O_TILE 1
#define QKV_ACROSS 1
#define QKV_TILE 1
#define QKV_TILES 192
#define QK_TILES 160
#define SHARERS 1
#define SIXES 0
#define SIX_DOWN 0
#define SIX_GU 0
#define SIX_O 0
#define SIX_QK 0
#define SIX_V 0
#define SLIDING_TILES 0
#define SPAN 2048
#define TYPES 3
#define WINDOW 0
#define XSLOTS 4

// ---- moe: moe_experts_tiles.py, moe_experts_gemm.py
#define COLS 4096
#define COUNTER 0
#define DOWN_KIND 2
#define DOWN_PARTS 4
#define DOWN_TOTAL 0
#define DOWN_TYPE 2
#define DOWN_WARPS 4
#define EXPERTS 256
#define GATE_PARTS 8
#define GATE_TOTAL 0
#define GATE_TYPE 12
#define GATE_WARPS 8
#define INTER 2048
#define KIND 12
#define PHASE 0
#define QUARTERS_AHEAD 11
#define ROWS 2048
#define SINGLE 0
#define TOPK 6
#define TOTAL 0
#define UNITS_AHEAD 2

// ---- speculation: ngram_launch.py, ngram_index.py
#define LARGEST_N 64
#define LENGTH_BYTES 4
#define THREADS 512
#define TOKEN_BYTES 8
#define UNROLL 4

// ---- collectives: all_reduce.py
#define CHANNELS 512
#define IS_FLOAT 0
#define HAS_NORM 0
#define IS_GATHER 0
#define RANKS 2

// ---- what CUDA has and clang's headers lack
template <class T> __device__ void __stcg(T* to, T value);
