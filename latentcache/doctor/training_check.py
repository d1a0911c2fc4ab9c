"""Check of the device: one training step of a tiny denoiser, and an audit of every tensor involved."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, cast

import torch

from latentcache.devices.audit import audit
from latentcache.doctor.diagnosis import Diagnosis, Finding
from latentcache.families import DEFAULT, family_named
from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.types import Crop, Geometry, Size

BATCH_SIZE, LATENT_SIDE = 2, 8
SUBJECT = "training check"


def try_training(device: torch.device) -> Diagnosis:
    """Run forward, backward and an AdamW step on `device` in float32. The fact `training` holds loss and audit.

    A step that fails is an error finding with torch's message. Global random states do not change.
    """
    generator = torch.Generator().manual_seed(0)
    unet = cast(Any, tiny_denoiser()).train()  # mypy does not know that diffusers' models are modules
    batch = training_batch(generator)
    target = torch.randn(batch["sample"].shape, generator=generator)
    try:
        unet.to(device)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
        before = torch.nn.utils.parameters_to_vector(unet.parameters()).detach().clone()
        prediction = family_named(DEFAULT).predict(unet, batch["sample"], batch["timestep"], batch)
        loss = torch.nn.functional.mse_loss(prediction, target.to(device))
        loss.backward()
        optimizer.step()
        moved = torch.nn.utils.parameters_to_vector(unet.parameters()).detach().sub(before).abs().max().item()
    except RuntimeError as error:
        # Out of memory, a missing kernel, tensors on two devices: this check exists to find these.
        finding = Finding("error", SUBJECT, f"the step failed on {device}: {error}", "fix the cause in the message")
        return Diagnosis((finding,), {"training": {"device": str(device), "error": str(error)}})
    parts = {"unet": unet, "optimizer": optimizer, "batch": batch}
    report = audit(parts, device=device, training={"unet": True})
    findings = [
        Finding(found.level, f"{SUBJECT}: {found.part}", found.to_text(), "see docs/howto/devices-disagree.md")
        for found in report.findings
    ]
    loss_value = loss.item()
    if not (math.isfinite(loss_value) and 0 < moved < math.inf):
        found = f"on {device}: loss {loss_value}, largest weight change {moved}: the result is invalid"
        remedy = "run the check on cpu; if it passes there, update or reinstall the driver"
        findings.append(Finding("error", SUBJECT, found, remedy))
    if report.ok and not findings:
        text = f"one step on {device}: loss {loss_value:.4f}; {report.num_tensors} tensors audited, none misplaced"
        findings.append(Finding("ok", SUBJECT, text))
    facts = {"device": str(device), "loss": loss_value if math.isfinite(loss_value) else None}
    return Diagnosis(tuple(findings), {"training": {**facts, "audit": asdict(report)}})


def training_batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random inputs of the tiny denoiser, on the CPU: latents [B, C, h, w], embeddings, sizes of an uncropped image."""
    family = family_named(DEFAULT)
    channels, size = family.latent.channels, Size(*(LATENT_SIDE * family.latent.downscale,) * 2)
    sizes = family.size_conditions(Geometry(size, size, Crop(0, 0), size))
    shapes = family.text_shapes(tiny_parts(), family.text_recipe())
    return {
        "sample": torch.randn(BATCH_SIZE, channels, LATENT_SIDE, LATENT_SIDE, generator=generator),
        "timestep": torch.randint(0, 1000, (BATCH_SIZE,), generator=generator),
        **{name: torch.randn(BATCH_SIZE, *shape, generator=generator) for name, shape in shapes.items()},
        "add_time_ids": torch.tensor([sizes] * BATCH_SIZE, dtype=torch.float32),
    }
