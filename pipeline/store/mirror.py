"""A second copy of every sealed shard, on any filesystem that pyarrow or fsspec knows.

The copy in the run folder is never deleted by us. A shard counts as mirrored once its bytes were read back from the
mirror and their SHA-256 is the manifest's; until then it is uploaded again by the next command. Uploading twice does
no harm: a copy that is right already is left alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.errors import InputError, StoreError
from pipeline.store.durable import reached
from pipeline.store.manifest import ShardEntry

_BLOCK = 8 * 1024 * 1024


class Mirror:
    """The folder at ``uri``, for example ``s3://bucket/run``, ``gs://bucket/run`` or ``file:///mnt/copy``.

    Raises:
        InputError: the address is of no filesystem that can be used here.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._files, self._root = _filesystem(self.uri)

    def put(self, path: Path, entry: ShardEntry) -> None:
        """Copies a sealed shard under its own name; a reader there never sees half of it where renaming is one step.

        Raises:
            StoreError: it could not be written, or reads back differently.
        """
        target, temporary = f"{self._root}/{entry.name}", f"{self._root}/.{entry.name}.tmp"
        try:
            if self._digest(target) == entry.sha256:
                return
            reached("mirror: upload")
            self._files.create_dir(self._root, recursive=True)
            with path.open("rb") as source, self._files.open_output_stream(temporary) as sink:
                while block := source.read(_BLOCK):
                    sink.write(block)
            if self._digest(temporary) != entry.sha256:
                raise StoreError(f"{entry.name} reads back differently from {self.uri}; it counts as not mirrored")
            reached("mirror: rename")
            self._files.move(temporary, target)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{entry.name} could not be copied to {self.uri}: {error}") from error

    def _digest(self, path: str) -> str | None:
        """SHA-256 (hex) of what lies there; None where nothing does."""
        if self._files.get_file_info(path).type != pafs.FileType.File:
            return None
        digest = hashlib.sha256()
        with self._files.open_input_stream(path) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()


def _filesystem(uri: str) -> tuple[Any, str]:
    example = "s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, file:///FOLDER or what fsspec knows"
    if "://" not in uri:
        raise InputError("store.mirror", f"{uri!r} is no address", example)
    try:
        files, root = pafs.FileSystem.from_uri(uri)
        return files, root
    except (pa.ArrowException, OSError, ValueError) as first:
        import fsspec  # the many kinds that pyarrow does not know itself

        try:
            files, root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError, OSError):
            raise InputError("store.mirror", f"{uri!r} cannot be used: {first}", example) from None
        return pafs.PyFileSystem(pafs.FSSpecHandler(files)), root
