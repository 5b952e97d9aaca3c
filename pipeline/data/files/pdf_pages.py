"""PDF: a row is a page. Planning counts the pages; the engine of a server renders them.

A PDF that is damaged, encrypted or empty has one row, whose page cannot be rendered. The image of a page is a column of
names, FILE#page=NUMBER, so that a window takes little memory.
"""

import hashlib
import json
import os
import posixpath
import subprocess
import sys
import tempfile
import threading
import weakref
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.util import find_spec
from typing import IO, Any

import pyarrow as pa

from pipeline.data.files.footer import reading
from pipeline.data.files.listing import is_local
from pipeline.data.files.scan_cache import scanned
from pipeline.data.files.source_file import Blocks, Slice, SliceRead, SourceFile, changed, open_file
from pipeline.errors import ConfigError, InputError
from pipeline.machine.interpreter import child_environment
from pipeline.stores.filesystem import secrets_in

ENDING = ".pdf"
IMAGE = "page"  # column of the pages' images
NUMBER = "source_page"  # column of their numbers, from 1
SCHEMA = pa.schema([(NUMBER, pa.int64()), (IMAGE, pa.string())])
COUNT_TIMEOUT_S = 120.0  # of one PDF
COMMAND = ("-m", "pipeline.data.files.pdf_document")
_PIECE = "#page="
_CHUNK_BYTES = 1 << 20

Files = list[tuple[str, int]]


def pdfs_of(found: Files, name: str) -> tuple[Files, Files]:
    """Split files, given as (relative path, size), into PDFs and others. name: the job file's key and path, for
    messages. Raises InputError if there are no PDFs."""
    chosen = [file for file in found if file[0].lower().endswith(ENDING)]
    if not chosen:
        raise InputError(f"{name}: contains no {ENDING} files, which input.format: pdf reads")
    return chosen, [file for file in found if not file[0].lower().endswith(ENDING)]


def page_of(name: str) -> tuple[str, int]:
    """Return the file of a page's name, and the page, from 0."""
    file, _, number = name.rpartition(_PIECE)
    return file, int(number) - 1


class PdfReader:
    """Reader of the planning metadata of PDFs, with a process that counts their pages. Thread-safe."""

    def __init__(self) -> None:
        if find_spec("pypdfium2") is None:
            raise ConfigError("input.format: pdf: needs pypdfium2: pip install 'parquet-batch-inference[images]'")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def plan(
        self, fs: Any, path: str, relative: str, size: int, name: str, keep_bad: bool
    ) -> tuple[SourceFile, pa.Schema]:
        """Return the planning metadata and the schema of a PDF, also of a damaged one."""
        return scanned(fs, path, size, ("pages",), lambda: self._scan(fs, path, relative, size, name)), SCHEMA

    def _scan(self, fs: Any, path: str, relative: str, size: int, name: str) -> SourceFile:
        content, checksum = hashlib.sha256(), 0
        with reading(name, secrets_in(fs)), ExitStack() as stack:
            copy = None if is_local(fs) else stack.enter_context(tempfile.TemporaryFile())
            for chunk in _chunks(fs, path, size, name):
                content.update(chunk)
                checksum = zlib.crc32(chunk, checksum)
                if copy is not None:
                    copy.write(chunk)
            num_rows = self._count(path if copy is None else path_of(copy))
        content.update(b"%d" % num_rows)  # windows are cut by it: another number makes another input
        return SourceFile(
            relative=relative,
            size=size,
            digest=content.hexdigest(),
            num_rows=num_rows,
            group_rows=array("q", [num_rows]),
            group_bytes=array("q", [num_rows * len(relative)]),
            blocks=Blocks(array("q", [0]), array("q", [checksum]), array("q", [0])),
        )

    def _count(self, path: str) -> int:
        """Return the rows of a PDF: 1 if the process ends over it, or takes too long."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(),
                )  # fmt: skip
                weakref.finalize(self, _end, self._process)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(COUNT_TIMEOUT_S, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(path) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = ""
            finally:
                timer.cancel()
            if not answer:
                _end(process)
            return int(answer or 1)


def read_slices(
    fs: Any, root: str, shown: str, file: SourceFile, slices: list[Slice], schema: pa.Schema
) -> Iterator[SliceRead]:
    """Yield the columns of `schema` for each slice. Raises InputError if the file changed since planning."""
    path, name = posixpath.join(root, file.relative), posixpath.join(shown, file.relative)
    assert file.blocks is not None
    with reading(name, secrets_in(fs)):
        checksum = 0
        if int(fs.info(path)["size"]) == file.size:
            for chunk in _chunks(fs, path, file.size, name):
                checksum = zlib.crc32(chunk, checksum)
        if checksum != file.blocks.checksums[0]:
            raise changed(name)
    for piece in slices:
        numbers = range(piece.first_row + 1, piece.first_row + piece.num_rows + 1)
        columns = {NUMBER: numbers, IMAGE: [f"{file.relative}{_PIECE}{number}" for number in numbers]}
        yield SliceRead(pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema), [])


def path_of(file: IO[bytes]) -> str:
    """Return the path by which child processes open a file without a name."""
    file.flush()
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def _chunks(fs: Any, path: str, size: int, name: str) -> Iterator[bytes]:
    with closing(open_file(fs, path, size, name)) as file:
        yield from iter(partial(file.read, _CHUNK_BYTES), b"")


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
