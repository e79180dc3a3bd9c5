"""ZeRO 3 with compiled kernels: benchmarks/deepcompile of DeepSpeedExamples (45b4b715).

It leaves model and GPUs open: here Llama 3 8B on 8.
"""

import piper
from piper import recipes

cluster = "h100x8@inductor"
job = piper.models.job("llama3-8b", global_batch=8, length=1024)
directives = (recipes.one_f_one_b(rows=1), recipes.data_parallel(zero=3))
strategy = piper.Strategy(piper.Mesh(dp=8), directives, global_batch=8)
