"""A finished output with its digest, which changes if any of its parts is replaced.

Each write of a part puts a random nonce into its footer, so the digest differs also if `--retry-failed` wrote the same
rows again. A destination that records the digest together with the rows thus shows whether it holds this output.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.output.inventory import finished_counts
from pipeline.data.output.parts import NONCE_KEY, PartName, PartStore
from pipeline.errors import OutputError
from pipeline.formatting import Remaining
from pipeline.job.output.read_output import report_of
from pipeline.job.planning.fingerprint import JOB, read_job
from pipeline.report.run_report import RunReport
from pipeline.stores.read_ahead import read_ahead


@dataclass(frozen=True, kw_only=True)
class FinishedOutput:
    """Finished output of a job.

    fingerprint: of the job. digest: of the parts. parts: size in bytes and nonce of each, in the order of windows and
    units. schema: of the first part. job: the record `_pipeline/job.json`.
    """

    store: PartStore
    fingerprint: str
    digest: str
    num_rows: int  # output rows, with all samples
    parts: Mapping[PartName, tuple[int, bytes]]
    schema: pa.Schema
    job: Mapping[str, Any]
    report: RunReport

    @classmethod
    def open(cls, store: PartStore) -> "FinishedOutput":
        """Read the footers of all parts. Raises OutputError if the job is not finished, or its output does not match
        `_SUCCESS`."""
        counts, job = finished_counts(store), read_job(store)
        if job is None:
            raise OutputError(f"{store.folder.shown(JOB)}: missing, so the output's job is unknown; was it removed?")
        sizes, parts, num_rows, schema = dict(store.sizes()), {}, 0, pa.schema([])
        digest = hashlib.sha256()
        with closing(read_ahead(store.footer, store.list().parts(), store.folder.reads_at_once)) as footers:
            for name, footer in footers:
                num_rows += store.totals_in(name, footer).output_rows
                schema = schema if parts else footer.schema.to_arrow_schema().remove_metadata()
                parts[name] = sizes[name], footer.metadata[NONCE_KEY]
                digest.update(f"{name} {sizes[name]} {footer.metadata[NONCE_KEY].decode()}\n".encode())
        if num_rows != counts["output_rows"]:
            raise OutputError(
                f"{store.path}: its parts hold {num_rows:,} rows, _SUCCESS counts {counts['output_rows']:,}; "
                "`pipeline verify` lists the damage"
            )
        return cls(
            store=store,
            fingerprint=job["fingerprint"],
            digest=digest.hexdigest(),
            num_rows=num_rows,
            parts=parts,
            schema=schema,
            job=job,
            report=report_of(store),
        )

    def read(self, log: Callable[[str], None]) -> Iterator[tuple[PartName, bytes]]:
        """Yield each part with its bytes. Raises OutputError if one was replaced since `open`."""
        remaining = Remaining(log, "bytes read", sum(size for size, _ in self.parts.values()))
        done = 0
        for name, (size, nonce) in self.parts.items():
            data = self.store.folder.read(str(name)) or b""
            if len(data) != size or pq.read_metadata(pa.BufferReader(data)).metadata[NONCE_KEY] != nonce:
                raise OutputError(
                    f"{self.store.folder.shown(str(name))}: replaced or removed while it was published, as by another "
                    "run of the job; nothing was published. Wait for that run, then publish again"
                )
            yield name, data
            remaining(done := done + size)
