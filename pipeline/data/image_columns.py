"""Images in the columns of rows: bytes, urls, paths, Hugging Face's structs of bytes and path, and lists of these."""

from typing import Any

import pyarrow as pa

from pipeline.data.columns import is_list
from pipeline.data.messages import MessageRefused, image_of_data_url

MAX_IMAGE_BYTES = 64 << 20  # of an image as it is in the data
EXPECTED = "expected images: bytes, structs of bytes and path, urls, paths, or lists of these"


def holds_images(t: pa.DataType) -> bool:
    """Return whether a column of this type may hold images."""
    if is_list(t) or pa.types.is_fixed_size_list(t):
        return holds_images(t.value_type)
    if pa.types.is_struct(t):
        return any(f.name == "bytes" and _is_bytes(f.type) for f in t.fields)
    return _is_bytes(t) or pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_null(t)


def images_of(value: Any, position: str) -> list[bytes | str]:
    """Return the images of a column's value, in order, as content or as a path or url, which the engine may read. A
    null and an empty list have none. Raises MessageRefused for a value that is no image."""
    if value is None:
        return []
    if isinstance(value, list):
        found = [images_of(item, f"{position}[{i}]") for i, item in enumerate(value)]
        if [] in found:
            raise MessageRefused(f"{position}[{found.index([])}]: null, expected an image")
        return [image for images in found for image in images]
    if isinstance(value, dict):
        return images_of(value.get("path") if value["bytes"] is None else value["bytes"], position)
    if isinstance(value, str) and value.startswith("data:"):
        value = image_of_data_url(value, position)
    if not value:
        raise MessageRefused(f"{position}: 0 bytes, expected the content of an image")
    return [value]


def _is_bytes(t: pa.DataType) -> bool:
    return pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t)
