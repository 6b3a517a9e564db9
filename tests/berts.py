"""Small random BERTs with real WordPiece tokenizers, saved as `transformers` saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_bert(
    folder: Path,
    lines: Iterable[str],
    seed: int,
    vocab_size: int = 300,
    layers: int = 2,
    head: bool = True,
    **shape: Any,
) -> Path:
    """Save a BERT and a tokenizer trained on some lines. The weights are large enough to affect predictions."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    words = sorted(tokenizer.get_vocab().items(), key=lambda pair: int(pair[1]))
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 128}
    config = transformers.BertConfig(
        **{**size, **shape}, vocab_size=len(words), num_hidden_layers=layers, initializer_range=0.2
    )
    torch.manual_seed(seed)
    model = (transformers.BertForMaskedLM if head else transformers.BertModel)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and LayerNorms as well
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
