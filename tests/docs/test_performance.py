"""`docs/performance.md` and its plot show the results files, and a benchmark's JSON line is such a file."""

import json
import re
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks import engine
from tests.docs.pages import LOG
from tools import performance
from tools.generated import stale

LINK = re.compile(r"\]\(([^)#:]+)\)")


def test_table_and_plot_are_up_to_date() -> None:
    assert stale(performance.files()) == [], "run `python -m tools.performance`"
    plot = performance.files()[performance.PLOT]
    assert ElementTree.fromstring(plot).tag.endswith("svg")
    assert "prefers-color-scheme: dark" in plot


def test_the_page_stays_short() -> None:
    assert len(performance.PAGE.read_text(encoding="utf-8").splitlines()) <= 80


def test_the_index_has_every_entry_of_the_log() -> None:
    log = LOG / "log"
    named = set(LINK.findall((log / "README.md").read_text(encoding="utf-8")))
    entries = {path.relative_to(log).as_posix() for path in log.rglob("*.md")} - {"README.md"}
    assert named - {"../../docs/performance.md", "../README.md"} == entries


def test_the_json_line_of_a_benchmark_is_a_results_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--model tiny --requests 2 --rounds 1 --prompt-tokens 8 --output-tokens 2-4 --batch-sizes 2 --json"
    done = CliRunner().invoke(engine.main, options.split())
    assert done.exit_code == 0, done.output
    (tmp_path / "of-today.json").write_text(done.stdout)
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    rate = json.loads(done.stdout)["speeds"][0]["tokens_per_s"]["median"]
    assert f"| {rate:,.1f} |" in performance.table(performance.load())
    (tmp_path / "broken.json").write_text(json.dumps({"bench": "engine"}))
    with pytest.raises(ValueError, match=r"broken\.json: expected the last line of"):
        performance.load()
