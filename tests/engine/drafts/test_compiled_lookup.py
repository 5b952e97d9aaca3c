"""Which compiled lookup there is."""

import pytest

from pipeline.engine.drafts.lookup.compiled import select_lookup


def test_without_numba_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_lookup() is not None
    monkeypatch.setattr("pipeline.machine.numba.find_spec", lambda name: None)
    assert select_lookup() is None
