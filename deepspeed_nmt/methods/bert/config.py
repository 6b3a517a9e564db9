"""Settings that models of two BERTs share.

Devlin, Chang, Lee, Toutanova: "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
2019.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from deepspeed_nmt import huggingface
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_LAYERS, MAX_WIDTH, DataVocabulary, ModelConfig, Parts
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.transformer import StandardLayerConfig, refuse_differences
from deepspeed_nmt.registry import Config, problem_of


class BertShape(Config):
    """Shape of a BERT. The defaults are those of bert-base."""

    dim: int = Field(default=768, ge=2, le=MAX_WIDTH, description="width of the states (D)")
    layers: int = Field(default=12, ge=1, le=MAX_LAYERS, description="number of layers")
    heads: int = Field(default=12, ge=1, le=MAX_WIDTH, description="attention heads; must divide dim")
    ffn_dim: int = Field(
        default=3072, ge=1, le=MAX_INNER_WIDTH, description="inner width of the feed-forward networks"
    )
    positions: int = Field(
        default=512, ge=2, le=MAX_INNER_WIDTH, description="maximum length of a sentence, special tokens included"
    )
    norm_eps: float = Field(default=1e-12, gt=0.0, description="epsilon of LayerNorm")
    activation: Literal["relu", "gelu"] = Field(default="gelu", description="activation of the feed-forward networks")

    @model_validator(mode="after")
    def _check(self) -> BertShape:
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, but dim is {self.dim} and heads is {self.heads}")
        return self


class BertPair(ModelConfig):
    """Settings of a model of two BERTs, one for each language."""

    source_encoder: str = Field(default="", description="BERT of the source language: a folder, or a name on the hub")
    target_encoder: str = Field(default="", description="BERT of the target language: a folder, or a name on the hub")
    source: BertShape = Field(default=BertShape(), description="shape of the source's BERT, read from its folder")
    target: BertShape = Field(default=BertShape(), description="shape of the target's BERT, read from its folder")
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="dropout of embeddings and sub-layer outputs")
    attention_dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="dropout of attention weights")

    @model_validator(mode="after")
    def _one_width(self) -> BertPair:
        if self.source.dim != self.target.dim:
            raise ValueError(
                "source.dim and target.dim must be equal, because layers of one attend to states of the other, but "
                f"are {self.source.dim} and {self.target.dim}; use two BERTs of the same width"
            )
        return self

    learning_fields: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "attention_dropout", "freeze", "pretrained", "source_encoder", "target_encoder"}
    )
    shape_fields: ClassVar[frozenset[str]] = frozenset({"source", "target"})

    @property
    def berts(self) -> dict[Side, str]:
        """Folder or name of the BERT of each side; "" if not set."""
        return {"source": self.source_encoder, "target": self.target_encoder}

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse decoder layers other than BERT's."""
        if parts.layer.name != StandardLayerConfig().name:
            yield (
                f"layer.name={parts.layer.name} makes layers of a Transformer, but model.name={self.name} has the "
                f"layers of BERTs; use layer.name={StandardLayerConfig().name}"
            )

    def own_vocabulary(self) -> Vocabulary | None:
        """Return the vocabularies of the two BERTs; None unless both are set."""
        if not all(self.berts.values()):
            return None
        option = "model.source_encoder and model.target_encoder"
        source, target = (huggingface.load_vocabulary(name, option) for name in self.berts.values())
        vocabulary = Vocabulary.of_bert(target.size, target.special)
        if source.content == target.content:
            return vocabulary
        return replace(vocabulary, own_source=Vocabulary.of_bert(source.size, source.special))

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """Refuse data whose tokens are not those of the BERTs, from which training would learn badly."""
        for side, name in self.berts.items():
            if not name:
                continue  # Loading the weights raises the error.
            bert = huggingface.load_vocabulary(name, f"model.{side}_encoder")
            if not tokenizer.matches_bert(bert.content, bert.special, side):
                raise ConfigError(
                    f"model.{side}_encoder must have the vocabulary of the data's {side} side, but {name} has "
                    f"another; prepare the data with --tokenizer hf:{self.source_encoder},{self.target_encoder}, or "
                    "set the BERTs that it was prepared with"
                )

    def check_weights_of(self, other: ModelConfig, where: str) -> None:
        """Refuse weights of BERTs of another shape; the depth may differ."""
        if not isinstance(other, BertPair):
            refuse_differences(self.differences(other, self.shape_fields), "model", where)
            return
        for side in ("source", "target"):
            here, there = (getattr(each, side).model_dump(exclude={"layers"}) for each in (self, other))
            if here != there:
                key = next(key for key in here if here[key] != there[key])
                raise ConfigError(
                    f"the model must be that of {where}, but model.{side}.{key} is {there[key]} there and "
                    f"{here[key]} here; set the BERTs of that run"
                )

    def resolved(self, before: Config | None = None) -> BertPair:
        """Return the settings with the shapes of the BERTs' folders, or of the run that is resumed.

        A run can thus be resumed without the folders.

        Raises:
            ConfigError: if a folder cannot be read, or a shape that is set differs from its folder's.
        """
        if isinstance(before, BertPair):
            same = (before.source_encoder, before.target_encoder) == (self.source_encoder, self.target_encoder)
            if same and (self.source, self.target) in ((BertShape(), BertShape()), (before.source, before.target)):
                return self.model_copy(update={"source": before.source, "target": before.target})
        named = {"source": self.source_encoder, "target": self.target_encoder}
        found = {side: huggingface.load_shape(name, f"model.{side}_encoder") for side, name in named.items() if name}
        for side, shape in found.items():
            given: BertShape = getattr(self, side)
            if given not in (BertShape(), BertShape(**shape)):
                raise ConfigError(
                    f"model.{side} must be the shape of model.{side}_encoder, but {named[side]} has "
                    f"{BertShape(**shape)}; omit model.{side}"
                )
        try:
            return type(self).model_validate({**self.model_dump(), **found})
        except ValidationError as error:
            raise ConfigError(
                "the BERTs of model.source_encoder and model.target_encoder do not fit: "
                + problem_of(problem, ".".join(["model", *map(str, problem["loc"])]))
                for problem in error.errors()
            ) from error


SMALL_BERT = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "positions": 64}
"""Shape of the BERTs in self-tests."""
