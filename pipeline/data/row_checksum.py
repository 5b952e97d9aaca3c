"""Checksum of a set of rows: the sum, modulo 2^64, of a 64-bit mix of each row's file and number.

It does not depend on the order of the rows, and checksums of disjoint sets add up. Two different sets have the same
checksum with a probability of about 2^-64. It detects mistakes, not forgery.
"""

import hashlib

import numpy as np
import pyarrow as pa

MODULUS = 2**64
_STEP = np.uint64(0x9E3779B97F4A7C15)  # as in splitmix64, whose finalizer is `_mixed`


def rows_checksum(files: pa.ChunkedArray, rows: pa.ChunkedArray) -> int:
    """Return the checksum of these rows; nulls count like a row -1 of a file without a name."""
    return sum_of(row_mixes(files, rows))


def range_checksum(file: str, start: int, stop: int) -> int:
    """Return the checksum of rows start <= i < stop of a file."""
    return sum_of(_mixed(_hash(file) + np.arange(start, stop, dtype=np.uint64) * _STEP))


def row_mixes(files: pa.ChunkedArray, rows: pa.ChunkedArray) -> np.ndarray:
    """Return what each row adds to a checksum, as uint64."""
    names = files.fill_null("").combine_chunks().dictionary_encode()
    hashes = np.array([_hash(name) for name in names.dictionary.to_pylist()], dtype=np.uint64)
    numbers = rows.fill_null(-1).to_numpy().astype(np.uint64)
    return _mixed(hashes[names.indices.to_numpy()] + numbers * _STEP)


def sum_of(mixes: np.ndarray) -> int:
    return int(mixes.sum(dtype=np.uint64))


def _hash(file: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(file.encode()).digest()[:8], "big"))


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
