"""Python's collector of garbage."""

from __future__ import annotations

import gc

import pytest

from latentcache.utils.garbage import collector_paused


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_the_collector_is_as_it_was(enabled: bool, raises: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                pass
            assert not gc.isenabled()
            if raises:
                raise ValueError
    except ValueError:
        assert raises
    finally:
        after = gc.isenabled()
        (gc.enable if before else gc.disable)()
    assert after == enabled
