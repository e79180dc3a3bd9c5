"""Give the judge's module its initial weights, by the written rules of Job.init; this imports nothing of Piper.

The rules of init="seeded", which also hold for tensors that files do not have: every draw of the constructor has a seed
of its own, made of the job's seed and the number of the draw; memory that nothing fills is zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def constructed(job: Any) -> nn.Module:
    """Return the model of the constructor, with a seed before each draw if Job.init asks for that."""
    if job.init == "model" or (job.init != "seeded" and not _is_safetensors(Path(job.init))):
        model: nn.Module = job.model()
        return model
    with _SeededDraws(job.seed).in_constructor():
        seeded_model: nn.Module = job.model()
    return seeded_model


def load_weights(model: nn.Module, job: Any) -> None:
    """Copy the weights of the job's files into a module."""
    if job.init in ("model", "seeded"):
        return
    path = Path(job.init)
    if not _is_safetensors(path):
        model.load_state_dict(
            _renamed(torch.load(path, map_location="cpu", weights_only=True), job.rename)
        )
        return
    state = _renamed(_tensors(path), job.rename)
    missing, too_many = model.load_state_dict(state, strict=False)
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for name in too_many:  # buffers that a state_dict leaves out
        if name in named:
            named[name].data.copy_(state[name])
    unexpected = [name for name in too_many if name not in named]
    loaded = {id(named[name]) for name in state if name in named}
    if unexpected or any(
        id(named[name]) not in loaded for name in missing
    ):  # a tied tensor is loaded under another name
        raise ValueError(
            f"the files do not fit the model: {missing} are missing, {unexpected} are too many"
        )


class _SeededDraws(TorchDispatchMode):
    """Seed torch's generator before each draw; trunc_normal_, which draws until all numbers fit, is one draw."""

    def __init__(self, seed: int):
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._seed, self._draws, self._within = seed, 0, False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self._within:
            self._next()
        result = func(*args, **(kwargs or {}))
        if re.match(r"(new_)?empty(_|\.|$)", func.__name__) and isinstance(result, Tensor):
            result.zero_()
        return result

    def _next(self) -> None:
        digest = blake2b(f"{self._seed}/init/{self._draws}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(
            int.from_bytes(digest, "big") >> 1
        )  # torch.manual_seed: 50 times as long
        self._draws += 1

    @contextmanager
    def in_constructor(self) -> Iterator[None]:
        inner = nn.init._no_grad_trunc_normal_

        def once(*args: Any, **kwargs: Any) -> Tensor:
            self._next()
            self._within = True
            try:
                return inner(*args, **kwargs)
            finally:
                self._within = False

        nn.init._no_grad_trunc_normal_ = once
        try:
            with self:
                yield
        finally:
            nn.init._no_grad_trunc_normal_ = inner


def _is_safetensors(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".safetensors"


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, a folder of Hugging Face, or a distributed checkpoint of torch."""
    if (path / ".metadata").is_file():
        return _checkpoint(path)
    files = _shards(path) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _checkpoint(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a distributed checkpoint, as torch reads them."""
    import torch.distributed.checkpoint as checkpoints  # takes a second

    entries: Mapping[str, Any] = (
        checkpoints.FileSystemReader(folder).read_metadata().state_dict_metadata
    )
    sizes = {key: entry for key, entry in entries.items() if key.startswith("model.")}
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in sizes.items()
    }
    checkpoints.load(state, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in state.items()}


def _shards(folder: Path) -> list[Path]:
    """Return the files that the index of a folder names, or its only one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    return [
        folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]


def _renamed(state: Mapping[str, Tensor], rename: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors under the names of the model: parts of them, transposed or stacked if `rename` says so."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        for target, texts in _places(name, rename):
            to, rows, transposed = (
                (target, None, False)
                if isinstance(target, str)
                else (target.name, target.rows, target.transposed)
            )
            for text in texts:
                to = to.replace("*", text, 1)
            part = tensor if rows is None else tensor[rows[0] : rows[1]]
            part = part.t() if transposed else part
            if to.endswith("]"):
                base, _, number = to[:-1].rpartition("[")
                entries.setdefault(base, {})[int(number)] = part
            else:
                tensors[to] = part
    return tensors | {
        name: torch.stack([parts[k] for k in sorted(parts)]) for name, parts in entries.items()
    }


def _places(name: str, rename: Mapping[str, Any]) -> list[tuple[Any, tuple[str, ...]]]:
    for pattern, target in rename.items():
        match = re.fullmatch(re.escape(pattern).replace(r"\*", "(.+?)"), name)
        if match is not None:
            targets = target if isinstance(target, tuple) else (target,)
            return [(t, match.groups()) for t in targets if t is not None]
    return [(name, ())]


def cast_tensors(model: nn.Module, params: torch.dtype, compute: torch.dtype) -> None:
    """Cast the floating-point parameters of a module in place; under float64 its buffers and plain attributes, too.

    Tensors that share memory and dtype share memory afterwards: training one trains the other, as it does in the user's
    module. Complex tensors stay complex; `Module.to(dtype)` would drop their imaginary parts.
    """
    casts: dict[tuple[int, torch.dtype, torch.dtype], Tensor] = {}
    values = [
        value
        for m in model.modules()
        for value in (*m._parameters.values(), *m._buffers.values(), *vars(m).values())
    ]
    for tensor in {
        id(t): t for t in values if isinstance(t, Tensor) and t.is_floating_point()
    }.values():
        dtype = (
            params
            if isinstance(tensor, nn.Parameter)
            else torch.float64
            if compute == torch.float64
            else tensor.dtype
        )
        if tensor.dtype == dtype:
            continue
        memory = tensor.untyped_storage()
        key = (
            memory.data_ptr() or id(tensor),
            tensor.dtype,
            dtype,
        )  # without elements: no address, and nothing to share
        if key not in casts:
            casts[key] = torch.empty(0, dtype=tensor.dtype).set_(memory).to(dtype)
        tensor.data = casts[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
