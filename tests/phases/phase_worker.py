"""One rank of a training with DistributedDataParallel, then with FSDP, and with phases in the middle. Prints JSON.

`python phase_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`, with `tests` on the PYTHONPATH and `config.json` next to the
rendezvous file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.gloo_ranks import report
from helpers.phase_runs import forward, predict
from helpers.phase_training import Training
from helpers.runner_runs import runner_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from latentcache.config import Config
from latentcache.loading.cache import LatentCache

CPU = torch.device("cpu")


class Wrapper(Training):
    """Under DDP, and the wrapper is the part."""

    def wrap(self) -> None:
        self.unet = self.parts["unet"] = DistributedDataParallel(self.unet, gradient_as_bucket_view=True)

    def backward(self) -> None:
        """Compute gradients of other samples than the other rank does."""
        self.latents = self.latents + dist.get_rank()
        super().backward()


class Inside(Wrapper):
    """Under DDP, and the module inside is the part."""

    def wrap(self) -> None:
        super().wrap()
        self.parts["unet"] = self.unet.module


class Sharded(Wrapper):
    def wrap(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.unet.mid_block, mesh=mesh)
        fully_shard(self.unet, mesh=mesh)


def accumulate(training: Training, validate: Callable[[Training], None] = lambda training: None) -> None:
    """Update with gradients that were pending during `validate`."""
    training.backward()
    validate(training)
    training.optimizer.step()


def outcome(kind: type[Training], variant: str, **options: Any) -> list[Any]:
    """The losses of a run, a digest of its tensors, and a draw from each generator after it."""
    training, digest = kind(CPU, variant).run(partial(accumulate, **options)), hashlib.sha256()
    for tensor in training.tensors():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return [training.losses, digest.hexdigest(), training.draws]


def in_ddp(config: Config) -> dict[str, Any]:
    """The outcome without a validation, and with one on the first rank, first on a cold cache."""
    found: dict[str, Any] = {"without": outcome(Wrapper, "plain"), "num_filled": []}

    def validate(training: Training) -> None:
        with LatentCache(config.cache.path) as cache:
            validated = runner_for(training, cache, config).run(1)
        found["num_filled"].append(validated.num_filled if validated else None)
        found["notes"] = validated.notes if validated else ()

    return found | {kind.__name__: outcome(kind, "plain", validate=validate) for kind in (Inside, Wrapper)}


def gathered(training: Training) -> int:
    return sum(not isinstance(parameter, DTensor) for parameter in training.unet.parameters())


def in_fsdp() -> dict[str, Any]:
    """The outcome with and without phases, and the state inside and after them."""
    found: dict[str, Any] = {"without": outcome(Sharded, "ema")}

    def validate(training: Training) -> None:
        unet, phases = training.unet, training.phases
        found["reasons"] = [phases.not_moved().get("unet")]
        unet.eval()
        with torch.no_grad():  # a forward of the caller's own leaves the root gathered
            trained = forward(training).sum().item()
        unet.train()
        found["gathered before"] = gathered(training)
        unet.mid_block.compile(backend="eager")
        flags, call = [module.training for module in unet.modules()], unet.mid_block._compiled_call_impl
        with phases.enter("validate"):
            found["eager"] = unet.mid_block._compiled_call_impl is None
            found["training"] = any(module.training for module in unet.modules())
            found["averages are in"] = abs(predict(training).sum().item() - trained) > 0.1
            with phases.enter("sample"):
                torch.rand(dist.get_rank() + 2)
        after = [module.training for module in unet.modules()]
        found["restored"] = unet.mid_block._compiled_call_impl is call and after == flags
        found["gathered after"] = gathered(training)
        found["reasons"].append(phases.not_moved().get("unet"))
        unet.mid_block._compiled_call_impl = None

    return found | {"with": outcome(Sharded, "ema", validate=validate)}


def main() -> None:
    rank, world_size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    config = Config.model_validate_json((rendezvous.parent / "config.json").read_text())
    torch.use_deterministic_algorithms(True)
    file, timeout = f"file://{rendezvous}", timedelta(seconds=240)
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world_size, timeout=timeout)
    try:
        found = in_ddp(config) | {"fsdp": in_fsdp()}
    finally:
        dist.destroy_process_group()
    report(found)


if __name__ == "__main__":
    main()
