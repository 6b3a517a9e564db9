"""One rank that trains some updates from a checkpoint or from the start, and saves a checkpoint.

Arguments: corpus directory, method, engine (as in engine_worker), first and last update, checkpoint to start from or
"-", directory for the checkpoint of the last update, output file. The output is JSON: the losses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.parallel.world import join_world, leave_world
from deepspeed_nmt.parity import build, train
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore
from deepspeed_nmt.train.progress import Progress
from tests.support import parity_loader


def main() -> None:
    directory, method, engine_name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    first, last, start, store, out = int(sys.argv[4]), int(sys.argv[5]), sys.argv[6], Path(sys.argv[7]), sys.argv[8]
    world = join_world("cpu", timeout_s=300, tensor_ranks=int(os.environ["TENSOR_RANKS"]))
    checkpoint = None if start == "-" else Checkpoint(Path(start))
    weights = None if checkpoint is None else checkpoint.weights()
    engine = build(method, engine_name, world, directory, weights=weights)
    cursor = Cursor()
    if checkpoint is not None:
        engine.restore(checkpoint, checkpoint.scalars)
        cursor = Cursor(checkpoint.progress.epoch, checkpoint.progress.epoch_update)
    report = train(engine, parity_loader(directory, world, engine_name), world, first, last, cursor)
    end: Cursor = report["cursor"]
    scalars = engine.scalars()
    if world.is_main:
        progress = Progress(update=last, epoch=end.epoch, epoch_update=end.update)
        CheckpointStore(store).save(progress, scalars, engine.state())
        Path(out).write_text(json.dumps(report["loss"]))
    else:
        list(engine.state())
    engine.close()
    leave_world()


if __name__ == "__main__":
    main()
