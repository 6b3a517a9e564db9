"""Plant faults in the code, one at a time: do the tests that reach the line notice?

    python benchmarks/run.py planted [--commit HEAD] [--faults 25] [--room NAME ...] [--minutes 60] [--quick]

A fault is a small change of one expression: a comparison, an operator, a number, a condition, or a call that is left
out. As many are drawn in each room. First all unit tests run once, under the package `coverage`, which records the
tests that reach each line. Then each fault is planted in a copy of a commit, and the unit tests that reach its
line run, the fastest first, until one fails. If none does, the slower tests of the room run, many minutes; with
``--quick`` the fault has no row and is left for a run without it. A fault with which tests take twenty times as long
as they should is noticed, too.

Each fault is a row of the raw rounds; a fault that has a row is not planted again, so the benchmark resumes (name the
same commit: other lines have other faults). What no test noticed is shown with the reason, if it has one in REASONS.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from records import RESULTS, ROOT, Results, Table, read

RESUMES = True
"""A record that exists is continued."""


class Room(NamedTuple):
    """Files in which faults are planted.

    Attributes:
        files: patterns within the package.
        slower: files of tests, other than unit tests, that run on what they do not notice.
    """

    files: list[str]
    slower: list[str]


PARITY = "test_losses_norms_and_weights_equal_those_of_one_plain_process"
CELLS = [
    f"tests/parity/test_engines.py::{test}[{cell}]"
    for cell in (
        *("vanilla+mixture-2-zero2+packed", "vanilla-1-plain", "vanilla-3-zero3", "growing-2-zero1:bf16"),
        *("growing-2-zero2+recompute+packed", "exits-2-zero1+packed"),
    )
    for test in (
        "test_a_run_probed_and_restored_half_way_is_equal_to_the_bit",
        PARITY,
    )
    if not (test == PARITY and ":" in cell)  # which are of 32 bit
]
"""Tests of engines that take two minutes together; all would take ten times as long."""
ROOMS = {
    "batching": Room(
        ["data/batching.py", "data/packing.py", "data/loader.py", "data/update_order.py", "core/batch.py"],
        ["tests/parity/test_elastic.py", "tests/system/test_runs.py"],
    ),
    "engine": Room(
        ["engine/*.py", "train/loop.py", "train/stability.py"],
        [
            *CELLS,
            "tests/distributed/test_state.py",
            "tests/parity/test_elastic.py",
            "tests/system/test_runs.py",
        ],
    ),
    "checkpoint": Room(
        ["train/checkpoint.py", "train/saving.py", "train/progress.py"],
        [
            "tests/parity/test_elastic.py",
            *(f"tests/system/test_{name}.py" for name in ("runs", "saving_runs", "run_files", "kills")),
        ],
    ),
    "search": Room(
        ["search/*.py", "nn/cache.py"],
        [f"tests/system/test_{name}.py" for name in ("translate_options", "tags", "exports")],
    ),
    "mixtures": Room(
        ["data/mixture.py", "data/training.py", "data/corpus.py"],
        ["tests/system/test_mixture.py", "tests/system/test_runs.py", "tests/system/test_data_scripts.py"],
    ),
    "export": Room(
        ["export/*.py", "run/exporting.py"],
        ["tests/system/test_exports.py", "tests/system/test_translate_options.py"],
    ),
}
FAST = ["tests/unit", "tests/toy", "tests/papers"]  # those of kernels reach these rooms by the way, for many minutes
REASONS = {
    "data/loader.py:28": "size of a sample",
    "data/packing.py:36": "bound on the time of a search",
    "engine/hashes.py:60": "start of a checksum that is compared with its like alone",
    "export/formats.py:155": "check of lengths that are equal",
    "export/huggingface_weights.py:183": "beam that users of another program choose",
    "run/exporting.py:203": "sentences of one token need not be compared",
    "run/exporting.py:266": "a larger number than the other one, now left out",
    "run/exporting.py:332": "more sentences are scored than need be",
    "run/exporting.py:301": "factor of a tolerance, which has a bound of its own",
    "train/loop.py:229": "goodput before time has passed, when nothing is logged",
    "train/saving.py:225": "size of an empty file, which no checkpoint has",
    "train/saving.py:36": "share of the host's memory",
    "engine/plain.py:149": "the model that is trained is never set to inference: validation has a copy",
    "train/checkpoint.py:115": "indentation of a file",
    "train/checkpoint.py:556": "a file of exactly the bound",
    "train/saving.py:103": "copies to wait for exist on GPUs only",
}
"""Why no test need notice the fault at a place: it changes nothing, or what it changes is not seen here."""
TESTED = {
    "data/packing.py:91": "test_sizes_and_divisions_of_packed_rows_are_pinned",
    "data/packing.py:159": "test_sizes_and_divisions_of_packed_rows_are_pinned",
    "data/packing.py:284": "test_sizes_and_divisions_of_packed_rows_are_pinned",
    "data/packing.py:53": "test_sizes_and_divisions_of_packed_rows_are_pinned",
    "data/corpus.py:382": "test_packed_batches_of_tagged_and_segmented_corpora_have_the_tokens_of_their_rows",
    "engine/deepspeed.py:276": PARITY,
    "engine/deepspeed.py:278": PARITY,
    "engine/plain.py:225": "test_gradients_of_16_bit_are_added_in_fp32_collected_or_alone",
    "engine/settings.py:194": "test_a_section_without_a_stage_is_stage_0",
    "export/ctranslate2_weights.py:102": "test_ctranslate2_knows_special_tokens_by_their_names",
    "export/certificate.py:356": "test_two_first_uses_make_one_export",
    "export/ctranslate2_search.py:111": "test_ctranslate2_searches_as_this_program",
    "run/exporting.py:123": "test_an_export_has_a_certificate",
    "run/exporting.py:386": "test_a_difference_has_a_rule_or_a_margin",
    "search/models.py:167": "test_weights_are_packed_where_they_can_be",
    "engine/deepspeed.py:151": "test_an_update_is_computed_again_before_its_step",
    "engine/plain.py:103": "test_the_loss_scale_halves_on_overflow_and_doubles_after_good_updates",
    "train/checkpoint.py:525": "test_the_pointer_to_a_best_checkpoint_goes_with_it",
    "train/saving.py:221": "test_room_is_missing_if_the_c_library_says_so",
    "data/mixture.py:41": "test_a_weight_holds_from_its_first_update_to_its_last",
    "data/training.py:148": "test_tags_are_those_of_all_directories",
    "data/training.py:195": "test_text_of_another_form_is_refused_and_of_another_language_needs_a_tag",
    "export/certificate.py:173": "test_a_certificate_counts_near_ties_rules_and_what_nothing_explains",
    "export/huggingface_weights.py:86": "test_two_vocabularies_are_exported_for_transformers_with_post_norm_alone",
    "train/saving.py:167": "test_the_copy_takes_no_more_memory_than_the_checkpoint",
}
"""Tests that notice the faults at places where none of those that ran did: most were written for them, since."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor", "sorted": "list"}
WORDS = ("logger", "Field", "warn", "at")
"""Calls that say something, or declare it; their arguments are left alone."""


class Fault(NamedTuple):
    """A change of one expression of a file of the package, at offsets of its text."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case (
            ast.BinOp(ast.Constant(str()) | ast.JoinedStr()) | ast.BinOp(right=ast.Constant(str()) | ast.JoinedStr())
        ):
            return  # parts of a path or of a text
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        case ast.AugAssign() if type(node.op) in OPERATORS:
            yield ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in CALLS:
            yield ast.Call(ast.Name(CALLS[name]), node.args, [])
        case ast.Call(func=ast.Attribute(attr=name)) if name in CALLS:
            yield ast.Call(ast.Attribute(node.func.value, CALLS[name]), node.args, node.keywords)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)


def leaves_alone(node: ast.AST) -> bool:
    """Return True for what is said to people or types, rather than computed."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        return name in WORDS or (isinstance(owner, ast.Name) and owner.id in WORDS)
    return isinstance(node, (ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arg, ast.Import, ast.ImportFrom))


def faults_of(file: Path, package: Path) -> Iterator[Fault]:
    """Yield all faults that can be planted in a file."""
    text = file.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def visit(node: ast.AST) -> Iterator[Fault]:
        if leaves_alone(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner: list[ast.AST] = list(node.body)  # no decorators, annotations, or defaults
        else:
            inner = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.expr, ast.stmt)):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            for other in changed(node):
                after = ast.unparse(ast.fix_missing_locations(other))
                before = " ".join(data[start:end].decode().split())
                after = f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else after
                yield Fault(str(file.relative_to(package)), node.lineno, start, end, before, after)
        for child in inner:
            yield from visit(child)

    for statement in ast.parse(text).body:
        yield from visit(statement)


def drawn(package: Path, rooms: list[str], count: int, seed: int) -> Iterator[tuple[str, Fault]]:
    """Yield as many faults of each room, with its name."""
    for name in rooms:
        files = sorted({path for pattern in ROOMS[name].files for path in package.glob(pattern)})
        candidates = [fault for file in files for fault in faults_of(file, package)]
        chosen = random.Random(f"{seed} {name}").sample(candidates, min(count, len(candidates)))
        yield from ((name, fault) for fault in chosen)


PLUGIN = """
import json, os, coverage, pytest

passed = {}

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    coverage.Coverage.current().switch_context(item.nodeid)
    yield

def pytest_runtest_logreport(report):
    if not report.passed:
        passed[report.nodeid] = None
    elif passed.get(report.nodeid, 0.0) is not None:
        passed[report.nodeid] = passed.get(report.nodeid, 0.0) + report.duration

def pytest_sessionfinish():
    with open(os.environ["PLANTED_TIMES"], "w") as file:
        json.dump({name: seconds for name, seconds in passed.items() if seconds is not None}, file)
"""


class Tests:
    """A copy of a commit in which tests run, and what is known of the unit tests.

    Args:
        scratch: directory for the copies and for what is known, which is used again.
        commit: the commit.
    """

    def __init__(self, scratch: Path, commit: str) -> None:
        self.tree, self.known = scratch / "tree", scratch / "reached.json"
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{scratch}{os.pathsep}{self.tree}",
            "OMP_NUM_THREADS": "1",
            "PLANTED_TIMES": str(scratch / "times.json"),
            "COVERAGE_FILE": str(scratch / "coverage"),
            "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        }
        shutil.rmtree(self.tree, ignore_errors=True)  # in which a benchmark that was killed left its fault
        self.tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(self.tree)], input=archive, check=True)
        if not self.known.exists():
            self.record(scratch)
        self.times, self.reached = json.loads(self.known.read_text())

    def record(self, scratch: Path) -> None:
        """Run the unit tests, and write how long each takes and which lines it reaches."""
        import coverage  # only here, and after it was installed by hand

        (scratch / "planted_plugin.py").write_text(PLUGIN)
        patterns = sorted({pattern for room in ROOMS.values() for pattern in room.files})  # others would be slower
        files = "".join(f"\n  {self.tree}/deepspeed_nmt/{pattern}" for pattern in patterns)
        rules = f"[run]\ninclude ={files}\n"
        (scratch / "coveragerc").write_text(rules)
        run = ["coverage", "run", f"--rcfile={scratch}/coveragerc", "-m", "pytest", "-q", "-p", "planted_plugin"]
        subprocess.run([sys.executable, "-m", *run, *FAST], cwd=self.tree, env=self.environment, check=False)
        data = coverage.CoverageData(str(scratch / "coverage"))
        data.read()
        times = json.loads((scratch / "times.json").read_text())
        reached: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            lines = {
                line: [name for name in names if name in times]
                for line, names in data.contexts_by_lineno(file).items()
            }
            reached[str(Path(file).relative_to(self.tree / "deepspeed_nmt"))] = lines
        self.known.write_text(json.dumps([times, reached]))

    def of(self, fault: Fault, limit_s: float) -> list[str]:
        """Return the unit tests that reach a line, the fastest first, of at most some seconds together."""
        names = sorted(self.reached.get(fault.file, {}).get(str(fault.line), []), key=self.times.__getitem__)
        total, chosen = 0.0, []
        for name in names:
            total += self.times[name]
            if total > limit_s and chosen:
                break
            chosen.append(name)
        return chosen

    def fail(self, names: list[str], within_s: float) -> str:
        """Return the test that fails, "time" if they take too long, or "" if all pass."""
        (self.tree / "names.txt").write_text("\n".join(names))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "@names.txt"]
        process = subprocess.Popen(
            command, cwd=self.tree, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output = process.communicate(timeout=within_s)[0]
        except subprocess.TimeoutExpired:
            return "time"
        finally:
            kill(process)
        if process.returncode in (0, 5):
            return ""
        marks = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return marks[0].split(" - ")[0].split(" ", 1)[1] if marks else f"status {process.returncode}"

    def planted(self, fault: Fault, slower: list[str], limit_s: float) -> str | None:
        """Plant a fault, and return the test that notices it, "" for none, or None if that fails without it, too.

        Slower tests start processes that wait for one another, which may take too long on a busy machine.
        """
        file = self.tree / "deepspeed_nmt" / fault.file
        sound = file.read_bytes()
        names = self.of(fault, limit_s)
        within_s = 60 + 20 * sum(map(self.times.__getitem__, names))
        try:
            file.write_bytes(sound[: fault.start] + fault.after.encode() + sound[fault.end :])
            self.forget(file)
            noticed = self.fail(names, within_s) if names else ""
            if noticed and noticed != "time":
                return noticed
            if not noticed and slower:
                names, within_s = slower, 7200
                noticed = self.fail(names, within_s)
        finally:
            file.write_bytes(sound)
            self.forget(file)
        again = [noticed] if "::" in noticed else names
        return None if noticed and self.fail(again, within_s) else noticed

    @staticmethod
    def forget(file: Path) -> None:
        """Remove compiled code, which Python takes for that of the text if both have the same second and size."""
        for path in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            path.unlink()


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--commit", default="HEAD", help="what is changed and tested (default: %(default)s)")
    parser.add_argument("--faults", type=int, default=25, help="faults in each room (default: %(default)s)")
    parser.add_argument("--room", choices=ROOMS, action="append", help="room (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="begin none after this time (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="leave what unit tests do not notice for later")
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds of unit tests for each (default: %(default)s)"
    )
    parser.add_argument(
        "--scratch", type=Path, default=ROOT / "build/planted", help="directory for copies (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Plant the faults that have no row yet, and yield the record after each."""
    deadline = time.monotonic() + 60 * arguments.minutes
    path = arguments.results / f"{arguments.record}.json"
    rounds: list[dict[str, Any]] = read(path).rounds if path.exists() else []
    name = ["git", "rev-parse", "--short=10", arguments.commit]
    commit = subprocess.run(name, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    scratch = arguments.scratch / commit
    for other in arguments.scratch.glob("*"):
        if other != scratch:
            shutil.rmtree(other)
    tests = Tests(scratch, commit)
    done = {row["fault"] for row in rounds}
    package = tests.tree / "deepspeed_nmt"
    for room, fault in drawn(package, arguments.room or list(ROOMS), arguments.faults, arguments.seed):
        if fault.key in done:
            continue
        if time.monotonic() > deadline:
            break
        started = time.monotonic()
        noticed = tests.planted(fault, [] if arguments.quick else ROOMS[room].slower, arguments.limit)
        if not noticed and arguments.quick:
            sys.stdout.write(f"{room}: {fault.key}: left for the slower tests\n")
            continue
        if noticed is None:
            sys.stdout.write(f"{room}: {fault.key}: left for later, as a test fails without it, too\n")
            continue
        seconds = round(time.monotonic() - started, 1)
        rounds.append({"room": room, "fault": fault.key, "noticed": noticed, "seconds": seconds})
        sys.stdout.write(textwrap.shorten(f"{room}: {fault.key}: {noticed or 'NOT NOTICED'}", 300) + "\n")
        sys.stdout.flush()
        yield results(rounds)
    if rounds:
        yield results(rounds)


def place_of(row: dict[str, Any]) -> str:
    """Return the file and the line of a fault."""
    return str(row["fault"]).partition(": ")[0]


def results(rounds: list[dict[str, Any]]) -> Results:
    """Return the tables of all faults so far."""
    rows, missed = [], [row for row in rounds if not row["noticed"]]
    for name in [*ROOMS, "all"]:
        own = [row for row in rounds if name in (row["room"], "all")]
        fast = sum(row["noticed"].startswith(tuple(FAST)) or row["noticed"] == "time" for row in own)
        noticed = sum(bool(row["noticed"]) for row in own)
        reasons = sum(place_of(row) in REASONS for row in own if not row["noticed"])
        rows.append(
            {
                "room": name,
                "faults": len(own),
                "noticed": noticed,
                "of these by unit tests": fast,
                "not noticed, for a reason": reasons,
                "tested since": (tested := sum(place_of(row) in TESTED for row in own if not row["noticed"])),
                "not noticed": len(own) - noticed - reasons - tested,
                "%": round(100 * noticed / max(1, len(own) - reasons), 1),
            }
        )
    survivors = [
        {
            "room": row["room"],
            "fault": textwrap.shorten(row["fault"], 100, placeholder=" ..."),
            "reason, or test since": REASONS.get(place_of(row)) or TESTED.get(place_of(row), ""),
        }
        for row in missed
    ]
    tables = {"rooms": Table.of(rows)}
    if survivors:
        tables["survivors"] = Table.of(survivors)
    return Results(tables=tables, rounds=rounds)


if __name__ == "__main__":
    raise SystemExit(f"start it as: python {RESULTS.parent.name}/run.py planted")
