"""Small entries, and what lies in a cache directory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal

import numpy as np
import torch
from helpers.pack_damage import damage, find_bytes
from helpers.tensor_bits import bits, random_tensor, same_bits

from latentcache.identity import key_of
from latentcache.types import Entry, Record

fork = multiprocessing.get_context("fork")


def sample(number, shape=(4, 8, 8), dtype=torch.float16, **more):
    identity = {"number": number, "encoding": {"vae": "a1b2c3" * 10, "store_dtype": "float16"}}
    provenance = {"path": f"photos/{number}.jpg", "software": {"torch": "2.13.0", "diffusers": "0.42.1", "os": "x"}}
    generator = torch.Generator().manual_seed(number)
    tensors = {"moments": torch.randn(shape, generator=generator).to(dtype), **more}
    return Entry(Record(key_of(identity), "image", identity, provenance), tensors)


def text(number, length, dtype=torch.float32, width=3, **more):
    """An entry with two ragged fields of one length, and a field that has the same shape in all."""
    mask = torch.arange(number, number + length)
    entry = sample(number, shape=(7,), hidden=random_tensor((length, width), dtype, number), mask=mask, **more)
    return dataclasses.replace(entry, ragged=frozenset({"hidden", "mask"}))


def samples(*numbers):
    return [sample(number) for number in numbers]


def key(number):
    return sample(number).record.key


def digests(*numbers):
    """The keys of these samples as digests: uint8 [n, 32]."""
    return np.frombuffer(bytes.fromhex("".join(map(key, numbers))), np.uint8).reshape(-1, 32)


def same(left, right):
    names = left.tensors.keys()
    is_like = left.record == right.record and names == right.tensors.keys() and left.ragged == right.ragged
    return is_like and all(same_bits(left.tensors[name], right.tensors[name]) for name in names)


def assert_holds(store, *numbers):
    """The store gives these samples, to the last bit."""
    for number in numbers:
        assert same(store.get(key(number)), sample(number))


def payload(number):
    """The bytes of an entry's moments, as they lie in a pack."""
    return bits(sample(number).tensors["moments"]).numpy().tobytes()


def where(store, number):
    """The pack in which an entry's payload lies, and its offset there."""
    return find_bytes(store.path, payload(number))


def flip(store, *numbers):
    """Flip a bit in the payload of entries."""
    for number in numbers:
        damage(store.path, payload(number))


def listing(root):
    """Every file below `root`, packs by number instead of by name, without SQLite's own."""
    names = []
    for folder, _, files in os.walk(root):
        names += [os.path.relpath(os.path.join(folder, file), root) for file in files]
    packs = [name for name in names if name.startswith("packs/") and name.endswith(".safetensors")]
    return [*sorted(set(names) - set(packs)), f"{len(packs)} packs"]


CLEAN = ["CACHE.json", "index/cache.db", "index/open.lock", "upkeep.lock"]


def packs(store):
    return sorted(store.directory.packs.glob("*/*.safetensors"))


def before_call(name, call, action):
    """Do something before the `call`-th call of os.<name>, from now on."""
    calls, real = iter(range(1, 1000)), getattr(os, name)

    def replaced(*args, **kwargs):
        if next(calls) == call:
            action()
        return real(*args, **kwargs)

    setattr(os, name, replaced)


def meet(monkeypatch, place, name, action):
    """Do what another process does, once, after the next call of a function."""
    real = getattr(place, name)

    def replaced(*args):
        monkeypatch.setattr(place, name, real)
        found = real(*args)
        action()
        return found

    monkeypatch.setattr(place, name, replaced)


def raise_(error):
    raise error


def assert_dies(name, call, work, *args):
    """Another process does the work, and is killed before the `call`-th call of os.<name>."""

    def child():
        before_call(name, call, lambda: os.kill(os.getpid(), signal.SIGKILL))
        work(*args)

    assert run(child) == -signal.SIGKILL


def run(target, *args):
    """Run in another process and return its exit code."""
    process = fork.Process(target=target, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode
