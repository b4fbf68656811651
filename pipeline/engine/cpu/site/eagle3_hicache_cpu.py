"""An SGLang plugin that lets HiCache run on a CPU engine.

On a CPU the "device" KV pool and the "host" KV pool both lie in RAM; HiCache's policy (what is backed up, evicted and
loaded back) is the real one. Two operations are missing there and are added here:

- an allocator for the host pool that does not pin memory with CUDA, and
- ``transfer_kv_direct``, the copy between the pools (in the CUDA build a kernel of ``sgl_kernel``).

And one number is lowered: SGLang keeps 10 GiB of RAM out of the host pool's reach, more than many a machine without a
GPU has free; here it is 1 GiB.

SGLang loads this in every process of the engine by the entry-point group ``sglang.srt.plugins``, and swallows any
Exception a plugin raises. A plugin that quietly did not take would end as a NameError in the scheduler minutes later,
so this one leaves the process with SystemExit and one line on stderr when HiCache is asked for and SGLang's internals
are not as expected. Nothing is imported at module level that could fail outside ``install``.
"""

import os
import sys
from typing import Any

NAME = "eagle3-data HiCache-on-CPU plugin"
RESERVE_BYTES = 1 << 30


def install() -> None:
    """Entry point. Does nothing unless the engine's device is the CPU (SGLANG_USE_CPU_ENGINE=1)."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    try:
        missing = _patch()
    except Exception as error:  # whatever an unknown SGLang version does on import
        missing = f"{type(error).__name__}: {error}"
    if missing is None:
        return
    line = f"{NAME}: SGLang {_sglang_version()} is not laid out as expected: {missing}."
    if not _hicache_asked_for():
        print(f"{line} HiCache is off, so it is not needed.", file=sys.stderr, flush=True)
        return
    # SystemExit, not Exception: SGLang's plugin loader catches the latter and carries on without us.
    print(
        f"{line} HiCache cannot run on the CPU with it. Use SGLang 0.5.23 (see docs/cpu-engine.md), "
        "or start without --enable-hierarchical-cache.",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(78)  # EX_CONFIG


def _patch() -> str | None:
    """Adds the two operations. Returns what was not found, or None once both are in place."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    table = getattr(common, "ALLOC_MEMORY_FUNCS", None)
    if not isinstance(table, dict):
        return f"{common.__name__}.ALLOC_MEMORY_FUNCS is not a table of allocators"
    if getattr(mha, "ALLOC_MEMORY_FUNCS", None) is not table:
        return f"{mha.__name__} does not use {common.__name__}.ALLOC_MEMORY_FUNCS"
    pool = getattr(mha, "MHATokenToKVPoolHost", None)
    for method in ("load_to_device_per_layer", "backup_from_device_all_layer"):
        code = getattr(getattr(pool, method, None), "__code__", None)
        if code is None or "transfer_kv_direct" not in code.co_names:
            return f"{mha.__name__}.MHATokenToKVPoolHost.{method} does not call transfer_kv_direct"
    if not hasattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        return f"{base.__name__}.HICACHE_HOST_MEMORY_RESERVE_BYTES is not there"
    table["cpu"] = allocate_unpinned
    mha.transfer_kv_direct = transfer_kv_direct
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    return None


def allocate_unpinned(
    dims: tuple[int, ...],
    dtype: Any,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Any:
    """The host pool's memory from SGLang's own allocator, without registering it with CUDA."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def transfer_kv_direct(
    src_layers: list[Any],
    dst_layers: list[Any],
    src_indices: Any,
    dst_indices: Any,
    page_size: int,
) -> None:
    """Copies the rows (tokens) ``src_indices`` of each source layer to the rows ``dst_indices`` of its counterpart.

    Both index tensors list tokens, page by page, so ``page_size`` adds nothing here; the CUDA kernel uses it to copy
    whole pages at a time.
    """
    source = src_indices.to("cpu", non_blocking=False)
    destination = dst_indices.to("cpu", non_blocking=False)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[destination] = src[source]


def _hicache_asked_for() -> bool:
    """Whether this process, or the engine that spawned it (spawn copies argv), was given the flag, in any spelling.

    ``--enable-hierarchical-cache``, its alias ``--enable-hicache`` and argparse's abbreviations of both.
    """
    return any(arg.startswith("--enable-hi") and not arg.startswith("--enable-his") for arg in sys.argv)


def _sglang_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
