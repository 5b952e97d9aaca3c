"""Where an output must not lie: among the files that its job reads, or where it would end with a process."""

from contextlib import suppress

from pipeline.config import JobConfig
from pipeline.data.files.listing import would_find
from pipeline.errors import ConfigError
from pipeline.stores.filesystem import filesystem, is_url, protocols
from pipeline.stores.redaction import shown_url


def check_output_place(config: JobConfig) -> None:
    """Raise ConfigError where the next run would read the parts of this one as its input, so that no run could go on,
    and where the results would be gone with this process. No request is made; a url that cannot be opened is left to
    who opens it."""
    given, output = config.input, config.output
    shown = f"output.path {shown_url(output.path)}"
    with suppress(ImportError, ValueError, TypeError):
        if is_url(output.path) and "memory" in protocols(filesystem(output.path, output.storage)[0]):
            raise ConfigError(f"{shown}: lies in the memory of one process and ends with it; give a disk or a store")
        if would_find(given.path, given.storage, output.path, output.storage):
            raise ConfigError(
                f"{shown}: lies in input.path {shown_url(given.path)}, so the next run would read its parts as input; "
                "choose a folder outside of it, or one whose name begins with _"
            )
