"""`k3 plan`. Neither it nor what it imports needs torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def add_commands(app: typer.Typer, readable: Callable[[Callable[[], None]], None]) -> None:
    """Add the command to `app`.

    Args:
        readable: runs a command and turns what the user can put right into one line and an exit code.
    """

    @app.command(epilog="Examples:\nk3 plan kimi-k3 --budget 24GiB --context 131072\nk3 plan kimi-k3 --scenarios")
    def plan(
        model: Annotated[str, typer.Argument(help="Preset, folder with a config.json, or that file.")],
        budget: Annotated[
            str | None, typer.Option(help="Main memory for the process, e.g. 24GiB. Without: only what things cost.")
        ] = None,
        context: Annotated[int, typer.Option(min=1, help="Tokens of a row, prompt and answer.")] = 4096,
        batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 1,
        mode: Annotated[
            str, typer.Option(help="Use: infer, train, or lora (pairs beside the attention's linear layers only).")
        ] = "infer",
        dtype: Annotated[str | None, typer.Option(help="Number format of the weights. Default: the config's.")] = None,
        dense: Annotated[str, typer.Option(help="Dense part: full, int8, nf4 or fp4.")] = "full",
        experts: Annotated[str, typer.Option(help="Experts: auto, full, mxfp4, hqq8, hqq4, hqq3 or hqq2.")] = "auto",
        prefill_chunk: Annotated[
            int | None, typer.Option(min=1, help="Tokens of a prompt at once. Default: by the budget.")
        ] = None,
        rollback: Annotated[int, typer.Option(min=0, help="Tokens that can be taken back.")] = 0,
        prefix: Annotated[int, typer.Option(min=0, help="Tokens in the prefix cache.")] = 0,
        optimizer: Annotated[str, typer.Option(help="When training: adamw, muon or sgd.")] = "adamw",
        checkpointing: Annotated[
            bool, typer.Option("--checkpointing", help="Run layers again in the backward.")
        ] = False,
        world: Annotated[int, typer.Option(min=1, help="Accelerators to spread the layers over.")] = 1,
        scenarios: Annotated[
            bool, typer.Option("--scenarios", help="Compare a laptop, one GPU and eight GPUs.")
        ] = False,
        measure: Annotated[
            Path | None,
            typer.Option(
                help="Folder on the disk the model is read from: measure disk and memory, and say how long a "
                "token and a prompt should take. A few seconds, once."
            ),
        ] = None,
        json: Annotated[Path | None, typer.Option(help="Write everything to this file as well.")] = None,
        png: Annotated[Path | None, typer.Option(help="Draw stacked bars into this file.")] = None,
    ) -> None:
        """Say what a model takes, part by part, and how it runs inside a budget of memory. Loads nothing."""
        use = {
            "context": context, "batch": batch, "mode": mode, "dtype": dtype, "dense": dense, "optimizer": optimizer,
            "rollback_tokens": rollback, "prefix_tokens": prefix, "checkpointing": checkpointing,
        }  # fmt: skip
        readable(lambda: run_plan(model, budget, use, experts, prefill_chunk, world, scenarios, measure, json, png))


def run_plan(
    model: str,
    budget: str | None,
    use: dict,
    experts: str,
    chunk: int | None,
    world: int,
    side_by_side: bool,
    measure: Path | None,
    json: Path | None,
    png: Path | None,
) -> None:
    """Plan or count, print, write."""
    from modeling_k3.demo import UserError

    if measure is not None and (budget is None or side_by_side):
        raise UserError("--measure says how long a plan takes: give --budget as well, and not --scenarios.")
    other = {"budget": budget, "experts": experts, "prefill_chunk": chunk, "world": world, **use}
    _refuse_unused(other, side_by_side)
    try:
        lines, content, bars = _answer(model, budget, use, experts, chunk, world, side_by_side, measure)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    typer.echo("\n".join(lines))
    if json is not None or png is not None:
        from modeling_k3.planning import report

        if json is not None:
            report.write_json(content, json)
        if png is not None:
            report.draw(bars, png, f"{Path(model).name}: memory")


def _refuse_unused(given: dict[str, Any], side_by_side: bool) -> None:
    """Say in a line which options would change nothing.

    Args:
        given: values by name; what is not a default was asked for.
        side_by_side: machines are compared, for which context alone is read.
    """
    from modeling_k3.demo import UserError

    none = {"budget": None, "dtype": None, "prefill_chunk": None, "experts": "auto", "dense": "full", "mode": "infer"}
    none |= {"batch": 1, "world": 1, "optimizer": "adamw", "rollback_tokens": 0, "prefix_tokens": 0}
    none |= {"checkpointing": False}
    if side_by_side:
        unused, where = set(none), "--scenarios"
    elif given["budget"] is not None:
        unused, where = {"world", "optimizer", "checkpointing"}, "--budget"
    elif given["mode"] == "infer":
        unused, where = {"optimizer", "checkpointing"}, "--mode infer"
    else:
        unused, where = {"prefill_chunk", "rollback_tokens", "prefix_tokens"}, f"--mode {given['mode']}"
    found = [name for name in none if name in unused and given[name] != none[name]]
    if found:
        names = ", ".join("--" + name.removesuffix("_tokens").replace("_", "-") for name in found)
        raise UserError(f"{where} does not use {names}: leave that out.")


def _answer(
    model: str,
    budget: str | None,
    use: dict,
    experts: str,
    chunk: int | None,
    world: int,
    side_by_side: bool,
    measure: Path | None,
) -> tuple[list[str], object, dict]:
    """Lines, content for JSON, bars for the picture."""
    from dataclasses import asdict

    from modeling_k3.planning import report
    from modeling_k3.planning.plan import base_workload, plan_memory
    from modeling_k3.planning.shape import read_shape
    from modeling_k3.planning.workload import memory_table

    if side_by_side:
        from modeling_k3.planning.scenarios import scenarios

        found = scenarios(model, use["context"])
        bars = {f"{s.title}\n{name}": memory for s in found for name, memory in s.memories.items()}
        return report.scenario_lines(found), [asdict(scenario) for scenario in found], bars
    if budget is not None:
        plan = plan_memory(model, budget, experts=experts, prefill_chunk=chunk, **use)
        items = {name: size for group in plan.table.values() for name, size in group.items()}
        found = _expected(plan, model, measure) if measure is not None else None
        content = {**plan.as_dict(), "expected": found and asdict(found)}
        return report.plan_lines(plan, found), content, {plan.name: (plan.budget, items)}
    shape = read_shape(model)
    chosen = base_workload(shape, experts=experts, **use, **({} if chunk is None else {"prefill_chunk": chunk}))
    table = memory_table(shape, chosen)
    lines, content = report.table_lines(table), {"workload": vars(chosen), "bytes": table}
    if world > 1:
        from modeling_k3.planning.devices import split_layers
        from modeling_k3.planning.sizes import format_bytes

        split = split_layers(shape, chosen, world)
        lines.append(f"weights over {world} devices: {', '.join(map(format_bytes, split.weight_bytes))}")
        content = {**content, "device_map": split.device_map(shape), "weight_bytes_by_device": split.weight_bytes}
    return lines, content, {shape.name: (None, {n: s for group in table.values() for n, s in group.items()})}


def _expected(plan: Any, model: str, folder: Path) -> Any:
    """Measure, or remember, and compute."""
    from modeling_k3.planning.expected import expected_of
    from modeling_k3.planning.shape import read_shape

    if not folder.is_dir():
        raise ValueError(f"--measure {folder} is no folder; allowed is one on the disk the model will be read from")
    typer.echo("measuring disk and memory, a few seconds unless that was done before ...", err=True)
    from modeling_k3.planning.speed import measure_machine

    return expected_of(plan, read_shape(model), measure_machine(folder))
