"""Variants of a caption: texts that are made of it by shuffling and dropping its tags.

The rule is that of sd-scripts' `process_caption`, as of 48d368f: the same draws of a stream give the same text.
"""

from __future__ import annotations

from random import Random

from latentcache.config import CaptionsConfig
from latentcache.identity import canonical_json, digest

_SEED_DIGITS = 16


def variants_of(caption: str, rule: CaptionsConfig) -> tuple[str, ...]:
    """The variants of a caption: as many as the rule says, the first of which is the caption itself.

    Each depends on the caption, its own number, and the rule without its `variants`: more of them begin with the same.
    """
    streams = (_stream(rule.seed, caption, number) for number in range(1, rule.variants))
    return (caption, *(varied(caption, rule, stream) for stream in streams))


def varied(caption: str, rule: CaptionsConfig, stream: Random) -> str:
    """The caption with its tags shuffled and dropped as the stream draws.

    A rule that neither shuffles nor drops leaves the text as it is, but for the secondary separator. Any other joins
    the tags again, by a comma and a space whatever the separator is.
    """
    if rule.shuffle or rule.drop:
        first, tags, last = _split(caption, rule)
        if rule.shuffle:
            stream.shuffle(tags)
        if rule.drop:  # after the shuffle, from the same stream
            tags = [tag for tag in tags if stream.random() >= rule.drop]
        caption = ", ".join([*first, *tags, *last])
    if rule.secondary_separator:
        caption = caption.replace(rule.secondary_separator, rule.separator)
    return caption


def _split(caption: str, rule: CaptionsConfig) -> tuple[list[str], list[str], list[str]]:
    """The tags that stay first, those that move, and those that stay last.

    An empty tag is a tag, unless the caption is divided by `keep_separator`: so sd-scripts has it.
    """
    if rule.keep_separator and rule.keep_separator in caption:
        # What follows a third separator is part of the last tags, with the separator.
        parts = [*caption.split(rule.keep_separator, 2), ""][:3]
        first, tags, last = ([tag for tag in _tags(part, rule.separator) if tag] for part in parts)
        return first, tags, last
    tags = _tags(caption, rule.separator)
    return tags[: rule.keep], tags[rule.keep :], []


def _tags(text: str, separator: str) -> list[str]:
    return [tag.strip() for tag in text.strip().split(separator)]


def _stream(seed: int, caption: str, number: int) -> Random:
    """The stream of one variant. Python promises that a whole number seeds the same one in each of its versions."""
    return Random(int(digest(canonical_json([seed, caption, number]))[:_SEED_DIGITS], 16))
