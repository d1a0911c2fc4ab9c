"""What tiny text encoders give, in a few numbers: they show when a new transformers gives hidden states a new meaning.

A pipeline of diffusers reads hidden states by their index, and families with CLIP follow such a change unnoticed. The
others name modules, whose outputs may change too. An old cache would have keys that are right and values that are not.
Then the family's recipe needs a version, and `python tests/families/test_golden_texts.py` writes the numbers again.

Weights are drawn here, in the order of a model's parameters: how a library begins them does not matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_models import frozen, randomised, tiny_encoders

from latentcache.families import FAMILIES, family_named
from latentcache.families.base import MASK

pytestmark = pytest.mark.extended

FILE = Path(__file__).with_name("golden_texts.json")
TEXTS = ("cat", "a red cat on the table")


def text_numbers(name: str) -> dict[str, Any]:
    """Of each text and field: the number of rows, mean, deviation, and the first features of the first and last row."""
    family = family_named(name)
    parts = tiny_encoders(name)
    for number, encoder in enumerate(family.names("text_encoder")):
        randomised(parts[encoder], 100 + number)
    parts = frozen(parts)
    if family.text_reads_control:
        ramp = np.linspace(0, 255, 64 * 96 * 3).reshape(64, 96, 3).astype(np.uint8)
        tokens = family.tokenize_with_control(parts, TEXTS, [[ramp], [ramp, ramp.transpose(1, 0, 2)]])
    else:
        tokens = family.tokenize(parts, TEXTS)
    made = family.encode_text(parts, tokens, family.text_recipe())
    found: dict[str, Any] = {}
    for field in family.fields:
        mask = made.get(field + MASK, torch.ones(made[field].shape[:2], dtype=torch.bool))
        for number, text in enumerate(TEXTS):
            rows = made[field][number][mask[number]] if made[field].ndim > 2 else made[field][number][None].float()
            ends = torch.cat([rows[0].flatten()[:4], rows[-1].flatten()[:4]])
            numbers = [float(rows.mean()), float(rows.std()), *ends.tolist()]
            found[f"{field}: {text}"] = {"rows": len(rows), "numbers": [round(each, 5) for each in numbers]}
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_mean_what_they_meant(name: str) -> None:
    found, golden = text_numbers(name), json.loads(FILE.read_text(encoding="utf-8"))[name]
    assert found.keys() == golden.keys()
    for text, expected in golden.items():
        assert found[text]["rows"] == expected["rows"], text
        # Another CPU rounds otherwise; another layer differs by 0.1 and more.
        torch.testing.assert_close(found[text]["numbers"], expected["numbers"], rtol=1e-3, atol=1e-3, msg=text)


if __name__ == "__main__":
    lines = [f'"{name}": {json.dumps(text_numbers(name))}' for name in FAMILIES]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
