"""Samples of several parts and of several crops: their entries and keys, refusals, and why they are misses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from helpers.photo_files import write_mask, write_photo
from helpers.tiny_configs import config_of_dataset
from helpers.tiny_models import tiny_denoiser, tiny_encoders, tiny_folder
from PIL import Image

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ImagesConfig, ModelConfig
from latentcache.dataset.images import decode, prepare, prepare_mask
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import ConfigError, ModelError, StoreError
from latentcache.families import family_named
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.loading.sampler import Visit, Visits
from latentcache.loading.status import status, verify
from latentcache.models.denoiser import load_denoiser
from latentcache.models.tiny import tiny_part, tiny_parts
from latentcache.models.vae import encode_images
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Size
from latentcache.validation.loss import validation_loss
from latentcache.validation.sample_images import PromptEmbeddings, denoise

SIZE = (80, 144)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Two images with a control image and a mask each. The control image of b is the image of a."""
    write_pair(tmp_path, "a", 0)
    write_pair(tmp_path, "b", 1)
    (tmp_path / "before/b.png").write_bytes((tmp_path / "photos/a.png").read_bytes())
    write_mask(tmp_path / "masks/b.png", 1, (*SIZE, 3))
    return tmp_path


def write_pair(folder: Path, name: str, number: int) -> None:
    write_photo(folder / f"photos/{name}.png", number, SIZE).with_suffix(".txt").write_text(f"photo {name}")
    write_photo(folder / f"before/{name}.png", 7 + number, (40, 72))
    write_white_mask(folder / f"masks/{name}.png", number)


def write_white_mask(path: Path, seed: int) -> None:
    """Greys, and a white square: half of it is masked by either rule."""
    values = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    values[10:40, 20:90] = 255
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(values).save(path)


def config_of(folder: Path, **dataset: Any) -> Config:
    companions = {"control": {"path": folder / "before"}, "mask": {"path": folder / "masks"}}
    return config_of_dataset(folder, {"validation": {}}, **companions | dataset)


def rows_of(config: Config) -> dict[str, Row]:
    with LatentCache(config.cache) as cache:
        return dict(cache.manifest("photos").rows)


def row_of(config: Config, sample_id: str) -> Row:
    return rows_of(config)[sample_id]


def entry_of(config: Config, sample_id: str, name: str, *, flip: bool = False) -> dict[str, torch.Tensor]:
    key = next(ref.key for ref in row_of(config, sample_id).parts_of(flip=flip) if ref.role == name)
    with LatentCache(config.cache) as cache:
        return dict(cache.get(key).tensors)


def test_parts_are_encoded_once_and_a_second_run_encodes_nothing(pairs: Path) -> None:
    config = config_of(pairs)
    dry, first = run_precache(config, dry_run=True), run_precache(config)
    assert first.cache["payload_bytes"] == dry.miss_bytes, "the estimate is the payload"
    # Images, captions and the empty prompt; then controls and masks.
    assert (first.num_samples, first.num_refused, first.num_misses) == (2, 0, 2 + 3 + 2 + 2)
    assert first.misses_by_reason == {"new": 5, "control 1: new": 2, "mask: new": 2}
    assert run_precache(config).num_misses == 0
    found = status(config.cache)
    assert found.store["num_entries"] == {"image": 4, "mask": 2, "text": 3}
    assert (found.num_unused, found.num_lost) == (0, 0) and not verify(config.cache).damaged
    write_photo(pairs / "before/a.png", 8, (40, 72))
    text = explain(config, "a.png").to_text()
    [control] = [line for line in text.splitlines() if "control 1" in line]
    [mask] = [line for line in text.splitlines() if "mask" in line]
    assert "miss: control 1: image changed" in control and "hit" in mask and "(mask, 64x128)" in mask


def test_a_control_image_is_the_mean_of_its_posterior_in_the_bucket_of_its_image(pairs: Path) -> None:
    config = config_of(pairs, flip=True)
    run_precache(config)
    row, images = row_of(config, "b.png"), row_of(config, "a.png").images
    assert [(ref.role, ref.geometry.flip) for ref in row.parts] == [
        *(("control 1", False), ("control 1", True), ("mask", False), ("mask", True))
    ]
    for flip, image in enumerate(images):  # the control image of b is the image of a, whose moments have the same mean
        latents = entry_of(config, "b.png", "control 1", flip=bool(flip))
        assert list(latents) == ["latents"]
        with LatentCache(config.cache) as cache:
            mean = cache.get(image.key).tensors["moments"].chunk(2)[0]
        torch.testing.assert_close(latents["latents"], mean, rtol=0, atol=1e-6)
    control = row_of(config, "a.png").parts[0].geometry
    assert control == dataclasses.replace(images[0].geometry, original_size=Size(40, 72)), "it lies on its image"


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_mask_is_the_mean_of_the_squares_of_pixels(pairs: Path, name: str) -> None:
    config = config_of(pairs, flip=True, control=[])
    run_precache(config)
    geometry = row_of(config, f"{name}.png").parts[0].geometry
    (top, left), (height, width) = geometry.crop_top_left, geometry.target_size
    grey = Image.open(pairs / f"masks/{name}.png").convert("L")
    resized = np.asarray(grey.resize(geometry.resized_size[::-1], Image.Resampling.BOX), np.float32)
    cut = torch.from_numpy(resized[top : top + height, left : left + width].copy())
    expected = torch.nn.functional.interpolate(cut[None, None], (height // 8, width // 8), mode="area")[0]
    mask = entry_of(config, f"{name}.png", "mask")["mask"]
    assert mask.dtype == torch.uint8 and mask.shape == (1, height // 8, width // 8)
    assert (mask.float() - expected).abs().max() <= 0.5 + 1e-3
    assert torch.equal(entry_of(config, f"{name}.png", "mask", flip=True)["mask"], mask.flip(-1))


def test_a_mask_may_be_the_alpha_channel(pairs: Path) -> None:
    alpha = np.random.default_rng(1).integers(0, 256, (80, 144), dtype=np.uint8)
    image = Image.open(pairs / "photos/a.png").convert("RGB")
    image.putalpha(Image.fromarray(alpha))
    image.save(pairs / "photos/a.png")
    config = config_of(pairs, mask="alpha", control=[])
    assert run_precache(config).num_refused == 0
    geometry = row_of(config, "a.png").images[0].geometry
    assert np.array_equal(entry_of(config, "a.png", "mask")["mask"], prepare_mask(alpha, geometry, 8))
    assert (entry_of(config, "b.png", "mask")["mask"] == 255).all(), "an image without alpha counts everywhere"
    # The colour that the image is composited on does not change its alpha.
    again = run_precache(config_of(pairs, mask="alpha", control=[], images={"min_side": 8, "alpha_colour": "#000000"}))
    assert again.num_misses and not any(reason.startswith("mask") for reason in again.misses_by_reason)


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


HARMS: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "gone": ("before", Path.unlink, "missing", "control 1: there is no image gone in"),
    "corrupt control": ("before", corrupt, "corrupt", "control 1: "),
    "corrupt mask": ("masks", corrupt, "corrupt", "mask: "),
    "empty": ("masks", lambda path: path.write_bytes(b""), "empty", "mask: "),
    "square": ("masks", lambda path: write_mask(path, 1, (80, 80)), "other-shape", "mask: it is 80x80, but its "),
}


def test_a_bad_part_refuses_its_sample_by_name_and_nothing_else(pairs: Path) -> None:
    for number, (name, (folder, harm, _, _)) in enumerate(HARMS.items(), 2):
        write_pair(pairs, name, number)
        harm(pairs / folder / f"{name}.png")
    config = config_of(pairs)
    refused = {refusal.sample_id: refusal for refusal in run_precache(config).refused}
    assert refused.keys() == {f"{name}.png" for name in HARMS}
    for name, (folder, _, reason, message) in HARMS.items():
        refusal = refused[f"{name}.png"]
        assert refusal.reason == reason and refusal.detail.startswith(message)
        assert row_of(config, f"{name}.png").refusal == refusal
        if reason not in ("missing", "other-shape"):
            assert Path(refusal.path) == pairs / folder / f"{name}.png"
    assert row_of(config, "a.png").refusal is None and status(config.cache).num_lost == 0


def test_a_damaged_control_image_costs_the_text_of_its_sample_alone(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDXL as a family whose text encoder reads the control images with the text: as words of the caption."""

    def tokenize(family: Any, parts: Any, texts: list[str], images: list[list[np.ndarray]]) -> Any:
        words = [" ".join(f"{each.shape[0]} {int(each.sum())}" for each in group) for group in images]
        return family.tokenize(parts, [f"{text} {more}" for text, more in zip(texts, words, strict=True)])

    monkeypatch.setattr(type(SDXL), "text_reads_control", True)
    monkeypatch.setattr(type(SDXL), "tokenize_with_control", tokenize)
    corrupt(pairs / "before/a.png")
    config = config_of(pairs, role="validation")
    prompts = config.validation.model_copy(update={"prompts": ("photo a",), "path": pairs / "results"})
    report = run_precache(config.model_copy(update={"validation": prompts}))
    # The negative prompt that is read with the same control image is missing too, but is no further sample.
    [refusal] = report.refused
    assert (refusal.sample_id, refusal.reason) == ("a.png", "corrupt") and len(report.failed) == 1
    assert refusal.path == str(pairs / "before/a.png") and refusal.detail.startswith("control 1: it cannot be decoded")
    assert row_of(config, "a.png").refusal == refusal and row_of(config, "b.png").refusal is None


# Masked images, for denoisers that inpaint: their latents, their keys, batches of them, and the loss


SCHEDULER = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def masks_of(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"mask": {"path": f"{folder}/masks", **settings}}


def masked_config(folder: Path, family: str = "sdxl", **dataset: Any) -> Config:
    data = {"role": "validation", "flip": True, **masks_of(folder, inpaint="hard"), **dataset}
    model = {"path": str(tiny_folder(family)), "family": family}
    return config_of_dataset(folder, {"model": model, "validation.num_timesteps": 2}, **data)


def cached(folder: Path, family: str = "sdxl", **dataset: Any) -> Config:
    config = masked_config(folder, family, **dataset)
    assert run_precache(config).num_refused == 0
    return config


def inpainting(family: str = "sdxl") -> Any:
    """A denoiser of 9 channels."""
    torch.manual_seed(0)
    return UNet2DConditionModel.from_config(tiny_denoiser(family).config, in_channels=9).eval().requires_grad_(False)


@pytest.mark.parametrize(("inpaint", "kind"), [("hard", "file"), ("soft", "alpha")])
def test_a_masked_image_is_what_its_trainer_encodes(pairs: Path, inpaint: str, kind: str) -> None:
    values = np.asarray(Image.open(pairs / "masks/a.png"))
    if kind == "alpha":
        image = Image.open(pairs / "photos/a.png").convert("RGB")
        image.putalpha(Image.fromarray(values))
        image.save(pairs / "photos/a.png")
    where = {"alpha": True} if kind == "alpha" else {"path": f"{pairs}/masks"}
    config = cached(pairs, mask={**where, "inpaint": inpaint}, variations=2)
    row, vae = row_of(config, "a.png"), tiny_encoders("sdxl")["vae"]
    pixels = decode((pairs / "photos/a.png").read_bytes(), "a.png", ImagesConfig(min_side=8))
    assert [ref.role for ref in row.parts_of()] == ["mask", "masked image"]
    for crop in range(2):
        for image_ref in (ref for ref in row.images if ref.crop == crop):
            geometry = image_ref.geometry
            part = row.parts_of(crop, flip=geometry.flip)[-1]
            assert part.geometry == geometry
            (top, left), (height, width) = geometry.crop_top_left, geometry.target_size
            mask = Image.fromarray(values).resize(geometry.resized_size[::-1], Image.Resampling.BOX)
            mask = mask.crop((left, top, left + width, top + height))
            if geometry.flip:
                mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            seen = prepare(pixels, geometry)
            if inpaint == "hard":  # diffusers: pipeline_stable_diffusion_xl_inpaint.py
                processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
                binary = processor.preprocess(mask, height=height, width=width)
                given = VaeImageProcessor().preprocess(Image.fromarray(seen)) * (binary < 0.5)
            else:  # OneTrainer: mgds, GenerateMaskedConditioningImage.py
                share = torch.from_numpy(np.asarray(mask, np.float32) / 255)
                scaled = torch.from_numpy(seen.copy()).movedim(-1, 0)[None].float() / 255
                given = (scaled * (1 - share) + 0.5 * share) * 2 - 1
            with torch.no_grad():
                expected = vae.encode(given).latent_dist.mode()[0]
            with LatentCache(config.cache) as cache:
                entry = cache.get(part.key)
            assert list(entry.tensors) == ["latents"]
            torch.testing.assert_close(entry.tensors["latents"], expected, rtol=0, atol=5e-5)
            assert entry.record.identity["masking"]["rule"] == inpaint


def test_a_batch_has_masked_latents_that_are_scaled_as_its_latents_are(pairs: Path) -> None:
    config = cached(pairs)
    dataset = LatentDataset(config.cache, flips=True)
    sampler = BucketBatchSampler(dataset, 2, shuffle=False)
    with LatentCache(config.cache) as cache, LatentLoader(sampler, device="cpu", scaled=True) as loader:
        for number, batch in enumerate(loader):
            flip = number == 1
            keys = [row_of(config, name).parts_of(flip=flip)[-1].key for name in batch["sample_id"]]
            stored = torch.stack([cache.get(key).tensors["latents"] for key in keys])
            scaling = cache.scaling(cache.manifest("photos"))
            assert torch.equal(batch["masked_latents"], scaling.apply(stored))
            assert batch["masked_latents"].shape == batch["latents"].shape == (2, 4, 8, 16)
            assert batch["mask"].shape == (2, 1, 8, 16)
            same = cache.batch(batch["sample_id"], device="cpu", scaled=True, flip=flip)
            assert torch.equal(same["masked_latents"], batch["masked_latents"])
            assert not torch.equal(batch["masked_latents"], batch["latents"])


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
def test_a_denoiser_that_inpaints_is_given_latents_mask_and_masked_latents(pairs: Path, name: str) -> None:
    config, family, unet = cached(pairs, name), family_named(name), inpainting(name)
    folder_of_unet = pairs / "unet-inpainting"
    unet.save_pretrained(folder_of_unet)
    model = ModelConfig(path=str(tiny_folder(name)), family=name)
    loaded = load_denoiser(folder_of_unet, dtype=torch.float32, model=model)
    assert family.inpaints(loaded) and not family.inpaints(tiny_denoiser(name))
    with LatentCache(config.cache) as cache:
        batch = cache.batch(["a.png", "b.png"], device="cpu", scaled=True)
        noisy, timesteps = torch.randn(batch["latents"].shape), torch.tensor([10, 900])
        joined = torch.cat([noisy, batch["mask"] / 255, batch["masked_latents"]], dim=1)  # the order of diffusers
        conditions = family.conditions(loaded, noisy, batch)
        expected = loaded(joined, timesteps, **conditions, return_dict=False)[0]
        assert torch.equal(family.predict(loaded, noisy, timesteps, batch), expected)
        plain = tiny_denoiser(name).eval()
        assert family.predict(plain, noisy, timesteps, batch).shape == noisy.shape, "another one takes latents alone"
        del batch["masked_latents"]
        with pytest.raises(ModelError, match=r"inpaints: its 9 channels .* the batch has none\. Set `inpaint`"):
            family.predict(loaded, noisy, timesteps, batch)
        report = validation_loss(loaded, cache, scheduler=SCHEDULER, settings=config.validation)
        assert set(report.by_sample["photos"]) == {"a.png", "b.png"}


def test_the_validation_loss_depends_on_the_masked_images_and_names_their_lack(pairs: Path) -> None:
    unet, losses = inpainting(), []
    config = cached(pairs, **masks_of(pairs))
    with LatentCache(config.cache) as cache:
        with pytest.raises(ConfigError, match=r"its 9 channels .* photos has none\. Set `inpaint` of the dataset's"):
            validation_loss(unet, cache, scheduler=SCHEDULER, settings=config.validation)
        embeds = cache.prompt("", device="cpu")
    with pytest.raises(ConfigError, match="generates with a mask and a masked image, and prompts have none"):
        denoise(unet, SCHEDULER, [PromptEmbeddings("a cat", "", embeds, embeds)], config.validation)
    added = run_precache(masked_config(pairs), dry_run=True).misses_by_reason
    assert added == {"masked image: new": 4}, "and nothing else is encoded again"
    for inpaint in ("hard", "soft"):
        config = cached(pairs, **masks_of(pairs, inpaint=inpaint))
        with LatentCache(config.cache) as cache:
            losses.append(validation_loss(unet, cache, scheduler=SCHEDULER, settings=config.validation))
    hard, soft = losses
    assert hard.loss != soft.loss
    datasets = [each.measurement_settings.datasets for each in losses]
    assert datasets[0] != datasets[1], "two losses of other masked images are not comparable"


# Further crops of each image: where they lie, what they cost, what they share, and what their keys depend on


SQUARE = {"rule": "diffusers", "resolution": 64}
SIZES = {"wide.png": (80, 144), "high.png": (150, 70), "square.png": (96, 96)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wide image, a high one, and a square one that a square bucket takes whole.

    Each has its mask, a control image that lies on it, and one of other proportions.
    """
    for number, (name, size) in enumerate(SIZES.items()):
        write_photo(tmp_path / "photos" / name, number, size).with_suffix(".txt").write_text(f"photo {number}")
        write_photo(tmp_path / "before" / name, 10 + number, size)
        write_photo(tmp_path / "style" / name, 20 + number, (100, 90))
        write_mask(tmp_path / "masks" / name, number, size)
    return tmp_path


def crops_config(folder: Path, *, parts: bool = False, **dataset: Any) -> Config:
    data = {"buckets": SQUARE, "role": "validation"} | dataset
    if parts:
        data |= {"control": [{"path": folder / "before"}, {"path": folder / "style"}]}
        data |= {"mask": {"path": folder / "masks"}}
    return config_of_dataset(folder, **data)


def of_crop(row: Row, crop: int) -> list[Ref]:
    return [ref for ref in row.images if ref.crop == crop]


def test_further_crops_are_entries_of_their_own_and_the_first_one_stays(folder: Path) -> None:
    plain = crops_config(folder, flip=True, parts=True)
    run_precache(plain)
    before, items = rows_of(plain), LatentDataset(plain.cache, flips=True)
    config = crops_config(folder, flip=True, parts=True, variations=4, variations_seed=5)
    report = run_precache(config)
    # Of two images 3 further crops, mirrored too: the image, its control image and its mask.
    added = {"variation added": 12, "control 1: variation added": 12, "mask: variation added": 12}
    assert report.misses_by_reason == added
    assert run_precache(config).num_misses == 0
    same = LatentDataset(config.cache, flips=True)
    assert (len(same), same.identity()) == (len(items), items.identity()), "crops change no item"
    for name, row in rows_of(config).items():
        assert (len(row.images), {ref.crop for ref in row.images}, len(row.parts)) == (8, {*range(4)}, 24)
        assert of_crop(row, 0) == [*before[name].images], "the first crop is today's, with today's keys"
        assert tuple(ref for ref in row.parts if ref.crop == 0) == before[name].parts
        assert [ref.geometry.flip for ref in row.images] == [False, True] * 4
        assert {ref.geometry.target_size for ref in row.images} == {Size(64, 64)}, "all lie in one bucket"
        keys = {ref.key for ref in row.images}
        assert len(keys) == (2 if name == "square.png" else 8), "without a margin there is one crop"
        for crop in range(4):
            plain_ref, mirrored = of_crop(row, crop)
            for flip, ref in ((False, plain_ref), (True, mirrored)):
                parts = {ref.role: ref for ref in row.parts_of(crop, flip=flip)}
                assert list(parts) == ["control 1", "control 2", "mask"]
                assert parts["control 1"].geometry == parts["mask"].geometry == ref.geometry, "they lie on the image"
        assert len({ref.key for ref in row.parts if ref.role == "control 2"}) == 2, "it moves with no crop"
    found = status(config.cache).store["num_entries"]
    assert found["mask"] == 2 * 8 + 2 and found["image"] == 2 * found["mask"] + 3 * 2


@pytest.mark.parametrize(
    "buckets", [{"area": 64 * 64, "step": 64}, {"rule": "kohya", "resolution": 64, "square": True}, SQUARE]
)
def test_what_is_encoded_is_the_crop_and_its_mirror_image(folder: Path, buckets: dict[str, Any]) -> None:
    """Of every rule the time ids of a mirrored crop are those of what is seen."""
    config = crops_config(folder, buckets=buckets, flip=True, variations=3, mask={"path": folder / "masks"})
    run_precache(config)
    vae, row = tiny_parts()["vae"], rows_of(config)["wide.png"]
    path = folder / "photos/wide.png"
    pixels = decode(path.read_bytes(), "wide.png", ImagesConfig(min_side=8))
    values = np.asarray(Image.open(folder / "masks/wide.png"))
    with LatentCache(config.cache) as cache:
        for crop in (1, 2):
            upright, mirrored = (ref.geometry for ref in of_crop(row, crop))
            spare = upright.resized_size.width - 64
            assert 0 <= upright.crop_top_left.left <= spare and spare > 20
            assert mirrored.seen_crop == Crop(upright.crop_top_left.top, spare - upright.crop_top_left.left)
            for flip, ref in enumerate(of_crop(row, crop)):
                entry = cache.get(ref.key)
                seen = prepare(pixels, upright, entry.record.identity["preparation"]["resample"])
                seen = seen[:, ::-1] if flip else seen
                moments = encode_images(vae, np.ascontiguousarray(seen)[None])[0]
                torch.testing.assert_close(entry.tensors["moments"], moments, rtol=0, atol=1e-5)
                [part] = row.parts_of(crop, flip=bool(flip))
                mask = cache.get(part.key).tensors["mask"].numpy()
                expected = prepare_mask(values, upright, 8)
                assert np.array_equal(mask, expected[..., ::-1] if flip else expected)


def test_a_crop_depends_on_the_seed_the_image_and_its_number_alone(folder: Path) -> None:
    config = crops_config(folder, variations=2)
    run_precache(config)
    first = rows_of(config)

    def sampler() -> BucketBatchSampler:
        return BucketBatchSampler(LatentDataset(config.cache, crops="random"), 1)

    state = sampler().state_dict()
    more = crops_config(folder, variations=3)
    assert run_precache(more, dry_run=True).misses_by_reason == {"variation added": 2}
    run_precache(more)
    with pytest.raises(StoreError, match=r"crops \('random of 2' there, 'random of 3' here\)"):
        sampler().load_state_dict(state)  # the rest of the epoch would draw others
    for name, row in rows_of(more).items():
        assert row.images[:2] == first[name].images, "more variations keep those that there are"
    mirrored = run_precache(crops_config(folder, variations=3, flip=True), dry_run=True)
    assert mirrored.misses_by_reason == {"flip added": 2 * 3 + 1}
    other = run_precache(crops_config(folder, variations=3, variations_seed=1), dry_run=True)
    assert sum(other.misses_by_reason.values()) >= 3, "by chance one may lie where another one did"
    assert all(reason.startswith("crop changed (") for reason in other.misses_by_reason)
    (folder / "photos/wide.png").rename(folder / "photos/renamed.png")
    (folder / "photos/wide.txt").rename(folder / "photos/renamed.txt")
    assert run_precache(more, dry_run=True).num_misses == 0
    write_photo(folder / "photos/high.png", 77, SIZES["high.png"])
    assert run_precache(more, dry_run=True).misses_by_reason == {"image changed": 3}


def test_a_crop_may_lie_at_either_edge_and_not_beyond(tmp_path: Path) -> None:
    write_photo(tmp_path / "photos/narrow.png", 1, (64, 66))
    config = crops_config(tmp_path, variations=32)
    run_precache(config)
    assert {ref.geometry.crop_top_left for ref in rows_of(config)["narrow.png"].images} == {(0, 0), (0, 1), (0, 2)}


def test_the_plan_the_loss_and_explain_know_which_crop_is_meant(folder: Path) -> None:
    run_precache(crops_config(folder))

    def loss() -> Any:
        with LatentCache(crops_config(folder).cache) as cache:
            torch.manual_seed(0)
            return validation_loss(tiny_denoiser("sdxl").eval(), cache, scheduler=tiny_part("scheduler"))

    before = loss()
    config = crops_config(folder, variations=3)
    report = run_precache(config)
    assert report.notes == ["photos: 3 crops of each image add 4 entries to 3"] and report.num_encoded == 4
    assert not run_precache(crops_config(folder), dry_run=True).notes
    after = loss()
    assert before.loss == after.loss and before.measurement_settings == after.measurement_settings
    crops = [ref.geometry.crop_top_left for ref in rows_of(config)["wide.png"].images]
    text = explain(config, "wide.png").to_text()
    assert all(f"at {crop.top},{crop.left})" in text for crop in crops) and len(set(crops)) == 3


@pytest.fixture(scope="module")
def five_wide(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Five wide images in one bucket with three crops each, mirrored too; and the same images with one."""
    folder = tmp_path_factory.mktemp("crops")
    for number in range(5):
        for write, kind in ((write_photo, "photos"), (write_mask, "masks")):
            write(folder / f"{kind}/{number}.png", number, (64, 140 + 8 * number))
    masks = {"path": folder / "masks"}
    config = crops_config(folder, flip=True, variations=3, mask=masks)
    one = type(config.datasets[0])(**config.datasets[0].model_dump() | {"name": "one", "variations": 1})
    config = config.model_copy(update={"datasets": (*config.datasets, one)})
    run_precache(config)
    return config


def test_each_visit_draws_a_crop_with_its_mask_and_time_ids(five_wide: Config) -> None:
    dataset = LatentDataset(five_wide.cache, "photos", crops="random", flips="random")
    plain = LatentDataset(five_wide.cache, "photos")
    assert (len(dataset), dataset.identity()) == (len(plain), plain.identity()) and len(plain) == 5
    sampler = BucketBatchSampler(dataset, 2, seed=3)
    rows, seen = rows_of(five_wide), set()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for visits in sampler:
            for visit, item in zip(visits, dataset.__getitems__(visits), strict=True):
                rest, flip = divmod(visit.draw, 2)
                row = rows[item["sample_id"]]
                image = of_crop(row, rest % 3)[flip]
                seen.add((item["sample_id"], rest % 3, flip))
                assert tuple(item["crop_top_left"].tolist()) == image.geometry.seen_crop
                assert item["add_time_ids"][2:4].tolist() == [*image.geometry.seen_crop]
                assert torch.equal(item["moments"], dataset.cache.get(image.key).tensors["moments"])
                [part] = row.parts_of(rest % 3, flip=bool(flip))
                assert torch.equal(item["mask"], dataset.cache.get(part.key).tensors["mask"])
    assert len(seen) > 24, "of 30: each crop of each image, on either side"
    first = plain.__getitems__([*range(5)])
    assert [tuple(item["crop_top_left"].tolist()) for item in first] == [
        rows[item["sample_id"]].images[0].geometry.crop_top_left for item in first
    ]


def test_datasets_of_several_crops_and_of_one_are_read_together(five_wide: Config) -> None:
    dataset = LatentDataset(five_wide.cache, ["photos", "one"], crops="random")
    assert dataset.groups().tolist()[:5] == dataset.groups().tolist()[5:], "samples of both share a batch"
    with LatentCache(five_wide.cache) as cache:
        ones = {ref.key for row in cache.manifest("one").rows.values() for ref in row.images}
    refs = dataset.refs(Visits.of([Visit.of(item, draw, 0, 1) for item in range(10) for draw in range(6)]))
    assert all(ref.keys[0] in ones for ref in refs[30:]) and not all(ref.keys[0] in ones for ref in refs[:30])
    with pytest.raises(StoreError, match="each image of one has one crop: set `variations` of the dataset, then run"):
        LatentDataset(five_wide.cache, "one", crops="random")
    with pytest.raises(StoreError, match="crops is 'all'; it must be one of first, random"):
        LatentDataset(five_wide.cache, "photos", crops="all")  # type: ignore[arg-type]
