"""Every tolerance of the test suite, each with the reason for its size.

A bound is an absolute difference unless its reason says otherwise. Golden cases bring their own bounds in the
`tolerance` block of `case.json`; the entries under the same keys here are the suggestion of `tests/golden/README.md`
(section 3) and serve tensors for which a case states none. A bound is never loosened to make a test pass: its reason
names what the arithmetic was measured to cost, and a result far above that is wrong.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """A bound and why it is neither smaller nor larger."""

    bound: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    # Golden cases, fp32 against the stored fp32 reference. Logits have RMS 2 and reach 9.6.
    "logits_max_abs": Tolerance(5e-4, "fp32 against fp64 costs 5.9e-5, other evaluation orders 7.4e-5"),
    "logits_rms": Tolerance(5e-5, "fp32 against fp64 costs 4.6e-6; sees small errors that are everywhere"),
    "hidden_max_abs": Tolerance(2e-4, "fp32 against fp64 costs 2.0e-5"),
    "layer_output_max_abs": Tolerance(2e-4, "fp32 against fp64 costs 2.5e-5"),
    "module_io_max_abs": Tolerance(2e-4, "as layer outputs, of which they are the summands"),
    "block_residuals_max_abs": Tolerance(2e-4, "block residuals are layer outputs put aside"),
    "router_weights_max_abs": Tolerance(5e-5, "fp32 against fp64 costs 4.0e-6; the weights are at most 2.5"),
    "recurrent_state_max_abs": Tolerance(2e-4, "fp32 against fp64 costs 6.3e-6, fused kernels 1.1e-5"),
    "conv_state_max_abs": Tolerance(2e-4, "fp32 against fp64 costs 9.6e-6"),
    "key_value_cache_max_abs": Tolerance(2e-4, "fp32 against fp64 costs 1.3e-5"),
    "gen_logits_max_abs": Tolerance(1e-3, "32 steps through the cache cost 1.6e-4 against one forward"),
    "other_process_logits": Tolerance(
        5e-5, "equal weights elsewhere in memory: BLAS picks kernels by alignment, which cost 3.8e-6 on logits of RMS 1"
    ),
    "native_kimi_linear_logits": Tolerance(
        5e-4, "fp32 against fp32 in another order, as in the golden cases: logits reach 5 and differ by 2e-5"
    ),
    # Golden cases, a model that is fp64 throughout.
    "logits_f64_max_abs": Tolerance(
        1e-6, "`logits_f64` is stored as fp32: at 9.6 half a unit in the last place is 4.8e-7"
    ),
    "f64_paths_max_abs": Tolerance(
        1e-10, "recurrent and chunked evaluation differ by 1e-13; a detour through fp32 costs 1e-6"
    ),
    # Golden cases in bfloat16: relative error per token, ||a - b|| / ||b|| over the vocabulary, and a rate.
    "median_relative_error_per_token": Tolerance(
        0.08, "the bf16 reference is at 3.7 %, with every parameter in bf16 at 6.6 %"
    ),
    "p90_relative_error_per_token": Tolerance(
        0.25, "the bf16 reference is at 6.7 %, with every parameter in bf16 at 20 %"
    ),
    "forced_median_relative_error_per_token": Tolerance(
        0.05, "with the experts of the fp32 run: the bf16 reference, which chooses the same ones, is at 3.7 %"
    ),
    "forced_p90_relative_error_per_token": Tolerance(
        0.10, "as the median; the bf16 reference is at 6.7 %, a model with every parameter in bf16 at 20 %"
    ),
    "top1_agreement_min": Tolerance(
        0.85, "a rate, at least; the bf16 reference agrees with fp32 on 92 % of the tokens"
    ),
    # Unit tests: one operation on numbers of order one against its equation in fp64.
    "unit_f64_max_abs": Tolerance(1e-12, "a few thousand roundings of 1e-16; a detour through fp32 costs 1e-7"),
    "differences_f64": Tolerance(
        1e-5,
        "relative: central differences with steps of 1e-5 are off by the third derivative's 1e-10 and rounding's 1e-9",
    ),
    "unit_fp32_max_abs": Tolerance(2e-6, "a few dozen roundings of 6e-8; one in bf16 costs 4e-3"),
    "unit_softplus_max_abs": Tolerance(
        2e-8, "torch's softplus is the identity above 20, where it is off by 2e-9; the gates here multiply it by 4.5"
    ),
    "unit_kda_fp32_max_abs": Tolerance(
        1e-5, "300 tokens in chunks cost 2e-6 in fp32, token by token as much; decay or beta in bf16 costs 1e-3"
    ),
    "unit_kda_strong_decay_fp32_max_abs": Tolerance(
        5e-5,
        "a log decay below -104 is a factor of zero in fp32; sums that pass through one that large round by 4e-6 per "
        "token, and small decays beside it inherit that",
    ),
    "unit_kda_gradient_fp32_relative": Tolerance(
        1e-4, "relative to the largest entry: gradients of 130 tokens cost 1e-5 in fp32, one bf16 product 4e-3"
    ),
    "unit_long_state_relative": Tolerance(
        1e-5, "relative norm: 4096 tokens at decay 0.99992 cost 3e-7 in fp32; the decay rounded to bf16 costs 1e-3"
    ),
    "unit_experts_fp32_max_abs": Tolerance(1e-5, "outputs reach 7.6; three products in a row cost 2e-6 in fp32"),
    "unit_experts_gradient_fp32_relative": Tolerance(
        1e-5, "relative to the largest entry: fp32 products cost 5e-7, one in bf16 4e-3"
    ),
    "unit_mla_bf16_relative": Tolerance(
        0.02, "relative norm: six bf16 products in a row, each rounding to 2^-8, cost about 0.5 %"
    ),
    "unit_model_fp32_max_abs": Tolerance(1e-4, "logits of order 1 to 5 after three layers, pieces against whole: 1e-5"),
    "unit_bf16_gradient_relative": Tolerance(
        0.02, "relative norm: the incoming gradient and the result are rounded to 2^-8 each, which costs about 0.4 %"
    ),
    "unit_kda_layer_bf16_relative": Tolerance(
        0.03, "relative norm: projections, convolutions and output rounded to 2^-8 each cost about 1 %"
    ),
}


def bound(name: str) -> float:
    """The bound filed under `name`; an unknown name is a KeyError, so that no test invents its own."""
    return TOLERANCES[name].bound
