"""Calls of torch's operators in the package against the signatures of the versions of torch that it supports."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.gpu_without_gpu.signatures import RECORDED, Call, calls, calls_in, schemas_of

VERSIONS = json.loads(RECORDED.read_text(encoding="utf-8"))
INSTALLED = torch.__version__.partition("+")[0]


def schemas(operator: str, version: str) -> list[Any]:
    """Return the signatures of an operator in a version of torch."""
    if version in VERSIONS:
        return [schemas_of(text) for text in VERSIONS[version].get(operator, [])]
    packet = getattr(torch.ops.aten, operator)
    return [getattr(packet, name)._schema for name in packet.overloads()]


def refused(called: list[Call], version: str) -> list[Call]:
    """Return the calls that no overload of a version accepts."""
    return [each for each in called if not any(map(each.suits, schemas(each.operator, version)))]


@pytest.mark.parametrize("version", [*VERSIONS, "installed"])
def test_operators_accept_the_calls(version: str) -> None:
    called = calls()
    assert len({each.operator for each in called}) > 8
    assert refused(called, version) == [], f"torch {version}; see signatures.py if an operator is not recorded"


@pytest.mark.skipif(INSTALLED not in VERSIONS, reason="this version of torch is not recorded")
def test_the_record_is_that_of_torch() -> None:
    for operator, texts in VERSIONS[INSTALLED].items():
        known = {str(each) for each in schemas(operator, "installed")}
        assert {str(schemas_of(text)) for text in texts} <= known, operator


def test_versions_of_attention_differ_only_by_later_optional_arguments() -> None:
    first, *later = VERSIONS.values()
    assert {"2.11", "2.13", "2.14"} == {version.rpartition(".")[0] for version in VERSIONS}
    for name in [name for name in first if "attention" in name]:
        for text, *others in zip(first[name], *(version[name] for version in later), strict=True):
            old = schemas_of(text).arguments
            for new in (schemas_of(other).arguments for other in others):
                assert [each.name for each in old] == [each.name for each in new][: len(old)], name
                assert all(each.has_default_value() for each in new[len(old) :]), name


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.1, scale=s)", True),
        ("aten._scaled_dot_product_efficient_attention(q, k, v, None)", False),
        ("aten._scaled_dot_product_efficient_attention(q, k, v, None, True, window_size=3)", False),
        ("aten._scaled_dot_product_efficient_attention.default(*inputs, True, **more)", True),
        ("aten._flash_attention_forward(q, k, v, a, b, 5, 5, 0.0, True, False, num_splits=1)", False),
        ("torch._foreach_add_(a, b, alpha=2.0)", True),
        ("torch._foreach_add_(a, b, beta=2.0)", False),
    ],
)
def test_a_call_that_an_operator_does_not_accept(line: str, fits: bool) -> None:
    (call,) = calls_in(f"aten = torch.ops.aten\n{line}\n", "file.py")
    assert call.where == "file.py:2" and (refused([call], "2.11.0") == []) == fits
