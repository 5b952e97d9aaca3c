"""Numbers as reports write them."""

from pipeline.report.number_formats import aligned, bar, money, seconds


def test_columns_are_as_wide_as_they_must_be():
    rows = [["device", "memory", ""], ["L4", "24", "x"]]
    assert aligned(rows) == ["device  memory", "L4          24  x"]
    assert aligned(rows, 2) == ["device  memory", "L4      24      x"]


def test_number_formats():
    assert [seconds(us) for us in (0, 850_000, 12_340_000, 99_960_000, 245_000_000, 7_620_000_000)] == [
        "0 ms", "850 ms", "12.3 s", "1 m 40 s", "4 m 05 s", "2 h 07 m",
    ]  # fmt: skip
    assert [money(usd) for usd in (None, 0.0, 1234.5, 0.1, 0.0000292, 1.5e-12)] == [
        "unpriced", "$0.00", "$1,234.50", "$0.10", "$0.0000292", "$0.00000000000150",
    ]  # fmt: skip
    assert (bar(0.0004), bar(0.0006), bar(1)) == ("", "█", "█" * 30)
