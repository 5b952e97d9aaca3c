"""Adds to the built site (`mkdocs.yml`) the page of commands and the files of the repository that pages link to.

mkdocs calls the two functions. A page links to `../jobs/judge.yaml`, which is right in the repository; in the
site that file lies under `files/`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # of the extra `docs`

from tools.reference import command_page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


def in_repository(page: str, link: str) -> str | None:
    """The path of a linked file in the repository, where the link of a page leads out of `docs/` to a file."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return path if not path.startswith("docs/") and (ROOT / path).is_file() else None


def on_files(files: Any, config: Any) -> Any:
    """Add the page of commands, and the files that pages link to."""
    files.append(File.generated(config, "cli.md", content=command_page()))
    linked = {
        path
        for page in files.documentation_pages()
        for link in LINK.findall(page.content_string)
        if (path := in_repository(page.src_uri, link))
    }
    for path in sorted(linked):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Lead these links to where the files are in the site."""

    def moved(match: re.Match[str]) -> str:
        path = in_repository(page.file.src_uri, match[1])
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(f'files/{path}', here)}" if path else match[0]

    return LINK.sub(moved, markdown)
