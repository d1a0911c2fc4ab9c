"""The tiny SDXL with trained weights: they are those that were trained, and small enough."""

from __future__ import annotations

import pytest
import torch
from model_identities import F32
from safetensors import safe_open

from latentcache.config import ModelConfig
from latentcache.integrations.diffusers import load_scheduler, load_unet
from latentcache.models.files import TINY_PHOTOS_FOLDER
from latentcache.models.model_loader import ModelLoader
from latentcache.models.part_identity import weights_digest
from latentcache.models.tiny import tiny_photos_pipeline

DIGESTS = {
    "vae": "777a244d4261306066df340797e36db71104b2239c36839dd936f2e58604ce36",
    "text_encoder": "754ee2ec18ff9c6c9b3d799e5bb3cef41992bb340cb2bb6462043cf09f87f39c",
    "text_encoder_2": "c591851ef0e275bc03510df4fa6c3b78f57303dba1ffc11ae6d56ae72aa7b466",
    "unet": "30f0e4fbb826aafab7435a316b2faf9fe3f1ea9dbf487a2885ce82844ced3976",
}
"""Of the weights as they are loaded."""
WHEEL_BYTES = 4_000_000


def digest_of(module: torch.nn.Module) -> str:
    """Of all weights: that of a VAE's identity leaves its decoder out."""
    return weights_digest("all weights", module, F32)


def test_the_weights_are_those_that_were_trained() -> None:
    pipe = tiny_photos_pipeline()
    assert {part: digest_of(getattr(pipe, part)) for part in DIGESTS} == DIGESTS


def test_the_name_and_the_folder_are_one_model() -> None:
    named, folder = ModelLoader("tiny-photos"), ModelLoader(str(TINY_PHOTOS_FOLDER))
    for part in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"):
        assert named.identity(part, F32) == folder.identity(part, F32)
        assert named.origin(part) == "tiny-photos"
    assert ModelLoader("tiny", vae="tiny-photos").identity("vae", F32) == named.identity("vae", F32)
    model = ModelConfig(path="tiny-photos")
    unet = load_unet(dtype=F32, model=model)
    assert digest_of(unet) == DIGESTS["unet"]
    assert load_scheduler(model=model).config.prediction_type == "v_prediction"


def test_the_package_stays_small() -> None:
    files = [path for path in TINY_PHOTOS_FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= WHEEL_BYTES


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_weights_have_the_names_of_published_models(part: str) -> None:
    """transformers 5.5, which OneTrainer and ai-toolkit pin, finds no weight of CLIPTextModel by another name."""
    with safe_open(TINY_PHOTOS_FOLDER / part / "model.safetensors", "pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} <= {"text_model", "text_projection"}
