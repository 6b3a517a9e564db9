"""Format of Hugging Face's `transformers`: weights and tokenizers as it reads them, and its translation of an export.

Post-norm models are MarianMT models, pre-norm ones Pegasus models: these classes read their sinusoidal positions from
the weights, so they can have any wavelengths.

Legend: V vocabulary, D model width, T positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt import huggingface
from deepspeed_nmt.core.description import NotStandardError, StandardTransformer
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.export.ctranslate2_search import ExportBeamSettings
from deepspeed_nmt.export.formats import MAX_TOKENS, Format, Sentences, Subject, standardise
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty

_CLASSES = {"post": ("marian", "MarianMTModel"), "pre": ("pegasus", "PegasusForConditionalGeneration")}
_EPS = 1e-5
"""Eps of the LayerNorms of both classes."""
LAYER_NAMES = {
    "self_attention": "self_attn",
    "self_residual.norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.up_proj": "fc1",
    "feed_forward.down_proj": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
    "final_norm": "layer_norm",
}
"""Modules of a stack here, and their names in `transformers` and in fairseq."""
_EMBEDDINGS = ("source_embedding.weight", "target_embedding.weight")
_FIXED_NAMES = {
    "source_embedding.weight": "model.encoder.embed_tokens.weight",
    "target_embedding.weight": "model.decoder.embed_tokens.weight",
    "projection.weight": "lm_head.weight",
    "projection.bias": "final_logits_bias",
}


class HuggingFaceFormat(Format):
    """``generate`` of transformers, with one length limit for sentences of equal length."""

    name = "huggingface"
    length_penalty = "power:1"
    package = "transformers"
    install = huggingface.EXTRA

    def __init__(self, directory: Path, subject: Subject) -> None:
        self._model = huggingface.load_translation_model(directory)
        self._vocabulary, self._longest = subject.tokenizer.vocabulary, subject.longest

    @override
    @staticmethod
    def check(model: TranslationModel) -> None:
        described = model.described()
        norms = described.norms
        if described.norm_eps != _EPS:
            raise NotStandardError(
                f"its LayerNorms have eps {described.norm_eps:g}, and those of transformers' classes {_EPS:g}"
            )
        if described.relative:
            raise NotStandardError(
                "it has relative positions, and transformers has no class for translation with them; CTranslate2 has "
                "(--format ctranslate2)"
            )
        if len(set(norms)) > 1:
            raise NotStandardError(
                f"its encoder is {norms[0]}-norm and its decoder {norms[1]}-norm, and transformers has no class with "
                "both; CTranslate2 has (--format ctranslate2)"
            )
        if norms[0] == "pre" and len({len(described.weights[name]) for name in _EMBEDDINGS}) > 1:
            raise NotStandardError("it is pre-norm and has two vocabularies, and transformers' Pegasus has one")

    @override
    @staticmethod
    def write(directory: Path, subject: Subject) -> None:
        described, vocabulary = subject.model.described(), subject.tokenizer.vocabulary
        write_huggingface(directory, described, vocabulary, subject.longest, subject.dropouts)
        write_marian_tokenizer(directory, subject.tokenizer, subject.longest)

    @override
    def translate(self, sources: Sentences, settings: ExportBeamSettings) -> list[Hypothesis]:
        penalty = LengthPenalty.parse(settings.length_penalty)
        numbers_of: dict[int, list[int]] = {}
        for number, source in enumerate(sources):
            numbers_of.setdefault(len(source) + 1, []).append(number)
        best: dict[int, Hypothesis] = {}
        for length, numbers in numbers_of.items():
            size = max(1, MAX_TOKENS // length)
            for batch in (numbers[start : start + size] for start in range(0, len(numbers), size)):
                source_BS = torch.tensor([[*sources[number], self._vocabulary.source.eos] for number in batch])
                options: dict[str, Any] = {
                    "num_beams": settings.beam,
                    "max_length": settings.limit(length, self._longest) + 1,  # with BOS
                    "forced_eos_token_id": self._vocabulary.eos,
                    "return_dict_in_generate": True,
                    "output_scores": True,
                    "do_sample": False,
                }
                if settings.beam > 1:
                    options |= {"early_stopping": True, "length_penalty": penalty.exponent}
                done = self._model.generate(input_ids=source_BS, attention_mask=torch.ones_like(source_BS), **options)
                scores = done.sequences_scores.tolist() if settings.beam > 1 else [math.nan] * len(batch)
                for number, (_, *tokens), score in zip(batch, done.sequences.tolist(), scores, strict=True):
                    end = tokens.index(self._vocabulary.eos) if self._vocabulary.eos in tokens else len(tokens)
                    best[number] = Hypothesis(tokens[:end], score, math.nan)
        return [best[number] for number in range(len(sources))]

    @override
    def token_log_probs(self, sources: Sentences, targets: Sentences) -> list[list[float]]:
        result = []
        pad, bos = self._vocabulary.pad, self._vocabulary.bos
        for source, target in zip(sources, targets, strict=True):
            # Padding is part of the comparison: one position on either side.
            source_BS = torch.tensor([[*source, self._vocabulary.source.eos, pad]])
            mask_BS = torch.tensor([[*[1] * (len(source) + 1), 0]])
            target_input_BT = torch.tensor([[bos, *target, pad]])
            with torch.inference_mode():
                output = self._model(input_ids=source_BS, attention_mask=mask_BS, decoder_input_ids=target_input_BT)
            log_p_TV = output.logits.float().log_softmax(dim=2)[0]
            tokens = [*target, self._vocabulary.eos]
            result.append([float(log_p_TV[place, token]) for place, token in enumerate(tokens)])
        return result


def write_huggingface(
    directory: Path, model: StandardTransformer, vocabulary: Vocabulary, longest: int, dropouts: Mapping[str, float]
) -> None:
    """Write a model as ``transformers`` reads it: weights, ``config.json`` and ``generation_config.json``."""
    model = standardise(model)
    kind, name = _CLASSES[model.norms[0]]
    state = _state(model, longest)
    tied = "lm_head.weight" not in state
    special = {
        "pad_token_id": vocabulary.pad,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "decoder_start_token_id": vocabulary.bos,
        "forced_eos_token_id": None,
    }
    (source_size, dim), (target_size, _) = (model.weights[name].shape for name in _EMBEDDINGS)
    encoder_layers, decoder_layers = model.depths
    ffn_dim = len(model.weights["encoder.layers.0.feed_forward.up_proj.weight"])
    config = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": source_size,
        "decoder_vocab_size": target_size,
        "share_encoder_decoder_embeddings": tied,
        "tie_word_embeddings": tied,
        "d_model": dim,
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "encoder_attention_heads": model.heads,
        "decoder_attention_heads": model.heads,
        "encoder_ffn_dim": ffn_dim,
        "decoder_ffn_dim": ffn_dim,
        "activation_function": model.activation,
        "scale_embedding": True,
        "max_position_embeddings": longest,
        "static_position_embeddings": True,
        "is_encoder_decoder": True,
        **{name: dropouts.get(name, 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")},
        "torch_dtype": "float32",
        **special,
    }
    generation = {
        **special,
        "suppress_tokens": list(vocabulary.unpredicted),
        "early_stopping": True,
        "num_beams": 5,
        "max_length": longest,
    }
    _write(directory / "config.json", config, indent=1)
    _write(directory / "generation_config.json", generation, indent=1)
    try:
        save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


def _state(model: StandardTransformer, longest: int) -> dict[str, Tensor]:
    """Return the weights there. A matrix that serves as embeddings and output is there once."""
    state, positions_TD = {}, model.positions(longest).cpu()
    # The scale there is sqrt(D); whatever else scales the embedded tokens is in the matrices.
    excess = model.scale / math.sqrt(positions_TD.shape[1])
    factors = dict(zip(_EMBEDDINGS, (excess * scale for scale in model.input_scales), strict=True))
    for name, weight in model.weights.items():
        state[name_there(name)] = _copy(weight * factors[name] if name in factors else weight)
        if name.endswith("_proj.weight"):
            state.setdefault(name_there(name.removesuffix("weight") + "bias"), torch.zeros(len(weight)))
    for side, scale in zip(("encoder", "decoder"), model.input_scales, strict=True):
        state[f"model.{side}.embed_positions.weight"] = _copy(positions_TD * scale)
    state["model.shared.weight"] = state["model.decoder.embed_tokens.weight"].clone()
    bias_V = state.get("final_logits_bias", torch.zeros(len(model.weights["projection.weight"])))
    state["final_logits_bias"] = bias_V.unsqueeze(0)
    matrices = {model.weights[name].data_ptr() for name in (*_EMBEDDINGS, "projection.weight")}
    if model.input_scales == (1.0, 1.0) and len(matrices) == 1:
        for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
            del state[name]
    return state


def _copy(tensor: Tensor) -> Tensor:
    # Tensors that share memory cannot be saved in one file.
    return tensor.detach().to("cpu", torch.float32).clone().contiguous()


def name_there(name: str, fixed: Mapping[str, str] = _FIXED_NAMES, prefix: str = "model.") -> str:
    """Return the name there of a parameter of a Transformer of this program: ``fixed``, or by :data:`LAYER_NAMES`."""
    there = prefix + name
    for part, other in LAYER_NAMES.items():
        there = there.replace(f".{part}.", f".{other}.")
    return fixed.get(name, there)


def write_marian_tokenizer(directory: Path, tokenizer: Tokenizer, longest: int) -> None:
    """Write files from which ``transformers`` makes a tokenizer, as far as it has one for the vocabulary.

    A vocabulary of SentencePiece becomes a MarianTokenizer. Other vocabularies are written as ``vocab.json`` only: a
    number for each token.
    """
    special, pieces = tokenizer.vocabulary, tokenizer.all_pieces("target")
    vocabularies = {"vocab.json": tokenizer.all_pieces("source")}
    if special.own_source is not None:
        vocabularies["target_vocab.json"] = pieces
    for name, of_side in vocabularies.items():
        _write(directory / name, {piece: number for number, piece in enumerate(of_side)})
    if (models := tokenizer.sentencepiece_models()) is None:
        return
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


def _write(path: Path, content: Mapping[str, Any], indent: int = 0) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
