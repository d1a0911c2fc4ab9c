"""One rank of test_phases_distributed: training under DDP and FSDP with phases in the middle. Prints JSON.

`python phase_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`, with `tests` on the PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from helpers.gloo_ranks import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from latentcache.phases.phases import Phases

NUM_STEPS = 4


class Net(torch.nn.Module):
    """Dropout draws, BatchNorm's buffers change in a forward, and one layer may have no use."""

    def __init__(self, *, unused: bool = False):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.dropout = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(8, 2)
        self.unused = torch.nn.Linear(3, 3) if unused else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(self.first(inputs).relu())))


class Ema:
    """An average of sharded or whole parameters, with the methods of diffusers' EMAModel."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.shadow_params = [parameter.detach().clone().mul_(0.5) for parameter in parameters]
        self.temp_stored_params: list[torch.Tensor] | None = None

    def store(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.temp_stored_params = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter, shadow in zip(parameters, self.shadow_params, strict=True):
            parameter.copy_(shadow)

    @torch.no_grad()
    def restore(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        assert self.temp_stored_params is not None
        for parameter, stored in zip(parameters, self.temp_stored_params, strict=True):
            parameter.copy_(stored)
        self.temp_stored_params = None


class Run:
    """A training whose part `unet` is `wrap(net)`. Its outcome: losses, and a digest of weights and state."""

    def __init__(self, wrap: Callable[[Net], torch.nn.Module], *, unused: bool = False, averaged: bool = False):
        torch.manual_seed(dist.get_rank())
        net = Net(unused=unused)
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)
        self.unet = wrap(net)
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=0.1)
        self.parts: dict[str, Any] = {"unet": self.unet, "optimizer": self.optimizer}
        if averaged:
            self.parts["ema"] = Ema(self.unet.parameters())
        self.phases = Phases(self.parts, device="cpu")
        self.phases.start("train")
        self.inputs = torch.randn(8, 6)

    def run(self, validate: Callable[[Run], object] | None = None, *, before_update: bool = False) -> list[Any]:
        losses = []
        for number in range(NUM_STEPS):
            loss = self.unet(self.inputs).square().mean()
            loss.backward()
            if before_update and validate and number == 1:
                validate(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if not before_update and validate and number == 1:
                validate(self)
            losses.append(loss.item())
        return [losses, self.digest(), torch.rand(()).item()]

    def digest(self) -> str:
        tensors = [*self.unet.parameters(), *self.unet.buffers()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        digest = hashlib.sha256()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def validate(run: Run) -> None:
    with run.phases.enter("validate") as phases:
        phases.module("unet")(run.inputs[: 3 + dist.get_rank()])
        with phases.enter("sample"):
            torch.rand(dist.get_rank() + 2)
            phases.module("unet")(run.inputs)


def in_ddp() -> dict[str, Any]:
    """The outcome without phases, with them on one rank, and on both."""
    found: dict[str, Any] = {}
    for unused in (False, True):

        def make(unused: bool = unused) -> Run:
            return Run(
                lambda net: DistributedDataParallel(net, find_unused_parameters=unused, gradient_as_bucket_view=True),
                unused=unused,
            )

        def only_first(run: Run) -> None:
            if dist.get_rank() == 0:
                validate(run)

        found[f"find_unused_parameters={unused}"] = {
            "without": make().run(),
            "on rank 0": make().run(only_first),
            "on both": make().run(validate),
            "before the update": make().run(only_first, before_update=True),
        }
    return found


def in_fsdp() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def shard(net: Net) -> torch.nn.Module:
        fully_shard(net.first, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def compiled(net: Net) -> torch.nn.Module:
        net.first.compile(backend="eager")
        return shard(net)

    run = Run(shard)
    expected = run.run()
    seen: dict[str, Any] = {"reason": run.phases.not_moved().get("unet")}
    run.unet(run.inputs).sum()  # a forward of the caller's own leaves the root gathered
    seen["gathered"] = sum(not isinstance(parameter, DTensor) for parameter in run.unet.parameters())
    before = [(id(module), module.training) for module in run.unet.modules()]
    with run.phases.enter("validate") as phases:
        seen["training"] = any(module.training for module in run.unet.modules())
        phases.module("unet")(run.inputs)
    seen["flags restored"] = before == [(id(module), module.training) for module in run.unet.modules()]
    seen["left gathered"] = sum(not isinstance(parameter, DTensor) for parameter in run.unet.parameters())
    seen["still not moved"] = run.phases.not_moved().get("unet")

    run = Run(compiled)
    call = run.unet.first._compiled_call_impl
    with run.phases.enter("validate"):
        seen["compiled in the phase"] = run.unet.first._compiled_call_impl is not None
    seen["compiled after it"] = call is not None and run.unet.first._compiled_call_impl is call

    averages: list[float] = []

    def watch(run: Run) -> None:
        trained = run.unet(run.inputs).sum().item() if run.unet.eval() else 0.0
        run.unet.train()
        with run.phases.enter("validate") as phases:
            averages.append(abs(phases.module("unet")(run.inputs).sum().item() - trained))

    outcomes = {
        "without": expected,
        "after the update": Run(shard).run(validate),
        "before the update": Run(shard).run(validate, before_update=True),
        "with an ema": Run(shard, averaged=True).run(watch),
    }
    return seen | {"outcomes": outcomes, "averages": averages}


def main() -> None:
    rank, world_size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        found = {"ddp": in_ddp(), "fsdp": in_fsdp()}
    finally:
        dist.destroy_process_group()
    report(found)


if __name__ == "__main__":
    main()
