"""Compare the gradients of two runs bit for bit, and show where they part.

    python benchmarks/compare_gradients.py RUN OTHER_RUN

Both were trained with engine.hash_gradients=true: hashes by update, micro-batch, rank and parameter, before and after
the reduction. To compare two commits, train the same in a checkout of each (`git worktree add`). The exit status is 1
if anything differs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path


def read_hashes(run: Path) -> dict[str, str]:
    """Return the hashes of a run's gradients in the order of training; of an update made twice, the last ones."""
    hashes: dict[tuple[int, float, int, str], str] = {}
    for file in (run / "gradients").glob("rank-*.jsonl"):
        rank = int(file.stem.removeprefix("rank-"))
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            micro_batch = math.inf if entry["micro_batch"] is None else entry["micro_batch"]
            for name, digest in entry["gradients"].items():
                hashes[entry["update"], micro_batch, rank, name] = digest
    return {
        f"update {update}, {'reduced' if part == math.inf else f'micro-batch {part}'}, rank {rank}, {name}": digest
        for (update, part, rank, name), digest in sorted(hashes.items())
    }


def first_difference(old: dict[str, str], new: dict[str, str]) -> str:
    """Describe the first value that differs; return an empty string if all are equal."""
    names = [name for name in old | new if old.get(name) != new.get(name)]
    if not names:
        return "" if old else "there is nothing to compare"
    was, became = (values.get(names[0], "missing")[:40] for values in (old, new))
    return f"{names[0]} was {was}, is {became}; {len(names)} of {len(old | new)} differ"


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs=2, type=Path, help="run directory")
    difference = first_difference(*map(read_hashes, parser.parse_args().runs))
    sys.stdout.write(f"{difference or 'equal to the bit'}\n")
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())
