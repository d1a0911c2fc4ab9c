"""The keys of entries are frozen, of masks and control images too: caches that exist must stay valid.

A failing test here means that every cache of SDXL would be encoded again: undo the change, or raise `identity.SCHEMA`
on purpose. A new family or a new field changes none of these constants.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcache.config import BucketsConfig, ImagesConfig
from latentcache.config_file import parse_config
from latentcache.dataset.bucket_rules import assign, bucket_table, fit
from latentcache.dataset.images import preparation_policy
from latentcache.dataset.manifest import Manifest
from latentcache.devices.placement import Placement
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import Scaling
from latentcache.identity import (
    ImageEncoding,
    ImageIdentity,
    PartIdentity,
    Preparation,
    TextEncoding,
    TextIdentity,
    caption_digest,
    digest,
    key_of,
    keys_like,
)
from latentcache.models.model_loader import LoadedModels
from latentcache.models.vae import VaeFacts
from latentcache.precache.encodings import Encodings
from latentcache.precache.plan import make_plan
from latentcache.precache.workspace import Workspace
from latentcache.types import Size


def part(name: str) -> PartIdentity:
    return PartIdentity(name, digest(f"weights of {name}".encode()), digest(f"config of {name}".encode()))


IMAGE = ImageEncoding(
    vae=part("AutoencoderKL"),
    compute_dtype="float32",
    output="moments",
    store_dtype="float32",
    scaling_factor=0.13025,
    shift_factor=None,
)
TEXT = TextEncoding(
    parts=(
        ("text_encoder", part("CLIPTextModel")),
        ("text_encoder_2", part("CLIPTextModelWithProjection")),
        ("tokenizer", part("CLIPTokenizer 1")),
        ("tokenizer_2", part("CLIPTokenizer 2")),
    ),
    compute_dtype="float16",
    store_dtype="float16",
    recipe=(("clip_skip", 0),),
)
WITH_FIRST_FRAME = dataclasses.replace(IMAGE, condition=family_named("wan-i2v").clip_condition)
LANDSCAPE = Size(1000, 1500)
A_RED_HOUSE = "ea688c954a6eb69db960ba6155192f59eaaf67d59235ed4a7a2c88a0165e9b6a"
NO_CAPTION = "45568c8ac282e525202dc55d7833e67794851ac2c940c0bb3cd32ed1657d63c1"
PARTS = [
    "01ec436990c6dab673333a76966e1a358424e7da9af18285746fac134d50b10d",
    "666126faf19103456aaec0a42b636f1e4ad3e98dd5679679ec428fddb07c8887",
    "233e568fa6d90da1643acaf7bafc0794f37fd8fc7ea6942904259cdaf53b26c6",
    "4d277aad00a4ff2328e755cb32c14a11498e2a8e1d24449ba4b71d1988737f47",
    "7b7e5710d240c356192b9c440529778438d6aa5f84d1493aa02a2439e2506be9",
    "8c479a5990623a48734ebbac3f06d23f846601cb212413d8fbd70f44c97947bf",
]
"""Of two control images and a mask, each followed by its mirrored twin."""
ALPHA = [
    "3b436eff659f00c67f1dc8f17d56467680eeb5bfe157199669f065bf44f328fe",
    "5bb26d0accb1fec3d9b5fbbc0e148e9df15da4eecb4edf707cbca0280174a6d2",
]


def preparation(size: Size = LANDSCAPE, flip: bool = False, **images: Any) -> Preparation:
    geometry = fit(size, assign(size, bucket_table(BucketsConfig())), flip=flip)
    return Preparation(**preparation_policy(ImagesConfig(**images)), geometry=geometry)


@pytest.mark.parametrize(
    ("prepared", "encoded", "salt", "key"),
    [
        ({}, {}, "", "f0a94183a97455e139ecaba2ef57593b0e7be1f28a1742d64fe2f6e3261110d5"),
        ({}, {}, "mine", "cb56dee05aa1e0afb7b9f1daa7d158e7abe31c0d6cf0b914901b582c6afbf612"),
        ({"flip": True}, {}, "", "b0862637728403bd507410dfec208ca604f584a21904cf4f0c03f7a312c81c7e"),
        ({"size": Size(144, 80)}, {}, "", "dcaf19a7dbd427890a4d3d8f74870fab33e6ad3fe43646b6ef1cdfa0c93ab5e0"),
        (
            {"alpha_colour": "#00FF00", "min_side": 8},
            {},
            "",
            "3d3c26d05b8cf57dfe1ac8968b6d5ec9d7cca9e04db3c0e12c4ee99b044a61e2",
        ),
        ({}, {"output": "mean"}, "", "29fd17c0556243aeef7637ee26f5513732ce16f5e8c81e1ee244ff290b587335"),
        ({}, {"output": "sample", "seed": 7}, "", "22c542bc0fa9013a9fd4d1446fb9c488d94aae7603c181ad15354f1e3f211a30"),
        (
            {},
            {"store_dtype": "float16", "compute_dtype": "bfloat16"},
            "",
            "5baa92f9a353bec462e75e1ed34369cd7c6931857c16baec16a198344ae594ca",
        ),
    ],
)
def test_image_keys(prepared: dict[str, Any], encoded: dict[str, Any], salt: str, key: str) -> None:
    encoding = dataclasses.replace(IMAGE, **encoded)
    identity = ImageIdentity(digest(b"the bytes of a photo"), preparation(**prepared), encoding, salt)
    assert key_of(identity.to_json()) == key
    assert keys_like(dataclasses.replace(identity, source=""))(identity.source) == key


@pytest.mark.parametrize(
    ("encoding", "fps", "key"),
    [
        (IMAGE, 16.0, "6d05812d41016ed8f7bebad2b92cfb7c3320338f505f5d1294d3355cb4210df7"),
        (IMAGE, None, "11d6ed80b34a8ddb4a54443d5c066ba2af57a5c46a5d475f69bed49f0796b463"),
        (WITH_FIRST_FRAME, 16.0, "4cb8b187231aac31349890a65a1157c4b4cf2ac9b345c0902725b0b4a5587487"),
    ],
)
def test_keys_of_clips(encoding: ImageEncoding, fps: float | None, key: str) -> None:
    geometry = dataclasses.replace(fit(LANDSCAPE, assign(LANDSCAPE, bucket_table(BucketsConfig()))), num_frames=9)
    policy = preparation_policy(ImagesConfig()) | {"fps": fps, "start": "first", "decoder": "pillow-or-pyav"}
    identity = ImageIdentity(digest(b"the bytes of a clip"), Preparation(**policy, geometry=geometry), encoding)
    assert key_of(identity.to_json()) == key


@pytest.mark.parametrize(
    ("caption", "salt", "clip_skip", "key"),
    [
        ("a red house", "", 0, A_RED_HOUSE),
        ("", "", 0, NO_CAPTION),
        ("ein rötes Haus, 猫", "", 0, "06a16c4e59b4e6dc97bdb4636a1257346fd9e28a74f36bff1d6672b0c5258c7e"),
        ("a red house", "", 1, "cb3feb0bfc82bfe7579e669755470e7706fbad6410db1c15332fbb455d9b7d8b"),
        ("a red house", "mine", 0, "5bb749acf3f5590c55decd993841b34be2f7a76ba4e4d36c890d26f2de1d28df"),
    ],
)
def test_text_keys(caption: str, salt: str, clip_skip: int, key: str) -> None:
    encoding = dataclasses.replace(TEXT, recipe=(("clip_skip", clip_skip),))
    assert key_of(TextIdentity(caption_digest(caption), encoding, salt).to_json()) == key
    assert keys_like(TextIdentity("", encoding, salt))(caption_digest(caption)) == key


@pytest.mark.parametrize(
    ("family", "options", "key"),
    [
        *((DEFAULT, {"max_length": length}, A_RED_HOUSE) for length in (None, 75, 77)),
        (DEFAULT, {"max_length": 150}, "d2025bdbf19c7c0b01be29bc946b8e8dac586b598bef6c3b548123604e073473"),
        (DEFAULT, {"max_length": 225}, "72d565e11d92bd989d0c709dd7e4f4ec2e37d5f634acda65e4512cbe7465bab6"),
        ("qwen-image-21", {}, "73cfb223a67f7b0c03c312b224ab6ad367ff36ea7f1c539807eb81db0846f6b7"),
        ("qwen-image-21-edit", {}, "35ac638b4dccf7d2a4db6523cb379e83b38c2b20809e7f948f4d4d5ade5fefd8"),
        ("anima-states", {}, "da62bd047c893242e0da4ca4df71621b31ba874dfffc288bb017f693a5cfdf72"),
        ("anima", {}, "1d33cdd16f80b467df92ec0c4404f6fba530f8f4341a7f6f98999e3d3e3eec14"),
        ("ernie-image", {}, "974ba64e97b4e39401dd2344e162b1f4104cc6c71bfdf2146d5737c841c26c11"),
        ("ideogram4", {}, "4862e6fa671f29d46190bde666ca44ec3d5c34484e283c4edd08389decc63346"),
        ("ideogram4-projected", {}, "5f11274d64ecf7864954c8b08ed466d3a948c12088ab6157dd446b7a2e2bd3d4"),
        ("wan-i2v", {}, "50af852b585736b74b785aafe91a23ff1266f43c151d084156b3fd58d0a869ac"),
    ],
)
def test_text_keys_of_recipes(family: str, options: dict[str, Any], key: str) -> None:
    encoding = dataclasses.replace(TEXT, recipe=tuple(family_named(family).text_recipe(**options).items()))
    assert key_of(TextIdentity(caption_digest("a red house"), encoding).to_json()) == key


def test_the_key_of_a_text_that_is_read_with_a_control_image() -> None:
    control = digest(b"the bytes of a control image"), preparation()
    identity = TextIdentity(caption_digest("make it winter"), TEXT, controls=(control,))
    assert key_of(identity.to_json()) == "984757927686cfc2feb2aec391f67cc49fecd37ea4026b8c055c826de5516634"


def test_the_keys_that_a_plan_gives_control_images_and_masks(tmp_path: Path) -> None:
    for folder in ("photos", "controls", "others", "masks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(png(144, 80))
    dataset = {
        "name": "photos",
        "source": {"path": tmp_path / "photos"},
        "images": {"min_side": 8},
        "control": [{"path": tmp_path / "controls"}, {"path": tmp_path / "others", "area": 64 * 64}],
        "mask": {"path": tmp_path / "masks"},
        "flip": True,
    }
    for changes, keys in (({}, PARTS), ({"control": [], "mask": "alpha"}, ALPHA)):
        [photos] = [each for each in planned({"datasets": [dataset | changes]}) if each.name == "photos"]
        assert [ref.key for ref in photos.rows["a.png"].parts] == keys


def test_the_keys_that_a_plan_gives_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(144, 80))
    (tmp_path / "a.txt").write_text("a red house\n")
    dataset = {"name": "photos", "source": {"path": tmp_path}, "images": {"min_side": 8}, "flip": True}
    validation = {"prompts": ["a red house"], "negative_prompt": ""}
    prompts, photos = planned({"datasets": [dataset], "validation": validation})
    assert prompts.name == "validation-prompts-25a339325724"
    assert {name: [ref.key for ref in row.captions] for name, row in prompts.rows.items()} == {
        "prompt: ": [NO_CAPTION],
        "prompt: a red house": [A_RED_HOUSE],
        "negative prompt: ": [NO_CAPTION],
    }
    row = photos.rows["a.png"]
    assert [ref.key for ref in row.images] == [
        "089f9c659a3119aba120310efd718bb3d3776bef0444e044129ec3b4b868aa70",
        "5855325b279032689d31106fe9dda2b3e6b67a3b092cbff4c0c5441b363f291c",
    ]
    assert [ref.key for ref in row.captions] == [A_RED_HOUSE]


def planned(settings: dict[str, Any]) -> list[Manifest]:
    """The manifests of a plan with these encodings."""
    placement = Placement(torch.device("cpu"), torch.float32, 1, "")
    encodings = Encodings(
        family=family_named(DEFAULT),
        text=TEXT,
        negative=TEXT,
        text_encoders=placement,
        text_bytes=1,
        image=IMAGE,
        vae=placement,
        facts=VaeFacts(Scaling(0.13025), True, 4, 8),
        image_group_size=1,
    )
    return make_plan(parse_config(settings), Workspace(), encodings, LoadedModels()).manifests


def png(height: int, width: int) -> bytes:
    """The same bytes on every machine: not compressed, because compressors differ."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + bytes(7 * value % 256 for value in range(3 * width))) * height
    block = b"\x01" + struct.pack("<HH", len(rows), 0xFFFF ^ len(rows)) + rows
    data = b"\x78\x01" + block + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
