"""The notebook `examples/tour.ipynb` is kept with what its cells print, so that a code host shows it.

python -m tests.tour            # run it and store what it prints; the tests say when that is needed
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"

_BETWEEN = "\x1e"
_RUNNER = f"""import json, sys
names = {{}}
for cell in json.loads(sys.argv[1]):
    exec(cell, names)
    print({_BETWEEN!r}, end="")
"""


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that are run, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """What a cell printed when the notebook was last run."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def run_cells(notebook: dict[str, Any]) -> list[str]:
    """Run all cells in a process of their own, in the notebook's folder; what each prints.

    Raises:
        RuntimeError: a cell failed; with what it said.
    """
    cells = json.dumps(["".join(cell["source"]) for cell in code_cells(notebook)])
    # As one imports what stands here, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER, cells], cwd=NOTEBOOK.parent, env=environment, capture_output=True, text=True,
        encoding="utf-8", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout.split(_BETWEEN)[:-1]


def main() -> None:
    """Store what the cells print now."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for number, (cell, text) in enumerate(zip(code_cells(notebook), run_cells(notebook), strict=True), start=1):
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
