"""A folder with the interface of `store.Bucket`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    """Files below a folder. A key is a relative path."""

    folder: Path

    def url(self, key: str) -> str:
        return str(self.folder / key)

    def put(self, key: str, data: bytes) -> None:
        """Write a new file, or replace one by a new file, as a copy from a backup does."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(data)
        new.replace(path)

    def get(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()

    def tags(self, prefix: str = "") -> dict[str, str]:
        """Return each key without the prefix, a folder, -> the version of its file."""
        tags = {}
        for path in (self.folder / prefix).rglob("*"):
            try:
                if path.is_file():
                    status = path.stat()
                    tags[str(path.relative_to(self.folder / prefix))] = f"{status.st_ino} {status.st_mtime_ns}"
            except FileNotFoundError:
                continue  # a temporary file
        return tags
