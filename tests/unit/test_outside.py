"""The list of skips that `make outside-test` ends with."""

from tests.outside.conftest import by_reason


def test_skips_are_listed_by_reason() -> None:
    lines = by_reason(
        [
            ("a.py::T::test_b", "Skipped: needs a GPU"),
            ("a.py::T::test_one", "Skipped: <class 'k.m.K3Model'> has\nno such layer"),
            ("a.py::T::test_a", "Skipped: needs a GPU"),
            ("a.py::T::test_long", "Skipped: " + "word " * 40),
        ]
    )
    assert lines[:3] == ["2 x needs a GPU", "      test_a", "      test_b"]
    assert lines[3:5] == ["1 x K3Model has no such layer", "      test_one"]
    assert lines[5].startswith("1 x word word") and lines[5].endswith("...") and len(lines[5]) < 120
    assert lines[6:] == ["      test_long"]
