"""Keys and bytes. Knows no model and no image."""

from latentcache.store.base import Store, StoreStats
from latentcache.store.disk import DiskStore
from latentcache.store.memory import MemoryStore
from latentcache.store.writer import Writer

__all__ = ["DiskStore", "MemoryStore", "Store", "StoreStats", "Writer"]
