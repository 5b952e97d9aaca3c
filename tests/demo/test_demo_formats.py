"""Table of formats: each format is made once, and measured on held-out reports with their right summaries."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.demo.reports import make_report
from pipeline.quantize import Recipe
from tools.demo import formats


def test_every_format_is_made_once_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "RECIPES", {"rtn": Recipe("rtn"), "fp8": Recipe("fp8")})
    monkeypatch.setattr(formats, "ON_LOAD", ())
    folders = formats.make_all(tmp_path, 2)
    made = (tmp_path / "rtn" / "config.json").stat().st_mtime_ns
    assert formats.make_all(tmp_path, 2) == folders == [tmp_path / "rtn", tmp_path / "fp8"]
    assert (tmp_path / "rtn" / "config.json").stat().st_mtime_ns == made
    data = tmp_path / "heldout.parquet"
    formats.write_reports(data, 2)
    assert pq.read_table(data)["summary"].to_pylist() == [make_report("heldout", i).summary for i in range(2)]
    found = formats.measure(folders, data)
    rounded = f"{folders[1]}, activations in fp8"
    assert [model.name for model in found.models] == ["demo:target", *map(str, folders), rounded]
    assert [model.expected for model in found.models] == [1.0] * 4
    rtn, fp8, both = (model.kl_mean or 0.0 for model in found.models[1:])
    assert 0 < fp8 < both < rtn < 0.2, "8 bits lose less than 4"
