"""Public config.json files, written down by hand from model cards and papers, and how many parameters they say."""

from __future__ import annotations

from typing import Any

PUBLIC: dict[str, tuple[dict[str, Any], str]] = {
    # meta-llama/Llama-3.1-8B: model card, 8.03B
    "llama3.1-8b": (
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4_096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
            "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
            "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "attention_bias": False, "mlp_bias": False,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "pretraining_tp": 1,
        },
        "8.03",
    ),
    # meta-llama/Meta-Llama-3-70B: arXiv 2407.21783, table 3; model card, 70.6B
    "llama3-70b": (
        {
            "model_type": "llama", "hidden_size": 8_192, "intermediate_size": 28_672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8_192,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "rope_scaling": None, "hidden_act": "silu",
            "attention_bias": False, "tie_word_embeddings": False,
        },
        "70.6",
    ),
    # Qwen/Qwen2.5-32B: arXiv 2412.15115; model card, 32.5B (31.0B without embeddings); 32.76B by its tensors
    "qwen2.5-32b": (
        {
            "model_type": "qwen2", "hidden_size": 5_120, "intermediate_size": 27_648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152_064, "max_position_embeddings": 131_072,
            "max_window_layers": 64, "sliding_window": 131_072, "use_sliding_window": False, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0,
        },
        "32.8",
    ),
    # mistralai/Mistral-7B-v0.1: arXiv 2310.06825, table 1; 7.24B
    "mistral-7b": (
        {
            "model_type": "mistral", "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 32_768,
            "sliding_window": 4_096, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu",
        },
        "7.24",
    ),
    # mistralai/Mixtral-8x7B-v0.1: arXiv 2401.04088, table 1; 46.7B
    "mixtral-8x7b": (
        {
            "model_type": "mixtral", "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 32_768,
            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "sliding_window": None,
            "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu", "output_router_logits": False,
        },
        "46.7",
    ),
    # Qwen/Qwen2.5-7B: model card, 7.61B (6.53B without embeddings)
    "qwen2.5-7b": (
        {
            "model_type": "qwen2", "hidden_size": 3_584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 131_072,
            "max_window_layers": 28, "sliding_window": 131_072, "use_sliding_window": False, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_dropout": 0.0,
        },
        "7.6",
    ),
    # Qwen/Qwen3-30B-A3B: model card, 30.5B
    "qwen3-30b-a3b": (
        {
            "model_type": "qwen3_moe", "hidden_size": 2_048, "intermediate_size": 6_144, "moe_intermediate_size": 768,
            "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
            "max_position_embeddings": 40_960, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 48,
            "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "30.5",
    ),
    # Qwen/Qwen1.5-MoE-A2.7B: model card, 14.3B
    "qwen1.5-moe-a2.7b": (
        {
            "model_type": "qwen2_moe", "hidden_size": 2_048, "intermediate_size": 5_632, "moe_intermediate_size": 1_408,
            "shared_expert_intermediate_size": 5_632, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "vocab_size": 151_936, "max_position_embeddings": 8_192, "num_experts": 60,
            "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "max_window_layers": 21,
            "use_sliding_window": False, "sliding_window": 32_768, "rope_theta": 1e6, "hidden_act": "silu",
        },
        "14.3",
    ),
    # google/gemma-2-9b: arXiv 2408.00118, tables 1 and 2: 9.24B (918M of embeddings, 8,324M)
    "gemma-2-9b": (
        {
            "model_type": "gemma2", "hidden_size": 3_584, "intermediate_size": 14_336, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256_000,
            "max_position_embeddings": 8_192, "sliding_window": 4_096, "sliding_window_size": None, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "cache_implementation": "hybrid",
        },
        "9.24",
    ),
    # google/gemma-3-1b-pt: arXiv 2503.19786, table 1: 302M of embeddings, 698M
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text", "hidden_size": 1_152, "intermediate_size": 6_912, "num_hidden_layers": 26,
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144,
            "max_position_embeddings": 32_768, "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_local_base_freq": 10_000,
        },
        "1.00",
    ),
    # microsoft/phi-2: model card, 2.78B
    "phi-2": (
        {
            "model_type": "phi", "hidden_size": 2_560, "intermediate_size": 10_240, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 51_200, "max_position_embeddings": 2_048,
            "partial_rotary_factor": 0.4, "qk_layernorm": False, "layer_norm_eps": 1e-5, "rope_theta": 10_000.0,
            "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attention_dropout": 0.0, "hidden_act": "gelu_new",
        },
        "2.78",
    ),
    # microsoft/Phi-3-mini-4k-instruct: arXiv 2404.14219, 3.8B
    "phi-3-mini": (
        {
            "model_type": "phi3", "hidden_size": 3_072, "intermediate_size": 8_192, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_064, "max_position_embeddings": 4_096,
            "original_max_position_embeddings": 4_096, "sliding_window": 2_047, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
            "rope_scaling": None, "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "3.8",
    ),
    # openai-community/gpt2-xl: model card, 1.5B; 1,557,611,200 by its tensors
    "gpt2-xl": (
        {
            "model_type": "gpt2", "n_layer": 48, "n_embd": 1_600, "n_head": 25, "n_positions": 1_024, "n_ctx": 1_024,
            "vocab_size": 50_257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1,
        },
        "1.558",
    ),
    # EleutherAI/gpt-neox-20b: arXiv 2204.06745, section 2: 20,554,567,680
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox", "hidden_size": 6_144, "intermediate_size": 24_576, "num_hidden_layers": 44,
            "num_attention_heads": 64, "vocab_size": 50_432, "max_position_embeddings": 2_048, "rotary_pct": 0.25,
            "rotary_emb_base": 10_000, "layer_norm_eps": 1e-5, "hidden_act": "gelu_fast", "attention_probs_dropout_prob": None,
            "tie_word_embeddings": False,
        },
        "20.555",
    ),
    # EleutherAI/gpt-j-6b: model card, 6,053,381,344
    "gpt-j-6b": (
        {
            "model_type": "gptj", "n_layer": 28, "n_embd": 4_096, "n_head": 16, "n_inner": None, "n_positions": 2_048,
            "rotary": True, "rotary_dim": 64, "vocab_size": 50_400, "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer",
            "gradient_checkpointing": False,
        },
        "6.05",
    ),
    # tiiuae/falcon-7b: arXiv 2311.16867, table 16; 6.92B by its tensors, the embedding once
    "falcon-7b": (
        {
            "model_type": "falcon", "hidden_size": 4_544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "alibi": False,
            "bias": False, "vocab_size": 65_024, "layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0,
            "apply_residual_connection_post_layernorm": False,
        },
        "6.92",
    ),
    # bigcode/starcoder2-7b: arXiv 2402.19173, table 6; 7.17B by its tensors
    "starcoder2-7b": (
        {
            "model_type": "starcoder2", "hidden_size": 4_608, "intermediate_size": 18_432, "num_hidden_layers": 32,
            "num_attention_heads": 36, "num_key_value_heads": 4, "vocab_size": 49_152, "max_position_embeddings": 16_384,
            "sliding_window": 4_096, "use_bias": True, "mlp_type": "default", "norm_type": "layer_norm", "norm_epsilon": 1e-5,
            "rope_theta": 1_000_000, "hidden_act": "gelu_pytorch_tanh", "residual_dropout": 0.0, "embedding_dropout": 0.0,
        },
        "7.17",
    ),
    # allenai/OLMo-2-1124-7B: arXiv 2501.00656, table 3; 7.30B
    "olmo2-7b": (
        {
            "model_type": "olmo2", "hidden_size": 4_096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100_352, "max_position_embeddings": 4_096,
            "rms_norm_eps": 1e-6, "rope_theta": 500_000, "attention_bias": False, "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "7.30",
    ),
    # stabilityai/stablelm-2-1_6b: arXiv 2402.17834, table 3: 1.64B
    "stablelm-2-1.6b": (
        {
            "model_type": "stablelm", "hidden_size": 2_048, "intermediate_size": 5_632, "num_hidden_layers": 24,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100_352, "max_position_embeddings": 4_096,
            "partial_rotary_factor": 0.25, "use_qkv_bias": True, "layer_norm_eps": 1e-5, "rope_theta": 10_000,
            "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "1.64",
    ),
    # CohereForAI/c4ai-command-r-v01: model card, 35B
    "command-r-35b": (
        {
            "model_type": "cohere", "hidden_size": 8_192, "intermediate_size": 22_528, "num_hidden_layers": 40,
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256_000, "max_position_embeddings": 8_192,
            "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 8_000_000.0, "attention_bias": False,
            "hidden_act": "silu", "use_qk_norm": False,
        },
        "35",
    ),
    # deepseek-ai/DeepSeek-V2-Lite: arXiv 2405.04434, appendix B: 15.7B
    "deepseek-v2-lite": (
        {
            "model_type": "deepseek_v2", "hidden_size": 2_048, "intermediate_size": 10_944, "moe_intermediate_size": 1_408,
            "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102_400,
            "max_position_embeddings": 163_840, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
            "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "moe_layer_freq": 1, "aux_loss_alpha": 0.001,
            "seq_aux": True, "rms_norm_eps": 1e-6, "rope_theta": 10_000, "rope_scaling": {"type": "yarn", "factor": 40},
            "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "15.7",
    ),
    # deepseek-ai/DeepSeek-V3: arXiv 2412.19437, section 4.2: 671B, and 11.6B of the block that predicts a further token
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3", "hidden_size": 7_168, "intermediate_size": 18_432, "moe_intermediate_size": 2_048,
            "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129_280,
            "max_position_embeddings": 163_840, "q_lora_rank": 1_536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "ep_size": 1,
            "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}, "rms_norm_eps": 1e-6,
            "rope_theta": 10_000, "rope_scaling": {"type": "yarn", "factor": 40}, "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "683",
    ),
    # openai/gpt-oss-20b: model card (arXiv 2508.10925, table 1): 20.91B
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss", "hidden_size": 2_880, "intermediate_size": 2_880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088,
            "max_position_embeddings": 131_072, "initial_context_length": 4_096, "num_local_experts": 32,
            "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128, "swiglu_limit": 7.0,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True, "attention_dropout": 0.0,
            "quantization_config": {"quant_method": "mxfp4"}, "rms_norm_eps": 1e-5, "rope_theta": 150_000,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "router_aux_loss_coef": 0.9, "output_router_logits": False,
            "hidden_act": "silu", "tie_word_embeddings": False,
        },
        "20.91",
    ),
    # ibm-granite/granite-3.1-8b-base: 8.17B by its tensors
    "granite-3.1-8b": (
        {
            "model_type": "granite", "hidden_size": 4_096, "intermediate_size": 12_800, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 49_152, "max_position_embeddings": 131_072,
            "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 16.0,
            "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
            "tie_word_embeddings": True,
        },
        "8.17",
    ),
    # nvidia/Minitron-4B-Base: arXiv 2407.14679, table 2: 4.2B
    "minitron-4b": (
        {
            "model_type": "nemotron", "hidden_size": 3_072, "intermediate_size": 9_216, "num_hidden_layers": 32,
            "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256_000,
            "max_position_embeddings": 4_096, "partial_rotary_factor": 0.5, "norm_eps": 1e-5, "rope_theta": 10_000,
            "attention_bias": False, "mlp_bias": False, "hidden_act": "relu2", "tie_word_embeddings": False,
        },
        "4.2",
    ),
    # mosaicml/mpt-7b: model card, 6.7B; 6,649,286,656 by its tensors
    "mpt-7b": (
        {
            "model_type": "mpt", "d_model": 4_096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4, "max_seq_len": 2_048,
            "vocab_size": 50_432, "no_bias": True, "norm_type": "low_precision_layernorm", "learned_pos_emb": True,
            "attn_config": {"alibi": True, "attn_type": "multihead_attention", "clip_qkv": None, "qk_ln": False},
            "emb_pdrop": 0, "resid_pdrop": 0, "embedding_fraction": 1.0, "init_device": "cpu", "logit_scale": None, "verbose": 0,
        },
        "6.649",
    ),
    # bigscience/bloom: arXiv 2211.05100, table 3: 176,247M
    "bloom-176b": (
        {
            "model_type": "bloom", "n_embed": 14_336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250_880,
            "seq_length": 2_048, "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True, "offset_alibi": 100,
            "pretraining_tp": 4, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
        "176.247",
    ),
    # moonshotai/Kimi-K2-Instruct: arXiv 2507.20534, table 2; 1,026B by its tensors
    "kimi-k2": (
        {
            "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7_168,
            "intermediate_size": 18_432, "moe_intermediate_size": 2_048, "num_hidden_layers": 61,
            "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1_536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
            "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
            "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "vocab_size": 163_840, "max_position_embeddings": 131_072,
            "rope_theta": 50_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
            "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "pretraining_tp": 1, "attention_bias": False,
        },
        "1026",
    ),
    # zai-org/GLM-4.5-Air: arXiv 2508.06471, table 1; 110.5B by its tensors, of which 1.24B are second copies of embedding
    # and head, beside the block that predicts further tokens
    "glm-4.5-air": (
        {
            "model_type": "glm4_moe", "hidden_size": 4_096, "intermediate_size": 10_944, "moe_intermediate_size": 1_408,
            "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "use_qk_norm": False,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "attention_bias": True, "vocab_size": 151_552,
            "max_position_embeddings": 131_072, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "109",
    ),
    # rednote-hilab/dots.llm1.inst: arXiv 2506.05767; 143B by its tensors
    "dots1": (
        {
            "model_type": "dots1", "hidden_size": 4_096, "intermediate_size": 10_944, "moe_intermediate_size": 1_408,
            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
            "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1, "vocab_size": 152_064, "max_position_embeddings": 32_768, "rope_theta": 1e7,
            "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
        },
        "143",
    ),
    # MiniMaxAI/MiniMax-M2: model card, 230B; 229B by its tensors
    "minimax-m2": (
        {
            "model_type": "minimax_m2", "hidden_size": 3_072, "intermediate_size": 1_536, "num_hidden_layers": 62,
            "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
            "num_experts_per_tok": 8, "rotary_dim": 64, "rope_theta": 5e6, "use_qk_norm": True, "scoring_func": "sigmoid",
            "vocab_size": 200_064, "max_position_embeddings": 196_608, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "229",
    ),
    # ibm-granite/granite-3.0-3b-a800m-base: model card, 3.3B
    "granite-3.0-3b-a800m": (
        {
            "model_type": "granitemoe", "hidden_size": 1_536, "intermediate_size": 512, "num_hidden_layers": 32,
            "num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8,
            "vocab_size": 49_155, "max_position_embeddings": 4_096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-6,
            "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22, "tie_word_embeddings": True,
        },
        "3.3",
    ),
    # microsoft/Phi-3.5-MoE-instruct: arXiv 2404.14219; 41.9B by its tensors
    "phi-3.5-moe": (
        {
            "model_type": "phimoe", "hidden_size": 4_096, "intermediate_size": 6_400, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
            "attention_bias": True, "lm_head_bias": True, "vocab_size": 32_064, "max_position_embeddings": 131_072,
            "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01, "input_jitter_noise": 0.01,
            "tie_word_embeddings": False,
        },
        "41.9",
    ),
    # baidu/ERNIE-4.5-21B-A3B-PT: model card, 21B; 22B by its tensors
    "ernie-4.5-21b-a3b": (
        {
            "model_type": "ernie4_5_moe", "hidden_size": 2_560, "intermediate_size": 12_288, "moe_intermediate_size": 1_536,
            "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1,
            "vocab_size": 103_424, "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
            "use_bias": False, "tie_word_embeddings": True,
        },
        "22",
    ),
    # databricks/dbrx-base: model card, 132B
    "dbrx": (
        {
            "model_type": "dbrx", "d_model": 6_144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32_768,
            "vocab_size": 100_352, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000},
            "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4, "moe_loss_weight": 0.05},
            "tie_word_embeddings": False, "resid_pdrop": 0.0, "emb_pdrop": 0.0,
        },
        "132",
    ),
    # bigcode/starcoderbase: arXiv 2305.06161, 15.5B
    "starcoderbase": (
        {
            "model_type": "gpt_bigcode", "n_embd": 6_144, "n_layer": 40, "n_head": 48, "n_inner": 24_576,
            "n_positions": 8_192, "vocab_size": 49_152, "multi_query": True, "activation_function": "gelu",
            "layer_norm_epsilon": 1e-5,
        },
        "15.5",
    ),
    # allenai/Olmo-3-1025-7B: model card, 7.3B
    "olmo3-7b": (
        {
            "model_type": "olmo3", "hidden_size": 4_096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100_278, "max_position_embeddings": 65_536,
            "sliding_window": 4_096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "rope_theta": 500_000.0, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
        },
        "7.3",
    ),
    # LGAI-EXAONE/EXAONE-4.0-32B: model card, 30.95B without embeddings; 32.0B by its tensors
    "exaone-4.0-32b": (
        {
            "model_type": "exaone4", "hidden_size": 5_120, "intermediate_size": 27_392, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 102_400,
            "max_position_embeddings": 131_072, "sliding_window": 4_096, "sliding_window_pattern": 4, "rope_theta": 1e6,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
        "32.0",
    ),
    # HuggingFaceTB/SmolLM3-3B: model card; 3.08B by its tensors
    "smollm3-3b": (
        {
            "model_type": "smollm3", "hidden_size": 2_048, "intermediate_size": 11_008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128_256, "max_position_embeddings": 65_536,
            "no_rope_layer_interval": 4, "rope_theta": 5e6, "rms_norm_eps": 1e-6, "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        "3.08",
    ),
    # ByteDance-Seed/Seed-OSS-36B-Base: model card, 36B
    "seed-oss-36b": (
        {
            "model_type": "seed_oss", "hidden_size": 5_120, "intermediate_size": 27_648, "num_hidden_layers": 64,
            "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 155_136,
            "max_position_embeddings": 524_288, "rope_theta": 1e7, "rms_norm_eps": 1e-6, "attention_bias": True,
            "attention_out_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        },
        "36",
    ),
    # baidu/ERNIE-4.5-0.3B-PT: model card, 0.36B
    "ernie-4.5-0.3b": (
        {
            "model_type": "ernie4_5", "hidden_size": 1_024, "intermediate_size": 3_072, "num_hidden_layers": 18,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103_424,
            "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "use_bias": False,
            "tie_word_embeddings": True,
        },
        "0.36",
    ),
    # arcee-ai/AFM-4.5B: 4.62B by its tensors
    "afm-4.5b": (
        {
            "model_type": "arcee", "hidden_size": 2_560, "intermediate_size": 18_432, "num_hidden_layers": 36,
            "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 128_004,
            "max_position_embeddings": 65_536, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "hidden_act": "relu2",
            "tie_word_embeddings": False,
        },
        "4.62",
    ),
    # THUDM/glm-4-9b-chat-hf and zai-org/GLM-4-9B-0414: 9.40B by their tensors
    **{
        name: (
            {
                "model_type": kind, "hidden_size": 4_096, "intermediate_size": 13_696, "num_hidden_layers": 40,
                "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151_552,
                "max_position_embeddings": 32_768, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0,
                "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False,
            },
            "9.40",
        )
        for name, kind in (("glm-4-9b", "glm"), ("glm-4-9b-0414", "glm4"))
    },
    # internlm/internlm2-7b: 7.74B by its tensors
    "internlm2-7b": (
        {
            "model_type": "internlm2", "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 92_544, "max_position_embeddings": 32_768,
            "bias": False, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "rope_scaling": {"type": "dynamic", "factor": 2.0}, "attn_implementation": "eager",
        },
        "7.74",
    ),
    # CohereLabs/c4ai-command-r7b-12-2024: model card, 8.03B by its tensors
    "command-r7b": (
        {
            "model_type": "cohere2", "hidden_size": 4_096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256_000,
            "max_position_embeddings": 132_096, "sliding_window": 4_096, "sliding_window_pattern": 4,
            "rope_theta": 50_000.0, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_parallel_block": True,
            "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "tie_word_embeddings": True,
        },
        "8.03",
    ),
}  # fmt: skip
"""The fields of each file by name, and its parameters in 10^9, in as many digits as are published."""
