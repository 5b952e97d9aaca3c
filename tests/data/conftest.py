from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.stores import failpoints


@pytest.fixture(autouse=True)
def _no_failpoints():
    yield
    failpoints.clear()


@pytest.fixture
def write(tmp_path):
    """Return a function such that write("a/b.parquet", {"text": [...]}, row_group_size=3) writes under tmp_path/in.

    The function returns the folder.
    """

    def write(name: str, columns: dict | pa.Table, **options):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        pq.write_table(table, path, **{"write_page_checksum": True, **options})
        return str(tmp_path / "in")

    (tmp_path / "in").mkdir()
    return write


class StoreSaidNo(Exception):
    """Error of a library behind fsspec: not an OSError."""


def in_memory(file: str | Path, folder: str) -> str:
    """Copy the file into a folder of fsspec's memory store, and return the folder's url."""
    fsspec.filesystem("memory").pipe_file(f"/{folder}/{Path(file).name}", Path(file).read_bytes())
    return f"memory://{folder}"
