"""Texts from data on a terminal or a page: control characters are escaped."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from pipeline.formatting import duration, money, percent, printable, printable_json, printable_lines, table

EVIL = "evil\x1b[31mRED\x1b]0;title\x07\x1b[2J\x9b2J\u202etxt.\r\n\tx"


def test_control_characters_are_spelled_out():
    assert printable(EVIL) == ("evil\\x1b[31mRED\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\u202etxt.\\r\\n\\tx")
    assert printable_lines(EVIL) == printable(EVIL).replace("\\n\\t", "\n\t")
    assert printable("Zürich 東京 █ naïve 🎉 'x' \\n") == "Zürich 東京 █ naïve 🎉 'x' \\n"


@given(st.text())
def test_other_text_is_unchanged_and_escaping_is_idempotent(text: str):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_lines(printable_lines(text)) == printable_lines(text)
    assert not text.isprintable() or printable(text) == text


@given(st.text(st.characters(exclude_categories=())))
def test_json_means_the_same(text: str):
    shown = printable_json(json.dumps({text: text}, ensure_ascii=False))
    assert shown.isprintable()
    assert json.loads(shown) == {text: text}


def test_a_table_is_as_wide_as_needed_and_folds_at_the_limit():
    rows = [["H200", "1", "$0.0711"], ["H100 SXM", "1,024", "$10.05"]]
    assert table(rows, head=["card", "engines", "USD"], sides="<>", indent=2).split("\n") == [
        "  card      engines      USD",
        "  H200            1  $0.0711",
        "  H100 SXM    1,024   $10.05",
    ]
    folded = table([["label", "one two three four five six seven eight nine ten"]], width=40)
    assert folded.split("\n") == ["label  one two three four five six seven", "       eight nine ten"]
    assert table([["a\x1b[31m\n", "[bold]"]]) == "a\\x1b[31m\\n  [bold]"
    assert table([["x" * 5000, "y"]]) == f"{'x' * 5000}  y"


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=4), st.integers(40, 90))
def test_a_folded_table_loses_nothing(rows: list[tuple[str, str]], width: int):
    drawn = table(rows, width=width)
    shown = Counter("".join(drawn.split()))
    assert all(cell_len(line) <= width for line in drawn.split("\n"))
    assert shown == Counter("".join(printable(cell) for row in rows for cell in row).replace(" ", ""))


def test_numbers_are_written_in_one_way():
    times = (0, 0.0015, 0.85, 12.34, 40, 99.96, 245, 725, 5 * 3600, 11_100, 190_000, -2)
    assert [duration(s) for s in times] == [
        "0 s", "1.5 ms", "850 ms", "12.3 s", "40 s", "1 min 40 s", "4 min 05 s", "12 min", "5 h", "3 h 05 min",
        "2 d 04 h", "-2 s",
    ]  # fmt: skip
    assert [percent(share) for share in (0, 0.05, 0.6234, 0.0004, 1)] == ["0%", "5%", "62.3%", "0%", "100%"]
    assert [money(usd) for usd in (None, 0.0, 1234.5, 0.1, 0.0000292, 1.5e-12, -2)] == [
        "unpriced", "$0.00", "$1,234.50", "$0.10", "$0.0000292", "$0.00000000000150", "-$2.00",
    ]  # fmt: skip
