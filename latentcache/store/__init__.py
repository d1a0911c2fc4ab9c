"""Keys and bytes. Knows no model and no image."""

from latentcache.store.base import Store, StoreStats, Writer
from latentcache.store.disk import DiskStore
from latentcache.store.index import Index
from latentcache.store.memory import MemoryStore

__all__ = ["DiskStore", "Index", "MemoryStore", "Store", "StoreStats", "Writer"]
