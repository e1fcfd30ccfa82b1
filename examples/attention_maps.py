"""Look inside: what each head attends to, which depth each sub-layer listens to, which experts a text uses.

python examples/attention_maps.py --output runs/maps            # attention.png, depth.png, experts.png
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is

TEXT = "for i in x:\n    print(i)\n"
INK = "#24313f"
# Inches that a line of the smallest letters, 9 points, takes.
LINE = 0.145


def draw_attention(maps: dict[str, Tensor], words: list[str], path: Path) -> None:
    """A row of squares per layer, a square per head; layers of one kind share their colours.

    Args:
        maps: "layer and kind" -> [H, T, T]. What a KDA layer's state amounts to has weights of any sign, which do not
            sum to one.
        words: the T tokens.
        path: of the PNG.
    """
    heads, side = max(map(len, maps.values())), min(max(len(words) * LINE, 1.8), 4.5)
    kinds = {title: title.rpartition(" ")[2] for title in maps}
    # Those that share their colours stand together.
    maps = {title: maps[title] for title in sorted(maps, key=kinds.__getitem__)}
    figure = Figure(figsize=(side * heads + 2.2, side * len(maps) + 1.2), dpi=130, layout="constrained")
    places = figure.subplots(len(maps), heads, squeeze=False, sharex=True, sharey=True)
    rows = dict(zip(maps, places, strict=True))
    for kind in dict.fromkeys(kinds.values()):
        alike = [title for title in maps if kinds[title] == kind]
        squares = [place for title in alike for place in rows[title]]
        weights = torch.cat([maps[title].flatten() for title in alike]).numpy()
        # A few strong ones would leave everything else white, and so would a scale without the root.
        top, is_signed = float(np.quantile(np.abs(weights), 0.995)) or 1.0, bool((weights < 0).any())
        norm = FuncNorm((lambda x: np.sign(x) * np.abs(x) ** 0.5, lambda x: np.sign(x) * x * x), -top * is_signed, top)
        for title in alike:
            for head, place in enumerate(rows[title][: len(maps[title])]):
                image = place.imshow(
                    maps[title][head], cmap="RdBu_r" if is_signed else "Blues", norm=norm, interpolation="nearest"
                )
        ticks = [top * n for n in ((-1, -0.25, 0, 0.25, 1) if is_signed else (0, 0.1, 0.4, 1))]
        bar = figure.colorbar(image, ax=squares, aspect=4 * side * len(alike), pad=0.01)
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks], fontsize=10)
        bar.set_label(f"weight, {kind}", fontsize=11)
    for place in places.flat:
        place.tick_params(length=0)
    for head, place in enumerate(places[0]):
        place.set_title(f"head {head}", fontsize=12, color=INK)
    for title, row in rows.items():
        _name(row[0], words, "y", side)
        row[0].set_ylabel(title, fontsize=12, color=INK)
    for place in places[-1]:
        _name(place, words, "x", side)
    figure.supxlabel("token that is read; rows: token that reads", fontsize=11)
    figure.savefig(path)


def draw_depth(weights: list[Tensor], sublayers: list[str], block: int, path: Path) -> None:
    """A row per sub-layer, a column per depth it can listen to: the mean weight over the text.

    Args:
        weights: [T, L] of every sub-layer. Source 0 is the embedding, source n the sum of block n, and the last one the
            sum of the block that is open, as far as it goes.
        sublayers: their names.
        block: layers in a block.
        path: of the PNG.
    """
    table = torch.full((len(weights), weights[-1].shape[1]), float("nan"))
    for row, found in zip(table, weights, strict=True):
        row[: found.shape[1]] = found.mean(dim=0)
    size = (1.3 * table.shape[1] + 3, 0.4 * len(table) + 1.2)
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    place = figure.subplots()
    image = place.imshow(table, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, column in (table == table).nonzero().tolist():
        value = table[row, column].item()
        color = "white" if value > 0.55 else INK
        place.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9, color=color)
    blocks = [f"layers\n{n * block} to {(n + 1) * block - 1}" for n in range(table.shape[1] - 1)]
    place.set_xticks(range(table.shape[1]), ["embedding", *blocks], fontsize=9)
    place.set_yticks(range(len(sublayers)), sublayers, fontsize=9)
    place.tick_params(length=0)
    place.set_title("which depth each sub-layer listens to", fontsize=12, color=INK)
    figure.colorbar(image, ax=place, label="mean weight")
    figure.savefig(path)


def draw_experts(layers: dict[str, Tensor], words: list[str], path: Path) -> None:
    """A panel per layer: experts by tokens, and each expert's share of the text.

    Args:
        layers: title -> [T, N], the weight of an expert for a token, 0 where it is not chosen.
        words: the T tokens.
        path: of the PNG.
    """
    top = max(weights.max().item() for weights in layers.values())
    width = min(max(len(words) * 0.22, 4.5), 11.0)
    figure = Figure(figsize=(width + 3, 3 * len(layers) + 0.6), dpi=130, layout="constrained")
    places = figure.subplots(len(layers), 2, squeeze=False, width_ratios=[width, 2], sharex="col", sharey="row")
    for (place, share), (title, weights) in zip(places, layers.items(), strict=True):
        image = place.imshow(weights.T, cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        place.set_ylabel(f"{title}, expert", fontsize=11, color=INK)
        used = (weights > 0).float().mean(dim=0)
        share.barh(range(len(used)), used, color="#1f5fa8", height=0.8)
        # What every expert would have if all were chosen alike.
        share.axvline(used.mean().item(), color="#c4622d", linewidth=1)
        share.spines[["top", "right"]].set_visible(False)
        place.tick_params(axis="x", length=0)
    _name(places[-1][0], words, "x", width)
    places[0][0].set_title("weight of the chosen experts", fontsize=12, color=INK)
    places[0][1].set_title("share of tokens", fontsize=12, color=INK)
    places[-1][1].set_xlabel("line: all alike", fontsize=10, color="#c4622d")
    figure.colorbar(image, ax=places, label="weight", aspect=30, pad=0.01)
    figure.savefig(path)


def _name(place: Axes, words: list[str], axis: str, inches: float) -> None:
    """Write the tokens along an axis of that length: all, or every n-th where they would not be readable."""
    step = math.ceil(len(words) * LINE / inches - 0.01)
    shown = words[::step]
    ticks = place.set_xticks if axis == "x" else place.set_yticks
    # Letters stand upright, words do not fit.
    turned = {"rotation": 90} if axis == "x" and max(map(len, shown)) > 1 else {}
    ticks(range(0, len(words), step), shown, fontsize=9, family="monospace", **turned)
    place.tick_params(axis=axis, length=0, pad=2)


def main(arguments: list[str] | None = None) -> None:
    """Run the model once over a text and draw what it did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")), help="a folder, or one of the hub")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--output", type=Path, default=Path("runs/maps"))
    parser.add_argument("--layers", type=int, nargs="+", help="layers to draw; default: the last two")
    parser.add_argument("--heads", type=int, default=4, help="heads to draw of each layer")
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        parser.error(
            f"--model {options.model}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    # Eager attention forms weights; "exact" writes a KDA layer as the attention that its state amounts to.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager").eval()
    ids = tokenizer(options.text, return_tensors="pt")["input_ids"]
    words = [tokenizer.decode(i).replace("\n", "↵").replace(" ", "·") for i in ids[0]]
    chosen: dict[str, Tensor] = {}

    def keep(name: str, output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, weights, experts = output
        chosen[f"layer {name.split('.')[2]}"] = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))

    for name, module in model.named_modules():
        if name.endswith(".block_sparse_moe.gate"):
            module.register_forward_hook(lambda _module, _inputs, output, name=name: keep(name, output))
    with torch.inference_mode():
        found = model(ids, kda_implementation="exact", output_attentions=True, output_depth_weights=True)

    options.output.mkdir(parents=True, exist_ok=True)
    count = model.config.num_hidden_layers
    shown = options.layers or list(range(count))[-2:]
    kinds = {"linear_attention": "KDA", "full_attention": "MLA"}
    titles = {n: f"layer {n} {kinds[model.config.layer_types[n]]}" for n in shown}
    maps = {titles[n]: found.attentions[n][0, : options.heads].float() for n in shown}
    draw_attention(maps, words, options.output / "attention.png")
    feed_forward = {"sparse": "experts", "dense": "MLP"}
    parts = [("attention", feed_forward[kind]) for kind in model.config.mlp_layer_types]
    sublayers = [f"layer {n} {part}" for n, both in enumerate(parts) for part in both] + ["output"]
    if found.depth_weights:
        depth = [weights[0].float() for weights in found.depth_weights]
        draw_depth(depth, sublayers, model.config.attn_res_block_size, options.output / "depth.png")
    if chosen:
        draw_experts({name: chosen[name] for name in list(chosen)[-4:]}, words, options.output / "experts.png")
    print(f"written: {', '.join(sorted(str(path) for path in options.output.glob('*.png')))}")


if __name__ == "__main__":
    main()
