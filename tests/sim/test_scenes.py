"""Device mismatches that people reported: first plain PyTorch fails, then the audit and the guard name the cause.

test_optimizer_table.py and test_cold_cache.py have three more.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from latentcache.devices.audit import audit
from latentcache.devices.guard import guard
from latentcache.errors import DeviceMismatchError

CPU = torch.device("cpu")
MISMATCH = "Expected all tensors to be on the same device"


# rasbt/LLMs-from-scratch #172, https://github.com/rasbt/LLMs-from-scratch/issues/172


def test_llms_from_scratch_172_a_head_made_after_to(device: torch.device) -> None:
    layers = {"tok_emb": torch.nn.Embedding(16, 4), "out_head": torch.nn.Linear(4, 16)}
    model = torch.nn.Sequential(OrderedDict(layers)).to(device)
    tokens = torch.zeros(2, 5, dtype=torch.long, device=device)
    model.out_head = torch.nn.Linear(4, 2)  # the fine-tuning chapter's new head, made after `.to`
    with pytest.raises(RuntimeError, match=MISMATCH):
        model(tokens)
    assert next(model.parameters()).device == device  # the article's assert passes on the broken model
    errors = audit({"model": model}, device=device).errors
    assert {finding.name for finding in errors} == {"out_head.weight", "out_head.bias"}
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(tokens)
    assert (caught.value.module, caught.value.argument) == ("out_head", "input")
    model.to(device)
    assert audit({"model": model}, device=device).findings == ()
    with guard(model):
        assert model(tokens).device == device


# OpenBMB/MiniCPM-V #246 and deepspeedai/DeepSpeed #5422, https://github.com/deepspeedai/DeepSpeed/issues/5422


def test_minicpm_v_246_an_offloaded_gradient_times_a_scale_on_the_device(device: torch.device) -> None:
    norms = [torch.tensor(3.0, device=device), torch.tensor(4.0, device=device)]
    total_norm = torch.norm(torch.stack(norms))  # DeepSpeed 0.14.1: 0-dim, on the device
    gradient = torch.ones(8)  # of an fp32 partition that ZeRO offloads to the CPU
    with pytest.raises(RuntimeError, match=MISMATCH):
        gradient.mul_(1.0 / total_norm)
    report = audit({"gradient": gradient, "total_norm": total_norm})
    assert [(finding.path, finding.found) for finding in report.errors] == [("total_norm", str(device))]
    # What 0.14.3 does. The rule is not symmetric: a number on the CPU goes with tensors anywhere.
    for where in (CPU, device):
        assert audit({"gradient": gradient.to(where), "total_norm": total_norm.cpu()}, device=where).findings == ()
    gradient.mul_(1.0 / total_norm.cpu())
    assert gradient.tolist() == pytest.approx([0.2] * 8)
