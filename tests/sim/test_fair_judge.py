"""Is the simulated device a fair judge? What CUDA accepts passes, what it refuses raises, and the values are right.

The same cases run on a CUDA device where there is one: there they say that the rules written down here are CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

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
    "CPU scalar times device scalar": lambda d: torch.tensor(2.0) * torch.tensor(3.0).to(d),
    "where with two CPU scalars": lambda d: torch.where(numbers(3, on=d) > 0, torch.tensor(1.0), torch.tensor(-1.0)),
    "masked_fill with CPU scalar": lambda d: numbers(3, on=d).masked_fill(numbers(3, on=d) > 0, torch.tensor(5.0)),
    "CPU indices": lambda d: numbers(4, 2, on=d)[torch.tensor([2, 0])],
    "device indices": lambda d: numbers(4, 2, on=d)[torch.tensor([2, 0]).to(d)],
    "assign CPU scalar by CPU indices": lambda d: numbers(4, on=d).index_put_((torch.tensor([1]),), torch.tensor(9.0)),
    "copy to the device": lambda d: torch.zeros(3, device=d).copy_(numbers(3)),
    "foreach with CPU scalar": lambda d: torch._foreach_mul([numbers(3, on=d), numbers(2, on=d)], torch.tensor(2.0))[0],
    "foreach, each pair on a device of its own": lambda d: torch._foreach_add(
        [numbers(3), numbers(3, on=d)], [numbers(3), numbers(3, on=d)]
    )[1],
    "foreach copy": lambda d: copied_by_foreach(d),
    "dtype and device at once": lambda d: numbers(3).to(d, torch.float64).float(),
}

ILLEGAL: dict[str, Callable[[Device, Device], object]] = {
    "mm": lambda a, b: torch.mm(numbers(2, 3, on=a), numbers(3, 2, on=b)),
    "addmm, bias apart": lambda a, b: torch.addmm(numbers(2, on=a), numbers(2, 3, on=b), numbers(3, 2, on=b)),
    "linear": lambda a, b: F.linear(numbers(2, 3, on=a), numbers(4, 3, on=b), numbers(4, on=b)),
    "embedding": lambda a, b: F.embedding(token_ids(a), numbers(4, 2, on=b)),
    "conv2d": lambda a, b: F.conv2d(numbers(1, 2, 4, 4, on=a), numbers(3, 2, 3, 3, on=b)),
    "cat": lambda a, b: torch.cat([numbers(2, on=a), numbers(3, on=b)]),
    "add": lambda a, b: numbers(3, on=a) + numbers(3, on=b),
    "mse_loss": lambda a, b: F.mse_loss(numbers(3, on=a), numbers(3, on=b)),
    "layer_norm": lambda a, b: F.layer_norm(numbers(2, 3, on=a), (3,), numbers(3, on=b), numbers(3, on=b)),
    "index_select": lambda a, b: numbers(4, 2, on=a).index_select(0, token_ids(b)[0]),
    "foreach add": lambda a, b: torch._foreach_add([numbers(3, on=a)], [numbers(3, on=b)]),
    "foreach, second pair": lambda a, b: torch._foreach_add(
        [numbers(3, on=a), numbers(3, on=a)], [numbers(3, on=a), numbers(3, on=b)]
    ),
}


def copied_by_foreach(device: Device) -> torch.Tensor:
    target = [torch.zeros(3, device=device)]
    torch._foreach_copy_(target, [numbers(3)])
    return target[0]


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


def test_two_devices_of_one_kind_do_not_mix(device: Device) -> None:
    if torch.get_device_module(device).device_count() < 2:
        pytest.skip(f"there is one {device.type} device")
    with pytest.raises(RuntimeError, match=MISMATCH):
        numbers(3, on=device) + numbers(3, on=torch.device(device.type, 1))


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
