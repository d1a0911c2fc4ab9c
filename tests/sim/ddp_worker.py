"""One rank of test_phases_ddp_on_device: the small training run under DDP, without and with a cold validation.

`python ddp_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE`, with `tests` on the PYTHONPATH. Next to the file of the
rendezvous are `config.json` and `case.txt`: the device, and what the part is.
"""

from __future__ import annotations

import hashlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.gloo_ranks import report
from helpers.phase_training import Training
from helpers.runner_runs import runner_for
from torch.nn.parallel import DistributedDataParallel

from latentcache.config import Config
from latentcache.loading.cache import LatentCache
from latentcache.phases.phases import Phases

TIMEOUT = timedelta(seconds=90)


def gloo_for_sim() -> str:
    """Install the simulated device, and gloo on its memory as the backend for its tensors."""
    from relabel import on_cpu
    from simulated import install

    install()

    class GlooOnSim(dist.ProcessGroup):
        """The collectives that DDP uses."""

        def __init__(self, gloo: Any):
            super().__init__(gloo.rank(), gloo.size())
            self.gloo = gloo

        def allreduce(self, tensors: Any, options: Any) -> Any:
            return self._ended(self.gloo.allreduce([on_cpu(t) for t in tensors], options), tensors)

        def broadcast(self, tensors: Any, options: Any) -> Any:
            return self._ended(self.gloo.broadcast([on_cpu(t) for t in tensors], options), tensors)

        def allgather(self, outputs: Any, tensors: Any, options: Any) -> Any:
            gathered = [[on_cpu(t) for t in output] for output in outputs]
            return self._ended(self.gloo.allgather(gathered, [on_cpu(t) for t in tensors], options), outputs)

        def _ended(self, work: Any, value: Any) -> Any:
            work.wait()
            result = torch.futures.Future()
            result.set_result(value)
            return torch._C._distributed_c10d._create_work_from_future(result)

        def getBackendName(self) -> str:
            return "gloo-on-sim"

    dist.Backend.register_backend(
        "gloo_on_sim",
        lambda store, rank, size, timeout: GlooOnSim(dist.ProcessGroupGloo(store, rank, size, timeout)),
        devices=["sim"],
    )
    return "cpu:gloo,sim:gloo_on_sim"


def run(device: torch.device, given: str, config: Config | None) -> tuple[list[Any], Any]:
    """Losses, a digest of the weights, and the report of a validation in the middle."""
    training = Training(device)
    training.latents = training.latents + dist.get_rank()
    ddp = DistributedDataParallel(training.unet)
    part = ddp if given == "the wrapper" else ddp.module
    training.phases = Phases(training.parts | {"unet": part}, device=device)
    training.phases.start("train")
    training.unet = ddp
    reports = []

    def validate(training: Training) -> None:
        assert config is not None
        with LatentCache(config.cache.path) as cache:
            reports.append(runner_for(training, cache, config).run(1))

    training.run(None if config is None else validate)
    digest = hashlib.sha256()
    for tensor in ddp.state_dict().values():
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return [training.losses, digest.hexdigest()], (reports[0] if reports else None)


def main() -> None:
    rank, world_size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    name, given = (rendezvous.parent / "case.txt").read_text().split("\n")
    config = Config.model_validate_json((rendezvous.parent / "config.json").read_text())
    backend = gloo_for_sim() if name.startswith("sim") else "gloo"
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    device = torch.device(name)
    try:
        without, _ = run(device, given, None)
        outcome, validated = run(device, given, config)
    finally:
        dist.destroy_process_group()
    report(
        {
            "without": without,
            "with": outcome,
            "num_filled": validated.num_filled if validated else 0,
            "notes": " ".join(validated.notes) if validated else "",
        }
    )


if __name__ == "__main__":
    main()
