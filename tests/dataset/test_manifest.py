"""Manifests: whole or refused, replaced as a whole, readable by every user who may read the packs."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import stat
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.dataset import manifest as manifest_module
from latentcache.dataset.manifest import Manifest, check_manifest, manifest_lines, prompts_name, read_manifest
from latentcache.dataset.manifest_folder import LOCK, ManifestFolder
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.errors import DatasetError, LatentCacheError, StorageFullError, StoreError
from latentcache.types import Crop, Geometry, Refusal, Size

COMMON = {"schema": 1, "salt": "", "text_encoding": {}}
GEOMETRY = Geometry(Size(100, 200), Size(64, 128), Crop(0, 3), Size(64, 120), True)


def manifest(*sample_ids: str, name: str = "photos") -> Manifest:
    rows = [
        Row(s, f"/x/{s}", "d" * 64, (ImageRef("a" * 64, GEOMETRY),), (CaptionRef(f"of {s}", "b" * 64),))
        for s in sample_ids
    ]
    rows[1:2] = [
        replace(row, parts=(PartRef("mask", "c" * 64, GEOMETRY, "e" * 64, "unverified"),)) for row in rows[1:2]
    ]
    rows.append(Row("bad", "/x/bad", None, (), (), Refusal("bad", "/x/bad", "empty", "0 bytes")))
    return Manifest(name, "train", 2, COMMON, {row.sample_id: row for row in rows})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.names() == [] and folder.read("photos") is None
    folder.write(manifest("one", "two"))
    assert folder.names() == ["photos"] and folder.read("photos") == manifest("one", "two")
    folder.write(manifest("three"))
    assert folder.read("photos") == manifest("three")
    assert sorted(path.name for path in folder.path.iterdir()) == [LOCK, "photos.jsonl"]
    assert manifest("one").keys() == {"a" * 64, "b" * 64}
    assert manifest("one", "two").keys() == {"a" * 64, "b" * 64, "c" * 64}
    assert "parts" not in manifest("one").rows["one"].to_json(), "old manifests and new ones are equal without parts"


@pytest.mark.parametrize(("more", "number"), [({}, 2), ({"family": "wan"}, 3), ({"parts": {}}, 3), ({"frames": {}}, 3)])
def test_a_program_that_knows_no_parts_refuses_their_manifests(
    tmp_path: Path, more: dict[str, Any], number: int
) -> None:
    """It would leave them out, and remove their entries."""
    written = manifest("a")
    written = replace(written, common={**written.common, **more})
    folder = ManifestFolder(tmp_path)
    folder.write(written)
    assert folder.read("photos") == written
    assert json.loads((tmp_path / "photos.jsonl").read_bytes().splitlines()[0])["format"] == number


def test_no_update_undoes_another(tmp_path: Path) -> None:
    """Two processes, and threads with folders of their own, add a sample each time."""
    num_updates = 15

    def work(who: str) -> None:
        folder = ManifestFolder(tmp_path / "manifests")

        def added(name: str) -> Manifest:
            found = folder.read("photos")
            time.sleep(0.002)
            rows = {} if found is None else found.rows
            return replace(manifest(), rows={**rows, **manifest(name).rows})

        for number in range(num_updates):
            folder.update(partial(added, f"{who}{number}"))

    if (child := os.fork()) == 0:
        work("child")
        os._exit(0)
    threads = [threading.Thread(target=work, args=(who,)) for who in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    found = ManifestFolder(tmp_path / "manifests").read("photos")
    assert found is not None and len(found.rows) == 3 * num_updates + 1


@given(st.lists(st.text(st.characters(), max_size=20), unique=True, max_size=5))
def test_any_names_and_captions_come_back(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = ManifestFolder(tmp_path_factory.mktemp("manifests"))
    folder.write(manifest(*names))
    assert folder.read("photos") == manifest(*names)


def test_others_may_read_it(tmp_path: Path) -> None:
    """A cache is shared: the manifest must not be more private than the packs."""
    before = os.umask(0o022)
    try:
        folder = ManifestFolder(tmp_path)
        folder.write(manifest("one"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "photos.jsonl").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "content",
    [b"", b"{}\n", b"nonsense", b"[" * 100_000, b'{"format": 1}\n', b'{"format": 3}\n', b"\xff\xfe"],
    ids=["empty", "no-header", "no-json", "nested", "older", "newer", "no-text"],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "photos.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=r"photos\.jsonl"):
        ManifestFolder(tmp_path).read("photos")


def _planted(path: Path, what: str) -> None:
    """Put something that is no manifest at the place of one."""
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path)
    else:
        with path.open("wb") as file:
            file.write(what.encode())
            os.truncate(file.fileno(), 200 << 30 if what == "sparse" else 1 << 30)


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "loop", "sparse", "zeros"])
def test_what_is_no_file_of_ours_is_refused_at_once(tmp_path: Path, what: str) -> None:
    folder = ManifestFolder(tmp_path)
    _planted(tmp_path / "photos.jsonl", what)
    assert folder.names() == ["photos"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DatasetError, match=r"photos\.jsonl.*latentcache precache CONFIG"):
        folder.read("photos")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    if what != "folder":  # which may be somebody's
        folder.write(manifest("one"))
        assert folder.read("photos") == manifest("one")


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "loop", "sparse", "zeros"])
def test_a_note_of_a_run_that_is_none_is_refused_at_once(tmp_path: Path, what: str) -> None:
    _planted(tmp_path / "photos.unfinished", what)
    with pytest.raises(DatasetError, match=r"photos\.unfinished.*prune --unfinished"):
        ManifestFolder(tmp_path).unfinished()


@pytest.mark.parametrize("what", ["file", "pipe", "link", "loop"])
def test_a_folder_of_manifests_that_is_none_is_not_an_empty_one(tmp_path: Path, what: str) -> None:
    path = tmp_path / "manifests"
    if what == "file":
        path.write_text("{}")
    elif what == "link":
        (tmp_path / "other").mkdir()
        path.symlink_to(tmp_path / "other")
    else:
        _planted(path, what)
    folder = ManifestFolder(path)
    for call in (folder.names, folder.unfinished, lambda: folder.read("photos")):
        with pytest.raises(LatentCacheError, match=r"manifests.*remove it"):
            call()


class _Line(Row):
    """A row whose line is any value."""

    def to_json(self) -> Any:
        return self.path


def line(change: Callable[[dict[str, Any]], Any]) -> Manifest:
    """A manifest with one changed line; its digest is made to fit."""
    value = manifest("one").rows["one"].to_json()
    changed = change(value)
    return replace(manifest("one"), rows={"one": _Line("one", value if changed is None else changed, None, (), ())})


def put(*places: Any) -> Callable[[dict[str, Any]], Any]:
    """Replace a value: the last of `places` is the new one."""

    def change(value: Any) -> None:
        for place in places[:-2]:
            value = value[place]
        value[places[-2]] = places[-1]

    return change


SIDES = [64.0, "64", None, True, 0, -1, 2**31, 2**63, 10**30, float("nan"), [1], {}]
LINES: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"a {name} that is {json.dumps(value)}": put(name, value)
       for name in ("sample_id", "path", "images", "captions") for value in (None, 7, True, {"a": 1}, [7], [None])},
    **{f"a source that is {value}": put("source", value) for value in (7, [], {})},
    **{f"a refusal that is {value}": put("refusal", value) for value in (7, "x", [], [1], {"reason": "x"}, {"x": "y"})},
    "a refusal of numbers": put("refusal", {"sample_id": 1, "path": 2, "reason": 3, "detail": 4}),
    **{f"a caption that is {value}": put("captions", 0, "text", value) for value in (7, None, ["x"], {})},
    **{f"a key of {kind}s that is {value!r:.10}": put(kind, 0, "key", value)
       for kind in ("images", "captions") for value in (7, ["a" * 64], None, "", "a" * 63, "A" * 64, "../" + "a" * 61)},
    **{f"a {name} with {value}": put("images", 0, name, [value, 64])
       for name in ("original_size", "resized_size", "target_size") for value in SIDES},
    **{f"a crop at {value}": put("images", 0, "crop_top_left", [0, value]) for value in SIDES if value != 0},
    **{f"a size that is {value}": put("images", 0, "target_size", value)
       for value in ([64], [64, 64, 64], [], "64", None, {"0": 1, "1": 2}, 64)},
    **{f"a flip that is {value}": put("images", 0, "flip", value) for value in (1, 0, "false", None, [])},
    **{f"a trust that is {value}": put("images", 0, "trust", value) for value in (1, "x", None, [])},
    **{f"no {name}": (lambda value, name=name: value.pop(name) and None)
       for name in ("sample_id", "path", "images", "captions")},
    **{f"{value} in place of a line": (lambda _, value=value: value) for value in ([], [1], 7, "text", {}, True)},
}  # fmt: skip


@pytest.mark.parametrize("change", LINES.values(), ids=LINES)
def test_a_line_with_other_values_is_refused_though_its_digest_fits(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(line(change))
    with pytest.raises(DatasetError, match=r"photos\.jsonl: is no manifest: line 2: .*latentcache precache CONFIG"):
        folder.read("photos")


def common(**changes: Any) -> dict[str, Any]:
    encoding = {"scaling_factor": 0.13025, "shift_factor": None}
    return {**COMMON, "image_encoding": encoding} | changes


HEADERS = {
    **{f"repeats that are {value!r}": {"repeats": value} for value in ("2", -1, 0, 10**9, 1.0, True, None, [])},
    **{f"a role that is {value!r}": {"role": value} for value in ("test", 7, None, ["train"])},
    **{f"{value!r} in common": {"common": value} for value in ([], {}, None, "x", 7, ["schema"])},
    **{f"no {name} in common": {"common": {k: v for k, v in common().items() if k != name}} for name in COMMON},
    **{f"a schema that is {value!r}": {"common": common(schema=value)} for value in ("1", None, 1.0, [])},
    **{f"imported that is {value!r}": {"common": common(imported=value)} for value in ("kohya", [], {}, {"format": 7})},
    **{f"a scaling factor of {value!r}": {"common": common(image_encoding={"scaling_factor": value,
       "shift_factor": None})} for value in (0, -1.0, float("nan"), float("inf"), "0.1", None, [])},
    **{f"a shift factor of {value!r}": {"common": common(image_encoding={"scaling_factor": 1.0, "shift_factor": value})}
       for value in (float("nan"), "0", [])},
    **{f"an encoding that is {value!r}": {"common": common(image_encoding=value)} for value in ([], "x", {}, 7)},
}  # fmt: skip


@pytest.mark.parametrize("changes", HEADERS.values(), ids=HEADERS)
def test_a_header_with_other_values_is_refused_though_its_digest_fits(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ManifestFolder(tmp_path)
    with monkeypatch.context() as patch:  # NaN is written too
        patch.setattr(manifest_module, "canonical_json", lambda value: json.dumps(value, sort_keys=True).encode())
        folder.write(replace(manifest("one"), **changes))
        with pytest.raises(DatasetError, match=r"photos\.jsonl: is no manifest: line 1: .*latentcache precache CONFIG"):
            folder.read("photos")


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one"))
    (tmp_path / "photos.jsonl").rename(tmp_path / "other.jsonl")
    with pytest.raises(DatasetError, match=r"samples of 'photos'.*of 'other'"):
        folder.read("other")


def test_a_sample_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    row = manifest("one").rows["one"]
    twice = replace(manifest("one"), rows={"one": row, "two": row})
    ManifestFolder(tmp_path).write(twice)
    with pytest.raises(DatasetError, match="line 3: sample 'one' was listed before"):
        ManifestFolder(tmp_path).read("photos")


def _error_of(read: Callable[..., object], data: bytes) -> str | None:
    try:
        read(io.BytesIO(data), "photos", "it")
    except DatasetError as error:
        return str(error)
    return None


def test_a_check_refuses_what_a_reader_refuses() -> None:
    row = manifest("one").rows["one"]
    wrong = [
        {"one": row, "two": row, "three": replace(row, sample_id="\udcff")},
        {"one": replace(row, source="D" * 64)},
        {"one": replace(row, images=(ImageRef("a" * 63, GEOMETRY),))},
        {"one": row, "two": replace(row, sample_id="two", captions=(CaptionRef("of two", "b" * 63 + " "),))},
        {"one": replace(row, parts=(PartRef("mask", "a" * 63, GEOMETRY, "b" * 64),))},
        {"one": replace(row, parts=(PartRef("mask", "a" * 64, GEOMETRY, "B" * 64),))},
        {"one": replace(row, parts=(PartRef("depth", "a" * 64, GEOMETRY, "b" * 64),))},  # type: ignore[arg-type]
        {"one": replace(row, images=(ImageRef("a" * 64, replace(GEOMETRY, target_size=Size(0, 1))),))},
    ]
    good = b"".join(manifest_lines(manifest("one", "two", "\udcff")))
    assert _error_of(check_manifest, good) is None is _error_of(read_manifest, good)
    files = [b"".join(manifest_lines(replace(manifest(), rows=rows))) for rows in wrong]
    for data in (*files, b"", good[:-1], good.replace(b'"two"', b'"too"'), good[: good.rindex(b"\n", 0, -1) + 1]):
        found = _error_of(check_manifest, data)
        assert found is not None and found == _error_of(read_manifest, data)
    assert "line 3: sample 'one' was listed before" in str(_error_of(check_manifest, files[0]))


def test_a_check_takes_little_memory_whatever_the_rows_are() -> None:
    peaks = []
    for num_rows in (4000, 12000):
        rows = {}
        for number in range(num_rows):
            name = f"photo {number:06}.jpg"
            images = (ImageRef("a" * 64, replace(GEOMETRY, original_size=Size(number + 1, 200))),)
            rows[name] = Row(name, f"/x/{name}", "d" * 64, images, (CaptionRef("of a house " * 20, "b" * 64),))
        data = b"".join(manifest_lines(Manifest("photos", "train", 1, COMMON, rows)))
        tracemalloc.start()
        check_manifest(io.BytesIO(data), "photos", "it")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * 8000


def test_a_line_that_never_ends_is_not_read_to_its_end(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one"))
    with (tmp_path / "photos.jsonl").open("r+b") as file:
        file.truncate(8 << 30)
    with pytest.raises(DatasetError, match=r"line 4: it has no end"):
        folder.read("photos")


def test_a_manifest_that_was_cut_is_refused(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one", "two"))
    whole = (tmp_path / "photos.jsonl").read_bytes()
    for end in (len(whole) - 1, len(whole) // 2, whole.rindex(b"\n", 0, -1) + 1):
        (tmp_path / "photos.jsonl").write_bytes(whole[:end])
        with pytest.raises(DatasetError, match="is no manifest"):
            folder.read("photos")


def test_a_flipped_bit_gives_no_other_samples(tmp_path: Path) -> None:
    folder, file = ManifestFolder(tmp_path), tmp_path / "photos.jsonl"
    folder.write(manifest("one"))
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                assert folder.read("photos") == manifest("one")
            except DatasetError as error:
                assert "photos.jsonl" in str(error)


def test_runs_that_began_are_listed_until_they_are_done(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path / "manifests")
    assert folder.unfinished() == {}
    folder.begin("photos")
    folder.begin("other")
    assert list(folder.unfinished()) == ["other", "photos"] and folder.names() == []
    folder.write(manifest("one"))
    assert list(folder.unfinished()) == ["other"]


def test_a_full_disk_leaves_the_old_manifest(tmp_path: Path) -> None:
    folder = ManifestFolder(tmp_path)
    folder.write(manifest("one"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StorageFullError, match="no space left"):
            folder.write(manifest(*map(str, range(1000))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.read("photos") == manifest("one")
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "photos.jsonl"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file")
    with pytest.raises(StoreError, match="manifests"):
        ManifestFolder(tmp_path / "manifests").write(manifest("one"))


def test_prompts_are_kept_apart_by_what_encodes_them() -> None:
    common = {"schema": 1, "salt": "", "text_encoding": {"clip_skip": 0}, "image_encoding": {"output": "mean"}}
    name = prompts_name(common)
    assert prompts_name(common | {"image_encoding": {"output": "moments"}}) == name
    for change in ({"text_encoding": {"clip_skip": 1}}, {"salt": "x"}, {"schema": 2}):
        assert prompts_name(common | change) != name
