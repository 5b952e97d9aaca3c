"""Quality figures of rows that were compared with a reference model, and the certainty of a drop."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pipeline.report.features import QualityReport, drop_text
from pipeline.report.record.quality_stats import QualityStats
from pipeline.report.record.row_stats import RowStats


def rows(agreed: list[int], tokens: int = 20) -> QualityStats:
    return sum((QualityStats.of_row(tokens, n, 1000 * n, n == tokens) for n in agreed), QualityStats())


def answers(both: int = 0, served: int = 0, reference: int = 0, neither: int = 0) -> QualityStats:
    kinds = [(True, True)] * both + [(True, False)] * served + [(False, True)] * reference + [(False, False)] * neither
    return sum((QualityStats.of_row(1, 1, 0, True, *kind) for kind in kinds), QualityStats())


def test_sums_do_not_depend_on_the_order_and_survive_json():
    parts = [rows([20, 18]), rows([3]), QualityStats(unmeasured={"too_long": 2}), answers(1, 1, 1, 1)]
    forth, back = sum(parts, QualityStats()), sum(reversed(parts), QualityStats())
    assert forth == back
    assert (forth.rows, forth.tokens, forth.agreed, forth.same_texts) == (7, 64, 45, 5)
    assert (forth.expected_rows, forth.served_right, forth.reference_right) == (4, 2, 2)
    twice = RowStats(quality=forth) + RowStats(quality=forth)
    assert RowStats.from_json(json.loads(json.dumps(twice.to_json()))) == twice
    assert twice.quality.unmeasured == {"too_long": 4}


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_error_of_the_agreement_equals_the_spread_of_samples(spread):
    """Rows differ in agreement and length; the test draws many samples of 60."""
    rng = np.random.default_rng(0)

    def sample() -> QualityStats:
        found = QualityStats()
        for _ in range(60):
            tokens, p = int(rng.integers(5, 40)), 0.9 + spread * rng.choice([-1, 1])
            found += QualityStats.of_row(tokens, int(rng.binomial(tokens, min(p, 1.0))), 0, False)
        return found

    samples = [sample() for _ in range(300)]
    deviation = np.std([s.agreement for s in samples])
    assert np.mean([s.agreement_error for s in samples]) == pytest.approx(deviation, rel=0.15)


def test_only_a_certain_drop_raises_an_alarm():
    assert rows([20] * 50).drops(0.0) == {}
    assert rows([18] * 200).drops(0.05) == {"agreement": pytest.approx(0.1)}
    assert rows([18] * 200).drops(0.1) == {}
    assert rows([18]).drops(0.05) == {}, "one row says little"
    assert rows([0]).drops(0.05) == {"agreement": 1.0}, "unless it says all"
    assert QualityStats().drops(0.0) == {}
    assert answers(both=80, reference=20).drops(0.05) == {"right_answers": pytest.approx(0.2)}
    assert answers(both=80, served=20).drops(0.0) == {}, "better than the reference"
    assert answers(both=60, served=18, reference=22).drops(0.02) == {}, "4 points, of rows that differ both ways"
    assert answers(both=3, reference=1).drops(0.02) == {}


def test_the_report_shows_figures_alarms_and_skipped_rows():
    assert QualityReport.from_sums(QualityStats(), 5, {}) is None
    sums = replace(rows([18] * 200) + answers(80, 0, 20), unmeasured={"too_long": 3})
    report = QualityReport.from_sums(sums, 5, {"max_drop": 0.02})
    assert report.kl_nats_per_token == pytest.approx(sums.kl_nanonats / 1e9 / sums.tokens)
    assert (report.served_correct_share, report.reference_correct_share) == (0.8, 1.0)
    assert set(report.drops) == {"agreement", "right_answers"}
    shown = report.to_text()
    assert "of 4,100 tokens agree with the reference model" in shown
    assert "80% of 100 answers correct, reference 100%" in shown
    assert "rows that could not be compared: too_long 3" in shown
    assert f"ALARM: {drop_text('agreement', report.drops['agreement'], 0.02)}" in shown
    only = QualityReport.from_sums(QualityStats(unmeasured={"too_long": 1}), 0, {"max_drop": 0.02})
    assert only.to_text() == "rows that could not be compared: too_long 1"
