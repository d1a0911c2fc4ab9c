from __future__ import annotations

import json

import pytest
import torch
from families.golden_texts import FILE, text_numbers

from latentcache.families import FAMILIES

pytestmark = pytest.mark.families

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_mean_what_they_meant(name: str) -> None:
    found, golden = text_numbers(name), GOLDEN[name]
    assert found.keys() == golden.keys()
    for text, expected in golden.items():
        assert found[text]["rows"] == expected["rows"], text
        # Another CPU rounds otherwise; another layer differs by 0.1 and more.
        torch.testing.assert_close(found[text]["numbers"], expected["numbers"], rtol=1e-3, atol=1e-3, msg=text)
