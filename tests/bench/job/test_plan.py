"""The bench of the driver at a small size: its datasets are real, its counts right, its failures told."""

import json

import pyarrow.parquet as pq

from pipeline.bench.job import plan as bench
from pipeline.data.source import open_source


def test_it_measures_what_it_says(tmp_path):
    said = []
    found = bench.bench_plan((1, 3), 4, 40_000, 5, 1, str(tmp_path), said.append)
    assert [(c.scale, c.files, c.rows) for c in found.costs] == [(1, 4, 160_000), (3, 12, 480_000)]
    # 40,000 rows in row groups of 4,000: a window of 65,536 rows takes 16
    assert [c.windows for c in found.costs] == [3, 8]
    assert [c.parts for c in found.costs] == [5 * 3, 5 * 8]
    assert all(vars(cost)[f"{what}_s"] > 0 for cost in found.costs for what in bench.DONE)
    text = found.to_text()
    assert " 3x 12 480,000 8 40 " in " ".join(text.split())
    assert json.loads(json.dumps(found.to_json()))["costs"][1]["windows"] == 8
    assert said == [
        f"{scale}: {what}"
        for scale, files in (("1x", 4), ("3x", 12))
        for what in (f"writing {files} files", "planning, executing, verifying, 1 of 1")
    ]
    assert list(tmp_path.iterdir()) == []


def test_its_files_claim_many_rows_and_differ(tmp_path):
    template = bench._template(100_000)
    assert len(template) < 100_000
    assert template.count(bench._MARK) == 1
    for number in (1, 2):
        (tmp_path / f"{number}.parquet").write_bytes(template.replace(bench._MARK, b"number-%012d" % number))
    source = open_source(str(tmp_path))
    assert [len(f.group_rows) for f in source.files] == [bench.ROW_GROUPS] * 2
    assert len({f.digest for f in source.files}) == 2
    assert pq.read_table(tmp_path / "1.parquet").num_rows == 100_000
