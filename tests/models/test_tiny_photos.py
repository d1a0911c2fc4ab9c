"""The tiny SDXL with trained weights: they are those that were trained, and small enough."""

from __future__ import annotations

import torch
from safetensors import safe_open
from same_models import F32

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
"""Of all weights as they are loaded: the digest of a VAE's identity leaves its decoder out."""


def digest_of(module: torch.nn.Module) -> str:
    return weights_digest("all weights", module, F32)


def test_the_weights_are_those_that_were_trained() -> None:
    pipe = tiny_photos_pipeline()
    assert {part: digest_of(getattr(pipe, part)) for part in DIGESTS} == DIGESTS
    files = [path for path in TINY_PHOTOS_FOLDER.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 4_000_000, "the package stays small"
    # transformers 5.5, which OneTrainer and ai-toolkit pin, finds no weight of CLIPTextModel by another name.
    for part in ("text_encoder", "text_encoder_2"):
        with safe_open(TINY_PHOTOS_FOLDER / part / "model.safetensors", "pt") as file:
            assert {name.partition(".")[0] for name in file.keys()} <= {"text_model", "text_projection"}


def test_the_name_and_the_folder_are_one_model() -> None:
    named, folder = ModelLoader("tiny-photos"), ModelLoader(str(TINY_PHOTOS_FOLDER))
    for part in named.family.parts:
        assert named.identity(part, F32) == folder.identity(part, F32)
        assert named.origin(part) == "tiny-photos"
    assert ModelLoader("tiny", vae="tiny-photos").identity("vae", F32) == named.identity("vae", F32)
    model = ModelConfig(path="tiny-photos")
    assert digest_of(load_unet(dtype=F32, model=model)) == DIGESTS["unet"]
    assert load_scheduler(model=model).config.prediction_type == "v_prediction"
