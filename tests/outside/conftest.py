"""The markers of the fetched tests, which their own repository declares; and what was skipped, by reason."""

import re
from collections import defaultdict

import pytest

_MARKERS = (
    "accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test all_flash_attn_test is_training_test "
    "is_tensor_parallel_test is_expert_parallel_test is_fsdp_test torch_compile_test torch_export_test generate "
    "is_pipeline_test is_staging_test not_device_test bitsandbytes deepspeed"
).split()
_WIDTH = 110


def pytest_configure(config: pytest.Config) -> None:
    for name in _MARKERS:
        config.addinivalue_line("markers", f"{name}: of transformers' own tests")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List each skipped test under its reason, the reason that most tests share first."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} skipped, by reason")
    for line in by_reason([(report.nodeid, report.longrepr[2]) for report in skipped]):
        terminalreporter.write_line(line)


def by_reason(skipped: list[tuple[str, str]]) -> list[str]:
    """Lines of a list: a reason with its count, then the tests.

    Args:
        skipped: of each test its id and what pytest says.
    """
    groups = defaultdict(list)
    for nodeid, said in skipped:
        reason = " ".join(said.removeprefix("Skipped: ").split())
        # Some reasons end with a list of all models, some begin with the address of a class.
        reason = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", reason)
        groups[reason if len(reason) <= _WIDTH else reason[: _WIDTH - 3].rstrip() + "..."].append(nodeid)
    lines = []
    for reason, names in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        lines.append(f"{len(names)} x {reason}")
        lines += [f"      {name.rpartition('::')[2]}" for name in sorted(names)]
    return lines
