"""Tokenizer files of exports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.tokenizer import Tokenizer


def write_marian_tokenizer(directory: Path, tokenizer: Tokenizer, longest: int) -> None:
    """Write files from which ``transformers`` makes a tokenizer, as far as it has one for the vocabulary.

    A vocabulary of SentencePiece becomes a MarianTokenizer. Other vocabularies are written as ``vocab.json`` only: a
    number for each token.

    Args:
        directory: of the export, with the files of the run's vocabulary in it.
        tokenizer: tokenizer of the run.
        longest: positions of the model.
    """
    for side, name in zip(SIDES, ("vocab.json", "target_vocab.json"), strict=True):
        if side == "target" and tokenizer.vocabulary.own_source is None:
            continue
        numbers = {piece: number for number, piece in enumerate(tokenizer.all_pieces(side))}
        _write(directory / name, numbers)
    models = tokenizer.sentencepiece_models()
    if models is None:
        return
    special = tokenizer.vocabulary
    pieces = tokenizer.all_pieces("target")
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (directory / name).write_bytes(model)
    config = {
        "tokenizer_class": "MarianTokenizer",
        "source_lang": "",
        "target_lang": "",
        "unk_token": pieces[special.unk],
        "eos_token": pieces[special.eos],
        "pad_token": pieces[special.pad],
        "model_max_length": longest,
        "separate_vocabs": special.own_source is not None,
    }
    _write(directory / "tokenizer_config.json", config)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
