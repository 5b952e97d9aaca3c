"""Links between pages lead to existing files and headings."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name, prose

LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"\]\([^)]*\)", "]", heading).lower() for heading in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_existing_targets(page: Path):
    wrong = []
    for match in LINK.finditer(re.sub(r"`[^`\n]*`", "", prose(page))):
        link = match[1] or match[2]
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def test_every_page_of_the_docs_is_linked_from_another():
    linked = {
        (page.parent / (match[1] or match[2] or "").partition("#")[0]).resolve()
        for page in PAGES
        for match in LINK.finditer(prose(page))
    }
    pages = {path for path in ROOT.glob("docs/*.md") if path.name != "index.md"}
    assert not pages - linked


def test_every_page_of_the_docs_is_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [path.name for path in ROOT.glob("docs/*.md") if path.name not in site]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_complete(page: Path):
    """The second line of a table aligns its columns, and an empty line ends it: later rows would be text."""
    wrong = []
    for table in re.findall(r"^\|.*(?:\n\|.*)*", prose(page), re.MULTILINE):
        lines = table.split("\n")
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        if len(lines) < 2 or not re.fullmatch(r"\|(?: *:?-+:? *\|)+", lines[1]) or len(columns) > 1:
            wrong.append(lines[0])
    assert not wrong
