"""The images and captions that a foreign cache was made from: found by name, never opened on its word."""

from __future__ import annotations

import os

import pytest
from helpers.photo_files import write_photo

from latentcache.errors import DatasetError, ImageRefused
from latentcache.interop.readers import SourceImages


def test_captions_lead_to_their_samples(photos):
    images = SourceImages(photos, captions=["a prompt", "a tree"])
    assert dict(images.captions()) == {
        "": ("d.png",),
        "a prompt": (),
        "a tree": ("sub/e.png",),
        "a red house": ("a.png",),
        "a house in the rain": ("a.png",),
        "a blue car": ("b.png", "c.png"),
    }
    assert images.captions_of("a.png") == ("a red house", "a house in the rain")


def test_sizes_are_those_after_the_exif_turn(tmp_path):
    turned = write_photo(
        tmp_path / "turned.jpg",
        0,
        (40, 60),
        exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0",
    )
    images = SourceImages(tmp_path)
    assert images.size("turned.jpg") == (60, 40) and images.path("turned.jpg") == turned
    assert "none.jpg" not in images
    turned.write_bytes(b"no image")
    with pytest.raises(ImageRefused, match="not-an-image"):
        images.size("turned.jpg")


def test_recorded_paths_are_looked_up_below_the_folder_or_the_recorded_root(photos):
    images = SourceImages(photos, recorded_root="/workspace/set")
    for recorded in ("sub/e.png", f"{photos}/sub/e.png", "/workspace/set/sub/e.png"):
        assert images.find(recorded) == "sub/e.png"
    for recorded in ("/e.png", "/other/sub/e.png", "/workspace/set/e.png", f"{photos}/../photos/sub/e.png", "", "/"):
        assert images.find(recorded) is None
    assert SourceImages(photos, recorded_root="C:\\set").find("C:\\set\\sub\\e.png") == "sub/e.png"


def test_without_a_folder_nothing_is_found():
    images = SourceImages(None, captions=["a prompt"])
    assert list(images) == [] and "a.png" not in images and images.find(os.devnull) is None
    assert dict(images.captions()) == {"": (), "a prompt": ()}


def test_what_the_folder_holds_and_cannot_be_used_is_listed(photos):
    (photos / "a.txt").write_bytes(b"\xff")
    images = SourceImages(photos)
    assert [refusal.reason for refusal in images.refusals] == ["bad-caption"] and "a.png" not in images
    with pytest.raises(DatasetError, match="does not exist"):
        SourceImages(photos / "none")
