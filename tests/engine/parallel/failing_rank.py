"""A rank's process that fails as a file says: `python -m tests.engine.parallel.failing_rank`, with the arguments of
`pipeline.engine.rank_process`.

The file holds the name of an error. The rank raises it in the last layer of its next step, and removes the file.
"""

import os
import sys
from pathlib import Path
from typing import Any

from pipeline.engine.rank_process import main
from pipeline.model.decoder import DecoderLayer

FILE = "FAILING_RANK"
ERRORS = {"memory": MemoryError("no memory for a test"), "bug": ValueError("a bug in a test")}


def fail(self: DecoderLayer, *arguments: Any) -> Any:
    path = Path(os.environ[FILE])
    if self.index == self.config.num_layers - 1 and path.exists():
        error = ERRORS[path.read_text()]
        path.unlink()
        raise error
    return feed_forward(self, *arguments)


feed_forward = DecoderLayer.feed_forward

if __name__ == "__main__":
    DecoderLayer.feed_forward = fail  # type: ignore[method-assign]
    main(*sys.argv[1:])
