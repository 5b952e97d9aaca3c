"""Estimate the tokens of a job's images from a sample, which is decoded as in a run, by the model's formula."""

import asyncio
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from pipeline.data.units import window_units
from pipeline.endpoint.images.pool import ImagePool, ImageRefused, size_of
from pipeline.endpoint.spec import EndpointConfig
from pipeline.job.planning.actor_specs import with_documents
from pipeline.job.planning.plan import JobPlan
from pipeline.job.preview.prompt_preview import sampled
from pipeline.model.image_tokens import ImageTokens, image_tokens
from pipeline.report.estimate import Interval

MAX_ROWS = 64


def image_tokens_of_a_row(plan: JobPlan, folder: Path) -> Interval | None:
    """Return the tokens of a row's images, in addition to their placeholders in the chat template; None if the formula
    of the model in `folder` is unknown. Decodes the images of rows that are evenly spread over the input."""
    config = plan.job.work_config()
    assert isinstance(config, EndpointConfig)
    rows: list[list[bytes | str]] = []
    for window in sampled(plan.num_rows, MAX_ROWS):
        for unit in window_units(plan.source, window, plan.job.prompt_units):
            columns = unit.own("_images").to_pylist(), unit.own("_error").to_pylist()
            rows += [
                [each["content"] or each["name"] for each in images or ()]
                for images, error in zip(*columns)
                if not error
            ]
    if not any(rows):
        return Interval(0, 0, 0)
    if (formula := image_tokens(folder)) is None:
        return None
    pool = ImagePool(with_documents(config, plan.source).images, config.storage_options)
    tokens = asyncio.run(_tokens(rows, pool, formula))
    mean = fmean(tokens or [0])
    error = 2 * stdev(tokens) / sqrt(len(tokens)) if 1 < len(tokens) < plan.num_rows else 0.0
    return Interval(max(0.0, mean - error), mean, mean + error)


async def _tokens(rows: list[list[bytes | str]], pool: ImagePool, formula: ImageTokens) -> list[int]:
    """Return the tokens of each row's images, without rows whose images are refused."""
    tokens = []
    try:
        for images in rows:
            try:
                encoded = [await pool.encoded(image) for image in images]
            except ImageRefused:
                continue
            tokens.append(sum(formula.num_more(*size_of(image)) for image in encoded))
    finally:
        await pool.close()
    return tokens
