"""Base classes of the settings of a run's parts: model, decoder layer, objective, search.

Parts combine freely, but some combinations have no meaning. Each part refuses the settings that it cannot be combined
with. It uses only the properties that all parts declare here, so that no part refers to another by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Config, Section

if TYPE_CHECKING:
    from deepspeed_nmt.core.model import TranslationModel

MAX_WIDTH = 1 << 16
"""Bound on the width of states."""
MAX_INNER_WIDTH = 1 << 20
"""Bound on the width within a sub-layer, and on positions."""
MAX_LAYERS = 1_000
"""Bound on the layers of a stack, repetitions counted."""
MAX_HYPOTHESES = 1_000
"""Bound on the hypotheses, samples or candidates of a sentence in a search."""


class PartConfig(Section):
    """Settings of a part of a run."""

    def contradictions(self, parts: Parts) -> Iterable[str]:
        """Return a sentence, with both settings and a remedy, for each setting that contradicts this part."""
        return ()


class Stages(NamedTuple):
    """Stages that an objective can train as exits.

    Attributes:
        setting: name of the setting with their number.
        total: their number.
        layers: number of layers of the first.
        shared: True if each stage applies all layers of the stack, as a loop does.
    """

    setting: str
    total: int
    layers: int
    shared: bool = False


class DataVocabulary(Protocol):
    """The data's tokenizer as a model uses it."""

    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        """Return True if the tokens of one side are those of a BERT, by its tokenizer and special tokens."""


class ModelConfig(PartConfig):
    """Settings of a model, and the properties that other parts of a run depend on.

    Attributes:
        name: name of the model in its registry.
        left_to_right: True if the model predicts each token from those before it; False if it predicts masked tokens.
        packed: True if it can be trained in the packed layout of batches: its ``encode`` and ``decode`` respect the
            sentences of a row.
        sliceable: True if tensor parallelism can slice its matrices.
        named_exits: names of exits other than the top and the numbered ones.
        grown_prefix: prefix of the parameters that `--grow-from` loads from another run; None if the model cannot be
            grown.
        learning_fields: settings that affect training only; those of a warm start's run may differ.
        shape_fields: settings that determine what the weights compute; those of a warm start's run must be equal.
        depth_fields: numbers and sizes of parts; those parts that a warm start's run lacks are initialised.
    """

    name: str
    left_to_right: ClassVar[bool] = True
    packed: ClassVar[bool] = False
    sliceable: ClassVar[bool] = True
    named_exits: ClassVar[tuple[str, ...]] = ()
    grown_prefix: ClassVar[str | None] = None
    learning_fields: ClassVar[frozenset[str]] = frozenset()
    shape_fields: ClassVar[frozenset[str]] = frozenset()
    depth_fields: ClassVar[frozenset[str]] = frozenset()

    def resolved(self, before: Config | None = None) -> ModelConfig:
        """Return the settings, completed from the files that they name, such as a pretrained model's shape.

        ``before`` are the model's settings in the run that is resumed; None for a new run.
        """
        return self

    def custom_layers(self) -> tuple[str, int] | None:
        """Return name and value of the setting that is the number of layers built by ``layer``; None: builds none."""
        return None

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return the stages of encoder and decoder that an objective can train; None if it can train the top only."""
        return None

    def own_vocabulary(self) -> Vocabulary | None:
        """Return the vocabulary of the model's pretrained files; None if the data determines the vocabulary."""
        return None

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """Refuse data that does not fit the model's pretrained weights, by a ConfigError."""

    def check_bottom(self, bottom: Parts, where: str) -> None:
        """Refuse to grow the run in directory ``where``, by a ConfigError. Called if :attr:`grown_prefix` is set."""

    def begins_as(self, name: str, other: ModelConfig) -> str | None:
        """Return the parameter of another model as which one begins that it lacks; None: there is no such rule.

        "" is that it begins as initialised.
        """
        return None

    def ways_to_grow(self) -> Sequence[str]:
        """Return the values of ``growth.by`` by which the model can grow in the course of a run; none by default."""
        return ()

    def check_shape_of(self, other: ModelConfig, where: str, keys: Iterable[str] | None = None) -> None:
        """Refuse weights of the run in directory ``where`` if settings differ, by default those in ``shape_fields``.

        Raises:
            ConfigError: if they do.
        """
        if differences := self.differences(other, self.shape_fields if keys is None else keys):
            raise ConfigError(
                f"the model is not that of {where}: {' and '.join(differences)}; make these settings those of "
                f"{where}/config.yaml"
            )

    def meant(self) -> dict[str, Any]:
        """Return the settings, those that are left out with the values that this means."""
        return self.model_dump()

    def differences(self, other: ModelConfig, keys: Iterable[str]) -> list[str]:
        """Return one phrase for each setting among ``keys`` that differs between this model and ``other``."""
        here, there = self.meant(), other.meant()
        return [
            f"model.{key} is {there.get(key, 'unset')} there and {here.get(key, 'unset')} here"
            for key in sorted(keys)
            if there.get(key) != here.get(key)
        ]

    def composition_differences(self, other: ModelConfig) -> list[str]:
        """Return one phrase for each differing setting that composes the same layers into a different network."""
        names, ignored = set[str](), set[str]()
        for config in (self, other):
            names |= type(config).model_fields.keys()
            ignored |= config.learning_fields | config.shape_fields | config.depth_fields
        return self.differences(other, names - ignored)


def _ascending(exits: tuple[int, ...]) -> tuple[int, ...]:
    if exits[0] < 1 or list(exits) != sorted(set(exits)):
        raise ValueError(f"is {list(exits)}; give different numbers from 1, ascending")
    return exits


ExitStages = Annotated[tuple[int, ...], Field(min_length=1, max_length=MAX_LAYERS), AfterValidator(_ascending)]
"""Stages (layers or loops) of a decoder that are exits, shallowest first."""


class LayerConfig(PartConfig):
    """Settings of the decoder layers, the name in the registry among them."""

    name: str

    @property
    def adapts(self) -> bool:
        """True if what the collapse monitor measures changes the layers in training."""
        return False

    def adapted(self, drop_ratio: float | None, reliance: float) -> float | None:
        """Return the drop ratio of the layers after a measurement of reliance, in nats per token.

        It is the lower one of those on the source and on the prefix.

        It is a function of its arguments and the settings alone: ``drop_ratio`` was returned after the measurement
        before, None if there was none. None if the layers keep theirs (:attr:`adapts`).
        """
        return None

    def attends_to_source(self, number: int) -> bool:
        """Return True if layer ``number``, counted from 1, has cross-attention."""
        return True


class LikelihoodConfig(PartConfig):
    """Settings of a likelihood.

    Attributes:
        adds_exits: True if it adds those of its setting ``exits`` to a trained model (`--add-exits`).
    """

    adds_exits: ClassVar[bool] = False

    def trains_exit(self, encoder: int, decoder: int, stages: tuple[int, int]) -> bool:
        """Return True if training includes an exit of a model with ``stages`` on both sides, counted from 1."""
        return (encoder, decoder) == stages

    def extend(self, model: TranslationModel) -> None:
        """Add to a freshly built model what this likelihood trains beside it, and freeze what it does not train."""

    def begins_as(self, name: str) -> str | None:
        """Return the parameter as which one of :meth:`extend` begins in a warm start, "" for none; None for others.

        If the warm start's run does not have that, it begins as initialised.
        """
        return None


class RegularizerConfig(PartConfig):
    """Settings of a regularizer; ``weight`` is the factor of its value in the loss, 0 disables it.

    Attributes:
        reads_links: True if it needs data with word alignments.
        pairs: True if it requests a paired pass, with which the likelihood compares the first.
    """

    weight: float
    reads_links: ClassVar[bool] = False
    pairs: ClassVar[bool] = False


class SearchConfig(PartConfig):
    """Settings of a search.

    Attributes:
        left_to_right: True if the search decodes one token after another.
        needs_exits: named exits that the model must have.
        width_setting: setting that bounds the number of translations per sentence and list; None if there is only
            one translation.
        lists: number of lists of translations of a sentence.
        takes: fields of :class:`~deepspeed_nmt.search.base.Request` that the search respects; if there are any, it
            takes a request for each sentence.
    """

    name: str
    left_to_right: ClassVar[bool] = True
    takes: ClassVar[frozenset[str]] = frozenset()
    needs_exits: ClassVar[tuple[str, ...]] = ()
    width_setting: ClassVar[str | None] = None
    lists: ClassVar[int] = 1

    @property
    def width(self) -> int:
        """Largest number of translations per sentence."""
        return 1 if self.width_setting is None else self.lists * int(getattr(self, self.width_setting))

    def from_one_exit(self) -> SearchConfig:
        """Return the settings of the search from an exit that a user has chosen: these, if they choose none."""
        return self

    def contradictions(self, parts: Parts) -> Iterable[str]:
        """Refuse models without the exits in ``needs_exits``."""
        if not set(self.needs_exits) <= set(parts.model.named_exits):
            yield (
                f"search.name={self.name} needs a model with the exits {' and '.join(self.needs_exits)}, but "
                f"model.name={parts.model.name} does not have them; use another search"
            )


@dataclass(frozen=True)
class Parts:
    """The configured parts of one run; the objective is one likelihood and any number of regularizers, by name."""

    model: ModelConfig
    layer: LayerConfig
    objective: Mapping[str, PartConfig]
    search: SearchConfig

    def contradictions(self) -> list[str]:
        """Return one sentence for each combination of settings that has no meaning."""
        parts: list[PartConfig] = [self.model, self.layer, *self.objective.values(), self.search]
        return [sentence for part in parts for sentence in part.contradictions(self)]

    def active_regularizers(self) -> dict[str, RegularizerConfig]:
        """Return the regularizers whose weight is above 0, by name."""
        regularizers = {name: part for name, part in self.objective.items() if isinstance(part, RegularizerConfig)}
        return {name: part for name, part in regularizers.items() if part.weight > 0.0}
