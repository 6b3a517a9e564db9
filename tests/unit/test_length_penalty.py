"""Length penalties: formulas computed by hand, and messages that name the allowed values."""

import pytest

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.search.base import LengthPenalty


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        ("gnmt:1", 7, 2.0),
        ("gnmt:0.5", 19, 2.0),
        ("gnmt:0", 30, 1.0),
        ("power:2", 3, 9.0),
        ("power:0.5", 16, 4.0),
        ("mean", 11, 11.0),
        ("none", 11, 1.0),
        ("power:10", 100_000, 1e50),
    ],
)
def test_formulas(text: str, length: int, expected: float) -> None:
    assert LengthPenalty.parse(text)(length) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["", "gnmt:", "power:-1", "power:nan", "gnmt:11", "mean:2", "wu:0.6"])
def test_errors_name_the_allowed_values(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        LengthPenalty.parse(text)
    message = str(error.value)
    assert f"'{text}'" in message
    assert all(name in message for name in ("gnmt:A", "power:A", "mean", "none"))
