"""Pool of processes that decode images (`decode.py`), and the parts of requests that carry them."""

import asyncio
import base64
import contextlib
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pipeline.data.files.pdf_pages import page_of
from pipeline.data.messages import IMAGE_REFERENCE
from pipeline.data.prompts import MAX_BYTES
from pipeline.endpoint.images import FIRST_FRAME, REFUSED, REPLY, REQUEST, WHOLE
from pipeline.endpoint.images.documents import Documents
from pipeline.endpoint.images.fetch import ImageFetcher, NotAllowed, Unavailable
from pipeline.endpoint.spec import ImageOptions
from pipeline.errors import EngineUnusable, PipelineError, RowError
from pipeline.machine.interpreter import child_environment

DECODE_TIMEOUT_S = 60.0
_PNG_SIZE, _JPEG_SIZE = struct.Struct(">II"), struct.Struct(">HH")
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of segments with the size
TRIES = 2  # of an image whose process ended: memory may have been short
DECODER = ("-m", "pipeline.endpoint.images.decode")
DEPTH = 2  # images of a process: it reads the next one while it decodes


class ImageRefused(Exception):
    """An image cannot be sent."""

    def __init__(self, reason: str, code: RowError = RowError.INVALID_IMAGE) -> None:
        super().__init__(reason)
        self.code = code


class _Ended(Exception):
    """The process ended with an image of another request."""


class _Decoder:
    """Process that decodes images in the order in which they are sent. It starts with the first one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.process: asyncio.subprocess.Process | None = None
        self.num_open = 0
        self.has_ended = False
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()

    async def exchange(self, page: int, content: bytes) -> tuple[int, bytes]:
        """Return the kind of the reply and the reply. Raises TimeoutError, EOFError if the process ends with this
        image, and _Ended if it ends with another one. The caller ends the decoder after any error."""
        is_first = self.num_open == 1
        async with self._sending:
            if self.has_ended:
                raise _Ended
            if self.process is None:
                pipe = asyncio.subprocess.PIPE
                self.process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=pipe, stdout=pipe, env=child_environment()
                )
            process = self.process
            assert process.stdin is not None
            try:
                process.stdin.write(REQUEST.pack(page, len(content)))
                process.stdin.write(content)
                await process.stdin.drain()
            except OSError:
                raise EOFError if is_first else _Ended from None
        async with self._receiving:
            if self.has_ended:
                raise _Ended
            assert process.stdout is not None
            async with asyncio.timeout(DECODE_TIMEOUT_S):
                kind, length = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
                return kind, await process.stdout.readexactly(length)

    async def end(self) -> None:
        self.has_ended = True
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


class ImagePool:
    """Processes that decode images. They start with the first images. All methods run in one event loop."""

    def __init__(self, options: ImageOptions, storage: Mapping[str, Mapping[str, Any]]) -> None:
        """storage: as in `ImageFetcher`."""
        self._options, self._fetcher = options, ImageFetcher(options, storage)
        self._documents = options.documents and Documents(options.documents, storage)
        self._free = asyncio.Semaphore(DEPTH * options.processes)
        self._decoders: list[_Decoder] = []
        self.num_first_frames = 0  # images of files that hold more

    async def body_with(self, body: Mapping[str, Any], images: Sequence[bytes | str]) -> tuple[dict[str, Any], int]:
        """Return a body whose parts hold the images as data urls instead of references, and the bytes of these. Raises
        ImageRefused."""
        encoded = await asyncio.gather(*(self.encoded(image) for image in images), return_exceptions=True)
        urls: list[str] = []
        for number, each in enumerate(encoded, 1):
            if isinstance(each, ImageRefused):
                raise ImageRefused(f"image {number} of {len(images)}: {each}", each.code)
            if isinstance(each, BaseException):
                raise each
            urls.append(f"data:image/{self._options.format};base64,{base64.b64encode(each).decode()}")
        if (size := sum(map(len, urls))) > MAX_BYTES:
            reason = f"the images have {size} bytes in base64, expected at most {MAX_BYTES}; lower images.max_pixels"
            raise ImageRefused(reason, RowError.PROMPT_TOO_LARGE)
        return {**body, "messages": _with_urls(body["messages"], iter(urls))}, size

    async def close(self) -> None:
        """End the processes."""
        await self._fetcher.close()
        if self._documents is not None:
            self._documents.close()
        for decoder in self._decoders:
            await decoder.end()
        self._decoders.clear()

    async def encoded(self, image: bytes | str) -> bytes:
        """Return an image as it is sent. Raises ImageRefused."""
        if isinstance(image, str) and self._documents is not None:
            return await self._page(image, self._documents)
        if isinstance(image, str):
            try:
                image = await self._fetcher.read(image)
            except NotAllowed as error:
                raise ImageRefused(str(error), RowError.IMAGE_NOT_ALLOWED) from None
            except Unavailable as error:
                raise ImageRefused(str(error), RowError.IMAGE_UNAVAILABLE) from None
        return await self._converted(WHOLE, image)

    async def _page(self, name: str, documents: Documents) -> bytes:
        file, page = page_of(name)
        try:
            async with documents.local(file) as path:
                return await self._converted(page, os.fsencode(path))
        except PipelineError as error:
            raise ImageRefused(str(error), RowError.IMAGE_UNAVAILABLE) from None

    async def _converted(self, page: int, content: bytes) -> bytes:
        """Return the image of a file's content, or of a page of a PDF, whose path is the content. Raises
        ImageRefused."""
        async with self._free:
            num_tries = 0
            while True:
                decoder = self._decoder_for_next()
                decoder.num_open += 1
                try:
                    kind, reply = await decoder.exchange(page, content)
                except BaseException as error:  # if it is cancelled, an answer may be on its way
                    if decoder in self._decoders:
                        self._decoders.remove(decoder)
                    await decoder.end()
                    if isinstance(error, TimeoutError):
                        raise ImageRefused(f"not decoded within {DECODE_TIMEOUT_S:g} s") from None
                    if not isinstance(error, EOFError | _Ended):
                        raise
                    num_tries += isinstance(error, EOFError)
                    if num_tries == TRIES:
                        raise ImageRefused(f"its decoder ended in each of {TRIES} tries") from None
                    continue
                finally:
                    decoder.num_open -= 1
                if kind == REFUSED:
                    raise ImageRefused(reply.decode(errors="replace"))
                self.num_first_frames += kind == FIRST_FRAME
                return reply

    def _decoder_for_next(self) -> _Decoder:
        """Return a decoder with the fewest images, a new one as long as there may be more and all have some."""
        given, decoders = self._options, self._decoders
        fewest = min(decoders, key=lambda decoder: decoder.num_open, default=None)
        if fewest is not None and (fewest.num_open == 0 or len(decoders) == given.processes):
            return fewest
        if find_spec("PIL") is None:
            raise EngineUnusable("prompt.images: needs Pillow: pip install 'parquet-batch-inference[images]'")
        options = str(given.max_pixels), given.format, str(given.quality), str(given.dpi)
        decoders.append(_Decoder([sys.executable, *DECODER, *options]))
        return decoders[-1]


def size_of(encoded: bytes) -> tuple[int, int]:
    """Return the width and height of an image as it is sent."""
    if encoded.startswith(b"\x89PNG"):
        return _PNG_SIZE.unpack_from(encoded, 16)
    at = 2
    while encoded[at + 1] not in _JPEG_FRAMES:
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    height, width = _JPEG_SIZE.unpack_from(encoded, at + 5)
    return width, height


def _with_urls(value: Any, urls: Any) -> Any:
    """Return the messages with the next url at each reference."""
    if isinstance(value, dict):
        media = value.get("image_url") if value.get("type") == "image_url" else None
        if isinstance(media, dict) and str(media.get("url")).startswith(IMAGE_REFERENCE):
            return {**value, "image_url": {**media, "url": next(urls)}}
        return {key: _with_urls(inner, urls) for key, inner in value.items()}
    return [_with_urls(inner, urls) for inner in value] if isinstance(value, list) else value
