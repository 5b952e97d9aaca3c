"""PDFs for tests, good and hostile ones. A page is filled with the colour of its number."""

import zlib
from collections.abc import Sequence

from tests.endpoint.odd_images import colour_of


def pdf(
    numbers: Sequence[int], count: int | None = None, box: str = "0 0 612 792", more: str = "", content: str = ""
) -> bytes:
    """Return a PDF with a page for each number. count: the number of pages that it states. more: entries of its
    trailer. content: of each page, instead of its colour."""
    pages: list[str] = []
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    for number in numbers:
        red, green, blue = (part / 255 for part in colour_of(number))
        drawn = content or f"{red:.4f} {green:.4f} {blue:.4f} rg 0 0 20000000 20000000 re f"
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
        objects.append(f"<< /Type /Page /Parent 2 0 R /MediaBox [{box}] /Contents {len(objects)} 0 R >>")
        pages.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(pages)}] /Count {len(numbers) if count is None else count} >>"
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, text in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{text}\nendobj\n".encode()
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    trailer = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {more} >>\nstartxref\n{len(out)}\n%%EOF\n"
    return bytes(out + (head + trailer).encode())


def _encrypted() -> bytes:
    key = "<" + "41" * 32 + ">"
    return pdf([1, 2], more=f"/Encrypt << /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -4 >> /ID [{key} {key}]")


def _with_kids(kids: str, count: int) -> bytes:
    return pdf([1, 2], count).replace(b"/Kids [4 0 R 6 0 R]", f"/Kids [{kids}]".encode())


def _damaged_page() -> bytes:
    return pdf([1, 2, 3]).replace(b"6 0 obj\n<< /Type /Page ", b"6 0 obj\n[ /Type /Page ")


def _bomb() -> bytes:
    """Return a page whose picture states 2 GB of pixels, in some kilobytes."""
    data = zlib.compress(bytes(3_000_000), 9)
    head = (
        "5 0 obj\n<< /Type /XObject /Subtype /Image /Width 40000 /Height 40000 /BitsPerComponent 8 "
        f"/ColorSpace /DeviceRGB /Filter /FlateDecode /Length {len(data)} >>\nstream\n"
    )
    made = pdf([1], content="q 600 0 0 600 0 0 cm /I Do Q")
    made = made.replace(b"/Contents 3 0 R", b"/Contents 3 0 R /Resources << /XObject << /I 5 0 R >> >>")
    end = b"\nendstream\nendobj\ntrailer\n<< /Root 1 0 R >>"
    return made[: made.index(b"xref")] + head.encode() + data + end


# rows of each, and of these the pages that can be rendered
HOSTILE: dict[str, tuple[bytes, int, int]] = {
    "encrypted": (_encrypted(), 1, 0),
    "empty": (b"", 1, 0),
    "no PDF": (b"<html><body>not found</body></html>", 1, 0),
    "truncated": (pdf(range(40))[:3000], 1, 0),
    "no pages": (pdf([]), 1, 0),
    "zeros": (bytes(5000), 1, 0),
    "head alone": (b"%PDF-1.7\n", 1, 0),
    "more pages stated": (pdf([1, 2, 3], count=1_000_000), 4, 3),
    "billions stated": (pdf([1, 2, 3], count=2**31 - 1), 3, 3),
    "fewer pages stated": (pdf([1, 2, 3], count=1), 1, 1),
    "negative count": (pdf([1, 2], count=-5), 2, 2),
    "tree in a circle": (_with_kids("2 0 R 2 0 R", 5), 1, 0),
    "missing pages": (_with_kids("77 0 R 88 0 R", 2), 1, 0),
    "damaged page": (_damaged_page(), 3, 2),
    "huge page": (pdf([1], box="0 0 10000000 10000000"), 1, 1),
    "thin page": (pdf([1], box="0 0 10000000 1"), 1, 1),
    "tiny page": (pdf([1], box="0 0 0.001 0.001"), 1, 1),
    "no area": (pdf([1], box="0 0 0 0"), 1, 1),
    "picture of 5 GB": (_bomb(), 1, 1),
}
