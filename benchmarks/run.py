"""Run benchmarks and experiments, and write what each measures to benchmarks/results/NAME.json.

    python benchmarks/run.py NAME... [--as RECORD] [--results DIR] [--replace] [options of NAME]
    python benchmarks/run.py NAME --help
    python benchmarks/run.py --list
    python benchmarks/run.py --write

``--list`` names them, a line each. ``--write`` fills the tables of RESULTS.md and the figures of the README in from
the records. Those of GPUs run by benchmarks/gpu/run.sh.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "experiments"), str(HERE.parent)]

from records import PAGES, RESULTS, Record, Results, rewrite  # noqa: E402

NAMES = {
    path.stem: path
    for folder in (HERE, HERE / "experiments")
    for path in sorted(folder.glob("*.py"))
    if "\ndef run(arguments" in path.read_text(encoding="utf-8")
}


def described(name: str) -> str:
    """Return the first line of a benchmark's description, without importing it."""
    return (ast.get_docstring(ast.parse(NAMES[name].read_text(encoding="utf-8"))) or "").partition("\n")[0]


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options and of those of all."""
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as", dest="record", default=name, help="name of the record (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the record")
    parser.add_argument("--replace", action="store_true", help="replace a record that exists")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def with_all_jobs(words: list[str], results: Results) -> list[str]:
    """Return the words with the jobs of all rows behind ``--jobs``: those of a record that is continued, too."""
    if "--jobs" not in words:
        return words
    jobs = [f"{row['arm']}:{row['seed']}" for row in results.rounds if isinstance(row, dict) and "arm" in row]
    begin = words.index("--jobs") + 1
    end = next((place for place in range(begin, len(words)) if words[place].startswith("--")), len(words))
    return [*words[:begin], *(jobs or words[begin:end]), *words[end:]]


def measure(name: str, words: list[str]) -> None:
    """Run a benchmark, and write its record, as often as it returns results."""
    module = importlib.import_module(name)
    parser = parser_of(name, module)
    arguments = parser.parse_args(words)
    path = arguments.results / f"{arguments.record}.json"
    if path.exists() and not arguments.replace and not getattr(module, "RESUMES", False):
        parser.error(f"{path} exists; name another record by --as, or give --replace")
    if getattr(arguments, "rounds", 1) < 1:
        parser.error(f"--rounds is {arguments.rounds}, which is below 1")
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    shown = [word for before, word in zip(["", *words], words, strict=False) if "--results" not in (before, word)]
    start, before = [*shlex.split(threads), "python", "benchmarks/run.py", name], os.getloadavg()[0]
    options = {key: value for key, value in vars(arguments).items() if key not in ("record", "results", "replace")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    found, record = module.run(arguments), None
    for results in [found] if isinstance(found, Results) else found:
        command = shlex.join([*start, *with_all_jobs(shown, results)])
        record = Record.of(
            arguments.record, results, command=command, load=before, settings=settings, seed=options.get("seed")
        )
        record.write(arguments.results)
    for title, table in record.tables.items() if record is not None else ():
        sys.stdout.write(f"{title}\n{table.markdown()}\n")
    sys.stdout.write(f"written to {path}\n" if record is not None else "nothing is left to measure\n")


def main() -> None:
    """Run what is named, or list it, or rewrite the pages."""
    names = sys.argv[1:]
    first = next((number for number, word in enumerate(names) if word.startswith("-")), len(names))
    names, words = names[:first], names[first:]
    if words == ["--list"] and not names:
        sys.stdout.write("".join(f"{name:<18}{described(name)}\n" for name in NAMES))
    elif words == ["--write"] and not names:
        for page in PAGES:
            page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
    elif not names or (unknown := set(names) - set(NAMES)):
        wrong = f"unknown: {', '.join(sorted(unknown))}; names: {', '.join(NAMES)}\n" if names else ""
        sys.stderr.write(f"{__doc__}\n{wrong}")
        sys.exit(0 if words in (["--help"], ["-h"]) else 2)
    else:
        for name in names:
            measure(name, words)


if __name__ == "__main__":
    main()
