"""The cut: which rows are in which window and unit. Parts of different cuts do not fit together, so the cut of fixed
inputs is compared with recorded hashes."""

import datetime
import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.data.files import text_blocks
from pipeline.data.prompts import PromptSpec
from pipeline.data.row_adapters import RowAdapters
from pipeline.data.row_texts import RowTexts
from pipeline.data.source import cut_windows, open_source
from pipeline.data.units import UnitSpec, window_units
from tests.data.test_corrupt import flip

NUM_ROWS = 300
ROWS = range(NUM_ROWS)
DAY = datetime.date(2026, 2, 3)
COLUMNS = {
    "text": pa.array([None if i % 41 == 7 else "" if i % 53 == 3 else f"{i} " + "word " * (i * 37 % 61) for i in ROWS]),
    "whole": pa.array([None if i % 29 == 5 else 7919**(i % 5) for i in ROWS], pa.int64()),
    "real": pa.array([i / 3 * 10.0 ** (i % 40 - 20) for i in ROWS]),
    "flag": pa.array([i % 3 == 0 for i in ROWS]),
    "day": pa.array([DAY + datetime.timedelta(days=i * 97) for i in ROWS]),
    "moment": pa.array([1_700_000_000_000_000 + i * 86_399_000_007 for i in ROWS], pa.timestamp("us")),
    "far": pa.array([10**11 * (i % 20) * i for i in ROWS], pa.timestamp("s")),  # some have no text form
    "list": pa.array([[f"x{j}" * (i % 5) for j in range(i % 4)] for i in ROWS]),
    "struct": pa.array([{"a": i % 11, "b": None if i % 7 == 0 else "y" * (i % 23)} for i in ROWS]),
    # groups of many rows with a shared prefix, and smaller groups within them
    "shared": pa.array([f"{i % 7} " * 200 + f"{i % 3} " * 150 + f"row {i}" for i in ROWS]),
    "chat": pa.array([json.dumps([{"role": "user", "content": "hm " * (i % 31)}]) for i in ROWS]),
    "adapter": pa.array([(None, "a", "b", "unknown")[i % 4] for i in ROWS]),
    "budget": pa.array([(None, 5.0, 900.0, float("nan"))[i % 4] for i in ROWS]),
    "samples": pa.array([None if i % 5 else i % 4 + 1 for i in ROWS]),
}  # fmt: skip


def spec(template: str = "Say {text}", **changes) -> UnitSpec:
    return UnitSpec(**{"prompt": PromptSpec(template=template), "unit_tokens": 1500, "unit_rows": 40} | changes)


# case -> units of its input, and the hash of their rows
CASES = {
    "texts": (spec(), "089d27f7b272a84d"),
    "numbers": (spec("{whole} {real} {flag}"), "4719c11593fb59b4"),
    "times": (spec("{day} {moment} {far}"), "eebde57e7a887156"),
    "nested": (spec("{list} {struct}"), "f1ee37b6ac8a45b3"),
    "chats": (spec(prompt=PromptSpec(messages="chat")), "420f9753f2bfa7b5"),
    "shared prefixes": (spec("Read this. {shared}", unit_tokens=20_000), "2674144810c21ce5"),
    "large groups": (spec("Read this. {shared}", unit_tokens=2000, unit_rows=7), "20c6516139365c8a"),
    "adapters": (spec(adapters=RowAdapters(("a", "b"), "adapter")), "15fe67dfd207d97b"),
    "own lengths": (spec(sampling_columns={"max_tokens": "budget", "n": "samples"}), "cdc1cb71f926f00c"),
    "completions": (spec(texts=RowTexts("task.completion", PromptSpec(column="shared"))), "4d4ea00fde2252ee"),
    "stretches": (spec("{text} {shared}", max_bytes=20_000), "26b0a33af5170d74"),
    "damaged row group": (spec("{text} {shared}", max_bytes=20_000), "ed0bdb466cb9b1eb"),
    "JSON Lines": (spec("{text} {whole} {real} {list} {struct}"), "cb7524d446636370"),
}


def write_input(case: str, write, tmp_path: Path) -> str:
    """Write two Parquet files, or one of JSON Lines, and return the input's path."""
    table = pa.table(COLUMNS)
    if case != "JSON Lines":
        write("a.parquet", table.slice(0, 200), row_group_size=90, compression="none", use_dictionary=False)
        folder = write("b.parquet", table.slice(200), row_group_size=25)
        if case == "damaged row group":
            path = Path(folder, "a.parquet")
            flip(path, path.read_bytes().index(b"100 word "))
        return folder
    rows = table.select(["text", "whole", "real", "list", "struct"]).to_pylist()
    path = tmp_path / "in" / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"text": \n')
    return str(path)


@pytest.mark.parametrize("case", CASES)
def test_the_cut_is_the_recorded_one(write, tmp_path, monkeypatch, case):
    monkeypatch.setattr(text_blocks, "BLOCK_BYTES", 5000)
    units, expected = CASES[case]
    source = open_source(write_input(case, write, tmp_path), on_corrupt="skip")
    digest, num_rows = hashlib.sha256(), 0
    for window in cut_windows(source, 100, 1 << 20):
        for unit in window_units(source, window, units):
            digest.update(json.dumps([unit.window, unit.index, unit.num_units, unit.row_ids()]).encode())
            num_rows += unit.num_rows
    assert num_rows == source.num_rows
    assert digest.hexdigest()[:16] == expected, (
        "the cut of the input into windows and units changed, so this version cannot resume outputs of earlier ones: "
        "raise CUT_VERSION in pipeline/data/units.py, and update the recorded values of this test"
    )
