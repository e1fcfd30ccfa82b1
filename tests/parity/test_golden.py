"""The model against the golden cases: every tensor that a case stores, within the bounds the case states.

Cases come from `tests/golden`, or from the folder named by `K3_GOLDEN`. See `golden.py` for what is compared how, and
`test_golden_mutations.py` for the proof that these comparisons can fail.
"""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from tests.parity.conftest import LoadCase
from tests.parity.golden import COMMITTED, Case, check, discover, kind_of, names_of, stage_of
from tests.parity.recording import Record, forced_routing, run_generate, run_greedy, run_pieces, run_prompt
from tests.tolerances import bound

CASES = [case for case in discover() if case.is_dense]
FULL_PRECISION = [case for case in CASES if case.compute_dtype == torch.float32]
LOW_PRECISION = [case for case in CASES if case.compute_dtype != torch.float32]
DENSE = {
    "base", "padded", "grouped_sigmoid", "grouped_softmax", "kimi_linear_like", "long", "chunked_prefill", "bf16",
}  # fmt: skip
# What a cache accounts for: a run in pieces or by single tokens must end with these.
CACHED_KINDS = ("logits", "recurrent_state", "conv_state", "key_value_cache")
# Kept in fp32 by the release whatever the model's dtype (golden README, 4.9).
FP32_LIST = (
    "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias", "o_norm.weight",
    "e_score_correction_bias",
)  # fmt: skip


def ids(cases: Iterable[Case]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


def storing(name: str, cases: Iterable[Case] = FULL_PRECISION) -> list:
    """Parameters: the cases that store a tensor of this name."""
    return ids(case for case in cases if name in case.names)


def cached_names(case: Case) -> list[str]:
    return [name for name in names_of(case, "prompt") if kind_of(name) in CACHED_KINDS]


def gen_steps(case: Case) -> int:
    return case.tensors["gen.tokens"].shape[1]


def test_committed_folder_is_complete() -> None:
    """The comparisons below are parametrised over what is found: nothing may be missing from the committed folder."""
    cases = {case.name: case for case in discover(COMMITTED)}
    assert {name for name, case in cases.items() if case.is_dense} == DENSE
    assert cases.keys() - DENSE == {"mxfp4_release", "mxfp4_release_wide"}
    assert (COMMITTED / "full_manifest.json").is_file()
    kinds = {name: {kind_of(tensor) for tensor in case.names} for name, case in cases.items()}
    everything = {"logits", "hidden", "layer_output", "router_indices", "router_weights", "num_block_residuals"}
    everything |= {"block_residuals", "module_io", "recurrent_state", "conv_state", "key_value_cache"}
    assert everything | {"gen_logits", "gen_tokens", "reference", "input"} == kinds["base"]
    assert "attention_mask" in cases["padded"].names
    assert "pieces" in cases["chunked_prefill"].names
    assert "logits_fp32_math" in cases["bf16"].names
    with_f64 = {name for name, case in cases.items() if "logits_f64" in case.names}
    assert with_f64 == {"base", "grouped_sigmoid", "grouped_softmax", "kimi_linear_like"}


@pytest.mark.parametrize("case", ids(CASES))
def test_every_stored_tensor_is_of_a_known_kind(case: Case) -> None:
    """A kind of tensor that the comparison does not know would pass unseen."""
    assert {stage_of(name) for name in case.names} <= {"", "prompt", "pieces", "gen"}
    assert names_of(case, "prompt")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, id=f"{case.name}-{kind}")
        for case in FULL_PRECISION
        for kind in dict.fromkeys(kind_of(name) for name in names_of(case, "prompt"))
    ],
)
def test_prompt(case: Case, kind: str, prompt_record: Callable[[Case], Record]) -> None:
    """One forward over the prompt: logits, streams, module inputs and outputs, routing, block residuals, states."""
    check(case, prompt_record(case), [name for name in names_of(case, "prompt") if kind_of(name) == kind])


@pytest.mark.parametrize("case", ids(FULL_PRECISION))
def test_public_outputs_are_the_recorded_tensors(case: Case, prompt_record: Callable[[Case], Record]) -> None:
    """`hidden_states` and `router_logits` hand out what the hooks saw: streams between layers, the normed end."""
    record = prompt_record(case)
    depth = case.config["num_hidden_layers"]
    for index in range(depth):
        assert torch.equal(record[f"hidden_states.{index}"], record[f"layers.{index}.input"])
    assert torch.equal(record[f"hidden_states.{depth}"], record["hidden"])
    assert f"hidden_states.{depth + 1}" not in record
    routers = [index for index in range(depth) if f"layers.{index}.router_logits" in record]
    assert len(routers) == sum(name.startswith("router_logits.") for name in record)
    for position, index in enumerate(routers):
        assert torch.equal(record[f"router_logits.{position}"], record[f"layers.{index}.router_logits"])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("case", ids(FULL_PRECISION))
def test_attention_implementations(case: Case, implementation: str, load_case: LoadCase) -> None:
    """Both attention paths of the library compute the same MLA."""
    model = load_case(case, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    check(case, run_prompt(model, case), names_of(case, "prompt"))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("case", ids(case for case in FULL_PRECISION if case.config.get("num_experts")))
def test_experts_implementations(case: Case, implementation: str, load_case: LoadCase) -> None:
    """All ways of multiplying with the chosen experts compute the same sum."""
    model = load_case(case, experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    check(case, run_prompt(model, case), names_of(case, "prompt"))


@pytest.mark.parametrize("case", storing("pieces"))
def test_chunked_prefill(case: Case, load_case: LoadCase) -> None:
    """The prompt in the stored pieces through one cache."""
    record = run_pieces(load_case(case), case, case.tensors["pieces"].tolist())
    renamed = {"logits_pieces": record.pop("logits")} | {f"pieces.{name}": value for name, value in record.items()}
    check(case, renamed, names_of(case, "pieces"))


@pytest.mark.parametrize("case", ids(FULL_PRECISION))
def test_token_by_token(case: Case, load_case: LoadCase) -> None:
    """The prompt one token per forward: the recurrent evaluation gives the one-shot logits and states."""
    record = run_pieces(load_case(case), case, [1] * case.input_ids.shape[1])
    check(case, record, cached_names(case))


@pytest.mark.parametrize("case", storing("gen.tokens"))
def test_greedy_stepwise(case: Case, load_case: LoadCase) -> None:
    """The greedy continuation one token per forward: tokens, the logits they come from, the states it ends in."""
    check(case, run_greedy(load_case(case), case, gen_steps(case)), names_of(case, "gen"))


@pytest.mark.parametrize("case", [param for param in storing("gen.tokens") if "pieces" in param.values[0].names])
def test_greedy_after_chunked_prefill(case: Case, load_case: LoadCase) -> None:
    """The continuation does not depend on how the prompt was cut."""
    record = run_greedy(load_case(case), case, gen_steps(case), case.tensors["pieces"].tolist())
    check(case, record, names_of(case, "gen"))


@pytest.mark.parametrize("case", storing("gen.tokens"))
def test_greedy_by_generate(case: Case, load_case: LoadCase) -> None:
    """The library's `generate` prepares inputs, mask and cache itself and gives the same continuation and states."""
    check(case, run_generate(load_case(case), case, gen_steps(case)), names_of(case, "gen"))


@pytest.mark.parametrize("case", storing("attention_mask"))
def test_each_row_alone(case: Case, load_case: LoadCase) -> None:
    """A row without its padding gives everything that it gives in the padded batch, continuation included."""
    model = load_case(case)
    for row in range(case.input_ids.shape[0]):
        single = case.alone(row)
        check(single, run_prompt(model, single), names_of(single, "prompt"))
        if "gen.tokens" in single.names:
            check(single, run_greedy(model, single, gen_steps(single)), names_of(single, "gen"))


@pytest.mark.parametrize("case", storing("logits_f64"))
def test_double_precision(case: Case, load_case: LoadCase) -> None:
    """An fp64 model computes in fp64 from end to end: `logits_f64` to its storage precision, states in fp64."""
    record = run_prompt(load_case(case, double=True), case)
    assert (record["logits"] - case.tensors["logits_f64"].double()).abs().max() <= bound("logits_f64_max_abs")
    assert {value.dtype for value in record.values() if value.is_floating_point()} == {torch.float64}
    check(case, record, names_of(case, "prompt"))


@pytest.mark.parametrize("case", storing("logits_f64"))
def test_double_precision_token_by_token(case: Case, load_case: LoadCase) -> None:
    """Chunked and recurrent evaluation are the same function: in fp64 they agree far below fp32 rounding."""
    model = load_case(case, double=True)
    whole, steps = run_prompt(model, case), run_pieces(model, case, [1] * case.input_ids.shape[1])
    for name, value in steps.items():
        assert (value - whole[name]).abs().max() <= bound("f64_paths_max_abs"), name


@pytest.mark.parametrize("case", ids(LOW_PRECISION))
def test_low_precision_keeps_the_fp32_list(case: Case, load_case: LoadCase) -> None:
    """Loading in bf16 leaves the release's fp32 tensors at their stored values; all others take the dtype."""
    model = load_case(case)
    stored = case.weights
    for name, tensor in model.state_dict().items():
        if name.endswith(FP32_LIST):
            assert tensor.dtype == torch.float32, name
            assert torch.equal(tensor, stored[name]), name
        else:
            assert tensor.dtype == case.compute_dtype, name


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """[tokens]: norm of the difference over norm, across the vocabulary."""
    return (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)


@pytest.mark.parametrize("case", ids(LOW_PRECISION))
def test_low_precision(case: Case, prompt_record: Callable[[Case], Record]) -> None:
    """bf16 logits against fp32 arithmetic on the same weights, by relative error per token; the KDA state is fp32."""
    record = prompt_record(case)
    real = case.attention_mask.bool()
    logits, expected = record["logits"][real], case.tensors["logits_fp32_math"][real]
    errors = relative_errors(logits, expected)
    assert errors.median() <= case.bound("median_relative_error_per_token")
    assert errors.quantile(0.9) <= case.bound("p90_relative_error_per_token")
    agreement = (logits.argmax(-1) == expected.argmax(-1)).double().mean()
    assert agreement >= case.bound("top1_agreement_min")
    assert {value.dtype for name, value in record.items() if "recurrent_state" in name} == {torch.float32}
    assert {value.dtype for name, value in record.items() if "conv_state" in name} == {case.compute_dtype}


@pytest.mark.parametrize("case", ids(LOW_PRECISION))
def test_low_precision_with_forced_routing(case: Case, load_case: LoadCase) -> None:
    """With the experts of the fp32 run, so that no near tie decides, bf16 costs no more than in the reference."""
    with forced_routing(load_case(case), run_prompt(load_case(case, dtype=torch.float32), case)):
        logits = run_prompt(load_case(case), case)["logits"]
    real = case.attention_mask.bool()
    errors = relative_errors(logits[real], case.tensors["logits_fp32_math"][real])
    assert errors.median() <= bound("forced_median_relative_error_per_token")
    assert errors.quantile(0.9) <= bound("forced_p90_relative_error_per_token")


@pytest.mark.parametrize("case", ids(LOW_PRECISION))
def test_low_precision_weights_in_fp32(case: Case, load_case: LoadCase) -> None:
    """The rounded weights in fp32 arithmetic meet the fp32 bounds: what remains in bf16 is rounding, not the model."""
    derived = case.against("_fp32_math")
    check(derived, run_prompt(load_case(case, dtype=torch.float32), derived), names_of(derived, "prompt"))
