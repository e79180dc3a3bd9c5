"""Which device a rank takes, what it communicates over, and what NCCL is asked for; without CUDA."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper_ir.ground.errors import ExecutionError
from piper_runtime.profile.measured_plans import channels_plan
from piper_runtime.rank.binding.rank import BoundComm
from piper_runtime.rank.values.device import CPU, choose_device
from piper_runtime.transport.gloo import GlooCommunicators
from piper_runtime.transport.nccl import NcclCommunicators
from piper_runtime.transport.transport import (
    SHARED_DEVICE,
    agreed_transport,
    choose_transport,
    nccl_of,
)


def test_devices_are_chosen_by_rule_and_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ExecutionError,
        match='device "gpu" is not known; use "auto", "cpu" or "cuda"'.replace('"gpu"', "'gpu'"),
    ):
        choose_device("gpu", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == choose_device("cpu", 3) == CPU
    with pytest.raises(ExecutionError, match='device "cuda": no CUDA device; use device="cpu"'):
        choose_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert [choose_device("auto", r).index for r in range(4)] == [0, 1, 0, 1] and choose_device(
        "cpu", 1
    ) == CPU
    device = torch.device("cuda", 1)
    assert [choose_transport(d, 2) for d in (CPU, device)] == ["gloo", "nccl"] and choose_transport(
        device, 3
    ) == "staged"


def test_the_environment_says_what_joins_ranks_that_share_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("NCCL_HOSTID", "ours")  # put back in the end
    device, hosts = torch.device("cuda", 1), set()
    for wanted in ("gloo", None):
        monkeypatch.setenv(SHARED_DEVICE, wanted) if wanted else monkeypatch.delenv(SHARED_DEVICE)
        assert [choose_transport(device, n) for n in (2, 3)] == ["nccl", "staged"]
        assert nccl_of(GlooCommunicators(dist.HashStore(), 0), device).name == "nccl"
        assert os.environ["NCCL_HOSTID"] == "ours", "with a device for each nothing is told"
    monkeypatch.setenv(SHARED_DEVICE, "nccl")
    assert [choose_transport(d, 3) for d in (CPU, device)] == ["gloo", "nccl"]
    for rank in range(3):
        assert nccl_of(GlooCommunicators(dist.HashStore(), rank), device).name == "nccl by sockets"
        hosts.add(os.environ["NCCL_HOSTID"])
    assert len(hosts) == 3 and all(platform.node() in h for h in hosts), (
        "each rank is a host of its own to NCCL"
    )
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert choose_transport(device, 3) == choose_transport(device, 2) == "staged"
    monkeypatch.setenv(SHARED_DEVICE, "mpi")
    with pytest.raises(
        ExecutionError,
        match='the environment has PIPER_SHARED_DEVICE=\'mpi\'; "gloo" and "nccl" are accepted',
    ):
        choose_transport(device, 3)
    assert choose_transport(CPU, 3) == "gloo"


def test_ranks_that_would_communicate_otherwise_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two nodes, one without a device per rank; before that, a run on the CPU, and one of fewer ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    device, file = torch.device("cuda", 0), str(tmp_path / "store")
    ranks = [GlooCommunicators(dist.FileStore(file, 3), r) for r in range(3)]
    assert [agreed_transport(r, 3, CPU, 3, ranks[r]) for r in range(3)] == ["gloo"] * 3
    assert [agreed_transport(r, 2, device, 2, ranks[r]) for r in range(2)] == ["nccl"] * 2
    assert [agreed_transport(r, 3, device, 2, ranks[r]) for r in (2, 0)] == ["nccl"] * 2
    with pytest.raises(
        ExecutionError,
        match="rank 1 would communicate over staged, another rank over nccl: every node",
    ):
        agreed_transport(1, 3, device, 3, ranks[1])


class NcclGroup:
    """In place of torch's: notes what it is asked for."""

    class Options:
        _timeout = None

    made: list[NcclGroup] = []

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        self.rank, self.size, self.asked = rank, size, list[tuple[str, int, bool]]()
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asked.append(("broadcast", options.rootRank, options.asyncOp))

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.asked.append(("allreduce", -1, options.asyncOp))


def test_over_nccl_a_message_is_a_broadcast_of_its_source_to_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a group of NCCL's own, and nothing is issued on a stream that is not the plan's."""
    assert NcclCommunicators.group is not GlooCommunicators.group, (
        "gloo's would wait here for ranks that do not come"
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setattr(NcclGroup, "made", [])
    device, tensor = torch.device("cuda", 0), torch.zeros(3)
    nccl = NcclCommunicators(GlooCommunicators(dist.HashStore(), 1), device)
    nccl.connect(channels_plan(3, ((0, 1, 2),)))
    asked = {}
    for kind, channel, peers in (
        ("send", "1>0", (1, 0)),
        ("recv", "0>1", (0, 1)),
        ("all_reduce", "0,1,2", (0, 1, 2)),
    ):
        before = [len(g.asked) for g in NcclGroup.made]
        nccl.bind(BoundComm(kind, channel, peers, lambda: tensor))()  # type: ignore[arg-type]  # a string of the three
        (group,) = (g for g, n in zip(NcclGroup.made, before, strict=True) if len(g.asked) > n)
        asked[channel] = (group.rank, group.size, group.device, *group.asked[-1])
    assert asked == {
        "1>0": (1, 2, device, "broadcast", 1, False),
        "0>1": (1, 2, device, "broadcast", 0, False),
        "0,1,2": (1, 3, device, "allreduce", -1, False),
    }
