"""Numbers of bytes: every unit people write, and what is none."""

from typing import Any

import pytest

from modeling_k3.byte_sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("300 MiB", 300 << 20), (17, 17), ("1.5kb", 1500), ("2TB", 2 * 10**12), ("24GiB", 24 << 30),
     ("7 B", 7), ("2TiB", 2 << 40), ("0", 0)],
)  # fmt: skip
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-3GB", "nan", True, None, 1.5e3j])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"budget=.* is no size"):
        parse_size(text, "budget")
