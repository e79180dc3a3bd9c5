"""Protect that a type without a description is planned by its class of transformers, and trains what that does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import Mesh, Strategy
from piper.api.reference.verification import verify_strategy
from piper.models import library
from piper.planning.sources import StepSize, understand
from piper_ir.ground.errors import JobError

FIELDS = {"model_type": "jamba", "vocab_size": 16, "hidden_size": 8, "max_position_embeddings": 6}


class Output(NamedTuple):
    logits: Tensor


class CausalLM(nn.Module):
    def __init__(self, config: SimpleNamespace, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.use_cache is False
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype) for _ in range(2)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: Tensor) -> Output:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return Output(self.head(x))


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in with one class; the library itself is not needed."""

    def for_model(model_type: str, **fields: Any) -> SimpleNamespace:
        if model_type == "none":
            raise ValueError("Unrecognized model identifier: none")
        return SimpleNamespace(**fields)

    module: Any = ModuleType("transformers")
    module.AutoConfig = SimpleNamespace(for_model=for_model)
    module.AutoModelForCausalLM = SimpleNamespace(from_config=CausalLM)
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


def written(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_its_class_is_the_job(tmp_path: Path, transformers: ModuleType) -> None:
    source = understand(str(written(tmp_path, FIELDS)), StepSize(rows=8))
    assert "a jamba of transformers; 8 rows of 6 tokens" in source.facts
    (note,) = source.notes
    assert (
        "most of its layers are no attention" in note
        and "its class of transformers is captured" in note
    )
    job = library.library_job(tmp_path / "config.json", global_batch=8, length=6)
    assert job.model is source.job.model and job.batch is source.job.batch, "they share a capture"
    strategy = Strategy(Mesh(pp=2), piper.recipes.gpipe(pp=2, microbatches=2))
    assert verify_strategy(job, strategy, steps=2).equal
    names: dict[str, Any] = {}
    exec("\n".join(source.lines), names)
    assert names["job"].tokens_per_row == 6 and names["job"].model is job.model


def test_what_it_cannot_make_is_one_message(tmp_path: Path, transformers: ModuleType) -> None:
    with pytest.raises(JobError, match=r"makes no causal language model of it .*Unrecognized"):
        understand(str(written(tmp_path, FIELDS | {"model_type": "none"})), StepSize(rows=8))
    short = {k: v for k, v in FIELDS.items() if k != "max_position_embeddings"}
    with pytest.raises(JobError, match="does not say how long a row is; give --length"):
        understand(str(written(tmp_path, short)), StepSize(rows=8))
    quantised = FIELDS | {"quantization_config": {"bits": 4}}
    with pytest.raises(
        JobError, match=r"no description says a jamba .*unless weights are quantised"
    ):
        understand(str(written(tmp_path, quantised)), StepSize(rows=8))


def test_without_the_library_the_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        JobError, match=r"no description says a jamba .most of its layers are no attention"
    ):
        understand(str(written(tmp_path, FIELDS)), StepSize(rows=8))
