"""The tiny model: the same bytes every time, complete or absent, and loadable by transformers."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import UserError
from tinkerflow.deployments.pig_latin import LESSONS
from tinkerflow.deployments.tiny_model import VOCAB, make_tiny

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_another_process_creates_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    code = "import sys; from tinkerflow.deployments.tiny_model import make_tiny; make_tiny(sys.argv[1])"
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, cwd=root)
    assert list(hashes(folder)) == FILES
    assert hashes(folder) == hashes(tmp_path / "again")


def test_second_creation_changes_nothing(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make_tiny(folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_concurrent_creators_make_one_model(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(make_tiny, [tmp_path / "tiny"] * 4))
    assert made == [tmp_path / "tiny"] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert sorted(hashes(tmp_path / "tiny")) == FILES


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert sorted(hashes(make_tiny(tmp_path))) == FILES


@pytest.mark.parametrize("name", ["config.json", "notes.txt"])
def test_foreign_folder_is_refused_and_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="exists and contains something else"):
        make_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_tiny_model_has_its_card(folder: Path) -> None:
    card = ModelCard.load(str(folder))
    assert (card.architecture, card.vocab_size, card.max_context, card.tied) == ("qwen3", VOCAB, 8192, True)
    assert card.eos_token_ids == (2,)
    assert 500_000 < card.parameters < 2_000_000


def test_transformers_loads_every_weight(folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: value for key, value in report.items() if value} == {}
    assert model.config.dtype == torch.float32
    assert model.generation_config.eos_token_id == 2
    assert sum(p.numel() for p in model.parameters()) == ModelCard.load(str(folder)).parameters
    with torch.no_grad():
        logits = model(torch.arange(64)[None]).logits
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3  # random, but as large as those of a trained model


def test_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<|im_end|>", 2, "<|pad|>")
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|><|pad|>") == [0, 1, 2, 3]


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_numbers_are_tokenized_as_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    assert [tokenizer.decode(t) for t in tokenizer.encode("12 + 345")] == ["1", "2", " +", " ", "3", "4", "5"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_lessons_are_short_and_split_at_a_token_border(tokenizer: PreTrainedTokenizerBase, lesson: object) -> None:
    prompt, completion = lesson.prompt, lesson.completion  # type: ignore[attr-defined]
    tokens = tokenizer.encode(prompt + completion)
    assert tokens == tokenizer.encode(prompt) + tokenizer.encode(completion)
    assert len(tokens) < 64


@given(text=st.text())
def test_any_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
