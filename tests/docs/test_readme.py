"""The README takes two minutes to read, and its status comes first."""

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short():
    lines = README.splitlines()
    assert len(lines) <= 180
    assert not [line for line in lines if len(line) > 110]


def test_the_status_precedes_the_first_section():
    head = README.partition("\n## ")[0]
    for expected in ("**Status**", "GPU", "cluster"):
        assert expected in head
