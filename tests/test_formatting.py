"""What data may say to a terminal or a page: nothing that is obeyed."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline.formatting import fitted, printable, printable_json, printable_lines

EVIL = "evil\x1b[31mRED\x1b]0;title\x07\x1b[2J\x9b2J\u202etxt.\r\n\tx"


def test_what_a_terminal_obeys_is_spelled_out():
    assert printable(EVIL) == ("evil\\x1b[31mRED\\x1b]0;title\\x07\\x1b[2J\\x9b2J\\u202etxt.\\r\\n\\tx")
    assert printable_lines(EVIL) == printable(EVIL).replace("\\n\\t", "\n\t")
    assert printable("Zürich 東京 █ naïve 🎉 'x' \\n") == "Zürich 東京 █ naïve 🎉 'x' \\n"


@given(st.text())
def test_nothing_else_is_changed_and_a_second_time_nothing(text: str):
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_lines(printable_lines(text)) == printable_lines(text)
    assert not text.isprintable() or printable(text) == text


@given(st.text(st.characters(exclude_categories=())))
def test_json_means_the_same(text: str):
    shown = printable_json(json.dumps({text: text}, ensure_ascii=False))
    assert shown.isprintable()
    assert json.loads(shown) == {text: text}


def test_a_text_fits_a_terminal():
    text = (
        "summarize: finished\n\n  Drafts      in 16 of 200 steps; 1,906 of 2,920 draft tokens accepted\n"
        "    up to 128      109   13.3 s  █████████\n    | site Minsol; tech Vami Lova\n"
        "  one-long-word-that-does-not-fit-anywhere-at-all"
    )
    assert fitted(text, 200) == text
    assert fitted(text, 40) == (
        "summarize: finished\n\n  Drafts      in 16 of 200 steps; 1,906\n              of 2,920 draft tokens\n"
        "              accepted\n    up to 128      109   13.3 s\n    | site Minsol; tech Vami Lova\n"
        "  one-long-word-that-does-not-fit-anywhere-at-all"
    )
    assert "    | site Minsol; tech Vami\n      Lova" in fitted(text, 30)


def test_a_table_that_is_wider_than_a_terminal_goes_on_below():
    table = "\n".join(
        [
            "On cards",
            "    card      engines  time   low  high       USD  spot",
            "    H200            1  40 s  40 s  47 s   $0.0711",
            "    H100 SXM    1,024   9 s   9 s  12 s  $10.0533  $0.1",
            "    A note below the table.",
        ]
    )
    assert fitted(table, 80) == table
    assert fitted(table, 40).split("\n") == [
        "On cards",
        "    card      engines  time   low  high",
        "    H200            1  40 s  40 s  47 s",
        "    H100 SXM    1,024   9 s   9 s  12 s",
        "",
        "    card           USD  spot",
        "    H200       $0.0711",
        "    H100 SXM  $10.0533  $0.1",
        "    A note below the table.",
    ]
