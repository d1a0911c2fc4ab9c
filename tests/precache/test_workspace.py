"""The memo of digests: remembered across processes, disposable, and never in the way."""

from __future__ import annotations

import contextlib
import random
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.photo_files import write_photo
from helpers.tiny_configs import config_of_dataset

from latentcache.config import SourceConfig
from latentcache.dataset import samples
from latentcache.dataset.samples import SampleSource
from latentcache.dataset.sources import open_source
from latentcache.errors import StoreError
from latentcache.identity import digest
from latentcache.precache import plan as planner
from latentcache.precache.memo import FLUSH_ROWS, Memo
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace


def test_what_was_remembered_is_there_next_time_and_in_other_processes(tmp_path: Path) -> None:
    first, second = Memo(tmp_path / "memo"), Memo(tmp_path / "memo")
    first["name"] = "value"
    first["odd \udcff name"] = "kept too"
    assert first["name"] == "value" and len(first) == 2 and "other" not in first and "name" not in second
    first.flush()
    assert second["name"] == "value" and second.get_many(["name", "missing"]) == {"name": "value"}
    for number in range(FLUSH_ROWS):
        first[str(number)] = "x"
    assert len(second) == FLUSH_ROWS + 2, "written without a flush"
    del second["name"]
    second.close()
    before = (tmp_path / "memo").read_bytes()
    with contextlib.closing(Memo(tmp_path / "memo", read_only=True)) as again:
        assert "name" not in again and again["odd \udcff name"] == "kept too"
        again["name"] = "kept in memory"
        again.flush()
        assert again["name"] == "kept in memory"
    assert (tmp_path / "memo").read_bytes() == before, "reading only writes nothing"


def test_a_damaged_memo_is_named_and_removed_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "memo"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreError, match=r"memo: .* is not a database\. Fix the cause, or remove the file"):
        Memo(path, read_only=True).get_many(["name"])
    with pytest.raises(StoreError, match=r"memo: .* is not a database\. It has been removed: run precache again"):
        Memo(path)
    with contextlib.closing(Memo(path)) as memo:
        memo["name"] = "value"
    assert Memo(path)["name"] == "value"


def test_a_flipped_bit_gives_no_other_text(tmp_path: Path) -> None:
    """Wherever it is in the database: what is read is right or absent, or the memo is named as damaged."""
    texts, path = {f"name {number}": f"text {number} " + "é" * 40 for number in range(20)}, tmp_path / "memo"
    with contextlib.closing(Memo(path)) as memo:
        memo.update(texts)
    whole, dice = path.read_bytes(), random.Random(14)
    used = [at for at, byte in enumerate(whole) if byte]
    num_absent = 0
    for at in dice.sample(used, 400):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
        with contextlib.suppress(StoreError):
            found = Memo(path, read_only=True).get_many(texts)
            assert found.items() <= texts.items(), f"byte {at}"
            num_absent += len(texts) - len(found)
    assert num_absent > 0


def sources_of(memo: Memo, **source: Any) -> list[str | None]:
    """The digests of the images that a run with this memo finds in this source."""
    workspace = Workspace(memo=memo)
    run_precache(config_of_dataset(Path(), source=source), workspace=workspace)
    manifest = workspace.manifests.read("photos")
    return [] if manifest is None else [row.source for row in manifest.rows.values()]


def test_another_column_of_a_table_has_other_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memo knows a row's image by the path of the row, which is the same for each column."""
    monkeypatch.setattr(samples, "SETTLED_NS", -1)
    images = {name: write_photo(tmp_path / name, seed).read_bytes() for seed, name in enumerate(("1.png", "2.png"))}
    pq.write_table(pa.table({name: [data] for name, data in images.items()}), tmp_path / "a.parquet")
    memo = Memo()
    for column in ("1.png", "2.png", "1.png"):
        found = sources_of(memo, kind="parquet", path=tmp_path / "a.parquet", image_column=column)
        assert found == [digest(images[column])], column


@pytest.mark.parametrize("kind", ["folder", "webdataset", "parquet"])
def test_a_folder_that_is_replaced_while_it_is_planned_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As a dataset behind a link that names its version: going back to the old one changes none of its files."""
    monkeypatch.setattr(samples, "SETTLED_NS", -1)
    for version in ("1", "2"):
        photo = write_photo(tmp_path / version / "a.png", int(version))
        with tarfile.open(photo.with_suffix(".tar"), "w") as tar:
            tar.add(photo, "a.png")
        pq.write_table(pa.table({"image": [photo.read_bytes()]}), photo.with_suffix(".parquet"))

    def point_to(version: str) -> None:
        (tmp_path / "current").unlink(missing_ok=True)
        (tmp_path / "current").symlink_to(tmp_path / version)

    def listed(source: SourceConfig, *arguments: Any, **options: Any) -> SampleSource:
        opened = open_source(source, *arguments, **options)
        items = list(opened.samples())
        monkeypatch.setattr(opened, "samples", lambda: iter(items))
        point_to("2")
        return opened

    memo = Memo()
    point_to("1")
    with monkeypatch.context() as patch:
        patch.setattr(planner, "open_source", listed)
        sources_of(memo, kind=kind, path=tmp_path / "current")
    point_to("1")
    assert sources_of(memo, kind=kind, path=tmp_path / "current") == [digest((tmp_path / "1/a.png").read_bytes())]
