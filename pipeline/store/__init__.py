"""The run folder: journal, shards, manifest, failures."""

from pipeline.store.folder import RunFolder, open_run
from pipeline.store.manifest import Capture, Manifest

__all__ = ["Capture", "Manifest", "RunFolder", "open_run"]
