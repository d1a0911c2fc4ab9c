"""What every store must do. A store's test class inherits one of the contracts and gives the fixture `store`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from helpers.tensor_bits import random_tensor, read_batch, same_bits

from latentcache.errors import EntryMissingError, StoreError
from latentcache.identity import key_of
from latentcache.store.batch import DTYPES, stack
from latentcache.types import Entry, Record

ABSENT = "0" * 64


def make_entry(number, kind="image", shape=(4, 3, 5), dtype=torch.float16, field="moments", seed=None):
    identity = {"source": f"sample {number}", "encoding": {"vae": "a1b2c3" * 10, "dtype": "float16"}, "salt": ""}
    provenance = {"path": f"photos/{number}.jpg", "software": {"torch": "2.13.0", "latentcache": "0.1.0", "os": "any"}}
    tensors = {field: random_tensor(shape, dtype, number if seed is None else seed)}
    if kind == "text":
        tensors["pooled"] = random_tensor((7,), dtype, number + 1)
    return Entry(Record(key_of(identity), kind, identity, provenance), tensors)


def make_text(number, length, dtype=torch.float32):
    """An entry with two ragged fields of one length, and a field that has the same shape in all."""
    entry = make_entry(number, kind="text", shape=(2,), dtype=dtype, field="pooled_2")
    tensors = {
        **entry.tensors,
        "hidden": random_tensor((length, 3), dtype, 1000 + number),
        "mask": random_tensor((length,), torch.int64, 2000 + number),
    }
    return dataclasses.replace(entry, tensors=tensors, ragged=frozenset({"hidden", "mask"}))


def keys_of(entries):
    return [entry.record.key for entry in entries]


def has(store, *keys):
    return store.has(np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)).tolist()


def stacked(entries, name="moments"):
    return torch.stack([entry.tensors[name] for entry in entries])


def assert_holds(store, *entries):
    for entry in entries:
        found = store.get(entry.record.key)
        assert found.record == store.record(entry.record.key) == entry.record
        assert found.tensors.keys() == entry.tensors.keys() and found.ragged == entry.ragged
        for name, tensor in entry.tensors.items():
            assert same_bits(found.tensors[name], tensor)


class StoreContract:
    def test_what_was_added_is_given_back_and_counted(self, store):
        entries = [make_entry(1), make_entry(2, kind="text"), make_entry(3, shape=())]
        assert store.add(entries[:1]) == 1 and store.add([*entries, *entries]) == 2
        assert_holds(store, *entries)
        assert set(store.keys()) == set(keys_of(entries))
        stats = store.stats()
        assert stats.num_entries == stats.to_json()["num_entries"] == {"image": 2, "text": 1}
        assert stats.payload_bytes == 2 * 60 * 2 + 7 * 2 + 2
        assert stats.num_damaged == 0 and store.damaged() == {}

    def test_every_dtype(self, store):
        entries = [make_entry(number, dtype=dtype) for number, dtype in enumerate([*DTYPES.values()] * 2)]
        store.add(entries)
        for pair in zip(entries, entries[len(DTYPES) :], strict=False):
            assert same_bits(read_batch(store, keys_of(pair))["moments"], stacked(pair))

    def test_entries_are_immutable(self, store):
        first, other = make_entry(1, seed=1), make_entry(1, seed=2)
        assert store.add([first, other]) == 1
        assert store.add([other]) == 0
        assert_holds(store, first)

    def test_tensors_are_copied_both_ways_as_plain_tensors(self, store):
        entry, expected = make_entry(1, dtype=torch.float32), make_entry(1, dtype=torch.float32)
        with store.writer() as writer:
            writer.add(entry)
            entry.tensors["moments"].zero_()
        store.get(entry.record.key).tensors["moments"].zero_()
        store.get(entry.record.key).record.identity["source"] = "changed"
        assert_holds(store, expected)
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        view = dataclasses.replace(make_entry(2), tensors={"moments": weight.t()})
        store.add([view])
        found = store.get(view.record.key).tensors["moments"]
        assert torch.equal(found, weight.detach().t()) and not found.requires_grad

    def test_missing(self, store):
        store.add([make_entry(1)])
        for call in (store.get, store.record, store.describe, lambda key: store.rows([*keys_of([make_entry(1)]), key])):
            with pytest.raises(EntryMissingError) as caught:
                call(ABSENT)
            assert caught.value.key == ABSENT
        assert store.find([ABSENT, *keys_of([make_entry(1)])]) == {*keys_of([make_entry(1)])}
        assert has(store, ABSENT, *keys_of([make_entry(1)]), ABSENT) == [False, True, False] and has(store) == []

    def test_what_is_no_key_is_refused(self, store):
        for key in ["", "../" * 20 + "abcd", "A" * 64, "0" * 63, "0" * 65, "0" * 63 + "\n", None, 7]:
            calls = [(call, key) for call in (store.get, store.record, store.describe)]
            calls += [(call, [key]) for call in (store.find, store.rows, store.remove)]
            calls += [(store.add, [Entry(Record(key, "image", {}, {}), make_entry(1).tensors)])]
            for call, argument in calls:
                with pytest.raises(StoreError, match="not a key"):
                    call(argument)

    def test_a_batch_is_stacked_in_order_and_keys_may_repeat(self, store):
        entries = [make_entry(number) for number in range(4)]
        store.add(entries)
        for _ in range(2):
            assert store.prefetch(key for key in [*keys_of(entries), ABSENT]) is None, "it changes nothing"
            chosen = [entries[number] for number in (2, 0, 3, 2, 2, 1)]
            assert same_bits(read_batch(store, keys_of(chosen))["moments"], stacked(chosen))
        assert read_batch(store, []) == {}

    def test_unequal_entries_are_not_a_batch(self, store):
        first, wide, other = make_entry(1), make_entry(2, shape=(4, 3, 6)), make_entry(3, dtype=torch.bfloat16)
        text = make_entry(4, kind="text")
        store.add([first, wide, other, text])
        for entry in (wide, other):
            with pytest.raises(StoreError, match=entry.record.key) as caught:
                read_batch(store, keys_of([first, entry]))
            assert first.record.key in str(caught.value)
        with pytest.raises(StoreError, match="same fields"):
            read_batch(store, keys_of([first, text]))

    def test_the_writer_keeps_what_was_added_before_an_exception(self, store):
        entries = [make_entry(number) for number in range(4)]
        writer = store.writer()
        with pytest.raises(KeyboardInterrupt), writer:
            for entry in entries[:3]:
                writer.add(entry)
            raise KeyboardInterrupt
        assert writer.num_added == 3 and writer.bytes_written > 0
        assert_holds(store, *entries[:3])
        assert store.find(keys_of(entries)) == {*keys_of(entries[:3])}

    def test_sealed_entries_are_there_at_once(self, store):
        with store.writer() as writer:
            writer.add(make_entry(1))
            writer.add(make_entry(1))
            writer.seal()
            assert_holds(store, make_entry(1))
            assert writer.num_added == 1
            writer.seal()
        with pytest.raises(StoreError, match="not open"):
            writer.add(make_entry(2))

    def test_bad_entries_are_refused(self, store):
        good = make_entry(1)
        record = good.record
        bad = {
            "identity gives": Entry(dataclasses.replace(record, identity={"other": 1}), good.tensors),
            "kind": Entry(dataclasses.replace(record, kind="Sound!"), good.tensors),
            "must be JSON": Entry(dataclasses.replace(record, provenance={"x": float("nan")}), good.tensors),
            "its record has": Entry(dataclasses.replace(record, provenance={"x": "y" * (1 << 20)}), good.tensors),
            "no tensors": Entry(record, {}),
            "has no elements": Entry(record, {"moments": torch.empty(0)}),
            "dtype": Entry(record, {"moments": torch.zeros(2, dtype=torch.complex64)}),
            "on meta": Entry(record, {"moments": torch.zeros(2, device="meta")}),
            "a name has": Entry(record, {"a/b": torch.zeros(2)}),
            "names fields that the entry lacks": Entry(record, good.tensors, frozenset({"hidden"})),
            "is a scalar": Entry(record, {"moments": torch.tensor(1.0)}, frozenset({"moments"})),
        }
        for message, entry in bad.items():
            with pytest.raises(StoreError, match=message):
                store.add([entry])
        assert store.find([record.key]) == set()

    def test_odd_text_in_records_survives(self, store):
        identity = {"caption": '雪\u202e\x00\ud800 "quoted" \\ 🦊', "list": [1, 2.5, None, True, {"deep": ["x" * 40]}]}
        entry = Entry(Record(key_of(identity), "text", identity, {"path": "\udcff.jpg"}), {"pooled": torch.ones(3)})
        store.add([entry])
        assert_holds(store, entry)

    def test_fields_of_natural_length_are_given_back(self, store):
        lengths = [3, 1, 7, 3]
        entries = [make_text(number, length) for number, length in enumerate(lengths)]
        assert store.add([*entries, make_entry(9)]) == 5
        assert_holds(store, *entries, make_entry(9))
        for entry, length in zip(entries, lengths, strict=True):
            (row,) = store.rows([entry.record.key])
            assert store.describe(entry.record.key) == dict(row.description)
            assert dict(row.description) == {
                "hidden": ("float32", (length, 3)),
                "mask": ("int64", (length,)),
                "pooled": ("float32", (7,)),
                "pooled_2": ("float32", (2,)),
            }
        assert store.stats().payload_bytes == sum(entry.num_bytes for entry in [*entries, make_entry(9)])
        equal, keys = [entries[0], entries[3]], keys_of(entries)
        assert same_bits(read_batch(store, keys_of(equal))["hidden"], stacked(equal, "hidden"))
        with pytest.raises(StoreError, match=r"'hidden' is float32 \[3, 3\] in .*padding") as caught:
            read_batch(store, keys)
        assert keys[0] in str(caught.value) and keys[1] in str(caught.value)

    def test_a_closed_store_says_so(self, store):
        entry = make_entry(1)
        store.add([entry])
        rows, batch = store.rows(keys_of([entry])), read_batch(store, keys_of([entry]))
        store.close()
        assert same_bits(stack(keys_of([entry]), rows)["moments"], stacked([entry]))
        assert same_bits(batch["moments"], stacked([entry]))
        for call in (
            lambda: store.get(entry.record.key),
            lambda: store.find([ABSENT]),
            lambda: store.prefetch([ABSENT]),
            lambda: store.rows([ABSENT]),
            lambda: store.add([make_entry(2)]),
        ):
            with pytest.raises(StoreError, match="closed"):
                call()


class RemovingStoreContract(StoreContract):
    """Of stores of which entries can be removed one by one: not of those that are elsewhere."""

    def test_what_was_removed_is_missing_and_what_was_read_stays(self, store):
        entries = [make_entry(number, kind="text") for number in range(3)]
        store.add(entries)
        keys = keys_of(entries)
        rows = store.rows(keys)
        assert store.remove([keys[0], ABSENT, keys[0]]) == 1 and store.remove(keys[:1]) == 0
        with pytest.raises(EntryMissingError):
            store.rows(keys)
        assert set(store.keys()) == store.find(keys) == {*keys[1:]} and has(store, *keys) == [False, True, True]
        assert same_bits(stack(keys, rows)["pooled"], stacked(entries, "pooled")), "what was read stays readable"
        assert store.add(entries) == 1 and store.remove(keys) == 3 and store.add(entries[:1]) == 1
        assert_holds(store, entries[0])
