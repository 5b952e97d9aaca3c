"""Figures computed from rounds, and the tables that show them."""

import os
import sys

import pytest

from benchmarks.measure import Spread, alternating, facts_to_text, last_line, machine_facts, ratio, table
from pipeline.errors import PipelineError


def test_columns_of_a_table_never_run_together():
    rows = [("one", 1234.5, None), ("a name that is long", 12345678.0, 0.25), ("three", "none", 0.5)]
    assert table("name <6 | all/s >7,.0f | MFU >4.0%", rows) == [
        "name                      all/s   MFU",
        "one                       1,234",
        "a name that is long  12,345,678   25%",
        "three                      none   50%",
    ]


def test_a_process_returns_its_last_line_and_an_error_shows_its_last_output():
    assert last_line([sys.executable, "-c", "print('a banner'); print('{\"s\": 1}')"], os.environ) == {"s": 1}
    with pytest.raises(PipelineError, match=r"exited with code 1: (.|\n)*no such job"):
        last_line([sys.executable, "-c", "raise SystemExit('no such job')"], os.environ)


def test_figures():
    assert ratio([2.0, 6.0, 4.0], [1.0, 2.0, 4.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.from_values([3.0, 1.0]).to_text(1) == "2.0 (1.0 to 3.0)"
    assert Spread.from_values([1234.5]).to_text(1) == "1,234.5"
    assert alternating(["a", "b"], 3) == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert "torch" in facts_to_text(machine_facts())
