"""A stand-in for SGLang's ``sgl_kernel`` on machines without CUDA libraries.

SGLang 0.5.23 imports these names when its device is the CPU; the real package cannot be imported without libcuda.
Plain generation calls none of them: without AMX, SGLang takes its PyTorch paths. Names that are not here fail to
import, which is what SGLang's own fallbacks expect.

It must never register ``torch.ops.sgl_kernel.convert_weight_packed``: SGLang reads that op's presence as "AMX
kernels are available" and would take paths that do not exist here.
"""

import os
from typing import Any, Callable

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    raise ImportError(
        f"{__file__} is eagle3-data's stand-in for sgl_kernel, for CPU engines only, and SGLANG_USE_CPU_ENGINE is not 1: "
        "take its folder off the PYTHONPATH of a GPU engine"
    )

__version__ = "0.0.0+eagle3.cpu.standin"


def _missing(name: str) -> Callable[..., Any]:
    def call(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not implemented: this is eagle3-data's CPU stand-in for sgl_kernel, which covers plain "
            "generation only (no speculative decoding, no AMX); see docs/cpu-engine.md"
        )

    call.__name__ = call.__qualname__ = name
    return call


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")


def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Any:
    """``input / sqrt(mean(input**2) + eps) * weight`` over the last axis, with the real kernel's signature."""
    import torch

    wide = input.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    result = (scaled * weight.to(torch.float32)).to(input.dtype)
    return result if out is None else out.copy_(result)
