"""A tokenizer with a token for each byte, and an end-of-text token."""

from __future__ import annotations

from pathlib import Path

END = 256


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer.json to a model's folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    tokenizer.save(str(folder / "tokenizer.json"))
