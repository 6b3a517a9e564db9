"""Time to make the micro-batches of an update from the corpus, by layout.

    python benchmarks/collating.py [--updates 30]

Lengths of news text, updates of 32,768 target tokens, micro-batches of up to 8,192. A thread makes them beside the
training, and each millisecond in which it holds Python's lock is one without launches. Dividing an update among
micro-batches is not counted. To compare two states of the code, run it in turns with each on the PYTHONPATH.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gpu.harness import write_corpus

from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader

VOCABULARY = Vocabulary(32000)


def main() -> None:
    """Time the updates, and print the medians in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=30, help="updates to time (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error(f"--updates must be at least 1, but is {arguments.updates}")
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 60000, VOCABULARY)
        for layout in ("packed", "padded"):
            config = BatchConfig(update_tokens=32768, micro_tokens=8192, layout=layout)
            loader = TrainLoader.of_corpus(corpus, config, 1, 0, 1, VOCABULARY)
            milliseconds, pairs = [], []
            window = loader.order.sample()
            for number in itertools.islice(itertools.cycle(range(len(window) - 1)), arguments.updates + 1):
                makers = loader._makers(window, window[number])
                started = time.thread_time()
                batches = [make(UpdateInfo()) for make in makers]
                milliseconds.append(1e3 * (time.thread_time() - started))
                pairs.append(sum(len(batch.sentence_ids_B) for batch in batches))
            median = statistics.median(milliseconds[1:])  # the first reads the file
            sys.stdout.write(f"{layout}: {median:.2f} ms an update, {statistics.mean(pairs):.0f} pairs\n")


if __name__ == "__main__":
    main()
