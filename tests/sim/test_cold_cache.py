"""OneTrainer #459, https://github.com/Nerogar/OneTrainer/issues/459: validation with a cold cache parks the model.

The cache fill moved every part away and only the encoder that it needed back. Where the cache was warm nothing moved,
so only the first validation failed: in the embedding of the text encoder, which is trained and gets tokens each step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.phase_runs import assert_as_without, fill, predict
from helpers.phase_training import Training

from latentcache.config import Config
from latentcache.devices.audit import AuditReport, audit
from latentcache.devices.placement import placed
from latentcache.errors import TrainableEncoderError
from latentcache.models.model_loader import LoadedModels
from latentcache.models.vae import encode_images
from latentcache.precache.run import run_precache

CPU = torch.device("cpu")


def audited(training: Training) -> AuditReport:
    """The placement that training needs: trained parts on the device in train mode, frozen ones parked."""
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
        predict(training)
    report = audited(training)
    assert {"text_encoder", "unet", "vae"} == {f.part for f in report.errors if f.kind in ("parameter", "buffer")}
    assert "text_encoder.embeddings.token_embedding.weight" in {finding.path for finding in report.errors}
    assert {"unet", "text_encoder"} == {finding.part for finding in report.errors if finding.kind == "mode"}


def encode_one(training: Training) -> None:
    """Only the encoder moves, and it is put back also after an error."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    with placed(training.parts["vae"], training.device) as vae:
        encode_images(vae, pixels)
    audited(training).raise_for_errors()


@pytest.fixture
def precache(make_config: Callable[..., Config], device: torch.device) -> Callable[[Training], None]:
    """A whole cold fill with the parts that are being trained with."""
    config = make_config(
        **{"encode.device": str(device), "encode.vae_dtype": "float32", "encode.text_dtype": "float32"}
    )

    def precache(training: Training) -> None:
        names = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
        report = run_precache(config, models=LoadedModels(**{name: training.parts[name] for name in names}))
        assert report.num_encoded > 0 and report.num_refused == 0

    return precache


def test_a_fill_in_the_middle_of_training_changes_nothing(
    precache: Callable[[Training], None], device: torch.device
) -> None:
    assert_as_without(encode_one, device, "text-encoder")
    assert_as_without(precache, device, "plain")


def test_a_text_encoder_that_is_trained_is_refused_and_stays_in_place(
    precache: Callable[[Training], None], device: torch.device
) -> None:
    training = Training(device, "text-encoder")
    training.step()
    with pytest.raises(TrainableEncoderError):
        precache(training)
    assert audited(training).findings == ()
    training.step()
