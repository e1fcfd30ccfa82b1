"""Look inside: what each head attends to, which depth each sub-layer listens to, which experts a text uses.

python examples/attention_maps.py --output runs/maps            # attention.png, depth.png, experts.png
"""

import argparse
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is

TEXT = "def add(left, right):\n    return left + right\n"
INK = "#24313f"


def draw_attention(maps: dict[str, Tensor], words: list[str], path: Path) -> None:
    """A row of squares per layer, a square per head.

    Args:
        maps: title -> [H, T, T]. What a KDA layer's state amounts to has weights of any sign, which do not sum to one.
        words: the T tokens.
        path: of the PNG.
    """
    heads = max(map(len, maps.values()))
    figure = Figure(figsize=(3 * heads + 0.8, 3.1 * len(maps) + 0.3), dpi=130, layout="constrained")
    places = figure.subplots(len(maps), heads, squeeze=False)
    for row, (title, found) in zip(places, maps.items(), strict=True):
        for head, place in enumerate(row[: len(found)]):
            weights = found[head]
            # A few strong ones would leave everything else white.
            top = weights.abs().flatten().quantile(0.995).item() or 1.0
            if (found < 0).any():
                image = place.imshow(weights, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
            else:
                image = place.imshow(weights, cmap="Blues", norm=PowerNorm(0.5, 0, top), interpolation="nearest")
            figure.colorbar(image, ax=place, shrink=0.75).ax.tick_params(labelsize=6)
            place.set_title(f"{title}, head {head}", fontsize=9, color=INK)
            place.set(xticks=[], yticks=[])
        _name(row[0], words, "y")
    for place in places[-1]:
        _name(place, words, "x")
    figure.supxlabel("token that is read", fontsize=10)
    figure.supylabel("token that reads", fontsize=10)
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
        color = "white" if value > 0.6 else INK
        place.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9, color=color)
    blocks = [f"layers\n{n * block} to {(n + 1) * block - 1}" for n in range(table.shape[1] - 1)]
    place.set_xticks(range(table.shape[1]), ["embedding", *blocks], fontsize=9)
    place.set_yticks(range(len(sublayers)), sublayers, fontsize=9)
    place.tick_params(length=0)
    place.set_title("which depth each sub-layer listens to", fontsize=10, color=INK)
    figure.colorbar(image, ax=place, label="mean weight")
    figure.savefig(path)


def draw_experts(layers: dict[str, Tensor], words: list[str], path: Path) -> None:
    """A panel per layer: experts by tokens, and each expert's share of the text.

    Args:
        layers: title -> [T, N], the weight of an expert for a token, 0 where it is not chosen.
        words: the T tokens.
        path: of the PNG.
    """
    figure = Figure(figsize=(0.17 * max(len(words), 40) + 3.5, 3 * len(layers) + 0.4), dpi=130, layout="constrained")
    places = figure.subplots(len(layers), 2, squeeze=False, width_ratios=[5, 1], sharey="row")
    for (place, share), (title, weights) in zip(places, layers.items(), strict=True):
        place.imshow(weights.T, cmap="Blues", vmin=0, vmax=weights.max(), aspect="auto", interpolation="nearest")
        place.set_ylabel("expert", fontsize=9)
        place.set_title(f"{title}: weight of the chosen experts", fontsize=10, color=INK)
        _name(place, words, "x")
        used = (weights > 0).float().mean(dim=0)
        share.barh(range(len(used)), used, color="#1f5fa8", height=0.8)
        # What every expert would have if all were chosen alike.
        share.axvline(used.mean().item(), color="#c4622d", linewidth=1)
        share.set_title("share of the tokens", fontsize=10, color=INK)
        share.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _name(place: Axes, words: list[str], axis: str) -> None:
    """Write the tokens along an axis, as far as they can be read."""
    if len(words) > 100:
        return
    # Letters are as high as their rows, and narrower than high.
    options = {"fontsize": min(7.0, (250 if axis == "x" else 170) / len(words)), "family": "monospace"}
    if axis == "x":
        place.set_xticks(range(len(words)), words, rotation=0 if max(map(len, words)) < 2 else 90, **options)
    else:
        place.set_yticks(range(len(words)), words, **options)
    place.tick_params(axis=axis, length=0, pad=1)


def main(arguments: list[str] | None = None) -> None:
    """Run the model once over a text and draw what it did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path(__file__).with_name("pico")))
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--output", type=Path, default=Path("runs/maps"))
    parser.add_argument("--layers", type=int, nargs="+", help="layers to draw; default: the last four")
    parser.add_argument("--heads", type=int, default=4, help="heads to draw of each layer")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
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
    shown = options.layers or list(range(count))[-4:]
    kinds = {"linear_attention": "KDA", "full_attention": "MLA"}
    titles = {n: f"layer {n}, {kinds[model.config.layer_types[n]]}" for n in shown}
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
