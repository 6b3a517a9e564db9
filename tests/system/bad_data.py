"""Training on data of which some gives NaN.

As a program, one rank of such a run. Its arguments: the bad updates of the first epoch, counted from 0 and separated
by commas; the data directory; the words of the command line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import LikelihoodOutput
from deepspeed_nmt.data.mixture import MixtureConfig
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.run.batches import update_order_of

UPDATE_TOKENS = 600
_original = LabelSmoothed.__call__


def bad_loss(data: Path | str, updates: set[int]) -> object:
    """Return a replacement of ``LabelSmoothed.__call__`` whose loss of micro-batches of these updates is NaN.

    The updates are numbered by the first epoch, from 0. A micro-batch is bad if one of them has all its sentences.
    ``data`` is the value of ``--data``.
    """
    training = TrainingData([DataOption.parse(str(data))])
    config = RunConfig.model_validate({"batch": {"update_tokens": UPDATE_TOKENS}})
    order = update_order_of(training.corpora(MixtureConfig()), config, training)
    assert order.updates_in(0) > max(updates) + 1
    bad = []
    for update in updates:
        place = order.place(Cursor(0, update), update + 1)
        window = order.window(place.window)
        bad.append(set(window.rows[window[place.index]].tolist()))

    def call(
        self: LabelSmoothed, model: TranslationModel, passes: object, batch: Batch, divergence: float
    ) -> LikelihoodOutput:
        output = _original(self, model, passes, batch, divergence)  # type: ignore[arg-type]
        ids = set(batch.sentence_ids_B.tolist())
        if not model.training or not any(ids <= sentences for sentences in bad):
            return output
        return output._replace(loss=output.loss * torch.nan)

    return call


if __name__ == "__main__":
    bad_updates = {int(number) for number in sys.argv[1].split(",")}
    LabelSmoothed.__call__ = bad_loss(Path(sys.argv[2]), bad_updates)  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[3:]))
