"""`python -m tools.manifests [--check]`: writes the examples of infra/kuberay, or says which are stale."""

import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from pipeline.cli.main import cli
from tools.generated import ROOT, check_or_write

PLACE = "infra/kuberay"
_CPU, _NIGHTLY = f"--config {PLACE}/cluster-cpu.yaml", f"--config {PLACE}/nightly.yaml --schedule '5 2 * * *'"
COMMANDS = {
    "once.k8s.yaml": f"jobs/summarize.yaml {_CPU}",
    "nightly.k8s.yaml": f"jobs/summarize.yaml {_CPU} {_NIGHTLY} --time-zone Europe/Berlin",
}


def files() -> dict[Path, str]:
    """Every example, with what it has to hold now."""
    made = {}
    for name, command in COMMANDS.items():
        words, argv = ["manifests", *shlex.split(command), "--output", f"{PLACE}/{name}"], sys.argv
        sys.argv = ["pipeline", *words]  # what the head of the file says
        try:
            done = CliRunner().invoke(cli, words[:-2], catch_exceptions=False)
        finally:
            sys.argv = argv
        if done.exit_code:
            raise RuntimeError(f"{command}: {done.output}")
        made[ROOT / PLACE / name] = done.stdout
    return made


if __name__ == "__main__":
    check_or_write(files(), "tools.manifests")
