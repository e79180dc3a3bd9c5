"""Capture and cut of GPT-3 175B (96 layers, d_model 12,288, 96 heads, 2,048 positions): goals 15 s and 1 GiB.

Prints one JSON object; `measure` does the work in this process, whose peak memory then holds torch and the capture only.
"""

from __future__ import annotations

import json
import resource
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper_compiler.capture import capture
from piper_ir.sizes import bind

LAYERS, WIDTH, HEADS, LENGTH, VOCAB = 96, 12_288, 96, 2_048, 50_257


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], LENGTH, HEADS, WIDTH // HEADS)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(WIDTH, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(LENGTH, device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(rows: range) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    return tokens, tokens


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))


def measure() -> dict[str, float]:
    """seconds (wall), cpu_seconds, peak_gib of the process, chunks, codes, and saved_gib of one layer per row of the batch."""
    wall, cpu = time.perf_counter(), time.process_time()
    captured = capture(GPT3, batch, loss, dtype=torch.bfloat16)
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    layer = captured.program.chunks[1]
    saved = sum(bind(spec.nbytes, 1) for port, spec in layer.ports.items() if port.startswith("saved"))
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "chunks": len(captured.program.chunks),
        "codes": len(captured.code),
        "parameters": sum(int(bind(p.spec.numel, 0)) for p in captured.program.params),
        "saved_gib_per_layer_and_row": round(saved / 2**30, 3),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
