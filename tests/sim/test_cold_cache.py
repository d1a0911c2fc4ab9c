"""OneTrainer #459, https://github.com/Nerogar/OneTrainer/issues/459: validation with a cold cache parks the model.

Filling the cache moved every part away, and only the encoder that it needed back. With a warm cache nothing moved, so
only the first validation failed, in the embedding of the text encoder, which is trained and gets tokens at each step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.phase_runs import assert_as_without, fill, forward
from helpers.phase_training import Training

from latentcache.config import Config
from latentcache.devices.audit import AuditReport, audit
from latentcache.errors import TrainableEncoderError
from latentcache.models.model_loader import LoadedModels
from latentcache.precache.run import run_precache

CPU = torch.device("cpu")


def audited(training: Training) -> AuditReport:
    """Audit the placement that training needs: trained parts on the device in train mode, frozen ones parked."""
    trained = ("unet", "text_encoder")
    return audit(
        training.modules() | {"optimizer": training.optimizer},
        device={name: training.device if name in trained else CPU for name in training.modules()},
        training={name: name in trained for name in training.modules()},
    )


def test_onetrainer_459_validation_fails_when_the_cache_is_cold(device: torch.device) -> None:
    training = Training(device, "text-encoder")
    training.step()
    assert audited(training).findings == ()
    message = r"Expected all tensors to be on the same device.*index_select"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        fill(training)
        forward(training)
    report = audited(training)
    assert {"text_encoder", "unet", "vae"} == {f.part for f in report.errors if f.kind in ("parameter", "buffer")}
    assert "text_encoder.embeddings.token_embedding.weight" in {finding.path for finding in report.errors}
    assert {"unet", "text_encoder"} == {finding.part for finding in report.errors if finding.kind == "mode"}


@pytest.mark.usefixtures("deterministic")
def test_a_fill_in_the_middle_of_training_changes_nothing(
    make_config: Callable[..., Config], device: torch.device
) -> None:
    """A whole cold fill with the parts of the training. A text encoder that is being trained is refused."""
    types = {"encode.vae_dtype": "float32", "encode.text_dtype": "float32"}
    config = make_config(**{"encode.device": str(device), **types})

    def precache(training: Training) -> None:
        names = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        report = run_precache(config, models=LoadedModels(**{name: training.parts[name] for name in names}))
        assert report.num_encoded > 0 and report.num_refused == 0

    assert_as_without(precache, device, "plain")
    training = Training(device, "text-encoder")
    training.step()
    with pytest.raises(TrainableEncoderError):
        precache(training)
    assert audited(training).findings == ()
