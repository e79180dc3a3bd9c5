"""What a newcomer writes first and what Piper says: the sentence says what is meant, and is not Python's or
Dynamo's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import piper
from piper_ir.ground.errors import PiperError
from tests.helpers.capture_jobs import sgd
from tests.helpers.cases import each_case

DATA = torch.linspace(-1, 1, 32).view(8, 4)
ONE = piper.Strategy(piper.Mesh(), (piper.split(piper.where(), microbatches=2),))


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    return DATA[rows.start : rows.stop], DATA[rows.start : rows.stop]


def job(**changed: Any) -> piper.Job:
    fields = dict(
        model=lambda: nn.Linear(4, 4), batch=batch, loss=F.mse_loss, optimizer=sgd, global_batch=8
    )
    return piper.Job(**{**fields, **changed})


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.linear(x).square().mean(), "logits": x}


class On(nn.Module):
    """Moves its input, or makes a tensor, on a device."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.body(x))


class Negatives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ x.T


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.LazyLinear(4), nn.LazyBatchNorm1d()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 4)


BATCH = (
    r"Job\(batch=\.\.\.\) .*\(step, rows\).*every rank asks for its own:\n"
    r"    def batch\(step, rows\):.*\n.*\n +return x\[index\], y\[index\]$"
)
LOSS = r"Job\(loss=\.\.\.\) .*\(output, targets\).*`lambda out, _: out\.loss`"
OPTIMIZER = r"Job\(optimizer=\.\.\.\) .*`lambda named: torch\.optim\.AdamW\(\[p for _, p in named\], lr=1e-3\)`"
DEVICE = r"leave \.cuda\(\), \.to\('cuda'\) and device='cuda' out.*device=x\.device"
CPU_ONLY = pytest.mark.skipif(
    torch.backends.cuda.is_built(), reason="torch for CUDA moves fake tensors, and so accepts it"
)

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a DataLoader": (dict(batch=DataLoader(TensorDataset(DATA))), BATCH),
    "a Dataset": (dict(batch=TensorDataset(DATA)), BATCH),
    "the tensors": (dict(batch=(DATA, DATA)), BATCH),
    "a batch of the step alone": (dict(batch=lambda step: (DATA, DATA)), BATCH),
    "all rows": (
        dict(batch=lambda step, rows: (DATA, DATA)),
        r"shape \(8, 4\) for 2 rows.*x\[rows\.start : rows\.stop\]",
    ),
    "arrays": (
        dict(batch=lambda step, rows: (DATA.numpy(), DATA)),
        r"of type ndarray.*torch\.from_numpy",
    ),
    "an optimizer": (dict(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())), OPTIMIZER),
    "the name of an optimizer": (dict(optimizer="adamw"), OPTIMIZER),
    "no loss": (dict(loss=None), LOSS),
    "a loss of the output alone": (dict(loss=lambda output: output.mean()), LOSS),
    "a loss that is a class": (dict(loss=nn.MSELoss), r"give an instance, MSELoss\(\)"),
    "the loss of a model with its own": (
        dict(model=OwnLoss),
        r"mse_loss fails: .*\n.*`lambda out, _: out\.loss`",
    ),
    "a module": (dict(model=nn.Linear(4, 4)), r"give a function that makes it"),
    "a model with an argument": (
        dict(model=lambda config: nn.Linear(4, 4)),
        r"is called as model\(\).*`lambda: Model\(config\)`",
    ),
    "precision by a short name": (
        dict(precision="bf16"),
        r"did you mean 'bfloat16'\? One of float64, float32, bfloat16 for all",
    ),
    "mixed precision by a word": (
        dict(precision="bf16-mixed"),
        r"Precision\(params='float32', compute='bfloat16'\)",
    ),
    "precision by torch's dtype": (dict(precision=torch.float64), r"did you mean 'float64'\?"),
    "a misspelt field": (
        dict(optimiser=sgd),
        r"^Job\(optimiser=\.\.\.\): .*did you mean 'optimizer'\?$",
    ),
    "a longer name of a field": (dict(global_batch_size=8), r"did you mean 'global_batch'\?"),
    "a field of something else": (
        dict(learning_rate=0.1),
        r"^Job\(learning_rate=\.\.\.\): .*accepted are model, batch, loss",
    ),
    "a model of another width": (
        dict(model=lambda: nn.Linear(5, 4)),
        r"^the model: cannot be captured: linear fails: .*\[rows, 4\] X \[5, 4\].*"
        r"\nThe batch has inputs \[rows, 4\], targets \[rows, 4\]",
    ),
    "targets of another width": (
        dict(model=lambda: nn.Linear(4, 3)),
        r"^the loss: cannot be captured: mse_loss fails: .*\[rows, 3\]",
    ),
    "another device for new tensors": (
        dict(model=lambda: On(lambda x: x + torch.ones(4, device="cuda"))),
        DEVICE,
    ),
    "in-batch negatives": (
        dict(model=Negatives, loss=lambda o, t: F.cross_entropy(o, torch.arange(o.shape[0]))),
        r"rows of a batch with each other.*changes with the number of rows.*as a tensor of the "
        r"batch, \[rows, \.\.\.\]",
    ),
    "a lazy module": (
        dict(model=Lazy),
        r"'first\.weight' has no shape yet.*nn\.Linear\(inputs, outputs\)",
    ),
    "a model on meta": (
        dict(model=on_meta),
        r"leaves parameter 'weight' on the meta device.*to_empty\(device='cpu'\)",
    ),
}


@each_case("name", MISTAKES)
def test_the_message_says_what_is_meant(name: str) -> None:
    changed, says = MISTAKES[name]
    with pytest.raises(PiperError, match=f"(?s){says}") as caught:
        piper.execute(piper.compile(job(**changed), ONE), steps=1, launcher="inline")
    assert "FakeTensor" not in str(caught.value) and "Explanation" not in str(caught.value)


@CPU_ONLY
@pytest.mark.parametrize("name", ["constructor", "forward", "loss"])
def test_cuda_in_the_users_code_on_a_machine_without(name: str) -> None:
    changed: dict[str, dict[str, Any]] = {
        "constructor": dict(model=lambda: nn.Linear(4, 4).cuda()),
        "forward": dict(model=lambda: On(lambda x: x.cuda())),
        "loss": dict(loss=lambda output, target: F.mse_loss(output, target.to("cuda"))),
    }
    with pytest.raises(PiperError, match=f"(?s){DEVICE}"):
        piper.compile(job(**changed[name]), ONE)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "another dtype": (
        lambda: piper.Precision("bf16"),
        r"Precision\(params='bf16'\).*did you mean 'bfloat16'\?",
    ),
    "a dtype that is not there": (
        lambda: piper.Precision("float8"),
        r"one of float64, float32, bfloat16, float16 is needed",
    ),
    "a misspelt dtype argument": (
        lambda: piper.Precision(param="float32"),
        r"did you mean 'params'\?",
    ),  # type: ignore[call-arg]  # on purpose
    "too few fields": (
        lambda: piper.Job(nn.Identity, batch),
        r"^Job\(model, batch, .*missing a required argument: 'optimizer'",
    ),
    "steps misspelt": (
        lambda: piper.execute(piper.compile(job(), ONE), step=1),
        r"^execute\(step=.*did you mean 'steps'\?",
    ),
    "a launcher misspelt": (
        lambda: piper.execute(piper.compile(job(), ONE), steps=1, luncher="inline"),
        r"^execute\(luncher=.*did you mean 'launcher'\?",
    ),
    "a keyword of the runtime misspelt": (
        lambda: piper.execute(piper.compile(job(), ONE), steps=1, gradient=True, launcher="inline"),
        r"^execute\(gradient=.*did you mean 'gradients'\?",
    ),
    "an emulation's misspelt": (
        lambda: piper.execute(piper.compile(job(), ONE), steps=1, launcher="emulated", scle=2.0),
        r"^execute\(scle=",
    ),
    "compile misspelt": (
        lambda: piper.compile(job(), ONE, opitons=None),
        r"^compile\(opitons=.*did you mean 'options'\?",
    ),  # type: ignore[call-arg]  # on purpose
    "no strategy": (
        lambda: piper.compile(job()),
        r"^compile\(source, strategy, .*missing a required argument: 'strategy'",
    ),  # type: ignore[call-arg]  # on purpose
}


@each_case("name", CALLS)
def test_misspelt_arguments_are_named_with_what_was_meant(name: str) -> None:
    call, says = CALLS[name]
    with pytest.raises(PiperError, match=says):
        call()


def test_what_is_right_stays_right() -> None:
    for changed in (
        dict(model=partial(nn.Linear, 4, 4)),
        dict(loss=nn.MSELoss()),
        dict(optimizer=torch.optim.SGD),
        dict(optimizer=partial(torch.optim.AdamW, lr=1e-3)),
        dict(scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1)),
        dict(model=OwnLoss, loss=lambda out, _: out["loss"]),
    ):
        assert piper.execute(piper.compile(job(**changed), ONE), steps=1, launcher="inline").losses


def test_a_folder_named_piper_beside_a_script_is_not_imported(tmp_path: Path) -> None:
    """A clone is such a folder, which Python takes for a package if an editable install is not on its path."""
    (tmp_path / "piper").mkdir()
    script = tmp_path / "job.py"
    script.write_text("import piper\nprint(piper.__version__)\n", encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == piper.__version__, done.stderr
