"""Control tokens in the texts of a conversation stay plain text, for all kinds of tokenizers and in all places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinkerflow.backend.catalog.control_tokens import ControlTokens

SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>"]
ROLES = ("system", "user", "tool", "assistant")
NAMED = ["<think>", "</think>", "<tool_call>"]  # not special, but used by the template
OTHERS = ["   ", "<b>"]  # added tokens that are ordinary text
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's character for a space
PIECES = [*SPECIAL, *NAMED, *OTHERS, "<|im_", "end|>", "<", "|", "x", " ", "\n", "é"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thoughts %}<think>{{ m.thoughts }}</think>{% endif %}"
    "{{ m.name }}{% if m.content is string %}{{ m.content | trim }}{% else %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% endif %}{% for call in m.calls or [] %}<tool_call>{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% for tool in tools or [] %}[INST]{{ tool | tojson }}{% endfor %}<|im_start|>assistant\n"
)


def _tokenizer(model: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens([AddedToken(text, rstrip=text == "[INST]", normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*NAMED, *OTHERS)])
    return tokenizer


def byte_level() -> Tokenizer:
    """A tokenizer like those of Qwen and Llama 3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[])
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _tokenizer(model, pre_tokenizer=split, decoder=decoders.ByteLevel())


def _characters() -> models.BPE:
    texts = "".join((*SPECIAL, *NAMED, *OTHERS, f"{SPACE}\n", *map(chr, range(33, 127))))
    vocab = {char: n for n, char in enumerate(dict.fromkeys(texts))}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    return models.BPE(vocab=vocab, merges=[], byte_fallback=True)


def _decoder() -> decoders.Sequence:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def metaspace() -> Tokenizer:
    """A tokenizer like Mistral's, with a space before only the first text."""
    split = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _tokenizer(_characters(), pre_tokenizer=split, decoder=decoder)


def legacy() -> Tokenizer:
    """A tokenizer like Llama 2's, with a space before each text between control tokens."""
    spaces = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _tokenizer(_characters(), normalizer=normalizers.Sequence(spaces), decoder=decoder)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"byte level": byte_level, "metaspace": metaspace, "legacy": legacy}
pytestmark = pytest.mark.parametrize("kind", TOKENIZERS)
_CACHE: dict[str, tuple[Tokenizer, ControlTokens]] = {}


def made(kind: str) -> tuple[Tokenizer, ControlTokens]:
    if kind not in _CACHE:
        tokenizer = TOKENIZERS[kind]()
        _CACHE[kind] = tokenizer, ControlTokens(tokenizer, TEMPLATE)
    return _CACHE[kind]


def render(messages: list[dict[str, Any]], tools: Any = None) -> str:
    environment = ImmutableSandboxedEnvironment()
    environment.filters["tojson"] = lambda value: __import__("json").dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE).render(messages=messages, tools=tools)


def controls(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [name for token in tokens if (name := tokenizer.id_to_token(token)) in (*SPECIAL, *NAMED)]


def places(evil: str) -> dict[str, tuple[list[dict[str, Any]], Any]]:
    """Messages and tools that contain a text, by its place."""
    user = {"role": "user", "content": "Hi"}
    return {
        **{
            role: ([{"role": role, "content": f"a {evil} b"}], None) for role in ("system", "user", "tool", "assistant")
        },
        "at the ends": ([{"role": "user", "content": f" {evil}x{evil} \n"}], None),
        "name": ([{**user, "name": evil}], None),
        "part": ([{"role": "user", "content": [{"type": "text", "text": evil}]}], None),
        "split": ([{"role": "user", "content": [{"text": evil[:2]}, {"text": evil[2:]}]}], None),
        "behind the name": ([{"role": "user", "name": f"{evil[:-1]}", "content": evil[-1:]}], None),
        "reasoning": ([{"role": "assistant", "content": "x", "thoughts": evil}], None),
        "call": ([{"role": "assistant", "content": "", "calls": [{"name": evil, "arguments": {evil: [evil]}}]}], None),
        "tool": ([user], [{"name": evil, "description": evil, "parameters": {"properties": {evil: {"enum": [evil]}}}}]),
    }


def test_text_adds_no_control_token_at_any_place(kind: str) -> None:
    tokenizer, control = made(kind)
    for evil in (*SPECIAL, *NAMED):
        for place, (messages, tools) in places(evil).items():
            plain, plain_tools = places("word")[place]
            template_s = controls(tokenizer, control.encode(render(plain, plain_tools)))
            text = render(control.hide_messages(messages), control.hide(tools))
            tokens = control.encode(text)
            allowed = template_s
            if place == "assistant" and evil in NAMED:  # the assistant's own reasoning and calls use real tokens
                allowed = [*template_s[:1], evil, *template_s[1:]]
            assert controls(tokenizer, tokens) == allowed, (evil, place)
            restored = control.restore(text)
            assert restored == render(messages, tools)
            if kind != "legacy" and "[INST]" not in restored:  # these tokenizers add or drop spaces
                assert tokenizer.decode(tokens, skip_special_tokens=False).lstrip() == restored, (evil, place)


def test_text_without_control_tokens_is_encoded_unchanged(kind: str) -> None:
    tokenizer, control = made(kind)
    for content in ("Hi", " two  words   ", "<b>bold</b>", "a < b | c", "</thin", "\ufdd1 \ufdd0"):
        text = render(control.hide_messages([{"role": "user", "content": content}, {"role": "user", "content": "x"}]))
        restored = control.restore(text)
        assert control.encode(text) == tokenizer.encode(restored, add_special_tokens=False).ids, content


@given(st.lists(st.sampled_from(PIECES), max_size=8))
def test_hidden_text_contains_no_control_tokens_and_is_restored(kind: str, pieces: list[str]) -> None:
    tokenizer, control = made(kind)
    text = "".join(pieces)
    hidden = control.hide(text)
    assert len(hidden) == len(text) and control.restore(hidden) == text
    assert not any(token in hidden + "end|>" for token in (*SPECIAL, *NAMED))
    assert not controls(tokenizer, control.encode(control.hide(text, assistant=False)))


def test_text_between_control_tokens_is_encoded_as_within_the_whole(kind: str) -> None:
    """A hidden text at the end does not change how the tokenizer encodes the rest."""
    tokenizer, control = made(kind)
    for before in ("", "so: ", "<|im_start|>user\n", "[INST]  two", "<b>   "):
        whole = tokenizer.encode(f"{before}<|im_end|> rest<think> [INST]  end", add_special_tokens=False).ids
        text = f"{before}<|im_end|> rest<think> [INST]  end<|im_end|>{control.hide('<think>')}"
        assert control.encode(text)[: len(whole)] == whole
