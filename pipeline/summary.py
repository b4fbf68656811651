"""A run's result in the words a person reads, at its end and later."""

from __future__ import annotations

from pathlib import Path

from pipeline.records import Totals


def totals_lines(totals: Totals, failures: dict[str, int]) -> list[str]:
    """Rows, failures by kind, tokens, and where prompt tokens came from."""
    lines = [f"rows       {totals.rows}"]
    if failures:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
        lines.append(f"failures   {sum(failures.values())} ({kinds}), listed in failures.jsonl")
    else:
        lines.append("failures   0")
    mean = totals.completion_tokens / max(totals.rows, 1)
    lines.append(f"tokens     {totals.completion_tokens} generated, {mean:.0f} a row")
    lines.append(f"truncated  {totals.truncated / max(totals.rows, 1):.0%} of rows reached sampling.max_new_tokens")
    lines.append(f"prompts    {prompt_tokens_by_tier(totals)}")
    if totals.retractions:
        lines.append(f"retracted  {totals.retractions} times: the KV pool was full, work was done twice")
    return lines


def prompt_tokens_by_tier(totals: Totals) -> str:
    """How many prompt tokens came from the device tier, from the host tier, and were computed."""
    whole = max(totals.prompt_tokens, 1)
    device, host = totals.cached_device_tokens, totals.cached_host_tokens
    computed = totals.prompt_tokens - device - host
    return (
        f"{totals.prompt_tokens} tokens: {computed / whole:.0%} computed, {device / whole:.0%} from the device tier, "
        f"{host / whole:.0%} from the host tier (HiCache)"
    )


def opening_lines(folder: Path) -> list[str]:
    """Two lines of Python that open the shards."""
    return [
        f'pandas.read_parquet("{folder / "shards"}")',
        f'datasets.load_dataset("parquet", data_dir="{folder / "shards"}")["train"]',
    ]
