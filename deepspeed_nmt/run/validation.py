"""Settings of validation, and the metrics that they choose for the text of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from deepspeed_nmt.data.batching import MAX_TOKENS
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.evaluate.metrics import AUTO, METRICS, Metric
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import TextForm


def _known(value: object) -> object:
    """Check names of metrics."""
    known = ", ".join(METRICS)
    if value != "auto" and not isinstance(value, list | tuple):
        raise ValueError(f"must be auto or a list of {known}, but is {shown(value)}")
    for name in () if isinstance(value, str) else value:
        if not isinstance(name, str) or name not in METRICS:
            hint = "; give auto alone, without brackets" if name == "auto" else did_you_mean(str(name), METRICS)
            raise ValueError(f"must be auto or a list of {known}, but has {shown(name)}{hint}")
    return value


class ValidationConfig(Config):
    """Validation during training."""

    metrics: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_known)] = Field(
        default="auto",
        description=f"metrics of the translated validation set, of {', '.join(METRICS)}; []: it is not translated; "
        "auto: bleu, bleu_tokenised, or both, as the form of the text allows",
    )
    best_by: str = Field(
        default="auto",
        description="measure that chooses the best checkpoint: loss or a metric; auto: the first metric, without one "
        "the loss; of scores equal to two decimals, or BLEU below 1, the one of lower loss",
    )
    max_sentences: int = Field(
        default=0, ge=0, description="number of sentences to translate, the first ones; 0: all"
    )
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_TOKENS, description="batch size of the search: sentences x longest source"
    )

    @model_validator(mode="before")
    @classmethod
    def _without_bleu(cls, content: Any) -> Any:
        """Read the setting `bleu` of older runs, which had no metrics.

        Their `best_by: bleu` was tokenised BLEU of segmented text, and the loss if BLEU was not computed.
        """
        if not isinstance(content, dict) or "bleu" not in content:
            return content
        content = dict(content)
        bleu = content.pop("bleu")
        if not isinstance(bleu, bool):
            raise ValueError(f"`bleu` must be true or false, but is {shown(bleu)}")
        content.setdefault("metrics", "auto" if bleu else [])
        if content.get("best_by") == "bleu":
            content["best_by"] = "auto"
        return content

    @field_validator("best_by")
    @classmethod
    def _is_measured(cls, best_by: str, info: ValidationInfo) -> str:
        metrics = info.data.get("metrics", "auto")
        known = ["auto", "loss", *(METRICS if metrics == "auto" else metrics)]
        if best_by not in known:
            raise ValueError(
                f"must be one of {', '.join(known)}, but is {shown(best_by)}"
                + ("; add it to validation.metrics" if best_by in METRICS else "")
            )
        return best_by

    def chosen(self, text: TextForm) -> tuple[tuple[Metric, ...], Metric | None]:
        """Return the metrics for a form of text, and the one that chooses the best checkpoint; None for the loss.

        Raises:
            ConfigError: if the text cannot be brought into the form that a metric requires.
        """
        names = AUTO[text.form] if self.metrics == "auto" else self.metrics
        problems = [
            f"the metric {name} needs {METRICS[name].kind} text, but {reason}; set validation.metrics to others, or "
            "run `prepare` again with --text and --target-lang"
            for name in names
            if (reason := text.problem(METRICS[name].kind))
        ]
        if self.best_by not in ("auto", "loss", *names):
            kind = METRICS[self.best_by].kind
            if reason := text.problem(kind):
                problems.append(
                    f"validation.best_by={self.best_by} needs {kind} text, but {reason}; set validation.best_by to "
                    f"{', '.join(names)} or loss, or run `prepare` again with --text and --target-lang"
                )
            names = (*names, self.best_by)
        if problems:
            raise ConfigError(problems)
        metrics = tuple(METRICS[name] for name in dict.fromkeys(names))
        if self.best_by == "auto":
            return metrics, next(iter(metrics), None)
        return metrics, METRICS.get(self.best_by)
