"""Report as an HTML page: complete, self-contained, with its charts, and data only as text."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from pipeline.data.output.part_totals import PartTotals
from pipeline.report.build import build_report
from pipeline.report.charts import stretches
from pipeline.report.estimate import Estimate, Interval
from pipeline.report.record.row_stats import Computed, ErrorExample, Histogram, Latency, LengthBucket, RowStats
from pipeline.report.record.run_record import PHASES, ActorRecord, Moment, Moments, RunRecord, SkippedInput
from pipeline.report.render import html
from pipeline.report.run_report import RunReport

HOSTILE = "<script>alert(1)</script> & $x^2$ \x1b[31m \u202e \"'"
CHARTS = {"speed", "running", "kv", "phases", "waterfall", "estimate", "prompts", "completions", "latency", "actors"}


def a_report(name: str = "summaries", num_actors: int = 2, hourly_usd: float | None = 2.5) -> RunReport:
    latency = Histogram.from_values(range(1000, 100_000, 500))
    stats = RowStats(
        Latency(latency, latency, latency),
        {64: LengthBucket(90, 4000, 10, 900), 4096: LengthBucket(10, 20_000, 0, 100)},
        {HOSTILE[:60]: (ErrorExample(HOSTILE, 3, HOSTILE),)},
        {64: Histogram.from_values(range(100))},
    )
    phases = {phase: 1_000_000 * (i + 1) for i, phase in enumerate(PHASES)}
    work = {"num_steps": 50, "batch_sum": 900, "generated_tokens": 1000, "prompt_tokens": 24_000}
    actors = [ActorRecord(i, phases, work, delivered_tokens=Computed(24_000, 1000)) for i in range(num_actors)]
    moments = [Moment(i * 10**6, i * 500, i * 20, i, i * 18, i * 300_000, num_actors) for i in range(29)]
    run = RunRecord(
        "0001", "2026-11-24", "finished", wall_us=28_000_000, actors=actors, rows_written=101, input_tokens=24_000,
        cached_tokens=10, generated_tokens=1000, row_stats=stats, moments=moments, hourly_usd=hourly_usd,
        resolved={"device": HOSTILE}, skipped_files=[SkippedInput(HOSTILE, 3, HOSTILE)],
    )  # fmt: skip
    totals = PartTotals(101, 1, {HOSTILE[:60]: 1}, 24_000, 10, 1000)
    made = Estimate("", 0, 101, Interval(1, 2, 3), 0.0, Interval(1, 2, 3), Interval(1e6, 5e7, 9e7), Interval(1, 2, 3),
                    phases, speeds_from=HOSTILE, lengths_from=HOSTILE)  # fmt: skip
    return build_report(name, "f" * 64, [run], totals, 101, made)


class Page(HTMLParser):
    """Parser that collects texts and tags like a browser, and checks that each tag is closed."""

    VOID = frozenset({"meta", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts, self.tags, self.ids, self.open = [], [], [], []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def hostile() -> Page:
    return Page(html(a_report(HOSTILE)))


def test_every_chart_occurs_once_and_every_tag_is_closed(hostile):
    assert set(hostile.ids) >= CHARTS
    assert hostile.tags.count("figure") == len(CHARTS)
    assert hostile.tags.count("svg") == 4  # three curves over time and one histogram; the others are bars
    assert len(hostile.ids) == len(set(hostile.ids))
    assert hostile.open == []


def test_nothing_is_fetched_and_nothing_is_run(hostile):
    assert not {"script", "link", "img", "iframe", "object"} & set(hostile.tags)
    names = {key for key, _ in hostile.attributes}
    assert not names & {"href", "xlink:href", "src", "srcset"}
    assert not [key for key in names if key.startswith("on")]
    assert not [value for _, value in hostile.attributes if value and ("url(" in value or "//" in value)]


def test_names_and_messages_are_text(hostile):
    shown = " ".join(hostile.texts)
    assert shown.count("<script>alert(1)</script>") >= 6
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_each_picture_has_a_name_and_each_axis_a_label(hostile):
    pictures = [value for key, value in hostile.attributes if key == "aria-label"]
    assert pictures == ["Tokens per second", "Rows running concurrently", "KV cache in use", "Length of completions"]
    for label in ("seconds since the job started", "tokens/s", "%", "generated tokens per row", "completed rows"):
        assert label in hostile.texts


def test_a_curve_fills_its_picture_and_a_bar_its_track():
    page = html(a_report())
    coordinates = [
        float(n) for d in re.findall(r'class="curve[^"]*" d="([^"]*)"', page) for n in re.findall(r"[\d.]+", d)
    ]
    assert min(coordinates) >= 0
    assert max(coordinates) <= 360
    for style in re.findall(r'<i style="([^"]*)"', page):
        left, _, width = style.removeprefix("left:").rpartition("width:")
        assert float(left.rstrip("%;") or 0) + float(width.rstrip("%")) <= 100.02


def test_it_is_small_with_any_number_of_engines():
    page = html(a_report(num_actors=300))
    assert len(page.encode()) < 2_000_000
    assert "The 16 with the most time, of 300." in page


def test_charts_without_data_are_left_out():
    report = a_report(hourly_usd=None)
    assert "waterfall" not in Page(html(report)).ids
    bare = build_report("x", "f" * 64, [replace(report.runs[0], moments=[], row_stats=RowStats())], PartTotals(), 0)
    assert CHARTS & set(Page(html(bare)).ids) == {"phases", "actors"}
    assert not CHARTS & set(Page(html(build_report("x", "f" * 64, [], PartTotals(), 0))).ids)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("width", [360, 1440])
def test_a_browser_shows_it_without_an_error_and_no_wider_than_its_window(tmp_path, width):
    page = tmp_path / "report.html"
    # a headless browser's window is at least 500 wide, so set the width of the page
    probe = (
        f"<style>body {{width: {width}px}}</style><script>document.title = document.body.scrollWidth</script></body>"
    )
    page.write_text(html(a_report(HOSTILE)).replace("</body>", probe))
    browser = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
         "--window-size=1440,900", f"file://{page}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in browser.stderr
    assert int(browser.stdout.partition("<title>")[2].partition("<")[0]) <= width


def test_moments_are_few_and_evenly_spaced_in_a_run_of_any_length():
    moments = Moments()
    for second in range(10_000):
        moments.add(second * 10**6, [ActorRecord(0, stats={"generated_tokens": second})])
    assert Moments.MAX_MOMENTS / 2 <= len(moments.recorded) <= Moments.MAX_MOMENTS
    gaps = {b.at_us - a.at_us for a, b in zip(moments.recorded, moments.recorded[1:])}
    assert len(gaps) == 1
    assert moments.recorded[-1].generated_tokens > 9800


def test_an_interval_is_the_growth_between_two_moments():
    before, now = Moment(10**6, 100, 10, 5, 50, 10**6, 2), Moment(3 * 10**6, 300, 50, 15, 150, 6 * 10**6, 2)
    (found,) = stretches([before, now], began_s=10.0)
    assert (found.from_s, found.to_s) == (11, 13)
    assert (found.prompt_per_s, found.generated_per_s) == (100, 20)
    assert (found.running, found.kv_usage) == (20, 0.5)  # ten rows per step in each of two engines
    assert [s.prompt_per_s for s in stretches([now, replace(before, at_us=5 * 10**6)])] == [0]
