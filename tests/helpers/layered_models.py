"""Models in whose modules layers stand where people put them, each in the spelling of a public family."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

WIDTH = 8


class Block(nn.Module):
    """A residual block, as in a ViT of timm."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(self.fc1(self.norm(x)).tanh()))


class Heads(nn.Module):
    """Heads that run beside each other, in a list, and two operations in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(torch.cat([head(x) for head in self.heads], -1))


class Stage(nn.Module):
    """A stage of blocks behind a projection, as in Swin and ConvNeXt."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.down, self.blocks = (
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(*(Block() for _ in range(blocks))),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.down(x))


class Whole(nn.Module):
    """An embedding, layers that run one after another, and a head in an nn.Sequential."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(WIDTH, WIDTH), layers
        self.head = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        each: Iterable[nn.Module] = (
            self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        )  # type: ignore[assignment]  # containers
        for layer in each:
            x = layer(x)
        return self.head(x)


class Numbered(nn.Module):
    """Attributes with numbers, each an nn.Sequential of blocks, as in a ResNet of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for number in (1, 2, 3):
            setattr(self, f"layer{number}", nn.Sequential(Block(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x)


class Reused(nn.Module):
    """One block that runs several times, as in ALBERT: it is the only entry of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.groups = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(0.3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = self.groups[0](x)
        return x


class Repeated(nn.Module):
    """A list that holds two blocks twice each, alternating."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(0.3), Block(0.3)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Listed(nn.Module):
    """Blocks in an nn.ModuleList, as ever."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


FOUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "operations": (
        lambda: nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))),
        "3, 0, 2, 4 (the longest chain of like modules, Linear)",
    ),
    "sequential with dropout": (
        lambda: Whole(nn.Sequential(*(Block(0.3) for _ in range(3)))),
        "3, layers.0, layers.1, layers.2 (the longest chain of like modules, Block); others: head.0, head.2, "
        "head.3 (3 Linear)",
    ),
    "dict": (
        lambda: Whole(nn.ModuleDict({name: Block() for name in ("low", "high")})),
        "2, layers.low, layers.high (the longest chain of like modules, Block)",
    ),
    "stages of stages": (
        lambda: Whole(nn.Sequential(Stage(1), Stage(2), Stage(2))),
        "5, layers.0.blocks.0, layers.1.blocks.0, ... layers.2.blocks.1 (the longest chain of like modules, "
        "Block); others: layers.0, layers.1, layers.2 (3 Stage)",
    ),
    "heads in lists": (
        lambda: Whole(nn.Sequential(*(Heads() for _ in range(3)))),
        "3, layers.0, layers.1, layers.2 (the longest",
    ),
    "numbered": (
        Numbered,
        "6, layer1.0, layer1.1, ... layer3.1 (the longest chain of like modules, Block); others: layer1",
    ),
    "repeated with dropout": (
        Repeated,
        "4, blocks.0, blocks.1, ... blocks.1 (entries of nn.ModuleList)",
    ),
    "reused with dropout": (
        Reused,
        "3, groups.0, 3 visits (the longest chain of like modules, Block)",
    ),
}
"""Models, and the layers that `piper explain` says."""
