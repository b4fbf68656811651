"""The run folder: journal, shards, manifest, failures."""

from pipeline.store.folder import RunFolder
from pipeline.store.manifest import Capture, Manifest
from pipeline.store.opening import open_run

__all__ = ["Capture", "Manifest", "RunFolder", "open_run"]
