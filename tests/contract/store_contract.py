"""What every store must do. A store's test class inherits one of the contracts and gives the fixture `store`."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from latentcache.errors import EntryMissingError, StoreError
from latentcache.identity import key_of
from latentcache.store.batch import read_batch, stack
from latentcache.types import Entry, Record

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]
ABSENT = "0" * 64
NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
MACHINE = settings(
    max_examples=6, stateful_step_count=8, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.bool()[..., 0] if dtype == torch.bool else bits.view(dtype)[..., 0].clone()


def make_entry(number, kind="image", shape=(4, 3, 5), dtype=torch.float16, field="moments", seed=None):
    identity = {"source": f"sample {number}", "encoding": {"vae": "a1b2c3" * 10, "dtype": "float16"}, "salt": ""}
    provenance = {"path": f"photos/{number}.jpg", "software": {"torch": "2.13.0", "latentcache": "0.1.0", "os": "any"}}
    tensors = {field: random_tensor(shape, dtype, number if seed is None else seed)}
    if kind == "text":
        tensors["pooled"] = random_tensor((7,), dtype, number + 1)
    return Entry(Record(key_of(identity), kind, identity, provenance), tensors)


def make_text(number, length, dtype=torch.float32, more=()):
    """An entry with two ragged fields of one length, and a field that has the same shape in all."""
    entry = make_entry(number, kind="text", shape=(2,), dtype=dtype, field="pooled_2")
    tensors = {
        **entry.tensors,
        "hidden": random_tensor((length, 3), dtype, 1000 + number),
        "mask": random_tensor((length,), torch.int64, 2000 + number),
        **dict(more),
    }
    return dataclasses.replace(entry, tensors=tensors, ragged=frozenset({"hidden", "mask"}))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(bits(left), bits(right))


def assert_holds(store, entry):
    found = store.get(entry.record.key)
    assert found.record == entry.record
    assert found.tensors.keys() == entry.tensors.keys() and found.ragged == entry.ragged
    for name, tensor in entry.tensors.items():
        assert same(found.tensors[name], tensor)


class StoreContract:
    removes = False
    """Whether entries can be removed one by one."""

    def test_what_was_added_is_given_back(self, store):
        entries = [make_entry(1), make_entry(2, kind="text"), make_entry(3, shape=())]
        assert store.add(entries) == 3
        for entry in entries:
            assert_holds(store, entry)
            assert store.record(entry.record.key) == entry.record
        assert set(store.keys()) == {entry.record.key for entry in entries}

    def test_every_dtype(self, store):
        entries = [make_entry(number, dtype=dtype) for number, dtype in enumerate(DTYPES * 2)]
        store.add(entries)
        for pair in zip(entries, entries[len(DTYPES) :], strict=False):
            batch = read_batch(store, [entry.record.key for entry in pair])["moments"]
            assert same(batch, torch.stack([entry.tensors["moments"] for entry in pair]))

    def test_entries_are_immutable(self, store):
        first, other = make_entry(1, seed=1), make_entry(1, seed=2)
        assert store.add([first, other]) == 1
        assert store.add([other]) == 0
        assert_holds(store, first)

    def test_tensors_are_copied_both_ways(self, store):
        entry = make_entry(1, dtype=torch.float32)
        expected = make_entry(1, dtype=torch.float32)
        with store.writer() as writer:
            writer.add(entry)
            entry.tensors["moments"].zero_()
        store.get(entry.record.key).tensors["moments"].zero_()
        store.get(entry.record.key).record.identity["source"] = "changed"
        assert_holds(store, expected)

    def test_views_and_parameters_are_stored_as_plain_tensors(self, store):
        entry = make_entry(1)
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        store.add([dataclasses.replace(entry, tensors={"moments": weight.t()})])
        found = store.get(entry.record.key).tensors["moments"]
        assert torch.equal(found, weight.detach().t()) and not found.requires_grad

    def test_missing(self, store):
        for call in (store.get, store.record, store.describe):
            with pytest.raises(EntryMissingError) as caught:
                call(ABSENT)
            assert caught.value.key == ABSENT
        with pytest.raises(EntryMissingError):
            read_batch(store, [ABSENT])
        with pytest.raises(EntryMissingError):
            store.rows([ABSENT])

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
        order = [2, 0, 3, 2, 2, 1]
        batch = read_batch(store, [entries[i].record.key for i in order])
        assert same(batch["moments"], torch.stack([entries[i].tensors["moments"] for i in order]))
        assert read_batch(store, []) == {}

    def test_unequal_entries_are_not_a_batch(self, store):
        first, wide, other = make_entry(1), make_entry(2, shape=(4, 3, 6)), make_entry(3, dtype=torch.bfloat16)
        text = make_entry(4, kind="text")
        store.add([first, wide, other, text])
        for entry in (wide, other):
            with pytest.raises(StoreError, match=entry.record.key) as caught:
                read_batch(store, [first.record.key, entry.record.key])
            assert first.record.key in str(caught.value)
        with pytest.raises(StoreError, match="same fields"):
            read_batch(store, [first.record.key, text.record.key])

    def test_prefetching_changes_nothing(self, store):
        entries = [make_entry(number) for number in range(3)]
        store.add(entries)
        keys = [entry.record.key for entry in entries]
        for _ in range(2):
            assert store.prefetch([*keys, ABSENT]) is None
            assert store.prefetch(key for key in keys) is None
            assert same(read_batch(store, keys)["moments"], torch.stack([e.tensors["moments"] for e in entries]))
        assert store.find([*keys, ABSENT]) == set(keys)

    def test_the_writer_keeps_what_was_added_before_an_exception(self, store):
        entries = [make_entry(number) for number in range(5)]
        writer = store.writer()
        with pytest.raises(KeyboardInterrupt), writer:
            for entry in entries[:3]:
                writer.add(entry)
            raise KeyboardInterrupt
        assert writer.num_added == 3 and writer.bytes_written > 0
        for entry in entries[:3]:
            assert_holds(store, entry)
        assert store.find([entries[3].record.key]) == set()

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
        key, record = good.record.key, good.record
        bad = {
            "identity gives": Entry(dataclasses.replace(record, identity={"other": 1}), good.tensors),
            "kind": Entry(dataclasses.replace(record, kind="Sound!"), good.tensors),
            "must be JSON": Entry(dataclasses.replace(record, provenance={"x": float("nan")}), good.tensors),
            "its record has": Entry(dataclasses.replace(record, provenance={"x": "y" * (1 << 20)}), good.tensors),
            "no tensor": Entry(record, {}),
            "no element": Entry(record, {"moments": torch.empty(0)}),
            "dtype": Entry(record, {"moments": torch.zeros(2, dtype=torch.complex64)}),
            "on meta": Entry(record, {"moments": torch.zeros(2, device="meta")}),
            "a name has": Entry(record, {"a/b": torch.zeros(2)}),
            "names fields that it lacks": Entry(record, good.tensors, frozenset({"hidden"})),
            "is a scalar": Entry(record, {"moments": torch.tensor(1.0)}, frozenset({"moments"})),
        }
        for message, entry in bad.items():
            with pytest.raises(StoreError, match=message):
                store.add([entry])
        assert store.find([key]) == set()

    def test_odd_text_in_records_survives(self, store):
        identity = {"caption": '雪\u202e\x00\ud800 "quoted" \\ 🦊', "list": [1, 2.5, None, True, {"deep": ["x" * 40]}]}
        entry = Entry(Record(key_of(identity), "text", identity, {"path": "\udcff.jpg"}), {"pooled": torch.ones(3)})
        store.add([entry])
        assert store.record(entry.record.key) == entry.record

    def test_stats(self, store):
        store.add([make_entry(1), make_entry(2), make_entry(3, kind="text")])
        stats = store.stats()
        assert stats.num_entries == {"image": 2, "text": 1}
        assert stats.payload_bytes == 3 * 60 * 2 + 7 * 2
        assert stats.num_damaged == 0 and store.damaged() == {}
        assert stats.to_json()["num_entries"] == {"image": 2, "text": 1}

    # Fields of natural length

    def test_ragged_fields_are_given_back(self, store):
        entries = [make_text(number, length) for number, length in enumerate([3, 1, 7, 3])]
        plain = make_entry(9)
        assert store.add([*entries, plain]) == 5
        for entry in [*entries, plain]:
            assert_holds(store, entry)
        for entry, length in zip(entries, [3, 1, 7, 3], strict=True):
            assert store.describe(entry.record.key) == {
                "hidden": ("float32", (length, 3)),
                "mask": ("int64", (length,)),
                "pooled": ("float32", (7,)),
                "pooled_2": ("float32", (2,)),
            }
            (row,) = store.rows([entry.record.key])
            assert dict(row.description) == store.describe(entry.record.key)
            assert same(stack([""], [row])["hidden"][0], entry.tensors["hidden"])
        assert store.stats().payload_bytes == sum(entry.num_bytes for entry in [*entries, plain])

    def test_ragged_fields_of_equal_length_are_a_batch_and_others_need_a_rule(self, store):
        entries = [make_text(1, 3), make_text(2, 3), make_text(3, 4)]
        store.add(entries)
        keys = [entry.record.key for entry in entries]
        batch = read_batch(store, keys[:2])
        assert same(batch["hidden"], torch.stack([entry.tensors["hidden"] for entry in entries[:2]]))
        with pytest.raises(StoreError, match=r"'hidden' is float32 \[3, 3\] in .*padding") as caught:
            read_batch(store, keys)
        assert keys[0] in str(caught.value) and keys[2] in str(caught.value)

    def test_it_does_what_a_dict_does(self, store):
        """After any calls, of which some are about the same entry twice, or about one that is there."""
        begun, removes = itertools.count(1000, 10), self.removes

        class Machine(RuleBasedStateMachine):
            def __init__(self):
                super().__init__()
                first = next(begun)  # one store for all runs: each has entries of its own
                self.entries, self.there = [make_entry(first + number, kind="text") for number in range(6)], {}

            @rule(numbers=NUMBERS)
            def add(self, numbers):
                added = {self.entries[number].record.key: self.entries[number] for number in numbers}
                assert store.add([self.entries[number] for number in numbers]) == len(added.keys() - self.there.keys())
                self.there |= added

            @rule(numbers=NUMBERS)
            def read(self, numbers):
                keys = [self.entries[number].record.key for number in numbers]
                there = [key for key in keys if key in self.there]
                assert store.find(keys) == set(there)
                for name, values in read_batch(store, there).items():
                    assert same(values, torch.stack([self.there[key].tensors[name] for key in there]))
                if len(there) < len(keys):
                    with pytest.raises(EntryMissingError):
                        store.rows(keys)

            @precondition(lambda self: removes)
            @rule(numbers=NUMBERS)
            def remove(self, numbers):
                keys = {self.entries[number].record.key for number in numbers}
                assert store.remove(sorted(keys)) == len(keys & self.there.keys())
                self.there = {key: entry for key, entry in self.there.items() if key not in keys}

        run_state_machine_as_test(Machine, settings=MACHINE)

    def test_a_closed_store_says_so(self, store):
        store.add([make_entry(1)])
        keys = [make_entry(1).record.key]
        rows, batch = store.rows(keys), read_batch(store, keys)
        store.close()
        assert same(stack(keys, rows)["moments"][0], make_entry(1).tensors["moments"])
        assert same(batch["moments"][0], make_entry(1).tensors["moments"])
        for call in (
            lambda: store.get(make_entry(1).record.key),
            lambda: store.find([ABSENT]),
            lambda: store.prefetch([ABSENT]),
            lambda: store.rows([ABSENT]),
            lambda: store.add([make_entry(2)]),
        ):
            with pytest.raises(StoreError, match="closed"):
                call()


class RemovingStoreContract(StoreContract):
    """Of stores of which entries can be removed one by one: not of those that are elsewhere."""

    removes = True

    def test_what_was_removed_is_missing_and_what_was_read_stays(self, store):
        entries = [make_entry(number, kind="text") for number in range(3)]
        store.add(entries)
        keys = [entry.record.key for entry in entries]
        rows = store.rows(keys)
        expected = {name: torch.stack([entry.tensors[name] for entry in entries]) for name in ("moments", "pooled")}
        store.remove(keys[:1])
        with pytest.raises(EntryMissingError):
            store.rows(keys)
        assert len(store.rows(keys[1:])) == 2 and not store.rows([])
        assert same(stack(keys, rows)["pooled"], expected["pooled"]), "what was read stays readable"
