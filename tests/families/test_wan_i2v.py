"""Wan, image to video: the condition of a clip, from the run that caches it to the step that trains on it.

What all families share is in test_families.py, for the models of Wan 2.2. Those of Wan 2.1 also take rows of CLIP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families.test_families import check_first_call, check_training_step
from families.test_family_denoisers import check_sample_images
from helpers.family_references import generator
from helpers.family_runs import NUM_FRAMES, SIDE, TEXTS, FamilyRun, family_config, family_run, loaded_models
from helpers.photo_files import write_clip, write_photo
from helpers.tiny_configs import config_of_dataset
from helpers.tiny_models import tiny_folder, tiny_model, wan_2_1_i2v
from safetensors import safe_open

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ModelConfig
from latentcache.errors import ConfigError, ModelError, SampleError
from latentcache.families import family_named
from latentcache.interop.formats import musubi, webdataset
from latentcache.models.denoiser import load_denoiser
from latentcache.models.model_loader import ModelLoader, Models
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.validation.runner import ValidationRunner
from latentcache.validation.sample_images import PromptPair, prompt_embeddings

pytestmark = pytest.mark.extended

FAMILY = family_named("wan-i2v")
TEXT = TEXTS[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyRun]:
    """With the parts of Wan 2.1."""
    made = family_run(tmp_path_factory.mktemp("wan-2.1"), FAMILY.name, wan_2_1_i2v())
    yield made
    made.cache.close()


def test_what_a_denoiser_gets_and_learns_is_that_of_live_encoding(run: FamilyRun) -> None:
    check_first_call(run)
    check_training_step(run)


@pytest.mark.parametrize("guidance", [0.0, 4.0])
def test_frames_of_a_validation_are_those_of_the_whole_pipeline(run: FamilyRun, guidance: float) -> None:
    check_sample_images(run, guidance)


def test_an_entry_has_the_condition_unscaled_and_the_rows_of_a_picture(run: FamilyRun) -> None:
    entry = run.cache.get(run.rows[TEXT].images[0].key)
    stored = entry.tensors
    assert stored.keys() == {"latents", "condition", "image_embeds"}
    assert torch.equal(run.scaling.apply(stored["condition"][None]), run.live_pictures(TEXT)["condition"])
    # The first latent frames of both are those of one picture; the later ones of the condition are of no grey clip.
    assert torch.equal(stored["condition"][:, 0], stored["latents"][:, 0])
    grey = run.parts["vae"].encode(torch.zeros(1, 3, NUM_FRAMES, SIDE, SIDE)).latent_dist.mode()
    assert (stored["condition"][:, 1] - grey[0, :, 1]).abs().max() > 0.1
    assert entry.record.provenance["models"].keys() == {"vae", "image_encoder", "image_processor"}
    assert entry.record.identity["encoding"]["image_pixels"] == "prepared"


def config_of(folder: Path, **dataset: Any) -> Config:
    given = {"name": "clips", "source": {"path": folder / "clips"}, "frames": {"count": 9, "fps": None}}
    given |= {"buckets": {"area": SIDE**2, "step": 16}, **dataset}
    settings = {"model": {"path": tiny_folder(FAMILY.name)}, "encode": {"device": "cpu"}, "validation": {}}
    return config_of_dataset(folder, settings, **given)


def test_what_gives_one_frame_is_refused(tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    write_clip(clips / "clip.png", 0, (SIDE, SIDE), 7)
    write_clip(clips / "short.png", 1, (SIDE, SIDE), 4)
    write_photo(clips / "still.png", 2, (SIDE, SIDE))
    report = run_precache(config_of(tmp_path))
    refused = {each.sample_id: each.reason for each in report.refused}
    assert refused == {"short.png": "too-short", "still.png": "too-short"}
    assert "wan-i2v trains on clips, but it has 1 frame" in report.refused[0].detail
    with LatentCache(tmp_path / "cache") as cache:
        assert cache.row("clip.png")[1].images[0].geometry.num_frames == 5
    with pytest.raises(ConfigError, match=r"dataset clips has no frames, but models of wan-i2v take clips") as caught:
        run_precache(config_of(tmp_path, frames=None))
    assert caught.value.key == "datasets.frames"


@pytest.mark.parametrize("output", ["mean", "moments"])
def test_a_loader_and_a_dataset_give_the_condition(tmp_path: Path, output: str) -> None:
    """Mirrored too, in two lengths. tests/service and tests/buckets compare what comes from elsewhere."""
    for number in range(4):
        write_clip(tmp_path / f"clips/{number}.png", number, (SIDE, SIDE), 5 if number < 2 else 9)
    config = config_of(tmp_path, flip=True)
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"image_output": output})})
    assert run_precache(config).num_refused == 0
    dataset, seen = LatentDataset(config.cache.path, flips=True), 0
    with LatentCache(config.cache.path) as cache:
        scaling = cache.scaling(cache.manifest("clips"))
        for name, length in (("0.png", 2), ("2.png", 3)):
            plain, scaled, mirrored = (
                cache.batch([name], device="cpu", scaled=scale, flip=flip)["condition"]
                for scale, flip in ((False, False), (True, False), (True, True))
            )
            assert scaled.shape == (1, 16, length, SIDE // 8, SIDE // 8) and not torch.equal(scaled, mirrored)
            assert torch.equal(scaling.apply(plain.float()), scaled)
        with LatentLoader(BucketBatchSampler(dataset, 2, seed=1), device="cpu", scaled=True) as loader:
            for made in loader:
                for name, condition in zip(made["sample_id"], made["condition"], strict=True):
                    wanted = [cache.batch([name], device="cpu", scaled=True, flip=flip) for flip in (False, True)]
                    seen += sum(torch.equal(each["condition"][0], condition) for each in wanted)
        assert seen == 8
        placed = dataset.place(dataset.collate([dataset[0], dataset[1]]), device="cpu", scaled=True)["condition"]
        assert torch.equal(placed, cache.batch(["0.png", "1.png"], device="cpu", scaled=True)["condition"])


def test_musubi_tuner_s_files_have_the_clip_its_first_frame_and_its_rows(run: FamilyRun, tmp_path: Path) -> None:
    """As its cache_io.py and VideoDataset have them: names, the mask before the condition, both scaled."""
    report = musubi.export(run.cache, "photos", tmp_path / "out", dtype=torch.float16)
    assert (report.num_images, report.num_texts, report.skipped) == (3, 3, [])
    assert (tmp_path / "out/1_wan_te.safetensors").is_file()
    with safe_open(tmp_path / "out/1_00000-005_0064x0064_wan.safetensors", "pt") as file:
        assert file.metadata()["architecture"] == "wan" and file.metadata()["frame_count"] == "5"
        found = {key: file.get_tensor(key) for key in file.keys()}
    batch, mask = run.batch([TEXT]), torch.stack([torch.ones(4, 8, 8), torch.zeros(4, 8, 8)], dim=1)
    expected = {
        "latents_2x8x8_float16": batch["latents"][0],
        "latents_image_2x8x8_float16": torch.cat([mask, batch["condition"][0]]),
        "clip_float16": batch["image_embeds"][0],
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value.half()) for key, value in expected.items())
    with pytest.raises(ConfigError, match="wan-i2v"):
        webdataset.export(run.cache, "photos", tmp_path / "shards")


def test_batches_and_denoisers_have_to_fit(run: FamilyRun) -> None:
    noisy, timestep = torch.randn(run.latent_shape(1), generator=generator()), torch.tensor([5e2])
    batch = run.batch([TEXT])
    for name, message in (
        ("condition", "the batch has no condition, the latents of first frames; precache clips as"),
        ("image_embeds", "takes image_embeds of first frames, but the batch has none; precache with a"),
    ):
        with pytest.raises(ModelError, match=message):
            FAMILY.predict(run.denoiser, noisy, timestep, {key: batch[key] for key in batch if key != name})
    own = tiny_model(FAMILY.name)["transformer"]
    without = {key: batch[key] for key in batch if key != "image_embeds"}
    with torch.no_grad():
        plain, given = (FAMILY.predict(own, noisy, timestep, each) for each in (without, batch))
    assert torch.equal(plain, given), "one of 2.2 takes none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"in_channels": 16}, "has in_channels 16, not 36"),
        ({"pos_embed_seq_len": 514, "image_dim": 32, "added_kv_proj_dim": 32}, "has pos_embed_seq_len 514, not None"),
    ],
)
def test_a_denoiser_of_another_kind_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = tiny_model(FAMILY.name)["transformer"]
    type(own).from_config(own.config, **settings).save_pretrained(tmp_path / "transformer")
    model = ModelConfig(path=tiny_folder(FAMILY.name), family=FAMILY.name)
    with pytest.raises(ModelError, match=message):
        load_denoiser(tmp_path / "transformer", dtype=torch.float32, model=model)


# Keys of Wan 2.1


def test_the_parts_that_make_rows_of_a_picture_are_in_the_key(run: FamilyRun, tmp_path: Path) -> None:
    """A folder gives the keys of the parts that were saved in it, and any change of them gives others."""

    def keys(models: Models) -> dict[str, Any]:
        return choose_encodings(run.config, models, {}).image.to_json()

    def keys_with(**changed: Any) -> dict[str, Any]:
        return keys(loaded_models(FAMILY, {**run.parts, **changed}))

    FAMILY.pipeline(**run.parts).save_pretrained(tmp_path / "model")
    expected = keys_with()
    assert keys(ModelLoader(str(tmp_path / "model"), family=FAMILY)) == expected
    assert expected["image_encoder"]["class_name"] == "CLIPVisionModel"
    cache = run.config.cache.model_copy(update={"path": tmp_path / "cache"})
    config = run.config.model_copy(update={"model": ModelConfig(path=str(tmp_path / "model")), "cache": cache})
    assert run_precache(config).num_refused == 0
    with LatentCache(tmp_path / "cache") as cache_of_folder:
        for row in run.rows.values():
            entry, other = cache_of_folder.get(row.images[0].key), run.cache.get(row.images[0].key)
            assert all(torch.equal(entry.tensors[name], other.tensors[name]) for name in other.tensors)
    different = [expected, keys_with(image_encoder=wan_2_1_i2v(seed=1)["image_encoder"])]
    for setting, value in (("crop_size", {"height": 16, "width": 32}), ("resample", 2), ("image_mean", [0.5] * 3)):
        processor = wan_2_1_i2v()["image_processor"]
        setattr(processor, setting, value)
        different.append(keys_with(image_processor=processor))
    without = {name: part for name, part in run.parts.items() if not name.startswith("image_")}
    different.append(keys(loaded_models(FAMILY, without)))
    assert all(one != other for number, one in enumerate(different) for other in different[:number])
    assert "image_encoder" not in different[-1] and "image_pixels" not in different[-1]
    older: Any = type("CLIPVisionModel", (torch.nn.Module,), {})()  # as transformers before 5.6 has it
    older.config, older.vision_model = run.parts["image_encoder"].config, run.parts["image_encoder"]
    assert keys_with(image_encoder=older.requires_grad_(False)) == expected
    with pytest.raises(ModelError, match="the model has image_encoder, but not all of image_encoder, image_processor"):
        keys(loaded_models(FAMILY, {**without, "image_encoder": run.parts["image_encoder"]}))


def test_a_validation_without_the_image_encoder_leaves_its_clips_as_they_are(tmp_path: Path) -> None:
    """A trainer may not have it: then one lost clip is skipped, and the others keep their rows of a picture."""
    changes = {"datasets.0.role": "validation", "validation": {"path": tmp_path / "results", "num_timesteps": 2}}
    parts, config = wan_2_1_i2v(), family_config(tmp_path, changes, with_clips=True)
    run_precache(config, models=loaded_models(FAMILY, parts))
    with LatentCache(config.cache) as cache:
        before = [*cache.manifest("photos").rows.values()]
        cache.store.remove([before[0].images[0].key])
    own = {name: part for name, part in parts.items() if not name.startswith("image_")}
    with LatentCache(config.cache) as cache:
        report = ValidationRunner(own, cache, config).run(1)
        assert report is not None and report.loss is not None and report.num_filled == 0
        assert [each.sample_id for each in report.loss.skipped] == [before[0].sample_id]
        cache.refresh()
        assert [*cache.manifest("photos").rows.values()] == before


def test_a_validation_encodes_a_negative_prompt_beside_a_first_frame(tmp_path: Path) -> None:
    models, config = loaded_models(FAMILY, wan_2_1_i2v()), family_config(tmp_path, {}, with_clips=True)
    run_precache(config, models=models)
    asked: list[PromptPair] = []

    def encode(pairs: Sequence[PromptPair]) -> None:
        asked.extend(pairs)
        with open_workspace(config.cache) as workspace:
            cache_prompts(config, workspace, models, pairs, device="cpu")

    with LatentCache(config.cache) as cache:
        prompt = next(iter(cache.manifest("photos").rows.values())).captions[0].text
        options: dict[str, Any] = {"device": "cpu", "datasets": ["photos"]}
        with pytest.raises(SampleError, match="is not cached"):
            prompt_embeddings(cache, [prompt], "blurry", **options)
        [found] = prompt_embeddings(cache, [prompt], "blurry", encode=encode, **options)
        expected = cache.prompt("blurry", device="cpu", negative=True)
    assert asked == [("blurry", True)]
    assert torch.equal(found.negative["prompt_embeds"], expected["prompt_embeds"])
