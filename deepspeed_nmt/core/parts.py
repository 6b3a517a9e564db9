"""The parts of a run as their configurations know each other: model, decoder layer, objective, search.

Parts are combined freely, and some combinations have no meaning. Each part states its own requirements, in terms of
what the other parts say of themselves here, so that no part needs to know another by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.registry import Config


class PartConfig(Config):
    """Settings of a part of a run."""

    def contradictions(self, parts: Parts) -> Iterable[str]:
        """Return one sentence for each setting of another part that this one cannot be combined with.

        A sentence names both settings and a way out.
        """
        return ()


class Stages(NamedTuple):
    """The stages of a stack that objectives can train as exits.

    Attributes:
        setting: the setting that counts them, without its section.
        total: number of stages.
        layers: layers in the first stage.
    """

    setting: str
    total: int
    layers: int


class DataVocabulary(Protocol):
    """What a model can ask of the data's tokenizer."""

    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        """Return True if a side's tokens are those of a BERT's tokenizer.

        Args:
            tokenizer_json: the BERT's tokenizer, serialised.
            special: numbers of its special tokens by name.
        """


class ModelConfig(PartConfig):
    """Settings of a model, and what other parts of a run need to know of it.

    Attributes:
        name: of the model in its registry.
        left_to_right: True if the model predicts a token from those before it; False if it guesses masked tokens.
        named_exits: exits with names of their own, besides the top and the numbered ones.
        grown_prefix: prefix of the parameters that `--grow-from` fills with another run's weights; None if the model
            does not grow.
        learning_fields: settings of how the model learns, which weights of another run may differ in.
        shape_fields: settings that decide what the weights compute, which must be those of another run whose weights
            are taken over.
        depth_fields: settings that count layers; layers above those of another run start fresh.
    """

    name: str
    left_to_right: ClassVar[bool] = True
    named_exits: ClassVar[tuple[str, ...]] = ()
    grown_prefix: ClassVar[str | None] = None
    learning_fields: ClassVar[frozenset[str]] = frozenset()
    shape_fields: ClassVar[frozenset[str]] = frozenset()
    depth_fields: ClassVar[frozenset[str]] = frozenset()

    def resolved(self, before: Config | None = None) -> ModelConfig:
        """Return the settings completed from files that they name, such as a pretrained model's shape.

        Args:
            before: the model's settings when the run began; None at its start.

        Raises:
            ConfigError: if a file cannot be read.
        """
        return self

    def custom_layers(self) -> tuple[str, int] | None:
        """Return the setting that counts the decoder layers made by ``layer``, and their number.

        None: the model makes all its layers itself.
        """
        return None

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return the stages of encoder and decoder that an objective can train; None if it trains the top alone."""
        return None

    def own_vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary that the model's own files bring; None if the data decides."""
        return None

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """Refuse data that the model's pretrained weights do not fit.

        Raises:
            ConfigError: naming the setting and what to do.
        """

    def check_bottom(self, bottom: Parts, where: str) -> None:
        """Refuse to grow on top of another run's model. Called where :attr:`grown_prefix` is set.

        Args:
            bottom: the other run's parts.
            where: the other run, for messages.

        Raises:
            ConfigError: if that model cannot be a bottom of this one.
        """

    def check_weights_of(self, other: ModelConfig, where: str) -> None:
        """Refuse weights of another run whose layers would compute something else in this model.

        Raises:
            ConfigError: naming the settings that differ.
        """

    def differences(self, other: ModelConfig, keys: Iterable[str]) -> list[str]:
        """Return one phrase for each setting among ``keys`` that two models differ in."""
        here, there = self.model_dump(), other.model_dump()
        return [
            f"model.{key} is {there.get(key, 'unset')} there and {here.get(key, 'unset')} here"
            for key in sorted(keys)
            if there.get(key) != here.get(key)
        ]

    def composition_differences(self, other: ModelConfig) -> list[str]:
        """Return one phrase for each setting by which the same layers are composed into another network."""
        names = {key for each in (self, other) for key in each.model_dump()}
        ignored = {
            field for each in (self, other) for field in each.learning_fields | each.shape_fields | each.depth_fields
        }
        return self.differences(other, names - ignored)


class LayerConfig(PartConfig):
    """Settings of the decoder layers."""

    name: str

    def attends_to_source(self, number: int) -> bool:
        """Return True if layer ``number``, counted from 1, has cross-attention."""
        return True


class LikelihoodConfig(PartConfig):
    """Settings of a likelihood."""

    def trains_exit(self, encoder: int, decoder: int, stages: tuple[int, int]) -> bool:
        """Return True if training looks at exit (encoder, decoder) of a model with so many stages."""
        return (encoder, decoder) == stages


class RegularizerConfig(PartConfig):
    """Settings of a regularizer: ``weight`` times it is added to the likelihood's loss."""

    weight: float


class SearchConfig(PartConfig):
    """Settings of a search.

    Attributes:
        name: of the search in its registry.
        left_to_right: True if it asks a model for one token after another.
        needs_exits: named exits that a model must have to be searched.
        width_setting: setting that bounds the translations of a sentence; None: the search gives one.
    """

    name: str
    left_to_right: ClassVar[bool] = True
    needs_exits: ClassVar[tuple[str, ...]] = ()
    width_setting: ClassVar[str | None] = None

    @property
    def width(self) -> int:
        """Upper bound of the translations of a sentence."""
        return 1 if self.width_setting is None else int(getattr(self, self.width_setting))

    def contradictions(self, parts: Parts) -> Iterable[str]:
        """Refuse models that lack an exit."""
        if not set(self.needs_exits) <= set(parts.model.named_exits):
            yield (
                f"search.name={self.name} needs a model with the exits {' and '.join(self.needs_exits)}, but "
                f"model.name={parts.model.name} has none such; use another search"
            )


@dataclass(frozen=True)
class Parts:
    """The configured parts of one run.

    Attributes:
        objective: one likelihood and any number of regularizers, by name.
    """

    model: ModelConfig
    layer: LayerConfig
    objective: Mapping[str, PartConfig]
    search: SearchConfig

    def contradictions(self) -> list[str]:
        """Return one sentence for each combination of settings that has no meaning."""
        each: list[PartConfig] = [self.model, self.layer, *self.objective.values(), self.search]
        return [sentence for part in each for sentence in part.contradictions(self)]

    def active_regularizers(self) -> dict[str, RegularizerConfig]:
        """Return the regularizers that have a weight, by name."""
        found = {name: part for name, part in self.objective.items() if isinstance(part, RegularizerConfig)}
        return {name: part for name, part in found.items() if part.weight > 0.0}
