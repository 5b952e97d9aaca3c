"""Images in the columns of rows: bytes, data urls, Hugging Face's structs of bytes and path, and lists of these."""

from typing import Any

import pyarrow as pa

from pipeline.data.columns import is_list
from pipeline.data.messages import MessageRefused, image_of_data_url

MAX_IMAGE_BYTES = 64 << 20  # of an image as it is in the data
EXPECTED = "expected images: bytes, structs of bytes and path, data urls, or lists of these"


class NotRead(ValueError):
    """An image that is only named by a path or a url."""


def holds_images(t: pa.DataType) -> bool:
    """Return whether a column of this type may hold images."""
    if is_list(t) or pa.types.is_fixed_size_list(t):
        return holds_images(t.value_type)
    if pa.types.is_struct(t):
        return any(f.name == "bytes" and _is_bytes(f.type) for f in t.fields)
    return _is_bytes(t) or pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_null(t)


def images_of(value: Any, position: str) -> list[bytes]:
    """Return the images of a column's value, in order. A null and an empty list have none. Raises NotRead for a path or
    a url, MessageRefused for a value that is no image."""
    if value is None:
        return []
    if isinstance(value, list):
        found = [images_of(item, f"{position}[{i}]") for i, item in enumerate(value)]
        if [] in found:
            raise MessageRefused(f"{position}[{found.index([])}]: null, expected an image")
        return [image for images in found for image in images]
    if isinstance(value, dict):
        if value["bytes"] is None and value.get("path") is not None:
            raise NotRead(f"{position}: no bytes, only the path {value['path']!r:.100}; store the bytes in the column")
        return images_of(value["bytes"], position)
    if isinstance(value, str):
        if not value.startswith("data:"):
            raise NotRead(f"{position}: {value[:100]!r}; paths and urls are not read: store the bytes in the column")
        value = image_of_data_url(value, position)
    if not value:
        raise MessageRefused(f"{position}: 0 bytes, expected the content of an image")
    return [value]


def _is_bytes(t: pa.DataType) -> bool:
    return pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t)
