"""What makes the real SGLang run, with HiCache on, on a machine without a GPU.

The folder ``site/`` goes on the PYTHONPATH of an engine process, and of nothing else, when the engine's device is
the CPU. It holds a stand-in for ``sgl_kernel`` (the real one needs CUDA libraries merely to be imported) and an
SGLang plugin that gives HiCache the two operations it lacks on a CPU. ``docs/cpu-engine.md`` explains each name.

This module itself imports neither torch nor sglang.
"""

from pathlib import Path

_PARTS = (
    "sgl_kernel/__init__.py",
    "eagle3_hicache_cpu.py",
    "eagle3_hicache_cpu-0.1.0.dist-info/METADATA",
    "eagle3_hicache_cpu-0.1.0.dist-info/entry_points.txt",
)


def site_dir() -> Path:
    """The folder to put first on a CPU engine's PYTHONPATH, absolute.

    Raises:
        FileNotFoundError: a file of the folder is missing, so the plugin would be skipped without a word
            (an incomplete installation: the wheel must carry the ``.dist-info`` folder too).
    """
    folder = Path(__file__).resolve().parent / "site"
    missing = [part for part in _PARTS if not (folder / part).is_file()]
    if missing:
        raise FileNotFoundError(f"incomplete installation: {folder} lacks {', '.join(missing)}")
    return folder
