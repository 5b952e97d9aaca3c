"""Section `images`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.values import IDENTITY, ConfigSection, Texts
from pipeline.endpoint.spec import ImageOptions
from pipeline.stores.filesystem import is_url


class ImagesSection(ConfigSection):
    """Decoding of images, and rendering of pages, for a server."""

    max_pixels: int = Field(
        default=ImageOptions.max_pixels,
        ge=1,
        description="Images with more pixels are scaled down to this number.",
        examples=[1_000_000],
        json_schema_extra=IDENTITY,
    )
    format: Literal["jpeg", "png"] = Field(
        default=ImageOptions.format,
        description="Format in which images are sent. An image that has it already, and needs no change, is sent as it "
        "is.",
        examples=["png"],
        json_schema_extra=IDENTITY,
    )
    quality: int = Field(
        default=ImageOptions.quality,
        ge=1,
        le=95,
        description="Quality of JPEG images.",
        examples=[95],
        json_schema_extra=IDENTITY,
    )
    dpi: int = Field(
        default=ImageOptions.dpi,
        ge=1,
        le=1200,
        description="Resolution at which pages of PDFs are rendered; lower where max_pixels requires it.",
        examples=[200],
        json_schema_extra=IDENTITY,
    )
    processes: int = Field(
        default=ImageOptions.processes,
        ge=1,
        le=64,
        description="Processes that decode images, for each engine of the run.",
        examples=[8],
    )

    hosts: Texts = Field(
        default=(),
        description='Hosts from which images are fetched if rows name them by url; "*" for any. Private addresses are '
        "refused unless they are listed themselves. Default: none.",
        examples=[["images.example.com"]],
    )
    roots: Texts = Field(
        default=(),
        description="Folders, or urls such as s3://bucket/prefix, below which images are read if rows name them by "
        "path. Default: none.",
        examples=[["/data/photos", "s3://bucket/photos"]],
    )

    def options(self) -> ImageOptions:
        """Return the engine's options."""
        roots = tuple(root if is_url(root) else str(Path(root).absolute()) for root in self.roots)
        return ImageOptions(**{**dict(self), "roots": roots})
