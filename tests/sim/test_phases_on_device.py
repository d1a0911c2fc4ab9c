"""The phase switch on a second device: what moves away comes back, and training continues bit by bit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import schedulefree
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook, init_empty_weights
from diffusers.training_utils import EMAModel
from helpers.phase_runs import Scenario, assert_as_without, cold, each_in_turn, forward, leave_no_trace, name_of
from helpers.phase_training import Training
from torch.utils._python_dispatch import TorchDispatchMode

from latentcache.errors import PhaseError
from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("variant", "scenario"),
    [("plain", each_in_turn), ("amp", cold), ("schedule-free", cold), ("text-encoder", cold)],
    ids=name_of,
)
def test_training_goes_on_bit_by_bit(variant: str, scenario: Scenario, device: torch.device) -> None:
    """LoRA and an EMA are tested with the runner."""
    assert_as_without(scenario, device, variant)


@pytest.mark.parametrize("variant", ["amp", "lora"])
def test_all_disturbances_at_once_are_put_back(variant: str, device: torch.device) -> None:
    leave_no_trace(device, variant)


def small_parts(device: torch.device) -> dict[str, Any]:
    """A UNet to train on the device, and other parts on the CPU."""
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


def test_a_parked_part_that_a_validation_casts_and_lends_has_its_bits_afterwards(device: torch.device) -> None:
    """As trainers do with a VAE: `vae.to(dtype=weight_dtype)` before it decodes."""
    parts = small_parts(device)
    phases, vae = Phases(parts, device=device), parts["vae"]
    phases.start("train")
    before = [(parameter.data_ptr(), parameter.detach().clone()) for parameter in vae.parameters()]
    with phases.enter("validate"):
        torch.nn.Module.to(vae, torch.bfloat16)
        with phases.lend("vae"):
            assert vae.weight.device == device and torch.equal(vae.weight.cpu(), before[0][1])
        assert torch.equal(vae.weight, before[0][1])
    for parameter, (memory, values) in zip(vae.parameters(), before, strict=True):
        assert parameter.data_ptr() == memory and torch.equal(parameter, values)


def test_averages_are_measured_in_a_phase_within_one_that_parks_the_model(device: torch.device) -> None:
    net, inputs = torch.nn.Linear(3, 3).to(device), torch.ones(1, 3, device=device)
    optimizer = schedulefree.ScheduleFreeWrapper(torch.optim.SGD(net.parameters(), lr=0.1), momentum=0.9)
    optimizer.train()
    phases = Phases({"unet": net, "optimizer": optimizer}, device=device)
    for _ in range(2):
        net(inputs).sum().backward()
        optimizer.step()
    trained = net.weight.detach().clone()
    with phases.enter(Phase(on_device=())), phases.enter("validate"):
        assert net.weight.device == device and not torch.equal(net.weight, trained)
    assert torch.equal(net.weight, trained)
    optimizer.step()  # raises in eval mode


class Params4bit(torch.nn.Parameter):
    """Has the name of bitsandbytes' class."""

    __module__ = "bitsandbytes.nn.modules"


def quantised(module: Any, device: torch.device) -> None:
    module[0].weight = Params4bit(module[0].weight.data, requires_grad=False)


def partitioned(module: Any, device: torch.device) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number


def sharded(module: Any, device: torch.device) -> None:
    for parameter in module.parameters():
        parameter.device_mesh = None


@pytest.mark.parametrize(
    ("manage", "reason"),
    [
        (quantised, "is a bitsandbytes Params4bit"),
        (partitioned, "is a partition of DeepSpeed ZeRO-3"),
        (sharded, "is a shard of FSDP"),
        (cpu_offload_with_hook, "under offload hooks, which move it"),
    ],
)
def test_what_other_software_places_is_left_where_it_is(
    manage: Callable[..., object], reason: str, device: torch.device
) -> None:
    for place in (CPU, device):
        parts = small_parts(device)
        encoder = parts["encoder"].to(place)
        manage(encoder, device)
        phases, tensors = Phases(parts, device=device), [*encoder.parameters(), *encoder.buffers()]
        assert list(phases.not_moved()) == ["encoder"] and reason in phases.not_moved()["encoder"]
        before = [tensor.device for tensor in tensors]
        phases.start("train")
        with phases.enter(Phase(on_device=("vae",))), phases.lend("encoder"):
            assert "vae" in phases.on_device()
            assert [tensor.device for tensor in tensors] == before
        assert [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())] == before


def test_a_refused_phase_leaves_no_old_values_to_a_later_one(device: torch.device) -> None:
    """Its memory must not be restored later, when the weights have been moved and trained."""
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


# Weights that share their memory with another tensor: parking would separate the two. Mapped files do not count.

FILL = Phase(on_device=())


@pytest.fixture
def sides(device: torch.device) -> tuple[torch.device, torch.device]:
    """The devices of training and of parked parts. A view on the simulated device has its own storage."""
    return (CPU, device) if device.type == "sim" else (device, CPU)


@pytest.mark.parametrize("num", [8, 6])
def test_what_a_flat_buffer_writes_is_in_the_weights_after_a_phase(
    num: int, sides: tuple[torch.device, torch.device]
) -> None:
    """A buffer over a whole layer, as in DeepSpeed ZeRO-1 and 2 and in Apex, or filled by one weight."""
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
        "unet": "weight shares its memory with another tensor, such as an optimizer's flat buffer or a "
        "state_dict that is still held"
    }


def test_weights_of_a_training_are_parked(sides: tuple[torch.device, torch.device]) -> None:
    """Neither pending gradients nor an open phase count as such a tensor."""
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


@pytest.mark.parametrize("in_one_buffer", [False, True])
def test_a_part_that_was_loaded_without_a_copy_is_lent_and_given_back(
    in_one_buffer: bool, tmp_path: Path, device: torch.device
) -> None:
    """The tensors are mapped from the file in order, or views of a buffer, and the caller may still hold them."""
    vae = tiny_parts(1)["vae"]
    safetensors.torch.save_file(vae.state_dict(), tmp_path / "vae.safetensors")
    with init_empty_weights():
        vae = type(vae).from_config(vae.config)
    state = safetensors.torch.load_file(tmp_path / "vae.safetensors")
    if in_one_buffer:
        views = torch.cat([each.flatten() for each in state.values()]).split([each.numel() for each in state.values()])
        state = {name: view.view(state[name].shape) for name, view in zip(state, views, strict=True)}
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


# DistributedDataParallel in one process: a move would drop its hooks.

REASON = "under DistributedDataParallel, whose hooks a move would drop"
GIVEN: dict[str, Callable[[Any], torch.nn.Module]] = {
    "the wrapper": lambda ddp: ddp,
    "the module inside": lambda ddp: ddp.module,
    "a part of the module inside": lambda ddp: ddp.module[0],
    "a module around it": lambda ddp: torch.nn.Sequential(ddp),
}


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, without threads. Skips the test if this torch has no torch.distributed."""
    if not dist.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def counted(ddp: Any) -> list[int]:
    """A list that grows by one for each bucket of gradients that DDP reduces."""
    reduced: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, which are strings here
        reduced.append(bucket.index())
        buffer = bucket.buffer()
        gradients = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        gradients.set_result(buffer)
        return gradients

    ddp.register_comm_hook(None, hook)
    return reduced


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_part_under_ddp_is_not_moved_and_a_cast_is_an_error(
    given: Callable[[Any], torch.nn.Module], device: torch.device
) -> None:
    """A simulated device has no collectives, so there is no initial synchronisation and only one forward under DDP."""
    net, vae = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(device), torch.nn.Linear(3, 3).requires_grad_(False)
    early = Phases({"unet": net}, device=device)
    assert early.not_moved() == {}
    ddp = torch.nn.parallel.DistributedDataParallel(net, init_sync=False)
    assert early.not_moved() == {"unet": REASON}
    net.requires_grad_(False)  # trainers that train parts in turn build phases while a part is frozen
    phases, reduced = Phases({"unet": given(ddp), "vae": vae}, device=device), counted(ddp)
    assert phases.not_moved() == {"unet": REASON}
    net.requires_grad_(True)
    phases.start("train")
    with phases.enter(Phase(on_device=())):
        assert phases.not_moved() == {"unet": REASON} and phases.on_device() == {"unet"}
        with phases.lend("vae"):
            assert phases.on_device() == {"unet", "vae"}
        net.requires_grad_(False)
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


# A full device: the order of moves at both ends of a phase, and parts that stay whole if a move fails

DECODE = Phase(on_device=("vae",))


class Card(TorchDispatchMode):
    """A device with `room` bytes for tensors. `peak` is in bytes too."""

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self.device, self.room, self.peak = device, room, 0

    def used(self) -> int:
        """Bytes of all tensors made in the test, including copies that nothing should hold."""
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.device == self.device}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == self.device:
            needed = self.used() + args[0].nbytes
            if needed > self.room:
                raise torch.OutOfMemoryError("no room on the device")
            self.peak = max(self.peak, needed)
        return func(*args, **(kwargs or {}))


class Net(torch.nn.Sequential):
    """Two tensors of 64 KiB each."""

    SIZE = 1 << 17

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(128, 128, bias=False) for _ in range(2)))

    def places(self) -> set[str]:
        return {parameter.device.type for parameter in self.parameters()}

    def memory(self) -> list[tuple[torch.device, int]]:
        return [(parameter.device, parameter.data_ptr()) for parameter in self.parameters()]


@pytest.fixture
def run(device: torch.device) -> Iterator[SimpleNamespace]:
    """A trained UNet on the device, a parked VAE, and a card with room for one of them."""
    gc.freeze()  # earlier tensors do not count
    run = SimpleNamespace(card=Card(device, Net.SIZE), unet=Net(), vae=Net().requires_grad_(False))
    run.phases = Phases({"unet": run.unet, "vae": run.vae}, device=device)
    with run.card:
        run.phases.start("train")
        yield run
    gc.unfreeze()


def test_a_phase_needs_no_more_room_at_its_end_than_at_its_beginning(run: Any) -> None:
    memory = run.vae.memory()
    with run.phases.enter(DECODE):
        assert run.phases.on_device() == {"vae"}
        with run.phases.enter(Phase(on_device=("unet",))):
            assert run.phases.on_device() == {"unet"}
        assert run.phases.on_device() == {"vae"}
    assert run.phases.on_device() == {"unet"} and run.card.peak == run.card.room
    assert run.vae.memory() == memory


def test_no_room_at_the_end_of_a_phase_leaves_parts_whole_and_place_repairs(run: Any, device: torch.device) -> None:
    values = [parameter.detach().cpu() for parameter in run.unet.parameters()]
    memory = run.vae.memory()
    for parameter in run.unet.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.card.room += Net.SIZE
    no_room = pytest.raises(PhaseError, match=r"no room on the device.*call Phases\.place\(\)")
    with no_room as caught, run.phases.enter(DECODE):
        run.unet.eval()
        run.card.room -= 1
    assert len(caught.value.offenders) == 1 and caught.value.offenders[0].startswith("unet: OutOfMemoryError")
    assert run.unet.places() == run.vae.places() == {"cpu"}
    assert run.unet.training and run.phases.current == "train"
    run.card.room += 1
    run.phases.place()
    assert run.unet.places() == {device.type} and run.vae.memory() == memory
    assert all(torch.equal(p.cpu(), v) for p, v in zip(run.unet.parameters(), values, strict=True))
    assert all(p.grad.device == device and (p.grad.cpu() == 1).all() for p in run.unet.parameters())


def test_no_room_at_the_beginning_of_a_phase_changes_nothing(run: Any, device: torch.device) -> None:
    memory = run.vae.memory()
    run.card.room += Net.SIZE - 1
    with pytest.raises(torch.OutOfMemoryError), run.phases.lend("vae"):
        pytest.fail("the phase began")
    assert run.unet.places() == {device.type} and run.vae.memory() == memory
    assert run.phases.current == "train"
