"""Is the simulated device a fair judge? What CUDA accepts passes, what it refuses raises, and the values are right.

The same cases run on a CUDA device where there is one: there they say that the rules written down here are CUDA's.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.models.tiny import tiny_denoiser

CPU = torch.device("cpu")
Device = torch.device

MISMATCH = "on the same device|should be the same|should be either on cpu or on the same device|too many CPU scalars"
"""What CUDA's checks say: the common one, the convolution's, indexing's, TensorIterator's."""


def numbers(*shape: int, on: Device = CPU, seed: int = 0) -> torch.Tensor:
    """The same values on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(on)


def token_ids(on: Device) -> torch.Tensor:
    return torch.tensor([[1, 0, 3]]).to(on)


LEGAL: dict[str, Callable[[Device], torch.Tensor]] = {
    "device vector times CPU scalar": lambda d: numbers(3, on=d) * torch.tensor(2.0),
    "CPU scalar times device vector": lambda d: torch.tensor(2.0) * numbers(3, on=d),
    "CPU scalar times device scalar": lambda d: torch.tensor(2.0) * torch.tensor(3.0).to(d),
    "in-place with CPU scalar": lambda d: numbers(3, on=d).mul_(torch.tensor(2.0)),
    "comparison with CPU scalar": lambda d: (numbers(3, on=d) > torch.tensor(0.0)).float(),
    "where with two CPU scalars": lambda d: torch.where(numbers(3, on=d) > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "masked_fill with CPU scalar": lambda d: numbers(3, on=d).masked_fill(numbers(3, on=d) > 0, torch.tensor(5.0)),
    "CPU indices": lambda d: numbers(4, 2, on=d)[torch.tensor([2, 0])],
    "CPU mask": lambda d: numbers(3, on=d)[torch.tensor([True, False, True])],
    "device indices": lambda d: numbers(4, 2, on=d)[torch.tensor([2, 0]).to(d)],
    "assign CPU scalar by CPU indices": lambda d: numbers(4, on=d).index_put_((torch.tensor([1]),), torch.tensor(9.0)),
    "copy to the device": lambda d: torch.zeros(3, device=d).copy_(numbers(3)),
    "copy to the CPU": lambda d: torch.zeros(3).copy_(numbers(3, on=d)),
    "foreach with CPU scalar": lambda d: torch._foreach_mul([numbers(3, on=d), numbers(2, on=d)], torch.tensor(2.0))[0],
    "foreach, each pair on a device of its own": lambda d: torch._foreach_add(
        [numbers(3), numbers(3, on=d)], [numbers(3), numbers(3, on=d)]
    )[1],
    "foreach copy": lambda d: copied_by_foreach(d),
    "dtype and device at once": lambda d: numbers(3).to(d, torch.float64).float(),
}

ILLEGAL: dict[str, Callable[[Device, Device], object]] = {
    "mm": lambda a, b: torch.mm(numbers(2, 3, on=a), numbers(3, 2, on=b)),
    "bmm": lambda a, b: torch.bmm(numbers(1, 2, 3, on=a), numbers(1, 3, 2, on=b)),
    "matmul out": lambda a, b: torch.mm(numbers(2, 2, on=a), numbers(2, 2, on=a), out=torch.empty(2, 2, device=b)),
    "addmm, bias apart": lambda a, b: torch.addmm(numbers(2, on=a), numbers(2, 3, on=b), numbers(3, 2, on=b)),
    "addmm, mat1 apart": lambda a, b: torch.addmm(numbers(2, on=b), numbers(2, 3, on=a), numbers(3, 2, on=b)),
    "addmm, mat2 apart": lambda a, b: torch.addmm(numbers(2, on=b), numbers(2, 3, on=b), numbers(3, 2, on=a)),
    "linear": lambda a, b: F.linear(numbers(2, 3, on=a), numbers(4, 3, on=b), numbers(4, on=b)),
    "embedding": lambda a, b: F.embedding(token_ids(a), numbers(4, 2, on=b)),
    "conv2d": lambda a, b: F.conv2d(numbers(1, 2, 4, 4, on=a), numbers(3, 2, 3, 3, on=b)),
    "cat": lambda a, b: torch.cat([numbers(2, on=a), numbers(3, on=b)]),
    "stack of scalars": lambda a, b: torch.stack([torch.tensor(1.0).to(a), torch.tensor(2.0).to(b)]),
    "add": lambda a, b: numbers(3, on=a) + numbers(3, on=b),
    "add in place": lambda a, b: numbers(3, on=a).add_(numbers(3, on=b)),
    "broadcast add of one element": lambda a, b: numbers(3, on=a) + numbers(1, on=b),
    "mse_loss": lambda a, b: F.mse_loss(numbers(3, on=a), numbers(3, on=b)),
    "layer_norm": lambda a, b: F.layer_norm(numbers(2, 3, on=a), (3,), numbers(3, on=b), numbers(3, on=b)),
    "group_norm": lambda a, b: F.group_norm(numbers(1, 4, 2, 2, on=a), 2, numbers(4, on=b), numbers(4, on=b)),
    "gather": lambda a, b: torch.gather(numbers(1, 4, on=a), 1, token_ids(b)),
    "index_select": lambda a, b: numbers(4, 2, on=a).index_select(0, token_ids(b)[0]),
    "foreach add": lambda a, b: torch._foreach_add([numbers(3, on=a)], [numbers(3, on=b)]),
    "foreach mul in place": lambda a, b: torch._foreach_mul_([numbers(3, on=a)], [numbers(3, on=b)]),
    "foreach, second pair": lambda a, b: torch._foreach_add(
        [numbers(3, on=a), numbers(3, on=a)], [numbers(3, on=a), numbers(3, on=b)]
    ),
}

ILLEGAL_ONE_WAY: dict[str, Callable[[Device], object]] = {
    "CPU vector times device scalar": lambda d: numbers(3) * torch.tensor(2.0).to(d),
    "device scalar times CPU vector": lambda d: torch.tensor(2.0).to(d) * numbers(3),
    "CPU vector times device scalar in place": lambda d: numbers(3).mul_(torch.tensor(2.0).to(d)),
    "write into a CPU scalar": lambda d: torch.tensor(1.0).add_(torch.tensor(2.0).to(d)),
    "too many CPU scalars": lambda d: torch.addcmul(numbers(3, on=d), torch.tensor(1.0), torch.tensor(2.0)),
    "CPU tensor by device indices": lambda d: numbers(4)[torch.tensor([1]).to(d)],
    "assign a CPU vector": lambda d: numbers(4, on=d).index_put_((torch.tensor([1, 2]),), numbers(2)),
}

VALUES: dict[str, Callable[[Device], torch.Tensor]] = {
    "write through a view": lambda d: written_through_view(d),
    "reductions": lambda d: torch.stack([t(numbers(5, on=d)) for t in (torch.sum, torch.mean, torch.amax, torch.std)]),
    "sort": lambda d: numbers(9, on=d).sort(descending=True).values,
    "bfloat16": lambda d: (numbers(4, on=d).bfloat16() * 3).float(),
    "integers and booleans": lambda d: (torch.arange(10, device=d) % 3 == 1).long().cumsum(0),
    "strides": lambda d: numbers(4, 6, on=d).t()[::2].contiguous(),
    "channels_last": lambda d: F.conv2d(
        numbers(2, 3, 6, 6, on=d).to(memory_format=torch.channels_last), numbers(4, 3, 3, 3, on=d), stride=2
    ),
    "transposed convolution": lambda d: F.conv_transpose2d(numbers(1, 2, 4, 4, on=d), numbers(2, 3, 3, 3, on=d)),
    "attention": lambda d: F.scaled_dot_product_attention(*(numbers(1, 2, 5, 4, on=d, seed=s) for s in range(3))),
    "out that grows": lambda d: torch.mul(numbers(3, on=d), 2.0, out=torch.empty(0, device=d)),
    "empty": lambda d: torch.cat([torch.empty(0, 2, device=d), numbers(1, 2, on=d)]),
    "complex": lambda d: torch.view_as_complex(numbers(3, 2, on=d)).conj().mul(1j).abs(),
    "interpolate": lambda d: F.interpolate(numbers(1, 2, 4, 4, on=d), scale_factor=2.0, mode="nearest"),
}


def copied_by_foreach(device: Device) -> torch.Tensor:
    target = [torch.zeros(3, device=device)]
    torch._foreach_copy_(target, [numbers(3)])
    return target[0]


def written_through_view(device: Device) -> torch.Tensor:
    base = torch.zeros(4, 4, device=device)
    base.view(16)[5:9].add_(1.0)
    base.t()[2].mul_(3.0)
    return base


@pytest.mark.parametrize("case", LEGAL)
def test_legal_mixes_pass_with_the_right_values(case: str, device: Device) -> None:
    torch.testing.assert_close(LEGAL[case](device).cpu(), LEGAL[case](CPU))


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_mixes_raise_in_both_orders(case: str, device: Device) -> None:
    with pytest.raises(RuntimeError, match=MISMATCH):
        ILLEGAL[case](device, CPU)
    with pytest.raises(RuntimeError, match=MISMATCH):
        ILLEGAL[case](CPU, device)
    # The case itself is sound: it is the mix that is refused.
    ILLEGAL[case](device, device)
    ILLEGAL[case](CPU, CPU)


@pytest.mark.parametrize("case", ILLEGAL_ONE_WAY)
def test_the_scalar_rule_is_not_symmetric(case: str, device: Device) -> None:
    with pytest.raises(RuntimeError, match=MISMATCH):
        ILLEGAL_ONE_WAY[case](device)
    if case != "too many CPU scalars":
        ILLEGAL_ONE_WAY[case](CPU)


def test_two_devices_of_one_kind_do_not_mix(device: Device) -> None:
    if torch.get_device_module(device).device_count() < 2:
        pytest.skip(f"there is one {device.type} device")
    with pytest.raises(RuntimeError, match=MISMATCH):
        numbers(3, on=device) + numbers(3, on=torch.device(device.type, 1))


@given(
    shapes=st.tuples(*[st.sampled_from([(), (1,), (3,), (2, 3)])] * 2), places=st.tuples(st.booleans(), st.booleans())
)
@settings(max_examples=60, deadline=None)
def check_add(device: Device, shapes: tuple, places: tuple[bool, bool]) -> None:
    a, b = (torch.ones(shape, device=device if there else CPU) for shape, there in zip(shapes, places, strict=True))
    legal = a.device == b.device or any(t.dim() == 0 and t.device == CPU for t in (a, b))
    try:
        result = a + b
    except RuntimeError:
        assert not legal
        return
    assert legal
    assert result.device == (device if any(places) else CPU)
    assert result.shape == torch.broadcast_shapes(*shapes) and bool((result == 2).all())


def test_addition_of_any_shapes_and_places(device: Device) -> None:
    check_add(device)


@pytest.mark.parametrize("case", VALUES)
def test_values_equal_those_of_the_cpu(case: str, device: Device) -> None:
    result = VALUES[case](device)
    assert result.device == device
    torch.testing.assert_close(result.cpu(), VALUES[case](CPU), rtol=1e-4, atol=1e-5)


def stepped(optimizer_class: type, device: Device, **flags: object) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(numbers(3, 2, on=device))
    optimizer = optimizer_class([parameter], lr=0.1, **flags)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_adamw_steps_as_on_the_cpu(flags: dict[str, bool], device: Device) -> None:
    there, _ = stepped(torch.optim.AdamW, device, **flags)
    here, _ = stepped(torch.optim.AdamW, CPU, **flags)
    torch.testing.assert_close(there.detach().cpu(), here.detach())


@pytest.mark.parametrize("name", ["step", "exp_avg", "exp_avg_sq"])
def test_fused_adamw_refuses_state_on_the_cpu(name: str, device: Device) -> None:
    parameter, optimizer = stepped(torch.optim.AdamW, device, fused=True)
    state = optimizer.state[parameter]
    state[name] = state[name].cpu()
    with pytest.raises(RuntimeError, match=MISMATCH):
        optimizer.step()


def test_plain_adamw_keeps_its_step_on_the_cpu(device: Device, host_syncs: Callable) -> None:
    parameter, optimizer = stepped(torch.optim.AdamW, device)
    state = optimizer.state[parameter]
    assert state["step"].device == CPU and state["exp_avg"].device == device
    with host_syncs() as count:
        optimizer.step()
    assert count.num == 0
    state["step"] = state["step"].to(device)
    with host_syncs() as count:
        optimizer.step()
    assert count.num > 0


@pytest.mark.parametrize("foreach", [True, False])
def test_plain_adamw_refuses_moments_on_the_cpu(foreach: bool, device: Device) -> None:
    parameter, optimizer = stepped(torch.optim.AdamW, device, foreach=foreach)
    optimizer.state[parameter]["exp_avg"] = optimizer.state[parameter]["exp_avg"].cpu()
    with pytest.raises(RuntimeError, match=MISMATCH):
        optimizer.step()


def test_moving_a_module_keeps_its_parameters(device: Device) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2, bias=False))
    tied = torch.nn.Linear(3, 2, bias=False)
    tied.weight = module[2].weight
    module.append(tied)
    before = [*module.parameters()]
    module[:3](numbers(4, 2)).sum().backward()
    module.to(device)
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))
    assert module[3].weight is module[2].weight
    tensors = [*module.parameters(), *module.buffers(), module[0].weight.grad]
    assert {tensor.device for tensor in tensors} == {device}
    module.to("cpu")
    assert all(one is other and one.device == CPU for one, other in zip(before, module.parameters(), strict=True))


def test_data_can_be_set_from_another_device(device: Device) -> None:
    """Offload hooks live on this."""
    parameter = torch.nn.Parameter(numbers(3, on=device))
    values = numbers(3, seed=1)
    parameter.data = values
    assert parameter.device == CPU and parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)
    parameter.data.mul_(2.0)
    assert torch.equal(values, numbers(3, seed=1) * 2)


def test_each_device_has_a_stream_of_random_numbers_of_its_own(device: Device) -> None:
    torch.manual_seed(5)
    first, cpu_first = torch.randn(4, device=device), torch.randn(4)
    torch.manual_seed(5)
    torch.randn(7)  # draws on the CPU leave the device's stream alone
    assert torch.equal(torch.randn(4, device=device), first)
    torch.manual_seed(5)
    torch.rand(9, device=device)
    assert torch.equal(torch.randn(4), cpu_first)
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    drawn = F.dropout(torch.ones(64, device=device), 0.5)
    module.set_rng_state(state, device)
    assert torch.equal(F.dropout(torch.ones(64, device=device), 0.5), drawn)
    with torch.random.fork_rng(devices=[device.index], device_type=device.type):
        torch.randn(3, device=device)
    after = module.get_rng_state(device)
    module.set_rng_state(state, device)
    F.dropout(torch.ones(64, device=device), 0.5)
    assert torch.equal(module.get_rng_state(device), after)


def test_a_generator_of_the_caller_is_used(device: Device) -> None:
    kind = CPU if device.type == "sim" else device
    if kind == CPU:
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1)).to(device)
        assert torch.equal(drawn.cpu(), numbers(3, seed=1))
    else:
        one, other = (torch.randn(3, device=device, generator=torch.Generator(device).manual_seed(1)) for _ in range(2))
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_on_cuda(dtype: torch.dtype, device: Device) -> None:
    linear = torch.nn.Linear(3, 2).to(device)
    inputs = numbers(4, 3, on=device)
    with torch.autocast(device.type, dtype=dtype):
        outputs = linear(inputs)
        loss = F.mse_loss(outputs, torch.zeros_like(outputs))
        assert (outputs.dtype, loss.dtype) == (dtype, torch.float32)
        assert F.softmax(outputs, -1).dtype == torch.float32
        with torch.autocast(device.type, enabled=False):
            assert linear(inputs).dtype == torch.float32
    loss.backward()
    assert linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(outputs.float().detach().cpu(), linear(inputs).detach().cpu(), rtol=0.05, atol=0.05)


def test_grad_scaler_scales_unscales_and_skips_a_step_with_inf(device: Device) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad.tolist() == [8.0, 8.0]
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0] and scaler.get_scale() == 4.0


def test_tensors_are_saved_on_one_device_and_loaded_on_another(device: Device) -> None:
    for source, target in ((device, CPU), (CPU, device), (device, device)):
        file = io.BytesIO()
        torch.save({"values": numbers(2, 3, on=source).t(), "none": torch.empty(0, device=source)}, file)
        file.seek(0)
        loaded = torch.load(file, map_location=target, weights_only=True)
        assert loaded["values"].device == target and loaded["none"].device == target
        assert torch.equal(loaded["values"].cpu(), numbers(2, 3).t())


def test_a_copy_has_memory_of_its_own(device: Device) -> None:
    module = torch.nn.Linear(2, 2).to(device)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        module.weight.zero_()
    assert twin.weight.device == device and bool((twin.weight != 0).any())
    tensor = numbers(2, 3, on=device)
    whole, view = copy.deepcopy({"whole": tensor}), copy.deepcopy(tensor.t()[1])
    tensor.zero_()
    assert whole["whole"].device == view.device == device
    torch.testing.assert_close(whole["whole"].cpu(), numbers(2, 3))
    torch.testing.assert_close(view.cpu(), numbers(2, 3)[:, 1])
    assert copy.deepcopy(torch.empty(0, device=device)).shape == (0,)


def loss_and_gradients(device: Device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward and backward of the tiny SDXL's UNet."""
    unet = tiny_denoiser(1).to(device).train()
    predicted = unet(
        numbers(2, 4, 8, 8, on=device),
        torch.tensor([3, 700]).to(device),
        numbers(2, 77, 72, on=device, seed=1),
        added_cond_kwargs={
            "text_embeds": numbers(2, 40, on=device, seed=2),
            "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2).to(device),
        },
    ).sample
    loss = F.mse_loss(predicted, numbers(2, 4, 8, 8, on=device, seed=3))
    loss.backward()
    return loss.detach().cpu(), {name: p.grad.cpu() for name, p in unet.named_parameters() if p.grad is not None}


def test_tiny_parts_forward_and_backward_equal_those_of_the_cpu(device: Device) -> None:
    loss, gradients = loss_and_gradients(device)
    cpu_loss, cpu_gradients = loss_and_gradients(CPU)
    torch.testing.assert_close(loss, cpu_loss, rtol=1e-4, atol=1e-6)
    assert len(gradients) > 300 and gradients.keys() == cpu_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, cpu_gradients[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
