"""How many ids the target can produce: its configuration says, the tokenizer does not.

Models pad their embedding beyond the tokenizer's ids, and sample from the padding now and then.
"""

from __future__ import annotations

import os
from typing import Any

from pipeline.config import ModelConfig


def model_vocab_size(model: ModelConfig) -> int | None:
    """``vocab_size`` of the model's configuration (of its text part, where it has several); None where the
    configuration cannot be had here, as with an attached engine whose model lies on another machine."""
    from transformers import AutoConfig  # takes seconds

    try:
        config: Any = AutoConfig.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code, local_files_only=os.path.isdir(model.path)
        )
    except (OSError, ValueError):
        return None
    size = getattr(config.get_text_config(), "vocab_size", None)
    return int(size) if size else None
