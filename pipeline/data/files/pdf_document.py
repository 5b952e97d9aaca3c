"""PDF documents, and the process that counts their pages: `python -m pipeline.data.files.pdf_document`.

PDFium parses files of strangers, so only processes of their own load it: this one, and the one that renders pages
(`endpoint/images/decode.py`). It reads paths from standard input, a JSON text in a line, and writes the rows of each.
"""

import json
import resource
import sys

import pypdfium2

MAX_MEMORY_BYTES = 8 << 30
MAX_MISSING = 1000  # pages in a row that cannot be loaded, after which no more are tried


class NoDocument(Exception):
    """The file cannot be opened, or the page cannot be loaded. The message says why."""


def open_document(path: str) -> pypdfium2.PdfDocument:
    """Open a PDF. Raises NoDocument."""
    try:
        document = pypdfium2.PdfDocument(open(path, "rb"), autoclose=True)  # noqa: SIM115
        document.init_forms()
        return document
    except pypdfium2.PdfiumError as error:
        if "password" in str(error):
            raise NoDocument("the PDF is encrypted, and opens only with a password") from None
        raise NoDocument("the file is no PDF, has no pages, or is damaged") from None


def load_page(document: pypdfium2.PdfDocument, index: int) -> pypdfium2.PdfPage:
    """Load a page, from 0. Raises NoDocument."""
    try:
        return document[index]
    except (pypdfium2.PdfiumError, IndexError):
        raise NoDocument(f"page {index + 1} of {len(document)} is missing or damaged") from None


def count_rows(path: str) -> int:
    """Return the rows of a PDF: one for each page. One row, an error row, for a PDF that cannot be opened, and for all
    pages that are missing at the end of one that states more than it has."""
    try:
        document = open_document(path)
    except NoDocument:
        return 1
    num_pages = len(document)
    if _has_page(document, num_pages - 1):
        return num_pages
    last = -1
    for index in range(num_pages):
        if index - last > MAX_MISSING:
            break
        if _has_page(document, index):
            last = index
    return last + 2


def _has_page(document: pypdfium2.PdfDocument, index: int) -> bool:
    try:
        load_page(document, index).close()
    except NoDocument:
        return False
    return True


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for line in sys.stdin:
        print(count_rows(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
