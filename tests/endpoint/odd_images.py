"""Image files of odd kinds. Each function takes a number, which determines the colour."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

Colour = tuple[int, int, int]


def colour_of(number: int) -> Colour:
    return number * 37 % 256, number * 101 % 256, number * 7 % 256


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _plain(number: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    return Image.new("RGB", size, colour_of(number))


def _turned(number: int) -> bytes:
    """Return a picture whose right half is black once it is upright."""
    image = _plain(number, (40, 20))
    image.paste("black", (20, 0, 40, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    return _saved(image.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)


def _transparent(number: int) -> bytes:
    image = Image.new("RGBA", (30, 30), (*colour_of(number), 255))
    image.paste((0, 0, 0, 0), (0, 0, 15, 30))
    return _saved(image, "PNG")


def _animated(number: int) -> bytes:
    frames = [_plain(number), _plain(number + 1)]
    return _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _bomb(number: int) -> bytes:
    """Return a PNG of 2 GB of pixels in some kilobytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 30_000 + number, 30_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(3_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def _noise(number: int) -> bytes:
    return _saved(Image.frombytes("RGB", (64, 64), random.Random(number).randbytes(64 * 64 * 3)), "JPEG")


GOOD: dict[str, Callable[[int], bytes]] = {
    "jpeg": lambda n: _saved(_plain(n), "JPEG"),
    "png": lambda n: _saved(_plain(n), "PNG"),
    "webp": lambda n: _saved(_plain(n), "WEBP", lossless=True),
    "bmp": lambda n: _saved(_plain(n), "BMP"),
    "tiff": lambda n: _saved(_plain(n), "TIFF"),
    "large": lambda n: _saved(_plain(n, (900, 700)), "JPEG"),
    "wide": lambda n: _saved(_plain(n, (3000, 1)), "PNG"),
    "grey": lambda n: _saved(_plain(n).convert("L"), "JPEG"),
    "16 bits": lambda n: _saved(Image.new("I;16", (20, 20), 256 * colour_of(n)[0]), "PNG"),
    "cmyk": lambda n: _saved(_plain(n).convert("CMYK"), "JPEG"),
    "palette": lambda n: _saved(_plain(n).convert("P"), "PNG"),
    "bits": lambda n: _saved(Image.new("1", (20, 20), n % 2), "PNG"),
    "turned": _turned,
    "transparent": _transparent,
    "animated": _animated,
    "noise": _noise,
}
BAD: dict[str, Callable[[int], bytes]] = {
    "bomb": _bomb,
    "truncated jpeg": lambda n: _noise(n)[:-300],
    "truncated png": lambda n: GOOD["transparent"](n)[:60],
    "html": lambda n: b"<!DOCTYPE html><html>%d not found</html>" % n,
    "text": lambda n: b"no image %d" % n,
    "pdf": lambda n: b"%PDF-1.7\n%" + str(n).encode(),
    "eps": lambda n: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%" + str(n).encode(),
    "svg": lambda n: b"<svg xmlns='http://www.w3.org/2000/svg'><!-- %d --></svg>" % n,
    "head only": lambda n: GOOD["jpeg"](n)[:20],
}
KINDS = {**GOOD, **BAD}


def odd_image(number: int) -> tuple[str, bytes]:
    """Return the kind and the content of an image file."""
    kind = list(KINDS)[number % len(KINDS)]
    return kind, KINDS[kind](number)
