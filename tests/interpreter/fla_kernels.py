"""fla's real kernels behind our seam, on a CPU: values, state, gradients, causality, packed rows, the choice itself.

    make test-fla

Not named `test_*`, so that the usual runs, whose environment has neither fla nor triton, do not collect it; there is
no skip in it. float32 only: the interpreter's bfloat16 products are not those of a GPU.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.interpreter import shims

shims.install()

from modeling_k3 import attn_res_fla, fused_kernel, kda_fla, kda_paths, kda_verdicts  # noqa: E402
from modeling_k3.attn_res import mix_residuals  # noqa: E402
from modeling_k3.attn_res_fla import probe_fused_mix  # noqa: E402
from modeling_k3.fused_kernel import FusedKernel  # noqa: E402
from modeling_k3.kda_check import compare, make_case  # noqa: E402
from modeling_k3.kda_fla import Kernels, find_kernels, fla_kda  # noqa: E402
from modeling_k3.kda_ops import recurrent_kda  # noqa: E402
from modeling_k3.norms import FUSED_GATED_NORM, K3RMSNormGated, gated_norm  # noqa: E402
from modeling_k3.short_conv import FUSED_FILTER, K3ShortConvolution, filter_and_silu  # noqa: E402
from tests.models import max_diff  # noqa: E402
from tests.tolerances import bound  # noqa: E402

WIDTH = 32


@pytest.fixture(autouse=True)
def kernels_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    for module in (kda_fla, fused_kernel):
        monkeypatch.setattr(module, "SUPPORTED_DEVICES", ["cuda", "cpu"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kda_verdicts, "_seen", {})
    kda_paths.reset_choices()
    for kernel in (FUSED_GATED_NORM, FUSED_FILTER):
        kernel.reset()
    yield
    kda_paths.reset_choices()


def test_the_kernels_are_known() -> None:
    found = find_kernels()
    assert isinstance(found, Kernels), found
    assert kda_fla.refusal(torch.empty(1, 9, 1, WIDTH), -5.0, True, torch.float32) is None


@pytest.mark.parametrize(("gate", "length"), [("released", 80), ("softplus", 33), ("parallel keys", 17)])
def test_chunk_kernel_forward_gradients_and_causality(gate: str, length: int) -> None:
    finding = compare(fla_kda, make_case(gate, length, torch.float32, heads=1, width=WIDTH))
    assert not finding.failures, finding


@pytest.mark.parametrize("gate", ["released", "at the bound", "softplus"])
def test_recurrent_kernel(gate: str) -> None:
    finding = compare(fla_kda, make_case(gate, 9, torch.float32, width=WIDTH), gradients=False)
    assert not finding.failures, finding


def test_packed_rows_and_their_states() -> None:
    q, k, v, log_decay, beta, state = make_case("released", 70, torch.float32, heads=1, width=WIDTH).inputs
    borders, states = torch.tensor([0, 5, 70]), torch.cat([state, -state])
    with torch.no_grad():
        o, final = fla_kda(q, k, v, log_decay, beta, states, cu_seqlens=borders, lower_bound=-5.0)
    expected_o, expected = recurrent_kda(q, k, v, log_decay, beta, states, cu_seqlens=borders)
    assert max_diff(o, expected_o) < bound("unit_kda_fp32_max_abs")
    assert max_diff(final, expected) < bound("unit_kda_fp32_max_abs")


def test_the_seam_takes_the_kernel_when_asked() -> None:
    inputs = make_case("released", 9, torch.float32, heads=1, width=WIDTH).inputs
    assert kda_paths.choose("fla", inputs[0], torch.float32, -5.0, False) == "fla"
    o, state = kda_paths.run_kda("fla", *inputs, lower_bound=-5.0)
    expected_o, expected = recurrent_kda(*inputs)
    assert max_diff(o, expected_o) < bound("unit_kda_fp32_max_abs") and max_diff(state, expected) < 1e-4
    assert not kda_paths._raised


def test_fused_mixture_over_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 3, 64, generator=generator) for _ in range(4)]
    query, gain = (torch.randn(64, generator=generator) for _ in range(2))
    monkeypatch.setattr(kda_fla, "SUPPORTED_DEVICES", ["cuda"])
    expected_h, expected_p = mix_residuals(sources, query, gain, eps=1e-5)
    with shims.cpu_passes_for_cuda(monkeypatch):
        assert probe_fused_mix(torch.device("cpu"), torch.float32).passed
        h, p = attn_res_fla._call(sources, query, gain, 1e-5)
    assert max_diff(h, expected_h) < bound("unit_fp32_max_abs") and max_diff(p, expected_p) < bound("unit_fp32_max_abs")


@pytest.mark.parametrize("kernel", [FUSED_GATED_NORM, FUSED_FILTER], ids=lambda kernel: kernel.name)
def test_layer_kernels_forward_and_gradients(kernel: FusedKernel) -> None:
    verdict = kernel.probe(torch.device("cpu"), torch.float32)
    assert verdict.passed, verdict


def test_the_gated_norm_takes_the_kernel() -> None:
    norm, generator = K3RMSNormGated(WIDTH, eps=1e-3), torch.Generator().manual_seed(0)
    norm.weight.data = torch.randn(WIDTH, generator=generator)
    x, gate = (torch.randn(2, 5, 3, WIDTH, generator=generator) * 0.05 for _ in range(2))
    assert FUSED_GATED_NORM.try_call(x.dtype, x, gate, norm.weight, eps=1e-3) is not None
    assert max_diff(norm(x, gate), gated_norm(x, gate, norm.weight, 1e-3)) < bound("unit_fp32_max_abs")


@pytest.mark.parametrize("length", [1, 9])
def test_the_convolution_takes_the_kernel(length: int) -> None:
    """Continued from a window, and with padding."""
    convolution, generator = K3ShortConvolution(WIDTH, 4), torch.Generator().manual_seed(0)
    z, window = torch.randn(2, length, WIDTH, generator=generator), torch.randn(2, WIDTH, 4, generator=generator)
    stream, taps = torch.cat([window.mT, z], dim=1)[:, 1:], convolution.weight[:, 0]
    assert FUSED_FILTER.try_call(z.dtype, stream, taps) is not None
    c, after = convolution(z, window)
    assert max_diff(c, filter_and_silu(stream, taps)) < bound("unit_fp32_max_abs")
    assert torch.equal(after, torch.cat([window, z.mT], dim=-1)[..., -4:])
    padded, _ = convolution(torch.cat([z + 1, z], dim=1), window, torch.arange(2 * length).expand(2, -1) >= length)
    assert max_diff(padded[:, length:], c) < bound("unit_fp32_max_abs")
