"""AlexNet as 2 stages x 2 replicas, rows of 8: training/pipeline_parallelism of DeepSpeedExamples (45b4b715)."""

import torch
from torch import nn

import piper


def model():
    first, wide, h = nn.Sequential(), (3, 64, 192, 384, 256, 256), 4096
    rest = nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 10))
    for k, size in enumerate((11, 5, 3, 3, 3)):
        first.append(nn.Conv2d(wide[k], wide[k + 1], size, 1 if k else 4, min(size // 2, 2)))
        first.extend([nn.ReLU(), nn.MaxPool2d(3, 2)][: 2 - (k in (2, 3))])
    first.extend([nn.Flatten(), nn.Dropout(), nn.Linear(9216, h)])
    return piper.tag(nn.Sequential(first, rest), {"0*": dict(stage=0), "...": dict(stage=1)})


cluster = "h100x4@eager"
images = torch.zeros(1).expand(256, 3, 224, 224)
data = torch.utils.data.TensorDataset(images, torch.arange(256) % 10)
job = piper.Job(model, piper.from_dataset(data), nn.functional.cross_entropy, torch.optim.Adam, 256)
last = piper.recipes.data_parallel(bucket_mb=1907, overlap=False)
directives = (piper.recipes.one_f_one_b(rows=8), last)
strategy = piper.Strategy(piper.Mesh(pp=2, dp=2), directives, global_batch=256)
