"""Kimi Delta Attention: projections, short convolutions and gates around the recurrence of `kda_ops`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .cache import K3Cache
from .configuration_k3 import K3Config
from .kda_guard import KDAGuard
from .kda_ops import decay_gate, exact_kda, l2_normalize
from .kda_paths import check_kda_implementation, run_kda
from .norms import K3RMSNormGated
from .packing import Packing
from .precision import Float32Parameters, storage_fp32, upcast
from .rollback import KDAInputs
from .short_conv import K3ShortConvolution


class K3DeltaAttention(Float32Parameters):
    """Linear attention with a per-channel decay and the delta rule.

        q, k = L2(SiLU(conv(W x)))      v = SiLU(conv(W_v x))      beta = sigmoid(W_b x)
        l    = decay_gate(W_fb W_fa x)                              per key channel, below 0
        o    = KDA(q, k, v, l, beta)                                see `kda_ops`
        y    = W_o [ RMSNorm_head(o) * sigmoid(W_g x) ]

    `A_log` [H] and `dt_bias` [H * K] stay float32. `g_proj` is one matrix (K3) or `g_b_proj(g_a_proj(x))`
    (Kimi Linear). Source: arXiv 2607.24653 section 2.1.1.
    """

    float32_parameters = ("A_log", "dt_bias")

    def __init__(self, config: K3Config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.implementation = "auto"
        self.kda_guard: KDAGuard | None = None
        self.num_heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.gate_lower_bound = config.gate_lower_bound
        width = self.num_heads * self.head_dim
        for stream in ("q", "k", "v"):
            self.add_module(f"{stream}_proj", nn.Linear(config.hidden_size, width, bias=False))
            self.add_module(f"{stream}_conv1d", K3ShortConvolution(width, config.short_conv_kernel_size))
        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads, dtype=storage_fp32()))
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=storage_fp32()))
        if config.use_full_rank_gate:
            self.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.use_full_rank_gate = config.use_full_rank_gate
        self.o_norm = K3RMSNormGated(self.head_dim, eps=config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: K3Cache | None = None,
        kda_implementation: str | None = None,
        output_attentions: bool | None = None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: x [B, T, D], zero at padding.
            attention_mask: [B, T] bool, False at padding; None: no padding.
            cache: continued and updated; None starts from nothing.
            kda_implementation: one of `kda_paths.KDA_IMPLEMENTATIONS` for this call; None: the module's own.
            output_attentions: ask "exact" for the effective attention weights.
            packing: documents to keep apart, then without a cache; None: each row is one.

        Returns:
            [B, T, D], zero at padding, and the effective weights [B, H, T, T] if they were asked for and "exact" runs,
            else None: the recurrence forms none.
        """
        inputs = KDAInputs(
            self.q_proj(hidden_states),
            self.k_proj(hidden_states),
            self.v_proj(hidden_states),
            self.f_a_proj(hidden_states),
            self.b_proj(hidden_states),
            attention_mask,
        )
        implementation = check_kda_implementation(kda_implementation or self.implementation)
        weights: list[Tensor] | None = [] if implementation == "exact" and output_attentions else None
        advance = partial(self._advance, implementation=implementation, weights=weights)
        if packing is not None:
            o = packing.run(inputs[:-1], lambda *x: advance(KDAInputs(*x), None, None)[0])
        elif cache is not None:
            o = cache.linear_layer(self.layer_idx).run(inputs, advance)
        else:
            o, _, _ = advance(inputs, None, None)

        gate = self.g_proj(hidden_states) if self.use_full_rank_gate else self.g_b_proj(self.g_a_proj(hidden_states))
        y = self.o_norm(o, gate.unflatten(-1, (self.num_heads, self.head_dim)))
        out = self.o_proj(y.flatten(-2))
        if attention_mask is not None:
            out = out.masked_fill(~attention_mask[..., None], 0)
        # Weights exist for a call that ran as one piece; a packed or rolled-back one did not.
        whole = weights and len(weights) == 1 and weights[0].shape[-1] == hidden_states.shape[1] and packing is None
        return out, weights[0] if whole else None

    def _advance(
        self,
        inputs: KDAInputs,
        windows: Sequence[Tensor] | None,
        state: Tensor | None,
        *,
        implementation: str,
        weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run convolutions, gates and the recurrence from (windows, state), None for the beginning of a sequence.

        Returns:
            o [B, T, H, V], the next windows and state. Effective weights are appended to `weights` if it is a list.
        """
        mask, next_windows, streams = inputs.mask, [], []
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        for index, (convolution, z) in enumerate(zip(convolutions, inputs[:3], strict=True)):
            c, window = convolution(z, None if windows is None else windows[index], mask)
            streams.append(c.unflatten(-1, (self.num_heads, self.head_dim)))
            next_windows.append(window)
        q, k, v = streams
        decay_logits = self.f_b_proj(inputs.decay)
        log_decay = decay_gate(decay_logits, self.A_log, self.dt_bias, lower_bound=self.gate_lower_bound)
        beta = upcast(inputs.beta).sigmoid()
        if mask is not None:
            # Padding neither decays the state nor writes to it.
            log_decay = log_decay.masked_fill(~mask[..., None, None], 0.0)
            beta = beta.masked_fill(~mask[..., None], 0.0)
        args = (l2_normalize(q), l2_normalize(k), v, log_decay, beta, state)
        if weights is not None:
            o, state, found = exact_kda(*args, output_weights=True)
            weights.append(found)
        else:
            o, state = self._recur(implementation, *args)
        return o, next_windows, state

    def _recur(self, implementation: str, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Evaluate, under the guard if there is one."""
        run = run_kda if self.kda_guard is None else self.kda_guard
        return run(implementation, *inputs, lower_bound=self.gate_lower_bound)
