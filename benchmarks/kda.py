"""KDA on this machine's CPU: our chunk and recurrent forms beside transformers' fallback and fla's naive chunk form.

    python benchmarks/kda.py --out runs/benchmark-kda
    python benchmarks/kda.py --contenders exact --lengths 32768 --heads 1 --forward-only --turns 1

What is measured is written after every case, and a run with the same folder goes on where one was stopped (--fresh
starts again). Every contender runs in a process of its own; they take turns, so that a slow minute of the machine meets
all of them, and each turn also times a plain fp32 matrix product. Reported are medians: time, peak extra memory,
nominal GFLOP/s and their share of the matrix product's. The nominal count belongs to the usual form with chunks of 64,
whatever is done.

"exact" takes part only when named: its time grows with T^2.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import command

LENGTHS, HEADS, WIDTH, CHUNK = (256, 1024, 4096, 16384), (8, 16), 128, 64
#: glibc settings under which freed memory is kept instead of given back and faulted in again.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": "0"}
#: Name in the table -> contender of `kda_worker.py` and environment.
LINEUP: dict[str, tuple[str, dict[str, str]]] = {
    "chunk": ("chunk", {}),
    "recurrent": ("recurrent", {}),
    "native": ("native", {}),
    "native, memory kept": ("native", KEEP_MEMORY),
    "fla naive": ("fla naive", {}),
    "exact": ("exact", {}),
}
DEFAULT_LINEUP = [name for name in LINEUP if name != "exact"]
#: Chunk x chunk x key tensors that the peers hold at once: forward (measured), and with backward (at least).
PEER_COPIES = {False: 3, True: 5}


@dataclass
class Contender:
    """A worker process and what it is called."""

    name: str
    process: subprocess.Popen[str]
    error: str | None = None
    died: bool = False

    def ask(self, case: dict[str, Any]) -> dict[str, float]:
        """Run one case once.

        Raises:
            RuntimeError: the worker died, of memory for instance.
        """
        try:
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.died = True
            raise RuntimeError(f"stopped with exit status {self.process.wait()}")
        return json.loads(line)


@dataclass
class Result:
    """What one contender needed for one case."""

    contender: str
    length: int
    heads: int
    backward: bool
    seconds: list[float] = field(default_factory=list)
    matmul_flops: list[float] = field(default_factory=list)
    peak_extra_bytes: float | None = None
    skipped: str | None = None

    def summary(self) -> dict[str, Any]:
        """Medians and rates, for JSON."""
        row: dict[str, Any] = {key: getattr(self, key) for key in ("contender", "length", "heads", "backward")}
        if self.skipped:
            return {**row, "skipped": self.skipped}
        flops = nominal_flops(self.length, self.heads) * (3 if self.backward else 1)
        seconds = statistics.median(self.seconds)
        shares = [flops / s / rate for s, rate in zip(self.seconds, self.matmul_flops, strict=True)]
        return {
            **row,
            "milliseconds": round(seconds * 1e3, 3),
            "fastest_milliseconds": round(min(self.seconds) * 1e3, 3),
            "nominal_gflops": round(flops / seconds / 1e9, 1),
            "matmul_gflops": round(statistics.median(self.matmul_flops) / 1e9, 1),
            "share_of_matmul": round(statistics.median(shares), 3),
            "peak_extra_mib": None if self.peak_extra_bytes is None else round(self.peak_extra_bytes / 2**20, 1),
            "turns": len(self.seconds),
        }


def nominal_flops(length: int, heads: int, width: int = WIDTH, chunk: int = CHUNK) -> float:
    """2 2C^2 K + C^2 (K + V) + 3 2C K V + 2 C^2 V for each head and chunk of C = 64; K = V = width."""
    per_chunk = 2 * 2 * chunk**2 * width + chunk**2 * 2 * width + 3 * 2 * chunk * width**2 + 2 * chunk**2 * width
    return heads * length / chunk * per_chunk


def available_bytes() -> int:
    """Memory that can be had now, or 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def predicted_bytes(contender: str, length: int, heads: int, backward: bool) -> int:
    """What a contender allocates: the peers form the chunk x chunk x key decays of all chunks and heads at once.

    The recurrence keeps several states of every token for a backward, the exact form about six scores of every pair; 0
    for what needs little.
    """
    if contender == "exact":
        return 6 * 8 * heads * length**2 if backward else 0
    if contender == "recurrent":
        return 4 * heads * length * WIDTH * WIDTH * 4 if backward else 0
    return 0 if contender == "chunk" else PEER_COPIES[backward] * heads * length * CHUNK * WIDTH * 4


def start(name: str, fla_python: str) -> Contender:
    """Start a worker; one that cannot run keeps its reason.

    Args:
        fla_python: interpreter for fla's form, which has no place in the package's own environment.
    """
    worker = Path(__file__).with_name("kda_worker.py")
    contender, environment = LINEUP[name]
    process = subprocess.Popen(
        [fla_python if contender == "fla naive" else sys.executable, str(worker), contender],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )
    line = process.stdout.readline()
    answer = json.loads(line) if line else {"error": "did not start"}
    return Contender(name, process, answer.get("error"))


def measure(contenders: list[Contender], length: int, heads: int, backward: bool, turns: int) -> list[Result]:
    """Let the contenders take turns at one case."""
    case = {"length": length, "heads": heads, "backward": backward}
    results = {c.name: Result(c.name, length, heads, backward, skipped=c.error) for c in contenders}
    free = available_bytes()
    for contender in contenders:
        needed = predicted_bytes(contender.name, length, heads, backward)
        if free and needed > 0.8 * free:
            results[contender.name].skipped = f"would need {needed / 2**30:.0f} GiB of {free / 2**30:.0f} GiB free"
    for turn in range(turns):
        for contender in contenders:
            result = results[contender.name]
            # A contender a hundred times slower need not take every turn.
            slow = turn > 0 and result.seconds and result.seconds[0] > 5
            if result.skipped or (slow and turn > 1):
                continue
            try:
                answer = contender.ask(case)
            except RuntimeError as error:
                result.skipped = str(error)
                continue
            result.seconds.append(answer["seconds"])
            result.matmul_flops.append(answer["matmul_flops"])
            result.peak_extra_bytes = answer.get("peak_extra_bytes", result.peak_extra_bytes)
    return list(results.values())


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table; the last columns compare with our chunk form in the same case."""
    lines = [
        "| T | H | what | contender | ms | GFLOP/s | of matmul | peak extra MiB | time / chunk | memory / chunk |",
        "| ---: | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    chunk = {(r["length"], r["heads"], r["backward"]): r for r in rows if r["contender"] == "chunk"}
    for row in rows:
        what = "forward + backward" if row["backward"] else "forward"
        head = f"| {row['length']} | {row['heads']} | {what} | {row['contender']} |"
        if "skipped" in row:
            lines.append(f"{head} {row['skipped']} | | | | | |")
            continue
        base = chunk.get((row["length"], row["heads"], row["backward"]), {})
        times = row["milliseconds"] / base["milliseconds"] if "milliseconds" in base else float("nan")
        memory = (row["peak_extra_mib"] or 0) / max(base.get("peak_extra_mib") or 0, 0.1)
        lines.append(
            f"{head} {row['milliseconds']:.1f} | {row['nominal_gflops']:.0f} | {row['share_of_matmul']:.0%} | "
            f"{row['peak_extra_mib']:.0f} | {times:.1f} | {memory:.1f} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over length, one panel for forward and one for forward + backward, one line for each contender and H."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    names = list(dict.fromkeys(row["contender"] for row in rows))
    styles = dict(zip(sorted({row["heads"] for row in rows}), ("-", "--", ":"), strict=False))
    for panel, backward in zip(panels, (False, True), strict=True):
        for number, name in enumerate(names):
            for heads, style in styles.items():
                mine = [
                    (row["length"], row["milliseconds"])
                    for row in rows
                    if (row["contender"], row["heads"], row["backward"]) == (name, heads, backward)
                    and "milliseconds" in row
                ]
                if mine:
                    panel.plot(*zip(*mine, strict=True), style, marker="o", ms=5, color=f"C{number}")
        panel.set(xscale="log", yscale="log", xlabel="tokens", title="forward + backward" if backward else "forward")
        panel.set_xticks(sorted({row["length"] for row in rows}), sorted({row["length"] for row in rows}), minor=False)
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("milliseconds (median)")
    # A colour for each contender, a stroke for each number of heads.
    for number, name in enumerate(names):
        panels[1].plot([], [], color=f"C{number}", lw=3, label=name)
    for heads, style in styles.items():
        panels[1].plot([], [], style, color="black", label=f"{heads} heads")
    figure.legend(loc="outside right center", fontsize=10, frameon=False)
    figure.suptitle(f"KDA, K = V = {WIDTH}, fp32, CPU")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the grid, print the table, write results.json, table.md and plot.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-kda"))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS))
    parser.add_argument("--contenders", nargs="+", choices=list(LINEUP), default=DEFAULT_LINEUP)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="measure again what the folder holds already")
    parser.add_argument("--fla-python", default=sys.executable, help="e.g. .venv/fla/bin/python after make test-fla")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [] if options.fresh else read_rows(options.out / "results.json")
    known = {case_of(row) for row in rows}
    contenders = [start(name, options.fla_python) for name in options.contenders]
    try:
        for heads in options.heads:
            for length in options.lengths:
                for backward in (False,) if options.forward_only else (False, True):
                    # One that ran out of memory in the case before begins anew.
                    contenders = [start(c.name, options.fla_python) if c.died else c for c in contenders]
                    turn = [c for c in contenders if (c.name, length, heads, backward) not in known]
                    if not turn:
                        continue
                    rows += [r.summary() for r in measure(turn, length, heads, backward, options.turns)]
                    rows.sort(key=lambda row: case_of(row)[2:0:-1] + case_of(row)[3:])
                    write(rows, options.out)
                    print(table([r for r in rows if case_of(r)[1:] == (length, heads, backward)]), flush=True)
    finally:
        for contender in contenders:
            contender.process.stdin.close()
            contender.process.wait()
    plot(rows, options.out / "plot.png")
    print(f"\nwritten to {options.out}: results.json, table.md, plot.png")


def case_of(row: dict[str, Any]) -> tuple[str, int, int, bool]:
    """What a row of the results measures."""
    return row["contender"], row["length"], row["heads"], row["backward"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run in the same folder; what was skipped then is tried again."""
    if not path.exists():
        return []
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["results"] if "skipped" not in row]


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write results.json and table.md; a run that is stopped here leaves the file before whole."""
    machine = {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    draft = out / "results.json.tmp"
    report = {"command": command(), "date": time.strftime("%Y-%m-%d"), "machine": machine, "results": rows}
    draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draft.replace(out / "results.json")
    (out / "table.md").write_text(table(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
