"""Photograph the top of a job's html report in headless Chromium, for `docs/pictures/report.png`.

pipeline run jobs/summarize.yaml && python -m tools.report_picture out/summarize
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.job.output.read_output import open_output, report_of
from pipeline.report.render import html

FILE = Path(__file__).parents[1] / "docs" / "pictures" / "report.png"
WIDTH, HEIGHT = 1200, 1230  # three columns of charts, and all of their rows


def photograph(output: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        page.write_text(html(report_of(open_output(output))), encoding="utf-8")
        subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--screenshot={file}",
             f"--window-size={WIDTH},{HEIGHT}", f"file://{page}"],
            check=True, timeout=120,
        )  # fmt: skip


if __name__ == "__main__":
    photograph(sys.argv[1], FILE)
