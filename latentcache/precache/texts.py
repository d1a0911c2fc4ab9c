"""What the key of a text is made of: the text as the tokenizer gets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from latentcache.families.base import Family
from latentcache.identity import Preparation, TextEncoding, TextIdentity, caption_digest, key_of, keys_like

Controls = tuple[tuple[str, Preparation], ...]
"""Control images: the digest of each and its preparation."""


class TextKeys:
    """The identities and keys of texts with one encoding. `tokenizers` gives those of the model, by name.

    It is called once, and only where the family renders texts: most plans need no tokenizer.
    """

    def __init__(self, family: Family, tokenizers: Callable[[], Mapping[str, Any]], encoding: TextEncoding, salt: str):
        self.family, self._tokenizers = family, tokenizers() if family.renders else {}
        self._encoding, self._salt = encoding, salt
        self._key = keys_like(TextIdentity("", encoding, salt))

    def source(self, text: str) -> str:
        """The digest of a text as the tokenizer gets it."""
        return caption_digest(self.family.rendered(self._tokenizers, text))

    def key(self, text: str, controls: Controls = ()) -> str:
        """The key of a text, and of the control images that are read together with it."""
        return key_of(self.identity(text, controls).to_json()) if controls else self._key(self.source(text))

    def identity(self, text: str, controls: Controls = ()) -> TextIdentity:
        """What the entry of a text is."""
        return TextIdentity(self.source(text), self._encoding, self._salt, controls=controls)
