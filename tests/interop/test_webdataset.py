"""WebDataset: Energon's metadata, other people's tars, and tars that lie."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.foreign_files import Bomb, damaged, items_quietly, reasons, split
from helpers.photo_files import write_photo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_samples import any_entry, cache_of, declared, items, reimported

from latentcache.errors import ConfigError, DatasetError
from latentcache.interop.declared_samples import NOTE_DERIVED, NOTE_NO_SIZE
from latentcache.interop.formats import webdataset
from latentcache.types import Refusal

FOREIGN = {"fields": {"latents": "npy"}}
SMALL = {"latents": "npy", "original_size": ["height", "width"], "caption": "prompt"}


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype == object)
    return file.getvalue()


def latents(seed: int, height: int = 64, width: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((4, height // 8, width // 8)).astype(np.float16)


def write_tar(path: Path, members: Iterable[tuple[str | tarfile.TarInfo, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`{id}.npy` and `{id}.json`, scaled, in two tars."""
    for shard in range(2):
        members = []
        for key in ("000", "001"):
            document = {"height": 80, "width": 160, "prompt": f"number {key}"}
            members += [(f"{key}.npy", npy(latents(shard))), (f"{key}.json", json.dumps(document).encode())]
        write_tar(tmp_path / f"tars/part-{shard}.tar", members)
    return tmp_path / "tars"


def test_energons_metadata_are_those_of_the_tars(tmp_path: Path) -> None:
    """As `energon prepare` reads them: each header, with tarfile."""
    webdataset.export(cache_of(items()), "foreign", tmp_path, shard_bytes=1 << 14)
    meta = tmp_path / ".nv-meta"
    shards = sorted(path.name for path in tmp_path.glob("*.tar"))
    samples, parts, counts = [], [], {}
    for number, shard in enumerate(shards):
        starts: list[int] = []
        keys: list[str] = []
        with tarfile.open(tmp_path / shard) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                if key not in keys:
                    keys.append(key)
                    starts.append(member.offset)
                parts.append((number, len(keys) - 1, part, member.offset_data, member.size))
            starts.append(tar.offset)
        assert np.fromfile(tmp_path / f"{shard}.idx", "<u8").tolist() == starts
        samples += [(number, key, at, starts[at], starts[at + 1] - starts[at]) for at, key in enumerate(keys)]
        counts[shard] = len(keys)
    assert len(shards) > 1 and len(samples) == 3
    with contextlib.closing(sqlite3.connect(meta / "index.sqlite")) as database:
        assert database.execute("SELECT * FROM samples ORDER BY rowid").fetchall() == samples
        assert database.execute("SELECT * FROM sample_parts ORDER BY rowid").fetchall() == parts
    assert json.loads((meta / ".info.json").read_text())["shard_counts"] == counts
    found = yaml.safe_load((meta / "split.yaml").read_text())
    assert found == {"split_parts": {"train": shards, "val": [], "test": []}, "exclude": []}
    assert yaml.safe_load((meta / "dataset.yaml").read_text())["__class__"] == "CrudeWebdataset"


def test_foreign_tars_are_read_as_they_are_declared(folder: Path) -> None:
    found, texts, refusals = split(webdataset.read(folder, declaration=declared(folder, fields=SMALL)))
    assert [each.sample_id for each in found] == [f"part-{shard}.tar/00{key}" for shard in (0, 1) for key in (0, 1)]
    assert texts == [] and refusals == []
    assert torch.equal(found[2].latents, torch.from_numpy(latents(1))) and found[0].is_scaled
    assert (found[0].geometry.original_size, found[0].geometry.target_size) == ((80, 160), (64, 128))
    assert (found[0].output, found[0].note) == ("sample", NOTE_DERIVED)


def test_scaling_and_shift_are_undone_and_kept(folder: Path) -> None:
    file = declared(folder, **FOREIGN, scaling_factor=0.5, shift_factor=0.25)
    again, report = reimported(webdataset.read(folder, declaration=file))
    stored = any_entry(again).tensors["latents"]
    assert torch.equal(stored, torch.from_numpy(latents(0)).float() / 0.5 + 0.25)
    encoding = again.manifest("foreign").common["image_encoding"]
    assert (encoding["scaling_factor"], encoding["shift_factor"]) == (0.5, 0.25)
    assert len(report.incomplete) == 4 and report.notes == {NOTE_NO_SIZE: 4}  # there are no embeddings


def test_latents_that_are_not_scaled_as_declared_are_refused(folder: Path) -> None:
    with pytest.raises(DatasetError, match=r"the declaration says unscaled latents, which have about 7\.68"):
        reimported(webdataset.read(folder, declaration=declared(folder, **FOREIGN, scaled=False)))


@pytest.mark.parametrize(("factor", "scaled"), [(1.0, True), (1.0, False), (1.2, True), (2.0, True)])
def test_a_factor_near_one_refuses_no_latents_that_fit_it(folder: Path, factor: float, scaled: bool) -> None:
    """As that of taesd, whose latents have a standard deviation of about 1."""
    stated = declared(folder, **FOREIGN, family="sd15", scaling_factor=factor, scaled=scaled)
    _, report = reimported(webdataset.read(folder, declaration=stated))
    assert report.num_images == 4
    stated = declared(folder, **FOREIGN, family="sd15", scaling_factor=2.0, scaled=False)
    with pytest.raises(DatasetError, match=r"unscaled latents, which have about 0\.5"):
        reimported(webdataset.read(folder, declaration=stated))


def test_texts_come_from_the_members_that_are_declared(folder: Path) -> None:
    embeds, pooled = np.ones((77, 64), np.float16), np.ones(32, np.float16)
    members = [
        ("1.npy", npy(latents(0))),
        ("1.t5.npy", npy(embeds)),
        ("1.clip.npy", npy(pooled)),
        ("1.txt", b"a cat\n"),
    ]
    write_tar(folder / "part-0.tar", members)
    fields = {"latents": "npy", "prompt_embeds": "t5.npy", "pooled_prompt_embeds": "clip.npy", "caption": "txt"}
    file = declared(folder, fields=fields, text_encoders="CLIP-L and bigG")
    _, (text,), refusals = split(webdataset.read(folder, declaration=file))
    assert (text.caption, text.prompt_embeds.shape, text.sample_ids) == ("a cat", (77, 64), ("part-0.tar/1",))
    assert reasons(refusals) == ["missing"] * 2  # the other tar has no embeddings


@pytest.mark.parametrize("which", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "nan"])
def test_a_sample_that_is_left_out_gives_no_caption_to_another_of_its_name(
    tmp_path: Path, which: int, is_whole: bool
) -> None:
    """Many sets have a 1.png in each of their folders."""
    for shard in range(2):
        values = latents(shard)
        if shard == which and not is_whole:
            values[0, 0, 0] = np.nan
        document = {"file": "1.png", "prompt": f"shard {shard}"}
        texts = (np.full((77, 8), 0.5 + shard, np.float16), np.full(8, 0.5 + shard, np.float16))
        members = [("000.npy", npy(values)), ("000.json", json.dumps(document).encode())]
        members += [(f"000.{name}.npy", npy(array)) for name, array in zip(("p", "q"), texts, strict=True)]
        write_tar(tmp_path / f"tars/part-{shard}.tar", members)
    fields = {"latents": "npy", "sample_id": "file", "caption": "prompt"}
    fields |= {"prompt_embeds": "p.npy", "pooled_prompt_embeds": "q.npy"}
    file = declared(tmp_path / "tars", fields=fields, text_encoders="of SDXL")
    again, report = reimported(webdataset.read(tmp_path / "tars", declaration=file))
    kept = 0 if is_whole else 1 - which
    (row,) = again.manifest("foreign").rows.values()
    assert [caption.text for caption in row.captions] == [f"shard {kept}"] and row.path.endswith(f"part-{kept}.tar#000")
    assert [refusal.path.partition("#")[0][-5] for refusal in report.refused] == [str(1 - kept)]


def test_an_image_that_is_still_there_is_found(folder: Path, tmp_path: Path) -> None:
    document = json.dumps({"file": "sub/a.png"}).encode()
    write_tar(folder / "part-0.tar", [("1.npy", npy(latents(0))), ("1.json", document)])
    (folder / "part-1.tar").unlink()
    photo = write_photo(tmp_path / "photos/sub/a.png", 0, (80, 160))
    file = declared(folder, fields={"latents": "npy", "sample_id": "file"})
    (found,) = split(webdataset.read(folder, declaration=file, images=tmp_path / "photos"))[0]
    assert (found.sample_id, found.image_path) == ("sub/a.png", photo)
    assert found.geometry.original_size == (80, 160)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vae": None, "scaled": None}, "does not state vae, scaled;"),
        ({"fields": {}}, "does not state fields.latents;"),
        ({"scaling_factor": None}, "does not state scaling_factor;"),
        ({"scaling_factor": 0.0}, "scaling_factor: Input should be greater than 0"),
        ({"output": "median"}, "output: Input should be 'mean' or 'sample'"),
        ({"preparation": "x" * 20_000}, "and each entry repeats it; 16,384 are allowed"),
        ({"vae": {}}, "vae."),
        ({"scaling_factor": float("nan")}, "scaling_factor: Input should be"),
        ({"prepration": "x"}, "prepration: Extra inputs"),
        ({"fields": {"latents": "npy", "prompt_embeds": "t5.npy"}}, "both prompt_embeds and pooled_prompt_embeds"),
        (
            {"fields": {"latents": "npy", "prompt_embeds": "a.npy", "pooled_prompt_embeds": "b.npy"}},
            "text_encoders is missing",
        ),
    ],
    ids=["vae", "fields", "factor", "zero", "median", "long", "nothing", "nan", "typo", "pooled", "encoders"],
)
def test_what_is_not_stated_is_named(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        webdataset.read(folder, declaration=declared(folder, **(FOREIGN | changes)))
    assert words in str(caught.value) and str(folder.parent / "tars.yaml") in str(caught.value)


def test_without_any_statement_nothing_is_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match="State vae, scaled, scaling_factor, output, preparation, fields in a YAML"):
        webdataset.read(folder)
    with pytest.raises(ConfigError, match="no such file"):
        webdataset.read(folder, declaration=folder / "nonsense.yaml")


def test_a_description_that_lies_is_a_typed_error(folder: Path) -> None:
    for depth in (300, 2000, 100_000):
        nested = '{"a":' * depth + "1" + "}" * depth
        text = (
            '{"declaration": {"vae": %s, "scaled": true, "scaling_factor": 1.0, "output": "mean", "preparation": "x", '
        )
        (folder / "latentcache.json").write_text(text % nested + '"fields": {"latents": "npy"}}}')
        try:
            webdataset.read(folder)
        except ConfigError as error:
            assert str(folder / "latentcache.json") in str(error)
        else:
            assert depth == 300
    (folder / "latentcache.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no declaration"):
        webdataset.read(folder)


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member


def header_of(tmp_path: Path) -> bytes:
    """An npy file that claims a terabyte."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": (4, 1 << 18, 1 << 19)})
    return file.getvalue()


@pytest.mark.parametrize(
    ("members", "reason", "words"),
    [
        (lambda _: [(link("1.npy"), b"")], "unreadable", "its npy is not a regular member"),
        (lambda _: [("1.json", b"{}")], "missing", "it has no npy"),
        (lambda _: [("1.npy", npy(latents(0)))] * 2, "duplicate", "two members 1.npy"),
        (lambda _: [("1.npy", b"\x93NUMPY")], "corrupt", "no whole npy file"),
        (lambda _: [("1.npy", npy(latents(0))[:-1])], "truncated", "holds other than"),
        (lambda tmp: [("1.npy", header_of(tmp))], "corrupt", "bytes; 268,435,456 are allowed"),
        (
            lambda tmp: [("1.npy", npy(np.array([Bomb(tmp / "boom")], object)))],
            "corrupt",
            "objects are never unpickled",
        ),
        (lambda _: [("1.npy", npy(np.zeros((8, 8), np.float16)))], "corrupt", "with 3 dimensions"),
        (lambda _: [("1.npy", npy(latents(0).astype(np.int32)))], "corrupt", "torch.int32"),
        (lambda _: [("1.npy", npy(latents(0).astype(np.longdouble)))], "corrupt", "at most 8 bytes"),
        (lambda _: [("1.npy", npy(latents(0))), ("1.json", b"[" * 100_000)], "corrupt", "its json cannot be read"),
        (lambda _: [("1.npy", npy(latents(0))), ("1.json", b"[1]")], "corrupt", "an object is needed"),
        (lambda _: [("1.npy", npy(latents(0))), ("1.json", b'{"height": -5, "width": 1}')], "corrupt", "no size in"),
        (lambda _: [(f"1.{part}", b"") for part in range(5000)], "corrupt", "more than 4,096 members"),
    ],
    ids=[
        "link",
        "lacking",
        "twice",
        "header",
        "short",
        "terabyte",
        "bomb",
        "flat",
        "int",
        "long",
        "nest",
        "list",
        "size",
        "many",
    ],
)
def test_samples_that_lie_are_refused_and_the_rest_is_read(
    tmp_path: Path, members: Callable[[Path], list[Any]], reason: str, words: str
) -> None:
    good = [("2.npy", npy(latents(1))), ("2.json", b'{"height": 80, "width": 160}')]
    write_tar(tmp_path / "tars/a.tar", [*members(tmp_path), *good])
    file = declared(tmp_path / "tars", fields=SMALL | {"caption": "prompt"})
    found, _, (refusal,) = split(webdataset.read(tmp_path / "tars", declaration=file))
    assert [each.sample_id for each in found] == ["a.tar/2"]
    assert (refusal.sample_id, refusal.reason) == ("a.tar/1", reason) and words in refusal.detail
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "name",
    ["../up.png", "/etc/passwd", "a\0b", "", 7, {"a": 1}],
    ids=["up", "root", "nul", "empty", "number", "object"],
)
def test_a_name_that_leads_elsewhere_is_refused_or_taken_as_a_name(tmp_path: Path, name: object) -> None:
    write_tar(tmp_path / "tars/a.tar", [("1.npy", npy(latents(0))), ("1.json", json.dumps({"id": name}).encode())])
    file = declared(tmp_path / "tars", fields={"latents": "npy", "sample_id": "id"})
    found, _, refusals = split(webdataset.read(tmp_path / "tars", declaration=file))
    names = [each.sample_id for each in found]
    assert names in ([], ["etc/passwd"], ["7"], ["{'a': 1}"]) and len(names) + len(refusals) == 1


def test_a_tar_that_is_cut_loses_its_last_sample(folder: Path) -> None:
    data = (folder / "part-1.tar").read_bytes()
    (folder / "part-1.tar").write_bytes(data[:6000])
    os.mkfifo(folder / "pipe.tar")
    found, _, refusals = split(webdataset.read(folder, declaration=declared(folder, **FOREIGN)))
    assert [each.sample_id for each in found][:3] == ["part-0.tar/000", "part-0.tar/001", "part-1.tar/000"]
    assert reasons(refusals) == ["truncated", "unreadable"] and "may be cut" in refusals[0].detail


def test_a_header_that_claims_terabytes_takes_no_memory(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "tars/a.tar", [("1.npy", npy(latents(0)))])
    member = tarfile.TarInfo("2.npy")
    member.size, member.type = 1 << 40, tarfile.XHDTYPE
    header = member.tobuf(tarfile.GNU_FORMAT)
    with path.open("r+b") as file:
        file.seek(2048)
        file.write(header)
        file.truncate(1 << 41)  # sparse: so long that the claim could be true
    tracemalloc.start()
    found = items_quietly(webdataset.read(tmp_path / "tars", declaration=declared(tmp_path / "tars", **FOREIGN)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [isinstance(each, Refusal) for each in found] == [True] and peak < 20 << 20


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gives_refusals_and_never_other_errors(folder: Path, data: st.DataObject) -> None:
    file = declared(folder, fields=SMALL)
    target = folder / "damaged"
    target.mkdir(exist_ok=True)
    (target / "a.tar").write_bytes(data.draw(damaged((folder / "part-0.tar").read_bytes())))
    for item in items_quietly(webdataset.read(target, declaration=file)):
        assert isinstance(item, Refusal) or item.latents.shape[0]  # type: ignore[union-attr]


def test_one_sample_is_in_memory_at_a_time(tmp_path: Path) -> None:
    large = (f"{number}.npy" for number in range(64))
    write_tar(tmp_path / "tars/a.tar", ((name, npy(latents(1, 1024, 1024))) for name in large))
    foreign = webdataset.read(tmp_path / "tars", declaration=declared(tmp_path / "tars", **FOREIGN))
    tracemalloc.start()
    count = sum(1 for _ in foreign.items())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 64 and peak < 4 << 20  # the tar has 8 MiB
