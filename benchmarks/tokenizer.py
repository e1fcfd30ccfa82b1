"""K3Tokenizer against tiktoken: the same ranks, the same pattern, the same text, taking turns in one process.

    python benchmarks/tokenizer.py --ranks tiktoken.model [--text FILE ...] [--out FILE.json]

Any rank file in tiktoken's format will do; the release has 163,584 ranks. Text is cut to one megabyte. The default text
is Python's own sources. Needs tiktoken. Prints and writes medians of wall time and their ratio; ids must be equal.
"""

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import tiktoken
from measure import machine

from modeling_k3.tokenization_k3 import K3Tokenizer
from modeling_k3.vocabulary import ALTERNATIVES, read_ranks

MEGABYTE = 1_000_000
#: The format cuts text here before anything else, so tiktoken is given the same slices.
SLICE = 400_000


def standard_library() -> str:
    """The first megabyte of Python's own sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(path.read_text(errors="replace") for path in sources)


def seconds(encode: Callable[[str], list[int]], text: str) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    encode(text)
    return time.perf_counter() - began


def in_slices(peer: tiktoken.Encoding, text: str) -> list[int]:
    """Ids of the slices, joined."""
    slices = (text[start : start + SLICE] for start in range(0, len(text), SLICE))
    return [token for piece in slices for token in peer.encode(piece, disallowed_special=())]


def compare(ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]], text: str, turns: int) -> dict:
    """Medians over alternating turns, after one of each to warm up and to compare the ids."""
    if ours(text) != theirs(text):
        raise SystemExit("the ids differ")
    times = [(seconds(ours, text), seconds(theirs, text)) for _ in range(turns)]
    mine, peer = (statistics.median(column) for column in zip(*times, strict=True))
    return {"bytes": len(text.encode()), "k3_s": mine, "tiktoken_s": peer, "ratio": mine / peer}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks = read_ranks(options.ranks)
    peer = tiktoken.Encoding("k3", pat_str="|".join(ALTERNATIVES), mergeable_ranks=ranks, special_tokens={})
    began = time.perf_counter()
    tokenizer = K3Tokenizer(vocab_file=str(options.ranks))
    report: dict = {"ranks": len(ranks), "load_s": time.perf_counter() - began, "texts": {}, "machine": machine()}
    texts = {path.name: path.read_text() for path in options.text} or {"standard library": standard_library()}
    for name, text in texts.items():
        cut = text.encode()[:MEGABYTE].decode(errors="ignore")
        row = compare(tokenizer.encode, lambda x: in_slices(peer, x), cut, options.turns)
        report["texts"][name] = row
        print(f"{name}: {row['bytes'] / 1e6:.2f} MB, K3 {row['k3_s']:.2f} s, tiktoken {row['tiktoken_s']:.2f} s")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
