"""The phase switch on a second device: what moves away comes back, and training goes on bit by bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook, init_empty_weights
from diffusers.training_utils import EMAModel
from helpers.phase_runs import Scenario, assert_as_without, cold, each_in_turn, forward, leave_no_trace, name_of
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("variant", "scenario"),
    [("plain", each_in_turn), ("amp", cold), ("schedule-free", cold), ("text-encoder", cold)],
    ids=name_of,
)
def test_training_goes_on_bit_by_bit(variant: str, scenario: Scenario, device: torch.device) -> None:
    """The variants with LoRA and an EMA are those of a validation by the runner."""
    assert_as_without(scenario, device, variant)


@pytest.mark.parametrize("variant", ["amp", "lora"])
def test_all_disturbances_at_once_are_put_back(variant: str, device: torch.device) -> None:
    leave_no_trace(device, variant)


def small_parts(device: torch.device) -> dict[str, Any]:
    """The UNet is trained on the device, the others wait on the CPU."""
    unet, vae = torch.nn.Linear(3, 3).to(device), torch.nn.Linear(3, 3).requires_grad_(False)
    encoder = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).requires_grad_(False)
    return {"unet": unet, "vae": vae, "encoder": encoder}


def test_sequential_offload_is_refused_on_what_is_trained(device: torch.device) -> None:
    parts = small_parts(device)
    phases = Phases(parts, device=device)
    phases.start("train")
    with phases.enter("validate"):
        cpu_offload(parts["unet"], device)
        with pytest.raises(PhaseError, match="replaces their Parameters"), phases.lend("vae"):
            pytest.fail("the phase began")
    with pytest.raises(PhaseError, match="replaces their Parameters"):
        phases.start("train")


class Params4bit(torch.nn.Parameter):
    """As bitsandbytes has it."""

    __module__ = "bitsandbytes.nn.modules"


def quantised(module: Any, device: torch.device) -> None:
    module[0].weight = Params4bit(module[0].weight.data, requires_grad=False)


def partitioned(module: Any, device: torch.device) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number


def sharded(module: Any, device: torch.device) -> None:
    for parameter in module.parameters():
        parameter.device_mesh = None


def hooked(module: Any, device: torch.device) -> None:
    cpu_offload_with_hook(module, device)


@pytest.mark.parametrize(
    ("manage", "reason"),
    [
        (quantised, "is a bitsandbytes Params4bit"),
        (partitioned, "is a partition of DeepSpeed ZeRO-3"),
        (sharded, "is a shard of FSDP"),
        (hooked, "under offload hooks, which move it"),
    ],
)
def test_what_other_software_places_is_left_where_it_is(
    manage: Callable[..., None], reason: str, device: torch.device
) -> None:
    for place in (CPU, device):
        parts = small_parts(device)
        encoder = parts["encoder"].to(place)
        manage(encoder, device)
        phases = Phases(parts, device=device)
        assert list(phases.not_moved()) == ["encoder"] and reason in phases.not_moved()["encoder"]
        before = [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())]
        phases.start("train")
        with phases.enter(Phase(on_device=("vae",))), phases.lend("encoder"):
            assert "vae" in phases.on_device()
            assert [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())] == before
        assert [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())] == before


def test_a_refused_phase_leaves_no_old_values_to_a_later_one(device: torch.device) -> None:
    """Memory that it kept is not put back: the weights have been moved and trained since."""
    parts = small_parts(device)
    unet, ema = parts["unet"], EMAModel([torch.zeros(1)])  # of another model
    phases = Phases({**parts, "ema": ema}, device=device)
    phases.start("train")
    with pytest.raises(PhaseError, match="averages 1 parameters"), phases.enter("validate"):
        pytest.fail("the phase began")
    unet.to(CPU)
    unet.to(device)
    with torch.no_grad():
        unet.weight.fill_(7)
    del phases.parts["ema"]
    with phases.enter("validate"):
        pass
    assert (unet.weight == 7).all()


# Weights whose memory another tensor shares: parking them would part the two. Mapped files are no such memory.

FILL = Phase(on_device=())


@pytest.fixture
def sides(device: torch.device) -> tuple[torch.device, torch.device]:
    """Where training is, and where parts are parked. A view on the simulated device has storage of its own."""
    return (CPU, device) if device.type == "sim" else (device, CPU)


@pytest.mark.parametrize("num", [8, 6])
def test_what_a_flat_buffer_writes_is_in_the_weights_after_a_phase(
    num: int, sides: tuple[torch.device, torch.device]
) -> None:
    """Over all of a layer, as DeepSpeed ZeRO-1 and 2, and Apex, have it, or filled by one weight."""
    here, park = sides
    net, flat = torch.nn.Linear(3, 2).to(here), torch.zeros(num, device=here)
    net.weight.data = flat[:6].view(2, 3)
    if num == 8:
        net.bias.data = flat[6:]
    phases = Phases({"unet": net}, device=here, park=park)
    phases.start("train")
    with phases.enter(FILL):
        pass
    with phases.enter("validate"):
        net.requires_grad_(False)
        with phases.enter(FILL):
            torch.nn.Module.to(net, torch.float64)
    flat.fill_(7)
    assert (net.weight == 7).all()
    assert phases.not_moved() == {
        "unet": "weight shares its memory with another tensor, such as an optimizer's flat buffer or a kept state_dict"
    }


def test_weights_of_a_training_are_parked(sides: tuple[torch.device, torch.device]) -> None:
    """Neither gradients that wait nor an open phase are such a tensor."""
    here, park = sides
    training = Training(here)
    phases = Phases(training.parts, device=here, park=park)
    phases.start("train")
    training.step()
    forward(training).sum().backward()
    assert phases.not_moved() == {}
    with phases.enter("validate"), phases.enter(FILL):
        assert phases.on_device() == frozenset() and phases.not_moved() == {}
    assert next(training.unet.parameters()).device == here


def as_loaded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state


def as_a_flat_buffer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of which nobody knows what it is for. What is parked is given back in its own memory."""
    flat = torch.cat([values.flatten() for values in state.values()])
    parts = flat.split([values.numel() for values in state.values()])
    return {name: part.view(values.shape) for (name, values), part in zip(state.items(), parts, strict=True)}


@pytest.mark.parametrize("laid", [as_loaded, as_a_flat_buffer])
def test_a_part_that_was_loaded_without_a_copy_is_lent_and_given_back(
    laid: Callable[..., dict[str, torch.Tensor]], tmp_path: Path, device: torch.device
) -> None:
    """The tensors lie in the file, in order, and the caller may still hold them."""
    vae = tiny_parts(1)["vae"]
    safetensors.torch.save_file(vae.state_dict(), tmp_path / "vae.safetensors")
    with init_empty_weights():
        vae = type(vae).from_config(vae.config)
    state = laid(safetensors.torch.load_file(tmp_path / "vae.safetensors"))
    vae.load_state_dict(state, assign=True)
    memory = [parameter.data_ptr() for parameter in vae.parameters()]
    phases = Phases({"unet": torch.nn.Linear(3, 2), "vae": vae.requires_grad_(False)}, device=device)
    phases.start("train")
    assert phases.not_moved() == {}
    with phases.lend("vae"):
        assert phases.on_device() == {"unet", "vae"}
        assert vae(torch.zeros(1, 3, 64, 64, device=device)).sample.device == device
    assert phases.on_device() == {"unet"}
    assert [parameter.data_ptr() for parameter in vae.parameters()] == memory


# DistributedDataParallel in one process: its hooks hang on the weights, and a move would drop them.

REASON = "under DistributedDataParallel, whose hooks a move would drop"
GIVEN: dict[str, Callable[[Any], torch.nn.Module]] = {
    "the wrapper": lambda ddp: ddp,
    "the module inside": lambda ddp: ddp.module,
    "a part of the module inside": lambda ddp: ddp.module[0],
    "a module around it": lambda ddp: torch.nn.Sequential(ddp),
}


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, without threads; skips the test where this torch has none."""
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    gc.freeze()  # phases look for wrappers among all objects: those that were there before the test are many
    yield
    gc.unfreeze()
    dist.destroy_process_group()


def counted(ddp: Any) -> list[int]:
    """A list that gets an entry for each bucket of gradients that DDP reduces from now on."""
    reduced: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are strings here
        reduced.append(bucket.index())
        gradients = torch.futures.Future()
        gradients.set_result(bucket.buffer())
        return gradients

    ddp.register_comm_hook(None, hook)
    return reduced


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_part_under_ddp_is_not_moved_and_a_cast_is_an_error(
    given: Callable[[Any], torch.nn.Module], device: torch.device
) -> None:
    """Without a first synchronisation, and with one forward under DDP: a simulated device has no collectives."""
    net, vae = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(device), torch.nn.Linear(3, 3).requires_grad_(False)
    early = Phases({"unet": net}, device=device)
    assert early.not_moved() == {}
    ddp = torch.nn.parallel.DistributedDataParallel(net, init_sync=False)
    assert early.not_moved() == {"unet": REASON}
    phases, reduced = Phases({"unet": given(ddp), "vae": vae}, device=device), counted(ddp)
    phases.start("train")
    with phases.enter(Phase(on_device=())):
        assert phases.not_moved() == {"unet": REASON} and phases.on_device() == {"unet"}
        with phases.lend("vae"):
            assert phases.on_device() == {"unet", "vae"}
    ddp(torch.ones(2, 3, device=device)).square().sum().backward()
    assert reduced == [0]

    before = [(t, t.dtype, t.data_ptr(), t.detach().clone()) for t in ddp.parameters()]
    refused = pytest.raises(PhaseError, match="wrap the module in DistributedDataParallel again")
    with refused as caught, phases.enter("validate"):
        for parameter in phases.module("unet").parameters():
            parameter.data = parameter.data.half()  # as `Module.half` does on CUDA
    assert "weight" in str(caught.value)
    for tensor, dtype, memory, values in before:
        assert (tensor.dtype, tensor.data_ptr()) == (dtype, memory) and torch.equal(tensor, values)
    net(torch.ones(2, 3, device=device)).square().sum().backward()
    assert reduced == [0], "the hooks are there: this is no error"
