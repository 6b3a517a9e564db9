"""Signatures of torch's operators that the package calls, recorded from several versions of torch.

    python tests/gpu_without_gpu/signatures.py WHEEL...

writes torch_operators.json from wheels of torch. Those for macOS are the smallest, and have the same operators:

    pip download --no-deps --platform macosx_14_0_arm64 --python-version 3.12 --only-binary :all: torch==2.14.1
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("torch_operators.json")
ATTENTION = re.compile(
    r"_(flash|efficient)_attention_(forward|backward)$|_scaled_dot_product_(flash|efficient)_attention"
)
"""Operators that are recorded, whether or not the package calls them."""
YAML = "torchgen/packaged/ATen/native/native_functions.yaml"


@dataclass(frozen=True)
class Call:
    """A call of an operator in the package.

    Attributes:
        operator: name, without namespace and overload.
        where: file and line.
        positional: number of arguments without names; None if a sequence is unpacked.
        names: of the other arguments.
        is_complete: False for a mention that is no call, and where a mapping is unpacked.
    """

    operator: str
    where: str
    positional: int | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    is_complete: bool = False

    def suits(self, schema: Any) -> bool:
        """Return True if an operator of this signature accepts the call."""
        given = [each.name for each in schema.arguments if not each.kwarg_only][: self.positional]
        if self.positional is not None and len(given) < self.positional:
            return False
        required = {each.name for each in schema.arguments if not each.has_default_value()}
        known = {each.name for each in schema.arguments}
        return self.names <= known and (not self.is_complete or required <= self.names | set(given))


@cache
def calls() -> list[Call]:
    """Return the calls of torch's operators in the package: ``torch.ops.aten.NAME`` and ``torch._foreach_NAME``."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "deepspeed_nmt").rglob("*.py"))}
    return [
        call
        for path, source in sources.items()
        if "torch.ops.aten" in source or "torch._foreach" in source
        for call in calls_in(source, str(path.relative_to(ROOT)))
    ]


def calls_in(source: str, path: str) -> Iterator[Call]:
    """Yield the calls in a source, and the mentions that are no calls."""
    tree = ast.parse(source)
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "torch.ops.aten"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    spaces = "|".join(["torch.ops.aten", *aliases]).replace(".", r"\.")
    pattern = re.compile(rf"(?:(?:{spaces})\.|torch\.(?=_foreach))(\w+)(?:\.\w+)?")
    called = set[int]()
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else node
        if not isinstance(function, ast.Attribute) or id(node) in called:
            continue
        match = pattern.fullmatch(ast.unparse(function))
        if match is None:
            continue
        called |= {id(each) for each in ast.walk(function)}
        where = f"{path}:{node.lineno}"
        if not isinstance(node, ast.Call):
            yield Call(match[1], where)
            continue
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        names = frozenset(each.arg for each in node.keywords if each.arg is not None)
        is_complete = not starred and all(each.arg is not None for each in node.keywords)
        yield Call(match[1], where, None if starred else len(node.args), names, is_complete)


def schemas_of(text: str) -> Any:
    """Return the signature that a line of torch's declarations states."""
    return torch._C.parse_schema(f"aten::{text}")


def declared(wheel: Path) -> dict[str, list[str]]:
    """Return the declarations of the operators by name."""
    wanted = {call.operator for call in calls()}
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(YAML).decode().splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"- func: (\w+)((?!\S*out\b).*)", line)  # not those that write into given tensors
        if match and (match[1] in wanted or ATTENTION.match(match[1])):
            found.setdefault(match[1], []).append(match[1] + match[2])
    return dict(sorted(found.items()))


def main(wheels: list[str]) -> None:
    versions = {Path(wheel).name.split("-")[1].partition("+")[0]: declared(Path(wheel)) for wheel in wheels}
    RECORDED.write_text(json.dumps(dict(sorted(versions.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
