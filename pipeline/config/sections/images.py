"""Section `images`."""

from typing import Literal

from pydantic import Field

from pipeline.config.values import IDENTITY, ConfigSection
from pipeline.endpoint.spec import ImageOptions


class ImagesSection(ConfigSection):
    """Decoding of images for a server."""

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
    processes: int = Field(
        default=ImageOptions.processes,
        ge=1,
        le=64,
        description="Processes that decode images, for each engine of the run.",
        examples=[8],
    )

    def options(self) -> ImageOptions:
        """Return the engine's options."""
        return ImageOptions(**dict(self))
