"""Comparison of two versions: intervals of ratios, and the whole command with environments that print fixed times."""

import json
import random
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.compare import Interval, main, run_bench


def environment(folder: Path, name: str, seconds: float) -> str:
    """Write an executable that replaces an environment's Python: its job benchmark takes `seconds` for 1,000 tokens."""
    found = {"job": [{"work_s": seconds, "whole_s": 60.0}], "generated_tokens": 1000}
    path = folder / name
    path.write_text(
        f"#!/bin/sh\ntest \"$*\" = '-m benchmarks.job --rows 8 --json' || exit 3\necho '{json.dumps(found)}'\n"
    )
    path.chmod(0o755)
    return str(path)


def compare(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, [*arguments, "--bench", "job", "--options", "--rows 8"])
    return done.exit_code, done.stdout


@pytest.mark.parametrize(("seconds", "slower", "verdict"), [(1.5, 1, "slower"), (1.01, 0, ""), (0.8, 0, "faster")])
def test_the_verdict_and_the_exit_code(tmp_path: Path, seconds: float, slower: int, verdict: str) -> None:
    old, new = environment(tmp_path, "old", 1.0), environment(tmp_path, "new", seconds)
    code, text = compare(old, new)
    row = next(line for line in text.splitlines() if "work, us/token" in line)
    assert row.split()[4:6] == ["1000.00", f"{1000 * seconds:.2f}"]
    assert f"{seconds:.3f} ({seconds:.3f} to {seconds:.3f})" in row
    assert "1.000 (1.000 to 1.000)" in row
    assert row.strip().split()[-1] == (verdict or "1.000)")
    assert code == slower
    code, text = compare(old, new, "--json", "--rounds", "2")
    first = json.loads(text)["compared"][0]
    assert first["ratio"]["median"] == pytest.approx(seconds)
    assert code == slower


def test_a_version_that_fails_is_named_with_its_last_output(tmp_path: Path) -> None:
    old, new = environment(tmp_path, "old", 1.0), tmp_path / "new"
    new.write_text("#!/bin/sh\necho no such bench >&2\nexit 2\n")
    new.chmod(0o755)
    done = CliRunner().invoke(main, [old, str(new), "--bench", "job", "--options", "--rows 8"])
    assert done.exit_code == 1
    assert f"{new} -m benchmarks.job" in done.stderr
    assert "no such bench" in done.stderr


def test_a_checkout_is_measured_with_its_own_package_and_our_benchmarks(tmp_path: Path) -> None:
    """The package of this checkout prints a result when it is imported, with its own folder or another one."""
    for name in ("pipeline", "benchmarks"):
        (tmp_path / name).mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('benchmarks of the checkout')")
    module = tmp_path / "pipeline" / "__init__.py"
    printed = "import json, os\nfound = {'job': [{'work_s': 2.0, 'whole_s': 9.0}], 'generated_tokens': 1000}\n"
    exits = "os.path.dirname(__file__)}), flush=True)\nos._exit(0)\n"
    module.write_text(f"{printed}print(json.dumps({{**found, 'package': {exits}")
    assert run_bench(tmp_path, "job", ()).seconds == {"work": 0.002, "whole process": 0.009}
    module.write_text(f"{printed}print(json.dumps({{**found, 'package': '/other' + {exits}")
    with pytest.raises(click.ClickException, match="imported /other"):
        run_bench(tmp_path, "job", ())


@pytest.mark.parametrize("size", [9, 15, 40])
def test_an_interval_holds_the_median_as_often_as_it_promises(size: int) -> None:
    drawn = random.Random(size)
    held = 0
    for _ in range(4000):
        found = Interval.from_values([drawn.lognormvariate(0, 1) for _ in range(size)])
        held += found.low <= 1 <= found.high
    assert 0.945 <= held / 4000 <= 0.99, "95% or more, and not everything"
