"""Records of measurements: one JSON file each, and the Markdown that is made of them.

A page shows records between marks, which ``python benchmarks/run.py --write`` fills in:

    <!-- record: NAME --> command, machine and versions <!-- end -->
    <!-- table: NAME/TABLE --> a table <!-- end -->
    <!-- figure: NAME/TABLE; row; column --> one cell, by the first cells of its row <!-- end -->
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md", ROOT / "docs" / "translation.md")
"""Pages with figures of records."""
PACKAGES = ("torch", "deepspeed", "triton", "transformers", "ctranslate2")
GPU_STATE = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit", "power.max_limit",
)  # fmt: skip
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
MARK = re.compile(r"<!-- (record|table|figure): ([^>]+?) -->(.*?)<!-- end -->", flags=re.S)

Cell = int | float | str | list[int | float] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Table(_Strict):
    """Figures in rows.

    Attributes:
        columns: format of the cells by title, as of ``str.format``; "{}" is that of :func:`number`. A cell of several
            numbers fills as many fields.
        rows: cells; text is shown as it is.
    """

    columns: dict[str, str]
    rows: list[list[Cell]]

    @model_validator(mode="after")
    def _is_rectangular(self) -> Table:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} cells for {len(self.columns)} columns: {row}")
        return self

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], formats: Mapping[str, str] | None = None) -> Table:
        """Return a table of rows by title, which has the titles of all rows, with the formats of some."""
        rows = list(rows)
        titles = list(dict.fromkeys(title for row in rows for title in row))
        columns = {title: (formats or {}).get(title, "{}") for title in titles}
        return cls(columns=columns, rows=[[row.get(title) for title in titles] for row in rows])

    def dicts(self) -> list[dict[str, Any]]:
        """Return the rows by title, without cells that are None."""
        named = (zip(self.columns, row, strict=True) for row in self.rows)
        return [{title: cell for title, cell in row if cell is not None} for row in named]

    def texts(self) -> list[list[str]]:
        """Return the cells as they are shown."""
        return [[_text(*cell) for cell in zip(row, self.columns.values(), strict=True)] for row in self.rows]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [list(self.columns), *([text.replace("|", "/") for text in row] for row in self.texts())]
        shown = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([shown[0], "|" + "---|" * len(self.columns), *shown[1:]])

    def figure(self, row: str, column: str) -> str:
        """Return the text of a cell.

        Raises:
            KeyError: if no row, or more than one, begins with the cells ``row``, or no column has the title.
        """
        number = list(self.columns).index(column) if column in self.columns else -1
        lines = [line for line in self.texts() if row in {", ".join(line[:end]) for end in range(1, 5)}]
        if number < 0 or len(lines) != 1:
            raise KeyError(f"{len(lines)} rows begin with {row!r}; columns: {', '.join(self.columns)}")
        return lines[0][number]


def number(value: object) -> str:
    """Format a value: whole numbers in full, others with four digits; None and NaN as nothing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _text(cell: Cell, form: str) -> str:
    if form == "{}" or cell is None or isinstance(cell, str):
        return number(cell)
    return form.format(*cell) if isinstance(cell, list) else form.format(cell)


class Results(_Strict):
    """Result of a benchmark: tables by name, and the raw rounds from which they were computed."""

    tables: dict[str, Table]
    rounds: Any = None


class Machine(_Strict):
    """Hardware as far as it is known.

    Attributes:
        cpu: model, or what is known of the machine.
        cores: cores that the process may use.
        features: instructions that matter to the arithmetic.
        gpu: name of the GPU.
        gpu_state: its driver, clocks and power limit by the names of nvidia-smi.
    """

    cpu: str = ""
    cores: int | None = None
    features: list[str] = []
    gpu: str | None = None
    gpu_state: dict[str, str] = {}

    @classmethod
    @cache
    def here(cls) -> Machine:
        """Return this machine, as it is at the first call."""
        info = Path("/proc/cpuinfo")
        text = info.read_text(errors="replace") if info.exists() else ""
        name = re.search(r"^model name\s*: (.+)$", text, flags=re.M)
        flags = set(re.findall(r"\w+", (re.search(r"^flags\s*: (.+)$", text, flags=re.M) or [""])[0]))
        torch = sys.modules.get("torch")
        gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
        cpu = name[1] if name else platform.processor() or platform.machine()
        features = [feature for feature in FEATURES if feature in flags]
        state = gpu_state() if gpu else {}
        return cls(cpu=cpu, cores=len(os.sched_getaffinity(0)), features=features, gpu=gpu, gpu_state=state)


def gpu_state(program: str = "nvidia-smi") -> dict[str, str]:
    """Return driver, clocks and power limit of the first GPU; a reason instead if they cannot be had."""
    query = [program, "--id=0", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"{type(error).__name__}: {error}"[:200]}
    return dict(zip(GPU_STATE, map(str.strip, answer.split(",")), strict=True))


@cache
def commit() -> str:
    """Return the commit of the program at the first call, with ``-dirty`` if files have been changed.

    A folder without a repository has the one that `benchmarks/gpu/pack.sh` has noted.
    """
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        noted = ROOT / ".gpu" / "commit"
        return noted.read_text(encoding="utf-8").strip() if noted.exists() else "unknown"


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, of packages, and of CUDA and NCCL if there is a GPU."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


class Record(_Strict):
    """Results of a measurement, with its command and machine.

    Attributes:
        name: name of the file.
        command: command line.
        date: date, or the month of a transcribed record.
        transcribed: True if it was copied from a page; then it has only what the page said.
        commit: of the program, with ``-dirty`` if files had been changed.
        settings: options of the command, defaults included.
        seed: seed of all random numbers; None if there is none, or if it differs from row to row.
        versions: versions of Python and of packages.
        machine: hardware.
        load: load of the machine in the minute before and at the end.
        tables: tables by name.
        rounds: raw rounds from which they were computed.
    """

    name: str
    command: str
    date: str
    transcribed: bool = False
    commit: str | None = None
    settings: dict[str, Any] = {}
    seed: int | None = None
    versions: dict[str, str] = {}
    machine: Machine = Machine()
    load: tuple[float, float] | None = None
    tables: dict[str, Table]
    rounds: Any = None

    @model_validator(mode="after")
    def _is_complete(self) -> Record:
        known = {"commit": self.commit, "versions": self.versions, "machine": self.machine.cores, "load": self.load}
        if not self.transcribed and (missing := [name for name, value in known.items() if not value]):
            raise ValueError(f"the record lacks {', '.join(missing)}")
        return self

    @classmethod
    def of(cls, name: str, results: Results, *, command: str, load: float, **fields: Any) -> Record:
        """Return the record of results that were measured here and now; ``load`` is that before."""
        return cls(
            **dict(results),
            name=name,
            command=command,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            commit=commit(),
            versions=versions(),
            machine=Machine.here(),
            load=(round(load, 1), round(os.getloadavg()[0], 1)),
            **fields,
        )

    def write(self, directory: Path = RESULTS) -> Path:
        """Write the record to NAME.json, and return the path. Rows and short lists have a line each."""
        path = directory / f"{self.name}.json"
        text = self.model_dump_json(indent=1, exclude_defaults=True)
        innermost = r"\[\s*((?:[^][{}\"]|\"(?:[^\"\\]|\\.)*\"|\[[^][{}\"]*\])*?)\s*\]"
        text = re.sub(innermost, lambda found: "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]", text)
        text = re.sub(r"\[ (?=[-\d])|(?<=\d) (?=\])", lambda found: found[0].strip(), text)
        directory.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(text + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
        return path

    def about(self, file: str | None = None) -> str:
        """Return the command, and a line on where and with what it ran, in Markdown.

        Args:
            file: the record's file in the directory of results, without its suffix; by default its name.
        """
        machine, parts = self.machine, []
        cores = f"{machine.cores} cores" if machine.cores else ""
        parts.append(", ".join(filter(None, [machine.gpu, machine.cpu, cores, " ".join(machine.features)])))
        parts.append(", ".join(f"{name} {version}" for name, version in self.versions.items()))
        if self.load:
            parts.append(f"load {self.load[0]} to {self.load[1]}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        rows = self.rounds if isinstance(self.rounds, list) else []
        commits = dict.fromkeys([row["commit"] for row in rows if isinstance(row, dict) and row.get("commit")])
        commits = commits or dict.fromkeys(filter(None, [self.commit]))
        parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}" if commits else "transcribed")
        line = f"{'; '.join(filter(None, parts))} (`results/{file or self.name}.json`)."
        command = textwrap.indent(self.command, "    ")
        return f"{command}\n\n" + textwrap.fill(line, 116, break_long_words=False, break_on_hyphens=False)


@cache
def read(path: Path) -> Record:
    """Read a record.

    Raises:
        ValueError: if it is not one, or has another name than its file.
    """
    record = Record.model_validate_json(path.read_text(encoding="utf-8"))
    if record.name != path.stem:
        raise ValueError(f"{path} has the record of {record.name}")
    return record


def marked(text: str) -> list[Sequence[str]]:
    """Return the marks of a page: kind, content and text of each."""
    return MARK.findall(text)


def rewrite(text: str, directory: Path = RESULTS) -> str:
    """Return a page with its marks filled in from the records."""

    def content(found: re.Match[str]) -> str:
        kind, words = found[1], found[2].split("; ")
        name, _, table = words[0].rpartition("/") if kind != "record" else (words[0], "", "")
        record = read(directory / f"{name}.json")
        if kind == "figure":
            shown = record.tables[table].figure(*words[1:])
        else:
            shown = f"\n\n{record.about(words[0]) if kind == 'record' else record.tables[table].markdown()}\n\n"
        return f"<!-- {kind}: {found[2]} -->{shown}<!-- end -->"

    return MARK.sub(content, text)
