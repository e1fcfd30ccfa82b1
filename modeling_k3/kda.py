"""Kimi Delta Attention: projections, short convolutions and gates around the recurrence of `kda_ops`."""

import torch
from torch import Tensor, nn

from .cache import K3Cache
from .configuration_k3 import K3Config
from .kda_ops import chunk_kda, decay_gate, exact_kda, l2_normalize, recurrent_kda
from .norms import K3RMSNormGated
from .precision import Float32Parameters, upcast
from .short_conv import K3ShortConvolution

#: How the recurrence is evaluated: a choice of the moment, never saved. All are the same function up to rounding.
KDA_IMPLEMENTATIONS = ("auto", "chunk", "recurrent", "exact")
#: Up to this many tokens the recurrence beats a chunk that is mostly padding.
_RECURRENT_UP_TO = 4


def check_kda_implementation(name: str) -> str:
    """Return `name` if it is an implementation of KDA.

    Raises:
        ValueError: it is not; names what is allowed.
    """
    if name not in KDA_IMPLEMENTATIONS:
        raise ValueError(f"kda_implementation={name!r} is unknown; allowed are {list(KDA_IMPLEMENTATIONS)}")
    return name


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
        self.num_heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.gate_lower_bound = config.gate_lower_bound
        width = self.num_heads * self.head_dim
        for stream in ("q", "k", "v"):
            self.add_module(f"{stream}_proj", nn.Linear(config.hidden_size, width, bias=False))
            self.add_module(f"{stream}_conv1d", K3ShortConvolution(width, config.short_conv_kernel_size))
        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
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
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            hidden_states: x [B, T, D], zero at padding.
            attention_mask: [B, T] bool, False at padding; None: no padding.
            cache: continued and updated; None starts from nothing.
            kda_implementation: "chunk", "recurrent", "exact" or "auto" for this call; None: the module's own.
            output_attentions: ask "exact" for the effective attention weights.

        Returns:
            [B, T, D], zero at padding, and the effective weights [B, H, T, T] if they were asked for and "exact" runs,
            else None: the recurrence forms none.
        """
        memory = None if cache is None else cache.linear_layer(self.layer_idx)
        windows = memory.windows if memory is not None and memory.windows is not None else [None] * 3
        q, q_window = self.q_conv1d(self.q_proj(hidden_states), windows[0], attention_mask)
        k, k_window = self.k_conv1d(self.k_proj(hidden_states), windows[1], attention_mask)
        v, v_window = self.v_conv1d(self.v_proj(hidden_states), windows[2], attention_mask)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))

        decay_logits = self.f_b_proj(self.f_a_proj(hidden_states))
        log_decay = decay_gate(decay_logits, self.A_log, self.dt_bias, lower_bound=self.gate_lower_bound)
        beta = upcast(self.b_proj(hidden_states)).sigmoid()
        if attention_mask is not None:
            # Padding neither decays the state nor writes to it.
            log_decay = log_decay.masked_fill(~attention_mask[..., None, None], 0.0)
            beta = beta.masked_fill(~attention_mask[..., None], 0.0)

        inputs = (l2_normalize(q), l2_normalize(k), v, log_decay, beta, None if memory is None else memory.state)
        implementation = check_kda_implementation(kda_implementation or self.implementation)
        weights = None
        if implementation == "exact" and output_attentions:
            o, state, weights = exact_kda(*inputs, output_weights=True)
        else:
            o, state = self._recur(implementation, *inputs)
        if memory is not None:
            memory.remember((q_window, k_window, v_window), state, hidden_states.shape[1])

        gate = self.g_proj(hidden_states) if self.use_full_rank_gate else self.g_b_proj(self.g_a_proj(hidden_states))
        y = self.o_norm(o, gate.unflatten(-1, (self.num_heads, self.head_dim)))
        out = self.o_proj(y.flatten(-2))
        if attention_mask is not None:
            out = out.masked_fill(~attention_mask[..., None], 0)
        return out, weights

    def _recur(self, implementation: str, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Evaluate; "auto" goes token by token for a decode step and by chunks for everything longer."""
        if implementation == "exact":
            return exact_kda(*inputs)
        if implementation == "recurrent" or (implementation == "auto" and inputs[0].shape[1] <= _RECURRENT_UP_TO):
            return recurrent_kda(*inputs)
        return chunk_kda(*inputs, lower_bound=self.gate_lower_bound)
