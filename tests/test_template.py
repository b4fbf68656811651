"""The chat template and the tokenizer, with small ones made here."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.config import ModelConfig
from pipeline.errors import InputError
from pipeline.prompts import PromptTemplate, load_template
from pipeline.records import Failure, Message, Prompt, TokenizedPrompt

CHATML = """\
{%- for message in messages -%}
{%- if message.role == 'forbidden' %}{{ raise_exception('no such role here') }}{% endif -%}
<|im_start|>{{ message.role }}
{% if tools and loop.first %}tools: {{ tools | map(attribute='name') | join(',') }}
{% endif -%}
{% if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content if message.content is defined else '(none)' }}
{%- for call in message.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor -%}
{%- if mood is defined %} ({{ mood }}){% endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def backend(text: str = "hello world user assistant") -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=specials, show_progress=False),
    )
    return made


def tokenizer(template: str | None = CHATML, text: str = "hello world user assistant", **options: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=backend(text), eos_token="<|im_end|>", **options)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def template() -> PromptTemplate:
    return PromptTemplate(tokenizer())


def ask(*messages: Message, tools: str | None = None) -> Prompt:
    return Prompt("D/x/t0/s0", "D", "x", 0, 0, messages, tools)


def rendered(template: PromptTemplate, prompt: Prompt) -> str:
    found = template.encode(prompt)
    assert isinstance(found, TokenizedPrompt), found
    assert found.prompt is prompt
    assert found.prompt_ids is not None
    return template.decode(found.prompt_ids, skip_special=False)


# Encoding


def test_a_prompt_ends_where_the_assistant_begins(template: PromptTemplate) -> None:
    text = rendered(template, ask(Message("system", "be"), Message("user", "hi")))
    assert text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_ids_are_int32_in_one_dimension_and_special_tokens_one_id_each(template: PromptTemplate) -> None:
    found = template.encode(ask(Message("user", "hi")))
    assert isinstance(found, TokenizedPrompt)
    assert found.prompt_ids is not None
    assert found.prompt_ids.dtype == np.int32
    assert found.prompt_ids.ndim == 1
    assert list(found.prompt_ids).count(1) == 2
    assert list(found.prompt_ids).count(2) == 1


def test_a_field_without_a_value_is_not_defined(template: PromptTemplate) -> None:
    assert "(none)" in rendered(template, ask(Message("assistant", None)))
    assert "<think>" not in rendered(template, ask(Message("assistant", "x")))
    assert "<think>hm</think>" in rendered(template, ask(Message("assistant", "x", reasoning_content="hm")))


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_calls_reach_the_template_as_objects(template: PromptTemplate, arguments: Any) -> None:
    calls = json.dumps([{"id": "c1", "function": {"name": "f", "arguments": arguments}}])
    assert "[Oslo]" in rendered(template, ask(Message("assistant", None, tool_calls=calls)))


@pytest.mark.parametrize(
    "call",
    [{"function": {"name": "f", "arguments": value}} for value in ("not json", "[1]", None)] + [{"name": "bare"}],
)
def test_a_call_without_an_object_of_arguments_is_left_as_it_is(call: dict[str, Any]) -> None:
    shows_calls = PromptTemplate(tokenizer("{{ messages[0].tool_calls | tojson }}"))
    assert json.loads(rendered(shows_calls, ask(Message("assistant", "x", tool_calls=json.dumps([call]))))) == [call]


def test_tools_reach_the_template_as_objects(template: PromptTemplate) -> None:
    prompt = ask(Message("user", "hi"), tools='[{"name": "f"}, {"name": "g"}]')
    assert "tools: f,g\n" in rendered(template, prompt)


def test_template_variables_are_passed_on() -> None:
    cheerful = PromptTemplate(tokenizer(), {"mood": "cheerful"})
    assert "hi (cheerful)<|im_end|>" in rendered(cheerful, ask(Message("user", "hi")))


def test_a_conversation_that_the_template_refuses(template: PromptTemplate) -> None:
    found = template.encode(ask(Message("user", "hi"), Message("forbidden", "x")))
    assert found == Failure("D/x/t0/s0", "D", "x", "template", "no such role here")


def test_any_error_of_a_template_is_a_failure_with_its_first_line() -> None:
    broken = PromptTemplate(tokenizer("{{ raise_exception('first\nsecond') }}"))
    found = broken.encode(ask(Message("user", "hi")))
    assert isinstance(found, Failure)
    assert found.detail == "first"
    found = PromptTemplate(tokenizer("{{ messages[0].content + 1 }}")).encode(ask(Message("user", "hi")))
    assert isinstance(found, Failure)
    assert "concatenate" in found.detail


def test_a_tokenizer_that_gives_a_mapping_all_the_same() -> None:
    made = tokenizer()
    plain = PromptTemplate(made).encode(ask(Message("user", "hi")))
    apply = made.apply_chat_template
    made.apply_chat_template = lambda *args, **kwargs: apply(*args, **{**kwargs, "return_dict": True})
    mapped = PromptTemplate(made).encode(ask(Message("user", "hi")))
    assert isinstance(plain, TokenizedPrompt)
    assert isinstance(mapped, TokenizedPrompt)
    assert np.array_equal(plain.prompt_ids, mapped.prompt_ids)


def test_a_worker_thread_encodes_while_this_one_decodes(template: PromptTemplate) -> None:
    prompt = ask(Message("user", "hello world " * 50))
    expected = rendered(template, prompt)
    found: list[str] = []
    worker = threading.Thread(target=lambda: found.extend(rendered(template, prompt) for _ in range(50)))
    worker.start()
    while worker.is_alive():
        assert template.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"
    worker.join()
    assert found == [expected] * 50


# Decoding


@settings(deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from(["a , b . c 's n't", " x  y ", "a<|im_end|> b", "\u2028 é"]))
def test_decoding_gives_back_every_character(template: PromptTemplate, text: str) -> None:
    ids = template._tokenizer.encode(text)
    assert template.decode(ids, skip_special=False) == text
    assert template.decode(np.asarray(ids, dtype=np.int32), skip_special=False) == text


def test_clean_up_that_a_tokenizer_asks_for_is_not_done() -> None:
    eager = PromptTemplate(tokenizer(clean_up_tokenization_spaces=True))
    eager._tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert eager._tokenizer.decode(eager._tokenizer.encode("a , b")) == "a, b", "else the test proves nothing"
    assert eager.decode(eager._tokenizer.encode("a , b"), skip_special=False) == "a , b"


def test_special_tokens_are_skipped_on_request(template: PromptTemplate) -> None:
    ids = template._tokenizer.encode("a<|im_end|> b")
    assert template.decode(ids, skip_special=True) == "a b"
    assert template.decode(ids, skip_special=False) == "a<|im_end|> b"


def test_a_character_cut_in_two_is_a_replacement_character(template: PromptTemplate) -> None:
    ids = template._tokenizer.encode("é")
    assert len(ids) == 2
    assert template.decode(ids[:1], skip_special=False) == "\ufffd"


def test_no_ids_are_no_text(template: PromptTemplate) -> None:
    assert template.decode([], skip_special=True) == ""


# Identity


def test_the_digest_is_that_of_the_same_tokenizer_loaded_again(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    first, second = (load_template(ModelConfig(path=str(tmp_path))) for _ in range(2))
    assert first.digest == second.digest
    assert len(first.digest) == 64
    assert int(first.digest, 16)


def test_the_digest_does_not_depend_on_what_was_encoded_before() -> None:
    made = tokenizer()
    before = PromptTemplate(made).digest
    made("hello", truncation=True, max_length=2)
    assert made.backend_tokenizer.truncation is not None, "else the test proves nothing"
    assert PromptTemplate(made).digest == before


def test_the_digest_covers_vocabulary_template_and_special_tokens() -> None:
    variants = [
        tokenizer(),
        tokenizer(text="other words other words"),
        tokenizer(template=CHATML + " "),
        tokenizer(pad_token="<|endoftext|>"),
    ]
    assert len({PromptTemplate(made).digest for made in variants}) == len(variants)


def test_vocab_size_is_the_largest_id_plus_one(template: PromptTemplate) -> None:
    made = tokenizer()
    before = PromptTemplate(made).vocab_size
    assert before == len(made)
    made.add_tokens(["<|one_more|>"])
    assert PromptTemplate(made).vocab_size == before + 1


def test_eos_ids_are_the_tokenizers_and_those_given(template: PromptTemplate) -> None:
    assert template.eos_ids == {2}
    assert PromptTemplate(tokenizer(), eos_ids=[0]).eos_ids == {0, 2}


# A tokenizer in Python, as Kimi's is


@pytest.fixture
def slow() -> Any:
    from transformers import PreTrainedTokenizer

    class Bytes(PreTrainedTokenizer):  # type: ignore[misc]
        vocab_size = 256

        def get_vocab(self) -> dict[str, int]:
            return {chr(byte): byte for byte in range(256)} | self.added_tokens_encoder

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return [chr(byte) for byte in text.encode()]

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token)

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            data = b"".join(t.encode("latin-1") if len(t) == 1 else t.encode() for t in tokens)
            return data.decode("utf-8", "replace")

    made = Bytes(eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHATML
    return made


def test_a_tokenizer_in_python_encodes_decodes_and_has_an_identity(slow: Any) -> None:
    template = PromptTemplate(slow)
    text = rendered(template, ask(Message("user", "a , é")))
    assert text == "<|im_start|>user\na , é<|im_end|>\n<|im_start|>assistant\n"
    assert template.vocab_size == 258
    before = template.digest
    slow.add_tokens(["<|one_more|>"])
    assert PromptTemplate(slow).digest != before


def test_added_tokens_count_where_a_tokenizer_does_not_call_them_vocabulary(slow: Any) -> None:
    before = PromptTemplate(slow).digest
    slow.get_vocab = lambda: {chr(byte): byte for byte in range(256)}
    assert PromptTemplate(slow).vocab_size == 258
    assert PromptTemplate(slow).digest == before


# Loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refused(**keys: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_template(ModelConfig(**keys))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_is_loaded_with_its_template_and_variables(folder: Path) -> None:
    template = load_template(ModelConfig(path=str(folder), chat_template_kwargs={"mood": "calm"}))
    assert "hi (calm)" in rendered(template, ask(Message("user", "hi")))


def test_the_tokenizer_may_lie_elsewhere_than_the_model(folder: Path) -> None:
    template = load_template(ModelConfig(path="org/model-that-is-not-here", tokenizer=str(folder)))
    assert template.eos_ids == {2}


@pytest.mark.parametrize(("value", "expected"), [(0, {0, 2}), ([0, 1], {0, 1, 2}), (None, {2})])
def test_the_models_generation_settings_add_eos_ids(folder: Path, value: Any, expected: set[int]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert load_template(ModelConfig(path=str(folder))).eos_ids == expected


def test_generation_settings_that_cannot_be_read(folder: Path) -> None:
    (folder / "generation_config.json").write_text("oops")
    text = refused(path=str(folder))
    assert text.startswith("model.path: ")
    assert "generation_config.json' is not as expected" in text


def test_a_long_prompt_brings_no_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"model_max_length": 8}))
    warnings: list[logging.LogRecord] = []
    listener = logging.Handler()
    monkeypatch.setattr(listener, "emit", warnings.append)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [listener])
    template = load_template(ModelConfig(path=str(folder)))
    rendered(template, ask(Message("user", "hello " * 100)))
    assert not warnings


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_folder_that_does_not_exist_is_not_looked_for_on_the_hub(key: str) -> None:
    text = refused(**{"path": "org/name", key: "/no/such/folder"})
    assert text == (f"model.{key}: '/no/such/folder' does not exist (accepted: a folder with a tokenizer, or a hub id)")


def test_an_empty_path_is_no_model() -> None:
    assert refused(path="").startswith("model.path: '' does not exist")


@pytest.mark.parametrize("key", ["path", "tokenizer"])
def test_a_folder_without_a_tokenizer(tmp_path: Path, key: str) -> None:
    text = refused(**{"path": "org/name", key: str(tmp_path)})
    assert text.startswith(f"model.{key}: no tokenizer can be loaded from {str(tmp_path)!r}: ")


def test_a_tokenizer_file_that_is_damaged(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert refused(path=str(folder)).startswith("model.path: no tokenizer can be loaded from ")


def test_a_tokenizer_without_a_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    text = refused(path=str(folder))
    assert text == (
        f"model.path: the tokenizer of {str(folder)!r} has no chat template (accepted: the tokenizer of a chat model)"
    )


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('out of order') }}"])
def test_a_chat_template_that_renders_nothing_at_all(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    text = refused(path=str(folder))
    assert text.startswith(f"model.path: the chat template of {str(folder)!r} does not render a user message: ")


@pytest.mark.parametrize("name", ["tokenize", "add_generation_prompt", "tools"])
def test_a_template_variable_that_is_ours(folder: Path, name: str) -> None:
    text = refused(path=str(folder), chat_template_kwargs={name: False})
    assert text == (
        f"model.chat_template_kwargs: {name!r} is set by the pipeline itself (accepted: variables of the chat template)"
    )


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nCheck your connection.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    assert refused(path="org/name") == (
        "model.path: no tokenizer can be loaded from 'org/name': "
        "We couldn't connect to 'https://huggingface.co' Check your connection."
    )


@pytest.fixture
def with_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tokenizer that can only be loaded by code in its folder."""
    settings = folder / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own_code.Own", None]}, "tokenizer_class": "Own"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | own))
    (folder / "own_code.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    modules = folder / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_of_a_tokenizer_is_not_run_unless_allowed(with_code: Path) -> None:
    text = refused(path=str(with_code))
    assert text == (
        f"model.path: the tokenizer of {str(with_code)!r} brings code of its own: "
        "set model.trust_remote_code=true to run it"
    )


def test_code_of_a_tokenizer_is_run_where_allowed(with_code: Path) -> None:
    template = load_template(ModelConfig(path=str(with_code), trust_remote_code=True))
    assert type(template._tokenizer).__name__ == "Own"
    assert "hi" in rendered(template, ask(Message("user", "hi")))


def test_threads_may_share_it(template: PromptTemplate) -> None:
    prompts = [
        Prompt(f"{n}", "local", "a", 0, 0, (Message("user", f"question {n} " * (n % 7 + 1)),)) for n in range(200)
    ]

    def there_and_back(prompt: Prompt) -> str:
        encoded = template.encode(prompt)
        assert isinstance(encoded, TokenizedPrompt)
        assert encoded.prompt_ids is not None
        return template.decode(encoded.prompt_ids, skip_special=False)

    alone = [there_and_back(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(there_and_back, prompts)) == alone
