"""The shape of the small model, as its `config.json` says it: 9 M parameters in less than 12 MB.

    layer   attention     routing
    0       window only   by token id
    1       CSA           by token id
    2       HCA           by scores
    3       CSA           by scores
    4       HCA           by scores
    MTP     window only   by scores

Widths are multiples of what the GPU kernels take: heads of 128 channels with 64 rotated (encoded
caches), experts of whole FP8 and FP4 groups. 64 heads as in the released models would not fit.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.small_v4.corpus import BOS, EOS
from benchmarks.small_v4.tokenizer import VOCAB_SIZE

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 128, 0],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 128,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
