"""The run folder: journal, shards, manifest, failures."""

from pipeline.store.folder import RunFolder
from pipeline.store.manifest import Capture, Manifest
from pipeline.store.mirror import Mirror
from pipeline.store.opening import open_run

__all__ = ["Capture", "Manifest", "Mirror", "RunFolder", "open_run"]
