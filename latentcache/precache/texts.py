"""Text entries: the encoders brought to their device for a while, and what is stored of their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from latentcache.devices.placement import Placement, placed
from latentcache.encoders.models import Models, TextParts
from latentcache.encoders.vae import DTYPES, problems
from latentcache.precache.encodings import TextEncodings
from latentcache.precache.faults import Fault
from latentcache.precache.plan import TextTask
from latentcache.provenance import Provenance
from latentcache.types import Entry, Record


@contextmanager
def placed_texts(models: Models, placement: Placement) -> Iterator[TextParts]:
    """Both text encoders on the placement's device, in its dtype; they go home whatever happens."""
    parts = models.text(placement.dtype)
    with placed(parts.text_encoder, placement.device), placed(parts.text_encoder_2, placement.device):
        yield parts


def text_entries(
    tasks: Sequence[TextTask],
    outputs: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    encodings: TextEncodings,
    models: Models,
) -> Iterator[tuple[TextTask, Entry | Fault]]:
    """What is stored of a batch's outputs, or why it cannot be. `lengths` are the captions' numbers of tokens."""
    dtype = DTYPES[encodings.text.store_dtype]
    tensors = {name: tensor.to(dtype) for name, tensor in outputs.items()}
    faults = list(zip(*(problems(tensor) for tensor in tensors.values()), strict=True))
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    for number, task in enumerate(tasks):
        fault = next((fault for fault in faults[number] if fault), None)
        if fault is not None:
            yield task, Fault("bad-output", f"the text encoders gave {fault} for caption {task.caption!r}")
            continue
        provenance = Provenance(
            sample_id=task.sample_id,
            source_path=task.path,
            models={part: models.origin(part) for part in ("text_encoder", "text_encoder_2")},
            device=str(encodings.text_encoders.device),
            computed_dtype=encodings.text.compute_dtype,
            num_tokens=lengths[number],
        )
        record = Record(task.key, "text", task.identity.to_json(), provenance.to_json())
        yield task, Entry(record, {name: tensor[number] for name, tensor in tensors.items()})
