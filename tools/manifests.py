"""Write the example manifests of infra/kuberay, or list stale ones: `python -m tools.manifests [--check]`."""

import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from pipeline.cli.main import cli
from tools.generated import ROOT, check_or_write

FOLDER = "infra/kuberay"
_CPU, _NIGHTLY = f"--config {FOLDER}/cluster-cpu.yaml", f"--config {FOLDER}/nightly.yaml --schedule '5 2 * * *'"
COMMANDS = {
    "once.k8s.yaml": f"jobs/summarize.yaml {_CPU}",
    "nightly.k8s.yaml": f"jobs/summarize.yaml {_CPU} {_NIGHTLY} --time-zone Europe/Berlin",
}


def files() -> dict[Path, str]:
    """Return every example with its current content."""
    contents = {}
    for name, command in COMMANDS.items():
        words, argv = ["manifests", *shlex.split(command), "--output", f"{FOLDER}/{name}"], sys.argv
        sys.argv = ["pipeline", *words]  # the file's head shows this command
        try:
            done = CliRunner().invoke(cli, words[:-2], catch_exceptions=False)
        finally:
            sys.argv = argv
        if done.exit_code:
            raise RuntimeError(f"{command}: {done.output}")
        contents[ROOT / FOLDER / name] = done.stdout
    return contents


if __name__ == "__main__":
    check_or_write(files(), "tools.manifests")
