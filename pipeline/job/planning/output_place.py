"""Where an output must not lie: among the files that its job reads."""

from contextlib import suppress

from pipeline.config import JobConfig
from pipeline.data.files.listing import would_find
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import storage_for
from pipeline.stores.redaction import shown_url


def check_output_place(config: JobConfig) -> None:
    """Raise ConfigError where the next run would read the parts of this one as its input, so that no run could go on.
    A url that cannot be opened is left to the code that opens it."""
    given, output = config.input.path, config.output.path
    shown = f"output.path {shown_url(output)}"
    with suppress(ImportError, ValueError, TypeError, OSError):
        if would_find(given, storage_for(given, config.storage), output, storage_for(output, config.storage)):
            raise ConfigError(
                f"{shown}: lies in input.path {shown_url(given)}, so the next run would read its parts as input; "
                "choose a folder outside of it, or one whose name begins with _"
            )
