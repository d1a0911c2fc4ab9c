"""`LatentCache.batch` again: what it remembers of samples, and the tensors that it is given to write to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import make_cache, plain

from latentcache import LatentCache, LatentDataset
from latentcache.dataset.manifest_row import CaptionRef
from latentcache.errors import SampleError, StoreError
from latentcache.identity import key_of
from latentcache.loading import loader, sample
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sample import SampleFacts, SampleReader, SampleRef, layout_of
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.store import DiskStore, MemoryStore
from latentcache.store.upkeep import compact
from latentcache.types import Crop, Entry, Geometry, Record, Refusal, Size

WIDE = ["a.png", "b.png", "sub/e.png"]
FACTS = SampleFacts()
"""Of a cache of the first family."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("remembered"))


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A cache of this test's own: moments in float32, embeddings too, flips, two captions of one sample."""
    return shutil.copytree(made, tmp_path / "cache")


@pytest.fixture
def cache(path: Path) -> Iterator[LatentCache]:
    with LatentCache(path) as cache:
        yield cache


# What is remembered ---------------------------------------------------------------------------------------------------


def test_samples_are_found_without_a_manifest_the_second_time(
    cache: LatentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [{}, {"caption": 0, "flip": True}, {"output": "moments"}]
    first = [plain(cache.batch(WIDE, device="cpu", **options)) for options in asks]
    assert first[0]["latents"] != first[1]["latents"]
    monkeypatch.setattr(cache, "dataset_names", lambda: pytest.fail("it looked"))
    assert [plain(cache.batch(WIDE, device="cpu", **options)) for options in asks] == first
    order = [2, 0, 1, 0]
    mixed = plain(cache.batch([WIDE[number] for number in order], device="cpu"))
    assert mixed == {name: [values[number] for number in order] for name, values in first[0].items()}


@pytest.mark.parametrize("given", [False, True])
def test_a_warm_batch_asks_the_store_once(cache: LatentCache, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tensors(cache.batch(WIDE, device="cpu", output="moments"))
    calls: list[str] = []
    for name in ("rows", "find", "describe", "record", "get", "prefetch"):
        asked = getattr(cache.store, name)
        monkeypatch.setattr(cache.store, name, lambda *keys, asked=asked, name=name: calls.append(name) or asked(*keys))
    monkeypatch.setattr(type(cache.manifests), "read", lambda *_: pytest.fail("it read a manifest"))
    cache.batch(WIDE, device="cpu", output="moments", out=out if given else None)
    assert calls == ["rows"]


def test_an_output_that_there_is_not_is_refused(cache: LatentCache) -> None:
    for output in ("moment", "prompt_embeds"):
        with pytest.raises(StoreError, match=f"output is '{output}'; it must be one of latents, moments"):
            cache.batch(WIDE, device="cpu", output=output)


def test_the_callers_default_device_moves_nothing(path: Path) -> None:
    def everything() -> list[Any]:
        with LatentCache(path) as cache:
            entry = cache.get(cache.row("a.png")[1].images[0].key)
            found: list[Any] = [plain(entry.tensors), plain(cache.batch(WIDE, device="cpu", output="moments"))]
        with loader_of(path, prefetch=0) as made:
            found.append([plain(batch) for batch in made])
        items = LatentDataset(path, caption="random").__getitems__([0, 1])
        return found + [item["original_size"].tolist() for item in items]

    expected = everything()
    with torch.device("meta"):  # as torch.set_default_device does it
        assert everything() == expected


def test_lists_are_the_callers_own(cache: LatentCache) -> None:
    first, expected = cache.batch(WIDE, device="cpu"), plain(cache.batch(WIDE, device="cpu"))
    for value in first.values():
        value.zero_() if isinstance(value, torch.Tensor) else value.clear()
    assert plain(cache.batch(WIDE, device="cpu")) == expected


def test_a_manifest_that_was_replaced_counts_after_a_refresh(cache: LatentCache) -> None:
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    manifest = cache.manifests.read("photos")
    assert manifest is not None
    rows = dict(manifest.rows)
    a, b = rows["a.png"], rows["b.png"]
    rows["a.png"] = replace(a, captions=(CaptionRef("edited", a.captions[1].key),))
    rows["b.png"] = replace(b, refusal=Refusal("b.png", "b.png", "corrupt", "a test says so"))
    cache.manifests.write(replace(manifest, rows=rows))
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    cache.refresh()
    batch = cache.batch(["a.png"], device="cpu")
    assert batch["caption"] == ["edited"]
    assert torch.equal(batch["prompt_embeds"][0], cache.get(a.captions[1].key).tensors["prompt_embeds"])
    with pytest.raises(SampleError, match=r"'b\.png': was refused"):
        cache.batch(WIDE, device="cpu")


def test_a_dataset_that_came_makes_a_sample_ambiguous_after_a_refresh(cache: LatentCache) -> None:
    cache.batch(WIDE, device="cpu")
    manifest = cache.manifests.read("photos")
    assert manifest is not None
    cache.manifests.write(replace(manifest, name="other"))
    assert cache.batch(WIDE, device="cpu")["sample_id"] == WIDE
    cache.refresh()
    with pytest.raises(SampleError, match="is in several manifests"):
        cache.batch(WIDE, device="cpu")
    assert cache.restricted("other").batch(WIDE, device="cpu")["sample_id"] == WIDE


def test_a_refresh_while_a_batch_is_read_counts_for_the_next(
    cache: LatentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = cache.manifests.read("photos")
    assert manifest is not None
    row = manifest.rows["a.png"]
    edited = replace(row, captions=(CaptionRef("edited", row.captions[1].key),))
    rows = cache.store.rows

    def refresh_then(keys: Any) -> Any:
        cache.manifests.write(replace(manifest, rows=dict(manifest.rows) | {"a.png": edited}))
        cache.refresh()  # as another thread may
        return rows(keys)

    monkeypatch.setattr(cache.store, "rows", refresh_then)
    assert cache.batch(["a.png"], device="cpu")["caption"] == ["a red house"]
    monkeypatch.undo()
    assert cache.batch(["a.png"], device="cpu")["caption"] == ["edited"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_a_closed_cache_releases_what_it_remembered(cache: LatentCache) -> None:
    cache.batch(WIDE, device="cpu")
    assert str(cache.path) in Path("/proc/self/maps").read_text()
    cache.close()
    assert str(cache.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
@pytest.mark.parametrize("reader", ["cache", "loader"])
def test_packs_that_were_compacted_away_are_released_with_the_next_batch(path: Path, reader: str) -> None:
    dataset = LatentDataset(path)
    loader = LatentLoader(BucketBatchSampler(dataset, 2, seed=5), device="cpu", prefetch=0)
    store = dataset.cache.store
    assert isinstance(store, DiskStore)
    extra = Record(key_of({"extra": 1}), "text", {"extra": 1}, {})
    store.add([Entry(extra, {"prompt_embeds": torch.ones(1)})])

    def batches() -> list[Any]:
        if reader == "loader":
            return [plain(batch) for batch in loader]
        return [plain(dataset.cache.batch([name], device="cpu")) for name in dataset.cache.sample_ids()]

    expected = batches()
    compact(store)
    loader.set_epoch(0)
    assert batches() == expected
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in lines if str(path) in line and line.endswith("(deleted)")]


def test_a_compaction_in_another_process_never_makes_a_batch_wrong(path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from latentcache.identity import key_of\n"
        "from latentcache.store import DiskStore\n"
        "from latentcache.store.upkeep import compact\n"
        "from latentcache.types import Entry, Record\n"
        "with DiskStore(sys.argv[1]) as store:\n"
        "    store.add([Entry(Record(key_of({'x': 1}), 'text', {'x': 1}, {}), {'prompt_embeds': torch.ones(1)})])\n"
        "    assert compact(store).num_packs_after == 1\n"
    )
    dataset, unread = LatentDataset(path), LatentDataset(path, flips=True)
    with LatentCache(path) as cache:
        expected = [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()]
        items = [plain(dataset[index]) for index in range(len(dataset))]
        run_python(script, path)
        assert [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()] == expected
        assert [plain(dataset[index]) for index in range(len(dataset))] == items
        assert [plain(unread[index]) for index in range(len(items) // 2)] == items[: len(items) // 2]
        # What is looked up again is found where it is now.
        list(cache.store.keys())
        assert [plain(cache.batch([name], device="cpu")) for name in cache.sample_ids()] == expected


def run_python(script: str, *arguments: object) -> None:
    """In another process."""
    subprocess.run([sys.executable, "-c", script, *map(str, arguments)], check=True, timeout=120)


def test_fields_in_another_order_and_under_one_name_are_told_apart() -> None:
    size = Size(8, 8)
    geometry = Geometry(size, size, Crop(0, 0), size)
    store, refs = MemoryStore(), []
    for number in range(2):
        names = ("a", "b", "both") if number else ("both", "b", "a")
        for kind, fields in (("image", names), ("text", ("both",))):
            identity = {"number": number, "kind": kind}
            tensors = {name: torch.full((2,), float(10 * number + len(name) + (kind == "text"))) for name in fields}
            tensors |= {"b": torch.full((2,), 7.0 + number)} if kind == "image" else {}
            store.add([Entry(Record(key_of(identity), kind, identity, {}), tensors)])  # type: ignore[arg-type]
        keys = [key_of({"number": number, "kind": kind}) for kind in ("image", "text")]
        refs.append(SampleRef(str(number), tuple(keys), "caption", layout_of(geometry, FACTS.family), FACTS))
    reader = SampleReader(store)
    for _ in range(2):
        batch = reader.gather(refs)
        found = {name: batch[name][:, 0].tolist() for name in ("a", "b", "both")}
        assert found == {"a": [1.0, 11.0], "b": [7.0, 8.0], "both": [5.0, 15.0]}


def test_samples_of_unequal_fields_are_refused_and_named(cache: LatentCache) -> None:
    identity = {"another": "width"}
    fields = {"prompt_embeds": torch.ones(77, 3), "pooled_prompt_embeds": torch.ones(40)}
    cache.store.add([Entry(Record(key_of(identity), "text", identity, {}), fields)])
    refs = [SampleRef.of(cache.row(name)[1], FACTS) for name in ("a.png", "b.png")]
    odd = [refs[0], replace(refs[1], keys=(refs[1].keys[0], key_of(identity)))]
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"equal shapes and dtypes: field 'prompt_embeds' .* in a\.png and .* in b\.png"
        ):
            cache.reader.gather(odd)
    assert cache.reader.gather(refs)["sample_id"] == ["a.png", "b.png"]


def test_what_is_remembered_is_bounded(path: Path, cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MAX_REFS", 4)
    for flip, output in product((False, True), ("latents", "moments")):
        expected = plain(LatentCache(cache.path).batch(WIDE, device="cpu", flip=flip, output=output))  # type: ignore[arg-type]
        assert plain(cache.batch(WIDE, device="cpu", flip=flip, output=output)) == expected  # type: ignore[arg-type]
        for sample_id in WIDE:
            cache.batch([sample_id], device="cpu", flip=flip)
        assert 0 < len(cache.known.refs) <= 4
    dataset = LatentDataset(path, flips=True, caption="random")
    for number in range(len(dataset)):
        assert dataset[number]["sample_id"] == dataset.refs([number])[0].sample_id
        assert 0 < len(dataset._refs) <= 4


# Tensors that are given ---------------------------------------------------------------------------------------------


def tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output", ["latents", "moments"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_batch_in_given_tensors_is_the_same(cache: LatentCache, dtype: Any, output: Any, scaled: bool) -> None:
    if scaled and output == "moments":
        pytest.skip("moments are stored unscaled")
    options = {"device": "cpu", "dtype": dtype, "output": output, "scaled": scaled}
    expected = cache.batch(WIDE, **options)
    names = list(tensors(expected))
    for given in ([], names[:1], names[1:], names):
        out = {name: torch.full_like(expected[name], 7) for name in given}
        batch = cache.batch(WIDE, out=out, **options)
        assert list(batch) == list(expected) and plain(batch) == plain(expected)
        assert all(batch[name] is tensor for name, tensor in out.items())


def test_stored_bytes_are_copied_to_them_directly(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tensors(cache.batch(WIDE, device="cpu", output="moments"))
    expected = plain(out)
    for tensor in out.values():
        tensor.zero_()
    given: list[Any] = []
    stack_columns = sample.stack_columns

    def stacking(keys: Any, columns: Any, padding: Any, out: Any, memory: Any) -> Any:
        given.append(out)
        return stack_columns(keys, columns, padding, out, memory)

    monkeypatch.setattr(sample, "stack_columns", stacking)
    assert plain(tensors(cache.batch(WIDE, device="cpu", output="moments", out=out))) == expected
    assert set(given[0]) >= {"moments", "prompt_embeds", "pooled_prompt_embeds"}


def bad_tensors() -> dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    return {
        "shape": ("moments", lambda t: t[:2].clone()),
        "dtype": ("prompt_embeds", lambda t: t.half()),
        "strides": ("moments", lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2)),
        "device": ("pooled_prompt_embeds", lambda t: t.to("meta")),
        "time ids": ("add_time_ids", lambda t: t.double()),
        "name": ("latents", lambda t: t),
        "no tensor": ("moments", lambda t: t.numpy()),  # type: ignore[return-value, dict-item]
    }


@pytest.mark.parametrize("case", list(bad_tensors()))
def test_a_tensor_that_does_not_fit_is_refused(cache: LatentCache, case: str) -> None:
    out = tensors(cache.batch(WIDE, device="cpu", output="moments"))
    name, make_bad = bad_tensors()[case]
    out[name] = make_bad(out.get(name, torch.zeros(1)))
    with pytest.raises(StoreError, match=rf"out\['{name}'\]") as caught:
        cache.batch(WIDE, device="cpu", output="moments", out=out)
    assert ("it has moments, pooled_prompt_embeds, prompt_embeds" in str(caught.value)) == (case == "name")


def test_computed_latents_are_checked_too(cache: LatentCache) -> None:
    latents = cache.batch(WIDE, device="cpu")["latents"]
    with pytest.raises(StoreError, match=r"out\['latents'\] is float16 .*give a contiguous cpu tensor, float32"):
        cache.batch(WIDE, device="cpu", out={"latents": latents.half()})


# The loader prefetches ------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What the loader does: prefetches samples, and gathers them."""
    done: list[tuple[str, list[str]]] = []
    prefetch, gather = SampleReader.prefetch, SampleReader.gather

    def prefetched(self: SampleReader, refs: Any) -> None:
        done.append(("prefetch", [ref.sample_id for ref in refs]))
        prefetch(self, refs)

    def gathered(self: SampleReader, refs: Any, **options: Any) -> Any:
        done.append(("gather", [ref.sample_id for ref in refs]))
        return gather(self, refs, **options)

    monkeypatch.setattr(SampleReader, "prefetch", prefetched)
    monkeypatch.setattr(SampleReader, "gather", gathered)
    return done


def loader_of(path: Path, **options: Any) -> LatentLoader:
    dataset = LatentDataset(path, flips=True, caption="random")
    return LatentLoader(BucketBatchSampler(dataset, 2, seed=5), device="cpu", **options)


def test_planned_batches_are_prefetched_in_time(path: Path, steps: list[tuple[str, list[str]]]) -> None:
    with loader_of(path, prefetch=0) as made:
        given = [batch["sample_id"] for batch in made]
    assert [ids for what, ids in steps if what == "gather"] == given
    prefetched: list[str] = []
    num_read, ends = 0, [*accumulate(map(len, given))]
    for what, sample_ids in steps:
        if what == "prefetch":
            prefetched += sample_ids
        else:
            num_read += 1
            assert len(prefetched) >= ends[min(num_read + loader.LOOK_AHEAD, len(given)) - 1]
    assert prefetched == [*chain.from_iterable(given)]


def test_an_error_comes_up_with_its_own_batch(path: Path) -> None:
    with loader_of(path, prefetch=2) as made:
        plan = [made.dataset.refs(planned.items) for planned in made.sampler.plan(0)]
        lost = plan[-1][0]
        first = next(n for n, batch in enumerate(plan) if any(item.keys[0] == lost.keys[0] for item in batch))
        assert made.dataset.cache.store.remove([lost.keys[0]]) == 1
        num_given = 0
        with pytest.raises(SampleError, match="has no entry") as caught:
            for _ in made:
                num_given += 1
        assert num_given == first and caught.value.sample_id == lost.sample_id


def test_a_sample_that_cannot_be_found_is_an_error_in_its_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(path) as made:
        plan = list(made.sampler.plan(0))
        bad, refs = plan[3].numbers[0], LatentDataset.refs

        def refusing(self: LatentDataset, indices: Any) -> Any:
            if bad in indices:
                raise SampleError("it", "is no more", "nothing helps")
            return refs(self, indices)

        monkeypatch.setattr(LatentDataset, "refs", refusing)
        num_given = 0
        with pytest.raises(SampleError, match="is no more"):
            for _ in made:
                num_given += 1
        assert num_given == 3
