"""The tiny SDXL with trained weights: they are those that were trained, small enough, and know the photos."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_identities import F32
from safetensors import safe_open

from latentcache.config import BucketsConfig, ImagesConfig, ModelConfig
from latentcache.dataset.buckets import assign, bucket_table, fit
from latentcache.dataset.images import decode, prepare
from latentcache.families.scaling import latents_from_moments
from latentcache.integrations.diffusers import load_scheduler, load_unet
from latentcache.models.files import TINY_PHOTOS_FOLDER
from latentcache.models.model_loader import ModelLoader
from latentcache.models.part_identity import weights_digest
from latentcache.models.tiny import tiny_photos_pipeline
from latentcache.models.vae import decode_latents, encode_images
from latentcache.types import Size

ROOT = Path(__file__).parent.parent.parent
DIGESTS = {
    "vae": "777a244d4261306066df340797e36db71104b2239c36839dd936f2e58604ce36",
    "text_encoder": "754ee2ec18ff9c6c9b3d799e5bb3cef41992bb340cb2bb6462043cf09f87f39c",
    "text_encoder_2": "c591851ef0e275bc03510df4fa6c3b78f57303dba1ffc11ae6d56ae72aa7b466",
    "unet": "30f0e4fbb826aafab7435a316b2faf9fe3f1ea9dbf487a2885ce82844ced3976",
}
"""Of the weights as they are loaded."""
WHEEL_BYTES = 4_000_000


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("quickstart") / "photos"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        import quickstart
    for name in ("quickstart", "bootstrap"):
        sys.modules.pop(name, None)
    quickstart.copy_photos(folder)
    return folder


@pytest.fixture(scope="module")
def squares(photos: Path) -> dict[str, np.ndarray]:
    """Each photo as uint8 [256, 256, 3]."""
    files = [path for path in sorted(photos.iterdir()) if path.suffix != ".txt"]
    return {path.name: square(path) for path in files}


def square(path: Path) -> np.ndarray:
    """A photo, decoded, resized and cropped to 256x256 as precaching does it."""
    pixels = decode(path.read_bytes(), str(path), ImagesConfig(min_side=16))
    size, table = Size(*pixels.shape[:2]), bucket_table(BucketsConfig(area=256 * 256, max_aspect=1.0))
    return prepare(pixels, fit(size, assign(size, table)))


def digest_of(module: torch.nn.Module) -> str:
    """Of all weights: that of a VAE's identity leaves its decoder out."""
    return weights_digest("all weights", module, F32)


def nearest(image: np.ndarray, photos: dict[str, np.ndarray]) -> str:
    """The photo with the least squared error to this image."""
    errors = {name: float(((photo.astype(float) - image) ** 2).mean()) for name, photo in photos.items()}
    return min(errors, key=lambda name: errors[name])


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


def test_photos_come_back_from_the_vae(squares: dict[str, np.ndarray]) -> None:
    vae = ModelLoader("tiny-photos").vae(F32)
    for name, photo in squares.items():
        latents = latents_from_moments(encode_images(vae, photo[None])) * vae.config.scaling_factor
        (found,) = decode_latents(vae, latents)
        assert 10 * np.log10(255**2 / ((found.astype(float) - photo) ** 2).mean()) > 17, name
        assert name.startswith(nearest(found, squares).split("_")[0])  # two photos show one motorcycle


def test_a_caption_gives_its_photo(squares: dict[str, np.ndarray]) -> None:
    pipe = tiny_photos_pipeline()
    settings = {"num_inference_steps": 8, "guidance_scale": 2.0, "output_type": "np"}
    for caption, name in (
        ("a photo of an astronaut", "astronaut.png"),
        ("a cup of coffee on a wooden table", "coffee.png"),
    ):
        made = pipe(caption, **settings, generator=torch.Generator().manual_seed(7))
        assert nearest(made.images[0] * 255, squares) == name


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2"])
def test_weights_have_the_names_of_published_models(part: str) -> None:
    """transformers 5.5, which OneTrainer and ai-toolkit pin, finds no weight of CLIPTextModel by another name."""
    with safe_open(TINY_PHOTOS_FOLDER / part / "model.safetensors", "pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} <= {"text_model", "text_projection"}
