"""Variants of a caption: texts that are made of it by shuffling and dropping its tags.

The rule is that of sd-scripts' `process_caption`, as of 48d368f: the same draws of a stream give the same text.
"""

from __future__ import annotations

from random import Random

from latentcache.config import CaptionsConfig
from latentcache.identity import seed_of


def variants_of(caption: str, rule: CaptionsConfig) -> tuple[str, ...]:
    """The variants of a caption: as many as the rule says, the first of which is the caption itself.

    Each depends on the caption, its own number, and the rule without its `variants`: more of them begin with the same.
    """
    if rule.variants == 1:
        return (caption,)
    # Python promises that a whole number seeds the same stream in each of its versions.
    first = seed_of(rule.seed, caption)
    return (caption, *(varied(caption, rule, Random(first + number)) for number in range(1, rule.variants)))


def varied(caption: str, rule: CaptionsConfig, stream: Random) -> str:
    """The caption with its tags shuffled and dropped as the stream draws.

    A rule that neither shuffles nor drops leaves the text as it is, but for the secondary separator. Any other joins
    the tags again, by a comma and a space whatever the separator is.
    """
    if rule.shuffle or rule.drop:
        first, moved, last = _split(caption, rule)
        if rule.shuffle:
            stream.shuffle(moved)
        if rule.drop:  # after the shuffle, from the same stream
            moved = [tag for tag in moved if stream.random() >= rule.drop]
        caption = ", ".join([*first, *moved, *last])
    if rule.secondary_separator:
        caption = caption.replace(rule.secondary_separator, rule.separator)
    return caption


def _split(caption: str, rule: CaptionsConfig) -> tuple[list[str], list[str], list[str]]:
    """The tags of a caption that stay first, those that move, and those that stay last.

    An empty one is a tag, unless `keep_separator` is in the caption: as in sd-scripts.
    """
    if rule.keep_separator and rule.keep_separator in caption:
        # What follows a third separator is part of the last tags, with the separator.
        parts = [*caption.split(rule.keep_separator, 2), ""][:3]
        first, moved, last = ([tag for tag in _stripped(part, rule) if tag] for part in parts)
        return first, moved, last
    tags = _stripped(caption, rule)
    return tags[: rule.keep], tags[rule.keep :], []


def _stripped(text: str, rule: CaptionsConfig) -> list[str]:
    return [tag.strip() for tag in text.strip().split(rule.separator)]
