"""Prompts -> token ids and back, with the target's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import ModelConfig
from pipeline.errors import InputError
from pipeline.prompts.hub import looks_like_hub_id, quiet
from pipeline.prompts.messages import message_fields
from pipeline.prompts.raw import one_line
from pipeline.records import Failure, Ids, Message, Prompt, TokenizedPrompt

_OURS = frozenset(
    {"add_generation_prompt", "continue_final_message", "conversation", "return_dict", "return_tensors", "tokenize"}
    | {"tools", "padding", "truncation", "max_length"}
)
"""Arguments of ``apply_chat_template`` that are set here and are no variables of a template."""


class PromptTemplate:
    """A tokenizer with its chat template. Threads may share it; they take turns.

    ``eos_ids`` are the ids that end an answer: the tokenizer's, and those of the model's generation settings.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None, eos_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._decode_options = _exact_decoding(tokenizer)
        # A fast tokenizer sets its padding at each encoding, and raises if another thread is using it then.
        self._turn = threading.Lock()
        self.eos_ids = frozenset(eos_ids) | frozenset(_as_list(tokenizer.eos_token_id))

    def encode(self, prompt: Prompt) -> TokenizedPrompt | Failure:
        """The ids that the engine is to read: int32 [prompt_tokens], up to where the assistant begins.

        A conversation that the template refuses is a :class:`Failure` of kind ``template``.
        """
        try:
            with self._turn:
                ids = self._render(prompt.messages, prompt.tools)
        except Exception as error:  # a template is a program of somebody else's and may raise anything
            return Failure(prompt.id, prompt.dataset, prompt.source_id, "template", _first_line(error))
        return TokenizedPrompt(prompt, ids)

    def decode(self, ids: Sequence[int] | Ids, skip_special: bool) -> str:
        """The exact text of ids: no space is added or taken. A character cut in two gives U+FFFD."""
        plain = np.asarray(ids, dtype=np.int64).tolist()
        with self._turn:
            text: str = self._tokenizer.decode(plain, skip_special_tokens=skip_special, **self._decode_options)
        return text

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of all that decides ids: the tokenizer, its special tokens, its chat template."""
        identity = {
            "tokenizer": _tokenizer_identity(self._tokenizer),
            "special_tokens": self._tokenizer.special_tokens_map,
            "chat_template": self._tokenizer.chat_template,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """The largest id, added tokens included, plus one."""
        largest: int = max(_vocabulary(self._tokenizer).values())
        return largest + 1

    def _render(self, messages: Iterable[Message], tools: str | None) -> Ids:
        rendered = self._tokenizer.apply_chat_template(
            [_template_message(message) for message in messages],
            tools=json.loads(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._kwargs,
        )
        # A tokenizer with code of its own may give a mapping all the same.
        ids = rendered["input_ids"] if isinstance(rendered, Mapping) else rendered
        return np.asarray(ids, dtype=np.int32)


def load_template(model: ModelConfig) -> PromptTemplate:
    """Loads the tokenizer of ``model.tokenizer``, or else of ``model.path``, and tries its chat template once.

    Raises:
        InputError: naming the key: nothing there, code of its own without ``model.trust_remote_code``, no chat
            template, or one that does not render a single user message.
    """
    if clash := _OURS & model.chat_template_kwargs.keys():
        raise InputError("model.chat_template_kwargs", f"{sorted(clash)[0]!r} is set by the pipeline itself",
                         "variables of the chat template")  # fmt: skip
    key = "model.tokenizer" if model.tokenizer else "model.path"
    source = model.tokenizer or model.path
    tokenizer = _load_tokenizer(key, source, model.trust_remote_code)
    if not tokenizer.chat_template:
        raise InputError(key, f"the tokenizer of {source!r} has no chat template", "the tokenizer of a chat model")
    template = PromptTemplate(tokenizer, model.chat_template_kwargs, _generation_eos(model))
    _try_template(template, key, source)
    return template


def _load_tokenizer(key: str, source: str, trust_remote_code: bool) -> Any:
    is_local = os.path.exists(source)
    if not is_local and not looks_like_hub_id(source):
        raise InputError(key, f"{source!r} does not exist", "a folder with a tokenizer, or a hub id")
    from transformers import AutoTokenizer  # takes seconds, and may bring torch along

    try:
        with quiet("transformers", "huggingface_hub"):
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code, local_files_only=is_local
            )
    except Exception as error:  # one kind of exception for each way a tokenizer can be broken
        raise _load_error(key, source, error) from error
    # Only used to warn of long texts; what fits is checked against the engine.
    tokenizer.model_max_length = sys.maxsize
    return tokenizer


def _load_error(key: str, source: str, error: Exception) -> InputError:
    if "trust_remote_code" in str(error):
        problem = f"the tokenizer of {source!r} brings code of its own: set model.trust_remote_code=true to run it"
        return InputError(key, problem)
    return InputError(key, f"no tokenizer can be loaded from {source!r}: {one_line(error)}")


def _try_template(template: PromptTemplate, key: str, source: str) -> None:
    """Fails before the run rather than at each of its prompts."""
    trial = template.encode(Prompt("trial", "", "", 0, 0, (Message("user", "Hello"),)))
    if isinstance(trial, Failure):
        raise InputError(key, f"the chat template of {source!r} does not render a user message: {trial.detail}")


def _generation_eos(model: ModelConfig) -> list[int]:
    """What the model's generation settings say ends an answer: often more than, or other than, the tokenizer's token.

    They are read from where the tokenizer came from, if ``model.path`` is not a folder.
    """
    from transformers.utils import cached_file

    place = model.path if os.path.isdir(model.path) else model.tokenizer or model.path
    with quiet("transformers", "huggingface_hub"):
        path = cached_file(
            place,
            "generation_config.json",
            local_files_only=os.path.isdir(place),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return _eos_of(Path(path)) if path else []


def _eos_of(path: Path) -> list[int]:
    try:
        return _as_list(json.loads(path.read_text("utf-8")).get("eos_token_id"))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError("model.path", f"{str(path)!r} is not as expected: {one_line(error)}") from error


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: the arguments of calls as objects."""
    return message_fields(message, _call)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _tokenizer_identity(tokenizer: Any) -> Any:
    if not getattr(tokenizer, "is_fast", False):
        return sorted(_vocabulary(tokenizer).items())
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # How the last batch was padded and cut is a state, not part of what the tokenizer is.
    return {name: part for name, part in backend.items() if name not in ("padding", "truncation")}


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    # Tokenizers with code of their own do not all count added tokens as vocabulary.
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    return {**tokenizer.get_vocab(), **added}


def _exact_decoding(tokenizer: Any) -> dict[str, bool]:
    options = {"clean_up_tokenization_spaces": False}
    # Until transformers 5, tokenizers in Python put spaces around added tokens.
    if "spaces_between_special_tokens" in inspect.signature(getattr(tokenizer, "_decode", tokenizer.decode)).parameters:
        options["spaces_between_special_tokens"] = False
    return options


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
