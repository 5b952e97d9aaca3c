"""Archives of a session: few, none too large, the newest first; and Triton's cache on another machine."""

import json
import os
import random
import tarfile

import pytest

from pipeline.bench.gpu.session.packing import MAX_FILES, Pack, pack, unpack
from pipeline.bench.gpu.session.triton_cache import FOLDER, drop_listings, unpack_cache
from pipeline.errors import ConfigError

LIMIT = 40_000


def write(folder, name, size, age=0.0):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(name).randbytes(size))  # cannot be made smaller
    os.utime(path, (1e9 - age, 1e9 - age))


def names_in(folder):
    found = {}
    for path in sorted(folder.glob("*.tar.gz")):
        with tarfile.open(path) as tar:
            found[path.name] = sorted(tar.getnames())
    return found


def test_files_are_spread_over_parts_and_the_oldest_are_left_out(tmp_path):
    source, target = tmp_path / "traces", tmp_path / "out"
    target.mkdir()
    for number in range(6):
        write(source, f"deep/{number}.gz", 15_000, age=number)
    write(source, "huge", LIMIT + 1, age=-1)
    write(source, "small", 100, age=9)
    write(source, ".half.part", 10)
    left_out = pack(Pack("traces", source, 2), target, LIMIT)
    assert names_in(target) == {
        "traces.tar.gz": ["traces/deep/0.gz", "traces/deep/1.gz", "traces/small"],
        "traces-2.tar.gz": ["traces/deep/2.gz", "traces/deep/3.gz"],
    }
    assert left_out == ["huge", "deep/4.gz", "deep/5.gz"]
    assert all(path.stat().st_size <= LIMIT for path in target.iterdir())
    assert {path.name for path in target.iterdir()} == {"traces.tar.gz", "traces-2.tar.gz"}
    for path in source.rglob("*.gz"):
        path.unlink()
    assert pack(Pack("traces", source, 2), target, LIMIT) == ["huge"]
    assert names_in(target) == {"traces.tar.gz": ["traces/small"]}, "a part that is not needed any more goes"


def test_text_counts_by_what_it_takes_packed(tmp_path):
    source = tmp_path / "results"
    source.mkdir()
    (source / "log").write_text("the same line\n" * 100_000)
    assert pack(Pack("results", source, 1), tmp_path, LIMIT) == []
    assert (tmp_path / "results.tar.gz").stat().st_size < LIMIT


def kernel(cache, key, *suffixes):
    folder = cache / key
    folder.mkdir(parents=True)
    names = [f"k{suffix}" for suffix in suffixes]
    for name in names:
        (folder / name).write_text(name)
    (folder / "__grp__k.json").write_text(json.dumps({"child_paths": {name: str(folder / name) for name in names}}))


def test_a_cache_comes_to_another_machine_with_its_binaries_alone(tmp_path):
    here, there, archives = tmp_path / "here", tmp_path / "there", tmp_path / "out"
    archives.mkdir()
    there.mkdir()
    kernel(here / FOLDER, "AB", ".ttir", ".ptx", ".cubin", ".json")
    (here / FOLDER / "CD").mkdir()
    (here / FOLDER / "CD" / "launcher.so").write_text("launcher")
    drop_listings(here / FOLDER)
    assert pack(Pack(FOLDER, here / FOLDER, 1), archives) == []
    unpack_cache([archives / f"{FOLDER}.tar.gz"], there)
    moved = there / FOLDER / "AB"
    assert json.loads((moved / "__grp__k.json").read_text())["child_paths"] == {
        "k.cubin": str(moved / "k.cubin"), "k.json": str(moved / "k.json"),
    }  # fmt: skip
    assert sorted(path.name for path in moved.iterdir()) == ["__grp__k.json", "k.cubin", "k.json"]
    assert (there / FOLDER / "CD" / "launcher.so").exists()


def test_a_kernel_that_came_in_part_is_compiled_anew(tmp_path):
    kernel(tmp_path / FOLDER, "AB", ".cubin", ".json")
    (tmp_path / FOLDER / "AB" / "k.cubin").unlink()
    drop_listings(tmp_path / FOLDER)
    assert not (tmp_path / FOLDER / "AB" / "__grp__k.json").exists()


def test_what_is_no_cache_is_refused(tmp_path):
    (tmp_path / "not.tar.gz").write_text("no archive")
    for name in ("not.tar.gz", "absent.tar.gz"):
        with pytest.raises(ConfigError, match=f"--cache .*{name}: cannot be unpacked"):
            unpack_cache([tmp_path / name], tmp_path)
    (tmp_path / "results").mkdir()
    write(tmp_path / "results", "a", 3)
    pack(Pack("results", tmp_path / "results", 1), tmp_path)
    with pytest.raises(ConfigError, match="holds no folder triton-cache"):
        unpack_cache([tmp_path / "results.tar.gz"], tmp_path)


def test_an_archive_stays_in_its_folder(tmp_path):
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "evil", "../evil-outside")
    with pytest.raises(tarfile.TarError):
        unpack(tmp_path / "evil.tar.gz", tmp_path / "into")


def test_a_session_leaves_few_enough_files():
    assert MAX_FILES >= 2 + 2 + 3 + 1, "results, traces, the cache, report.txt: see session/run.py"
