"""Add the page of commands, and files of the repository that pages link to, to the built site (`mkdocs.yml`).

mkdocs calls the two hooks. Pages link to files like `../jobs/judge.yaml`, which works in the repository. The site has
these files in `files/`.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # from the extra `docs`

from tools.reference import command_page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


def in_repository(page: str, link: str) -> str | None:
    """Return the repository path of a linked file outside `docs/`, or None for other links."""
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
    """Rewrite these links to the files' paths in the site."""

    def moved(match: re.Match[str]) -> str:
        path = in_repository(page.file.src_uri, match[1])
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(f'files/{path}', here)}" if path else match[0]

    return LINK.sub(moved, markdown)
