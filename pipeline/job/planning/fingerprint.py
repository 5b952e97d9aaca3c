"""Identity of a job: its settings and the digests of its inputs, in three classes.

*identity*: another value gives another output, so a changed job cannot resume. *numerics*: another value may change
tokens by rounding; a change is refused unless accepted, and then recorded. *free*: may change at any time.
`_pipeline/job.json` holds the values of the job's first run.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pipeline.config import JobConfig
from pipeline.config.identity import free_of, identity_of, numerics_of
from pipeline.data.output.parts import SUCCESS, PartStore
from pipeline.data.source import Source
from pipeline.errors import FingerprintError, OutputError
from pipeline.stores.redaction import shown_url

FORMAT = 2
JOB = "_pipeline/job.json"
ACCEPTED = "_pipeline/accepted-numerics.json"
FILES = "_pipeline/files.json"  # input files, if there are more than JOB lists
MAX_LISTED_FILES = 1000  # above this, JOB holds only a digest of all files
# Identity keys that a run may change for rows that it computes again: the first with --retry-failed, both with --redo
LIMIT, MAX_TOKENS = "engine.max_model_len", "sampling.max_tokens"
MAX_SHOWN = 20
MAX_VALUE_CHARS = 100


@dataclass(frozen=True)
class Fingerprint:
    """Settings and input digests of a job.

    `set_identity`, `set_numerics`: the same without values that equal their defaults. `needs_date`: the chat template
    can print the date. That date is part of the identity: the job file's, or after `claim` that of the output's first
    run. `recorded`: after `claim`, the digest by which the output's parts are named.
    """

    identity: dict[str, Any]
    numerics: dict[str, Any]
    free: dict[str, Any]
    set_identity: dict[str, Any]
    set_numerics: dict[str, Any]
    needs_date: bool = False
    recorded: str | None = None

    @property
    def digest(self) -> str:
        """Digest of the identity alone, as hex. A key at its default does not affect it."""
        return self.recorded or hashlib.sha256(_canonical(self.set_identity)).hexdigest()

    @property
    def undated(self) -> str:
        """Digest of the identity without the date of prompts, which does not affect the cost of the job."""
        return undated_digest(self.identity)

    @property
    def short(self) -> str:
        """First 8 digits of the digest, as in the names of parts."""
        return self.digest[:8]

    @property
    def date(self) -> datetime | None:
        """Date for the chat template; None if the job needs none or has none yet."""
        date = _date_in(self.identity)
        return None if date is None else datetime.fromisoformat(date)

    def with_date(self, date: str | None) -> "Fingerprint":
        """Return the same job with this date, if it needs one and the job file has none."""
        if not self.needs_date or date is None or self.date is not None:
            return self
        return replace(self, identity=_dated(self.identity, date), set_identity=_dated(self.set_identity, date))


def fingerprint(
    config: JobConfig,
    source: Source,
    model: Mapping[str, str],
    device: str,
    reads_date: bool = False,
    chat_template: str | None = None,
    later_files: Collection[str] = (),
    adapters: Mapping[str, Mapping[str, str]] | None = None,
    row_fn: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Return the fingerprint of a job. `model`: digests by file name; `device`: the resolved `engine.device`, without
    an index; `reads_date`: the chat template can print the date; `chat_template`: the text of the job file's own;
    `later_files`: names of appended files, which are not part of the identity; `adapters`: the digests of the adapters
    that rows may use, by file name; `row_fn`: the identity of the row function."""
    files = {name: digest for name, digest in file_digests(source).items() if name not in later_files}
    identities, all_numerics = [], []
    for only_set in (False, True):
        identity = _from_json({**identity_of(config, only_set), "files": _files(files), "model": dict(model)})
        if adapters:
            of_rows = config.model.model_dump(mode="json", include={"adapter"})["adapter"]
            identity["adapters"] = _from_json({"of_rows": of_rows, "files": dict(adapters)})
        if row_fn is not None:
            identity["row_fn"] = dict(row_fn)
        if chat_template is not None:
            identity["prompt"]["chat"]["template"] = hashlib.sha256(chat_template.encode()).hexdigest()[:32]
        numerics = _from_json(numerics_of(config, only_set))
        numerics["engine"]["device"] = device
        identities.append(identity)
        all_numerics.append(numerics)
    chat, free = config.prompt.chat, free_of(config)
    job = Fingerprint(
        identities[0],
        all_numerics[0],
        _from_json({**free, "input": {**free["input"], "path": shown_url(source.url)}}),
        set_identity=identities[1],
        set_numerics=all_numerics[1],
        needs_date=reads_date and chat is not None,
    )
    return job.with_date(chat and chat.date)


def claim(
    store: PartStore,
    job_name: str,
    ours: Fingerprint,
    accept_numerics: bool,
    versions: Mapping[str, str],
    now: datetime,
    files: Mapping[str, str] | None = None,
) -> Fingerprint:
    """Claim the output folder for this job, or check that it belongs to it. A refused claim changes nothing. `files`:
    the input files, as `file_digests` returns them.

    Return `ours` with the output's date: the job file's, else that of the output's first run, else `now`. Raises
    FingerprintError if the folder belongs to a different job, OutputError if it holds anything else.
    """
    raw = store.folder.read(JOB)
    is_new = raw is None
    if raw is None:
        _check_empty(store)
        store.folder.probe()
        first = ours.with_date(now.isoformat())
        head = {"format": FORMAT, "job": job_name, "fingerprint": first.digest, "versions": dict(versions)}
        body = {**head, "identity": first.identity, "numerics": first.numerics, "free": first.free}
        if files is not None and len(files) > MAX_LISTED_FILES:
            store.folder.replace(FILES, _canonical(files))
        if store.folder.create(JOB, json.dumps(body, indent=1, sort_keys=True).encode()):
            return first
        raw = store.folder.read(JOB)  # another run claimed the folder first; compare with that one
        assert raw is not None
    theirs = _parse(store, raw)
    ours = ours.with_date(theirs["date"])
    if not is_new:
        _agree(store, theirs, ours, accept_numerics=True)  # before anything is written
        store.folder.probe()
    _agree(store, theirs, ours, accept_numerics)
    return replace(ours, recorded=theirs["fingerprint"])


def check_output(store: PartStore, ours: Fingerprint) -> None:
    """Raise as `claim` would, without writing anything. Accepts what an option of `run` allows: other numerics, new
    files, other limits."""
    raw = store.folder.read(JOB)
    if raw is None:
        return _check_empty(store)
    theirs = _parse(store, raw)
    ours = ours.with_date(theirs["date"])
    changes = _changes(theirs, ours)
    if not _are_new_files(changes) and not _are_limits(changes):
        _agree(store, theirs, ours, accept_numerics=True)


def _check_empty(store: PartStore) -> None:
    existing = [name for name in store.folder.names("") if name[0] not in "_." or name == SUCCESS]
    if existing:
        raise OutputError(
            f"output.path {store.path}: not empty ({existing[0]}) and not the output of a job; choose a new folder"
        )


def with_limits_of(store: PartStore, ours: Fingerprint, keys: Collection[str]) -> tuple[Fingerprint, dict[str, Any]]:
    """Return `ours` with the output's own values of `keys`, and this run's values where they differ. Used to compute
    rows again. Raises OutputError."""
    raw = store.folder.read(JOB)
    limits: dict[str, Any] = {}
    for key, old, new in () if raw is None else _changes(_parse(store, raw), ours):
        if key in keys:
            section, _, name = key.partition(".")
            own = {**ours.identity[section], name: old}
            ours, limits[key] = replace(ours, identity={**ours.identity, section: own}), new
    return ours, limits


def differs(store: PartStore, ours: Fingerprint) -> bool:
    """Return whether the output belongs to a different job or was started with other numerics. Raises OutputError."""
    raw = store.folder.read(JOB)
    if raw is None:
        return False
    theirs = _parse(store, raw)
    return bool(_changes(theirs, ours.with_date(theirs["date"]))) or not _same_numerics(theirs["numerics"], ours)


def read_job(store: PartStore) -> dict[str, Any] | None:
    """Read the record of an output's job; None if there is none. Raises OutputError if it is damaged, or of a format
    that this version does not read."""
    raw = store.folder.read(JOB)
    return None if raw is None else _checked_job(store, raw)


def _checked_job(store: PartStore, raw: bytes) -> dict[str, Any]:
    file = f"{store.path}/{JOB}"
    try:
        job = json.loads(raw)
        if job["format"] != FORMAT:
            raise OutputError(
                f"{file}: format {job['format']}, written by version "
                f"{job.get('versions', {}).get('pipeline', 'unknown')}; this one reads and writes format {FORMAT}. "
                "Use that version for this output, or choose a new output.path"
            )
        if not isinstance(job["fingerprint"], str):
            raise TypeError("fingerprint")
        return job
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _edited(file, error) from error


def _edited(file: str, error: Exception) -> OutputError:
    return OutputError(f"{file}: damaged ({error}); was it edited? Choose a new output.path")


def _parse(store: PartStore, raw: bytes) -> dict[str, Any]:
    theirs = _checked_job(store, raw)
    try:
        date = _date_in(theirs["identity"])
        if date is not None:
            datetime.fromisoformat(date)
        files = dict(theirs["identity"]["files"])
        known = {name: theirs[name] for name in ("identity", "numerics")}
        path = (theirs.get("free") or {}).get("input", {}).get("path")
        return {**known, "files": files, "date": date, "fingerprint": theirs["fingerprint"], "path": path}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _edited(f"{store.path}/{JOB}", error) from error


def _agree(store: PartStore, theirs: dict[str, Any], ours: Fingerprint, accept_numerics: bool) -> None:
    changes = _changes(theirs, ours)
    if changes:
        limits = " With --redo truncated,invalid its cut and invalid rows are computed again under the new limits."
        if all(key == LIMIT for key, _, _ in changes):
            limits = " With --retry-failed its error rows are computed again under the new limit."
        files = " With --append only the new files are computed."
        path = ours.free["input"]["path"]
        moved = f" The first run read {theirs['path']}, this one reads {path}."
        raise FingerprintError(
            f"output.path {store.path} was produced by a different job. Differences (recorded -> current):\n"
            f"{shown(changes)}\nChoose a new output.path, or undo the changes to resume this job."
            + (moved if path != theirs["path"] and any(key.startswith("files.") for key, _, _ in changes) else "")
            + (limits if _are_limits(changes) else "")
            + (files if _are_new_files(changes) else "")
        )
    accepted = json.loads(store.folder.read(ACCEPTED) or b"[]")
    if any(_same_numerics(numerics, ours) for numerics in (theirs["numerics"], *accepted)):
        return
    changes = difference(theirs["numerics"], ours.numerics)
    if not accept_numerics:
        raise FingerprintError(
            f"output.path {store.path} was started with other numerics. Differences (recorded -> current):\n"
            f"{shown(changes)}\nThe remaining completions may differ by rounding from those of the recorded numerics. "
            "Add --accept-numerics to resume anyway; the change is recorded."
        )


def _changes(theirs: dict[str, Any], ours: Fingerprint) -> list[tuple[str, Any, Any]]:
    """Return the differences of the identities, as `difference` does."""
    return difference(_completed(theirs["identity"], ours.identity, ours.set_identity), ours.identity)


def _same_numerics(theirs: dict[str, Any], ours: Fingerprint) -> bool:
    return _completed(theirs, ours.numerics, ours.set_numerics) == ours.numerics


def _completed(theirs: dict[str, Any], ours: dict[str, Any], ours_set: dict[str, Any]) -> dict[str, Any]:
    """Return recorded values with our defaults for keys that the recording version did not have."""
    out = dict(theirs)
    for key, value in ours.items():
        if key not in theirs:
            if key not in ours_set:
                out[key] = value
        elif isinstance(value, dict) and isinstance(theirs[key], dict):
            out[key] = _completed(theirs[key], value, ours_set.get(key, {}))
    return out


def _are_new_files(changes: list[tuple[str, Any, Any]]) -> bool:
    return all(key.startswith("files.") and old is None for key, old, _ in changes)


def _are_limits(changes: list[tuple[str, Any, Any]]) -> bool:
    return all(key in (LIMIT, MAX_TOKENS) for key, _, _ in changes)


def record_numerics(store: PartStore, ours: Fingerprint) -> None:
    """Record that this run's numerics were accepted, unless they are the job's first ones."""
    raw = store.folder.read(JOB)
    assert raw is not None
    accepted = json.loads(store.folder.read(ACCEPTED) or b"[]")
    if not any(_same_numerics(numerics, ours) for numerics in (json.loads(raw)["numerics"], *accepted)):
        store.folder.replace(ACCEPTED, json.dumps([*accepted, ours.numerics], indent=1).encode())


def difference(old: Any, new: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old, new) of each differing leaf. None means absent."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in sorted({*old, *new})
            for change in difference(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [(key, old, new)]


def shown(changes: list[tuple[str, Any, Any]]) -> str:
    lines = []
    for key, old, new in changes[:MAX_SHOWN]:
        before, after = _differing(old, new)
        lines.append(f"  {key}: {before} -> {after}")
    if len(changes) > MAX_SHOWN:
        lines.append(f"  and {len(changes) - MAX_SHOWN} more")
    return "\n".join(lines)


def _differing(old: Any, new: Any) -> tuple[str, str]:
    """Return both values as text; long ones are cut to the part around the first difference."""
    a, b = ("nothing" if v is None else json.dumps(v, ensure_ascii=False) for v in (old, new))
    if max(len(a), len(b)) <= MAX_VALUE_CHARS:
        return a, b
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, first - MAX_VALUE_CHARS // 3)
    cut = [text[start : start + MAX_VALUE_CHARS] for text in (a, b)]
    return tuple(
        ("..." if start else "") + part + ("..." if start + MAX_VALUE_CHARS < len(text) else "")
        for part, text in zip(cut, (a, b), strict=True)
    )  # type: ignore[return-value]


def file_digests(source: Source) -> dict[str, str]:
    """Return size and digest of each input file, by its relative path."""
    digests = {f.relative: f"{f.size} bytes, {f.digest[:16]}" for f in source.files}
    return digests | {f.relative: f"{f.size} bytes, damaged, skipped" for f in source.skipped}


def first_files(store: PartStore) -> dict[str, str] | None:
    """Return the input files of the output's first run, as `file_digests` does; None if there was no run. Raises
    OutputError."""
    raw = store.folder.read(JOB)
    if raw is None:
        return None
    files = _parse(store, raw)["files"]
    if not isinstance(files.get("count"), int):
        return files
    listed = store.folder.read(FILES) or b""
    if hashlib.sha256(listed).hexdigest() != files["digest"]:
        raise OutputError(
            f"{store.path}/{FILES}: damaged or missing; it lists the {files['count']:,} input files of the first run. "
            "Was it edited? Choose a new output.path"
        )
    return json.loads(listed)


def undated_digest(identity: Mapping[str, Any]) -> str:
    """Return `Fingerprint.undated` of an identity from `_pipeline/job.json`."""
    prompt = dict(identity["prompt"])
    if prompt.get("chat"):
        prompt["chat"] = {key: value for key, value in prompt["chat"].items() if key != "date"}
    return hashlib.sha256(_canonical({**identity, "prompt": prompt})).hexdigest()


def _files(digests: dict[str, str]) -> dict[str, Any]:
    if len(digests) <= MAX_LISTED_FILES:
        return digests
    return {"count": len(digests), "digest": hashlib.sha256(_canonical(digests)).hexdigest()}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _dated(identity: dict[str, Any], date: str) -> dict[str, Any]:
    prompt = identity["prompt"]
    return {**identity, "prompt": {**prompt, "chat": {**prompt["chat"], "date": date}}}


def _date_in(identity: dict[str, Any]) -> str | None:
    return (identity["prompt"].get("chat") or {}).get("date")


def _from_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value after a round trip through JSON, so that it compares equal to a stored one."""
    return json.loads(json.dumps(value, sort_keys=True))
