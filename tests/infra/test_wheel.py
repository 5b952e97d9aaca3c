"""The wheel needs no clone: it has the package, nothing else, and runs the example elsewhere."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "pipeline")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes build files next to the sources."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        str(built),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=240)
    (file,) = built.glob("*.whl")
    return file


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pipeline", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if name.endswith((".png", ".svg", ".pyc"))]
    shipped = {name for name in names if name.startswith("pipeline/")}
    tracked = subprocess.run(["git", "ls-files", "pipeline"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert shipped == {*tracked.stdout.split()}
    assert wheel.stat().st_size < 12 << 20


def test_the_wheel_runs_the_example_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}

    def pipeline(*arguments: str) -> str:
        command = [sys.executable, "-m", "pipeline", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "pipeline run demo/summarize.yaml" in pipeline("demo")
    prompt = "Summarize the report in one sentence.\n{report}\nSummary:"
    flags = ["--prompt", prompt, "--model", "demo:target-awq", "--limit", "20", "--output", "out/labels"]
    assert "20 of 20: 20 completed" in pipeline("run", "demo/data", *flags)
    assert pq.read_table(tmp_path / "out" / "labels").num_rows == 20
