"""DeepSeek-V3 of 14 layers with its MTP block: deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release of Megatron-LM (d98e8a64).

On 64 GPUs (assumed); the layout is Et*2|(tt|)*5t|tmL. Nearest: a router without biases, messages of NCCL.
"""

import piper
from piper import models, recipes

cluster = "h100x8*8@hopper-megatron"
sizes = models.DecoderConfig(
    layers=14, width=7168, heads=128, hidden=18432, vocab=258560, length=4096, eps=1e-6, theta=1e4, dense_layers=3, mtp=1,
    latent=models.Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128), mtp_weight=0.1,
    experts=models.Experts(number=64, top_k=8, hidden=2048, shared_hidden=2048, score="sigmoid", scale=2.5, groups=8,
                           top_groups=4, balance=1e-4),
)  # fmt: skip
job = models.job(sizes, global_batch=512, clip_norm=1.0)
directives = (
    recipes.tensor_parallel(sequence=True),
    recipes.expert_parallel(over=("tp", "ep")),
    recipes.interleaved(rows=1, at=(2, 4, 6, 8, 10, 12, 13)),
    recipes.data_parallel(over=("dp", "ep"), zero=1, bucket_mb=152.6),
)
strategy = piper.Strategy(piper.Mesh(pp=4, ep=8, tp=2), directives, global_batch=512)
