"""`docs/performance.md` is as its results say, and a benchmark's last line is a results file as it stands."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from tools.generated import stale
from tools.performance.__main__ import FOLDER, PAGE, files
from tools.performance.results import Figure, ResultError, load
from tools.performance.tables import TABLES

LINK = re.compile(r"\]\(([^)#:]+)\)")
LINES = {
    "admission": "--job classification --kv-share 0.25 --max-num-seqs 8 --rows 32",
    "engine": "--model tiny --requests 2 --rounds 1 --prompt-tokens 8 --output-tokens 2-4 --batch-sizes 2",
    "scheduler": "--sequences 8 --steps 2 --rounds 1 --rows 8",
    "speculation": "--batch-sizes 1 --rows 1 --rounds 1",
}


def test_tables_and_plots_are_fresh() -> None:
    assert stale(files()) == [], "run `python -m tools.performance`"


def test_the_page_stays_short() -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 250


def test_the_index_has_every_entry_of_the_log() -> None:
    log = FOLDER / "log"
    named = set(LINK.findall((log / "README.md").read_text(encoding="utf-8"))) - {"../../performance.md"}
    assert named == {path.relative_to(log).as_posix() for path in log.rglob("*.md")} - {"README.md"}


def test_plots_are_svg_for_light_and_dark_pages() -> None:
    plots = {path: text for path, text in files().items() if path.suffix == ".svg"}
    assert {path.name for path in plots} == {path.name for path in (FOLDER / "plots").iterdir()}
    for text in plots.values():
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("bench", LINES)
def test_the_last_line_of_a_benchmark_is_a_results_file(bench: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["bench", bench, *LINES[bench].split(), "--json"])
    assert done.exit_code == 0, done.output
    (tmp_path / f"{bench}.json").write_text(done.stdout)
    (result,) = load(tmp_path)
    assert "](performance/results/" in TABLES[bench]([result])
    if bench == "engine":
        assert result.figure("transformers").median == pytest.approx(1 / _rates(result.data)[1])
    if bench == "speculation":
        plain, auto = result.data["batches"][0]["ways"][:2]
        assert result.speedup(1, "auto") == Figure(plain["seconds"][0] / auto["seconds"][0])
    if bench == "scheduler":
        assert result.figure("8").cautious == pytest.approx(result.data["costs"][0]["step_us"] / 1e3)


def _rates(data: dict) -> list[float]:
    """Tokens a second by this engine's."""
    rates = [speed["tokens_per_s"]["median"] for speed in data["speeds"]]
    return [rate / rates[0] for rate in rates]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("two\nlines", "broken: expected one JSON object"),
        (json.dumps({"bench": "engine", "machine": {}, "date": "2026-11-23"}), "broken: without command"),
        (json.dumps({"bench": "x", "machine": {}, "date": "", "command": ""}), "broken: bench 'x'; expected one of"),
    ],
)
def test_a_file_that_is_no_result_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ResultError, match=said):
        load(tmp_path)


def test_a_figure_that_is_not_there_is_named() -> None:
    results = {result.name: result for result in load(FOLDER / "results")}
    with pytest.raises(ResultError, match=r"0\.6b-bfloat16: no contender 'sglang'"):
        results["engine/2026-11-22-0.6b-bfloat16"].figure("sglang")


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"median": 1.16, "low": 1.15, "high": 1.18}, "1.16x (1.15 to 1.18)"),
        ({"median": 1.16, "low": 1.16, "high": 1.16, "count": 1}, "1.16x"),
        ({"low": 1.1, "high": 1.2}, "1.10 to 1.20x"),
        ([1.0, 3.0, 2.0], "2.00x (1.00 to 3.00)"),
        (2, "2.00x"),
    ],
)
def test_figures_in_words(told: object, text: str) -> None:
    assert Figure.of(told).to_text(2, "x") == text
