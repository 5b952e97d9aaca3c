"""Process that decodes images and renders pages.

    python -m pipeline.endpoint.images.decode MAX_PIXELS FORMAT QUALITY DPI

It reads files or paths from standard input and writes the images to send to standard output, each after its length. The
next file is read while one is decoded. It ends with its input, so a dead parent leaves no process behind. A file that
crashes a decoder ends only this process.
"""

import ctypes
import io
import os
import queue
import resource
import sys
import threading
import warnings
from contextlib import closing, suppress
from math import ceil
from typing import Any, BinaryIO

from PIL import ExifTags, Image, ImageOps

from pipeline.endpoint.images import FIRST_FRAME, IMAGE, REFUSED, REPLY, REQUEST, WHOLE

MAX_SOURCE_PIXELS = 128 << 20  # of a file; more are refused before they are decoded
MAX_MEMORY_BYTES = 8 << 30
MAX_DOCUMENT_BYTES = 64 << 20  # that an open document may keep
# Pillow's other formats call programs (EPS) or read no pictures of the web.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO")


class NoImage(Exception):
    """The file cannot be decoded. The message says why."""


Image.MAX_IMAGE_PIXELS = None  # `_converted` checks the size


def converted(raw: bytes, max_pixels: int, kind: str, quality: int) -> bytes:
    """Return the first frame of an image file, upright, in RGB, on white where it is transparent, with at most
    max_pixels, encoded as `kind`, "jpeg" or "png". A file that is so already is returned as it is. Raises NoImage."""
    try:
        with warnings.catch_warnings(), _opened(raw) as image:
            warnings.simplefilter("ignore")
            return _converted(image, raw, max_pixels, kind.upper(), quality)
    except NoImage:
        raise
    except Image.UnidentifiedImageError:
        begin = raw[:64].lstrip().lower()
        found = "an HTML or XML page" if begin.startswith(b"<") else f"a file that begins with {raw[:12]!r}"
        raise NoImage(f"not an image of a known format: {found}") from None
    except MemoryError:
        raise NoImage("the image needs too much memory") from None
    except Exception as error:  # Pillow's decoders raise many types
        raise NoImage(f"the image is damaged or not supported: {error}") from None


def _opened(raw: bytes) -> Image.Image:
    Image.init()
    return Image.open(io.BytesIO(raw), formats=[name for name in FORMATS if name in Image.OPEN])


def has_more_frames(raw: bytes) -> bool:
    """Return whether an image file is an animation, or has several pages."""
    if raw.startswith(b"\xff\xd8"):  # a second picture in a JPEG is a preview
        return False
    with suppress(Exception), warnings.catch_warnings(), _opened(raw) as image:
        warnings.simplefilter("ignore")
        return getattr(image, "is_animated", False)
    return False


def _converted(image: Image.Image, raw: bytes, max_pixels: int, kind: str, quality: int) -> bytes:
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise NoImage(f"{width} x {height} pixels, expected at most {MAX_SOURCE_PIXELS:,}")
    is_upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    is_done = image.format == kind and image.mode == "RGB" and is_upright and width * height <= max_pixels
    is_done = is_done and getattr(image, "n_frames", 1) == 1
    scale = min(1.0, (max_pixels / (width * height)) ** 0.5)
    image.draft("RGB", (int(width * scale), int(height * scale)))  # a JPEG is decoded at a fraction of its size
    image.load()
    if is_done:
        return raw
    found = _rgb(ImageOps.exif_transpose(image))
    scale = min(1.0, (max_pixels / (found.width * found.height)) ** 0.5)
    if scale < 1:
        width, height = max(1, int(found.width * scale)), max(1, int(found.height * scale))
        width = min(width, max_pixels // height)  # if the height was rounded up
        found = found.resize((width, min(height, max_pixels // width)), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return _encoded(found, kind, quality)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits: Pillow would clip them to 8
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif image.mode == "F":
        image = image.convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    return image.convert("RGB")


class Pages:
    """Pages of PDFs. The last document stays open until it has grown: PDFium keeps what it has read."""

    def __init__(self, max_pixels: int, kind: str, quality: int, dpi: int) -> None:
        self._max_pixels, self._kind, self._quality, self._dpi = max_pixels, kind.upper(), quality, dpi
        self._path = ""
        self._document: Any = None
        self._resident_bytes = 0  # when it was opened

    def image(self, path: str, page: int) -> bytes:
        """Return a page as an image of at most max_pixels, encoded. Raises NoImage."""
        from pipeline.data.files.pdf_document import NoDocument, load_page, open_document

        try:
            if path != self._path or _resident_bytes() > self._resident_bytes + MAX_DOCUMENT_BYTES:
                self._close()
                self._resident_bytes = _resident_bytes()
            if self._document is None:
                self._document, self._path = open_document(path), path
            with closing(load_page(self._document, page)) as loaded:
                scale = self._scale(*loaded.get_size())
                bitmap = loaded.render(scale=scale, rev_byteorder=True)  # type: ignore[arg-type]
                with closing(bitmap):
                    return _encoded(bitmap.to_pil().convert("RGB"), self._kind, self._quality)
        except NoDocument as error:
            raise NoImage(str(error)) from None
        except MemoryError:
            raise NoImage("the page needs too much memory") from None
        except Exception as error:  # PDFium's and Pillow's
            raise NoImage(f"page {page + 1} cannot be rendered: {error}") from None

    def _scale(self, width: float, height: float) -> float:
        """Return pixels per point, of 1/72 inch."""
        scale = min(self._dpi / 72, (self._max_pixels / (width * height)) ** 0.5)
        while ceil(width * scale) * ceil(height * scale) > self._max_pixels:
            scale *= 0.99
        return scale

    def _close(self) -> None:
        document, self._document = self._document, None
        if document is not None:
            with suppress(Exception):
                document.close()
            with suppress(AttributeError):  # not in every C library
                ctypes.CDLL(None).malloc_trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _encoded(image: Image.Image, kind: str, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"quality": quality} if kind == "JPEG" else {}))
    return out.getvalue()


def _read_ahead(file: BinaryIO, requests: "queue.Queue[tuple[int, bytes] | None]") -> None:
    """Put requests into the queue, and None at the end of the input."""
    try:
        while len(head := file.read(REQUEST.size)) == REQUEST.size:
            page, length = REQUEST.unpack(head)
            raw = file.read(length)
            if len(raw) < length:
                break
            requests.put((page, raw))
    finally:
        requests.put(None)


def main(max_pixels: int, kind: str, quality: int, dpi: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    target, requests = sys.stdout.buffer, queue.Queue[tuple[int, bytes] | None](1)
    threading.Thread(target=_read_ahead, args=(sys.stdin.buffer, requests), daemon=True).start()
    pages = Pages(max_pixels, kind, quality, dpi)
    while (request := requests.get()) is not None:
        page, raw = request
        try:
            if page == WHOLE:
                reply = converted(raw, max_pixels, kind, quality)
                found = FIRST_FRAME if has_more_frames(raw) else IMAGE
            else:
                reply, found = pages.image(os.fsdecode(raw), page), IMAGE
        except NoImage as reason:
            reply, found = str(reason)[:500].encode(), REFUSED
        target.write(REPLY.pack(found, len(reply)) + reply)
        target.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
