"""This machine as a cluster, on made-up machines with CUDA devices."""

from __future__ import annotations

import pytest
import torch

from piper.api.ground.this_machine import devices_of_runs
from piper_runtime.rank.values.device import using
from piper_simulator import load_cluster


@pytest.fixture
def two_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")


@pytest.mark.usefixtures("two_h200")
def test_runs_take_the_cuda_devices() -> None:
    with using("auto"):
        assert devices_of_runs(2) == load_cluster("h200x2")
        shared = devices_of_runs(3)
    assert shared.devices == 3
    assert (
        "3 ranks share 2 of these, and what they take from each other is not simulated"
        in shared.device.notes
    )
    with using("cpu"):
        assert devices_of_runs(2).name == "cpu-local"
