"""A tiny Qwen3-architecture model and its tokenizer, made here from a seed: a model to train without a download.

Its weights are random, so it generates nonsense before training. It is large enough to memorize a few sentences.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tinkerflow.backend.core.disk import flush
from tinkerflow.backend.core.errors import UserError

SEED = 20240501
VOCAB = 1024
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 128, 4, 4, 2, 32, 384
MAX_POSITIONS = 8192
EOT, START, END, PAD = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")  # ids 0, 1, 2, 3
CHAT_TEMPLATE = (  # reasoning and tools as in Qwen3
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n{% endif %}"
    'Tools, called by <tool_call>{"name": …, "arguments": {…}}</tool_call>:'
    "{% for tool in tools %}\n{{ tool['function'] | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['reasoning_content'] %}"
    "<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Floats = npt.NDArray[np.float32]


def make_tiny(folder: str | Path) -> Path:
    """Make the tiny model as a Hugging Face folder, with the same bytes every time. Returns the absolute path.

    The folder appears whole or not at all. If it already holds the model, nothing is done. UserError: the folder holds
    something else, or cannot be made.
    """
    target = Path(folder).expanduser().resolve()
    if _is_there(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        _write(draft)
        try:
            draft.rename(target)
        except OSError as error:
            # Another process may have been faster; a folder that is not empty is never replaced.
            if not _is_there(target):
                raise UserError(f"tiny model: cannot create {target} ({error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _is_there(target: Path) -> bool:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    config = target / "config.json"
    if config.is_file() and config.read_text(encoding="utf-8") == _json(_config()):
        return True
    raise UserError(f"tiny model: {target} exists and contains something else; give a new or empty folder")


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer's files of the tiny model, which are enough to tokenize and render chats."""
    (folder / "tokenizer_config.json").write_text(_json(_tokenizer_config()), encoding="utf-8")
    (folder / "tokenizer.json").write_text(_train_tokenizer().to_str(pretty=True) + "\n", encoding="utf-8")


def _write(folder: Path) -> None:
    generation = {"do_sample": True, "eos_token_id": SPECIALS.index(END), "pad_token_id": SPECIALS.index(PAD)}
    (folder / "config.json").write_text(_json(_config()), encoding="utf-8")
    (folder / "generation_config.json").write_text(_json(generation), encoding="utf-8")
    write_tokenizer(folder)
    weights = save(_weights(), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)  # `save_file` raises no OSError on a full disk
    for path in folder.iterdir():
        flush(path)  # a power cut must not leave a folder with empty files


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": SPECIALS.index(END),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": SPECIALS.index(PAD),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "add_prefix_space": False,
        "additional_special_tokens": [EOT, START],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_POSITIONS,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text round-trips, words of the corpus are single tokens, and so is each digit."""
    text = resources.files("tinkerflow.deployments").joinpath("tiny_corpus.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # Digits are split (also from a space before them), so that arithmetic uses digits, not whole numbers.
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer=trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"tiny_corpus.txt gives {tokenizer.get_vocab_size()} tokens; the model needs {VOCAB}")
    return tokenizer


def _weights() -> dict[str, Floats]:
    """Random weights by Hugging Face name, drawn in this order from one seeded stream.

    Uniform, not normal: uniform float32 values need only basic arithmetic, so they do not depend on a C library. A
    spread of 1/sqrt(in) keeps activations at size one. Outputs to the residual stream are divided by the square root of
    the number of additions.
    """
    stream = np.random.Generator(np.random.PCG64(SEED))

    def matrix(rows: int, columns: int, spread: float) -> Floats:
        bound = np.float32(spread * math.sqrt(3))
        return (stream.random((rows, columns), dtype=np.float32) * 2 - 1) * bound

    def ones(size: int) -> Floats:
        return np.ones(size, np.float32)

    inner, residual = 1 / math.sqrt(HIDDEN), 1 / math.sqrt(2 * LAYERS)
    tensors: dict[str, Floats] = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, inner)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}"
        tensors |= {
            f"{base}.input_layernorm.weight": ones(HIDDEN),
            f"{base}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, inner),
            f"{base}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, inner),
            f"{base}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, inner),
            f"{base}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{base}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{base}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, residual / math.sqrt(HEADS * HEAD_DIM)),
            f"{base}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{base}.mlp.gate_proj.weight": matrix(MLP, HIDDEN, inner),
            f"{base}.mlp.up_proj.weight": matrix(MLP, HIDDEN, inner),
            f"{base}.mlp.down_proj.weight": matrix(HIDDEN, MLP, residual / math.sqrt(MLP)),
        }
    return tensors | {"model.norm.weight": ones(HIDDEN)}
