"""transformers' common tests over our classes. `make outside-test` fetches them and runs this file.

What is ours here: the tiny model they run on, a reason for every test that does not apply, and three conditions that
some of them need and say nowhere:

* the library's lenient loading, which ours does when asked (`strict=False`);
* attention weights in every layer, which KDA forms in its exact form only;
* names of our classes in the library's own tables, by which it tells a decoder from a head.

Not in the distribution, and so not run: its tests of generation and export, and those of pipelines, which want models
from the hub. In it and not run: `test_fsdp_mixin`, which imports what starts processes from a file that is left out
and wants a `base_model_fsdp_plan`, which K3 lacks; `test_memory_cleanup_mixin`, which holds no test (it tidies up after
tests with models from the hub). Of tensor and expert parallelism the plans are tested; what starts processes is for
models on a list of the library's own, and skips itself.
"""

import functools
import inspect
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto import modeling_auto

from modeling_k3 import (
    K3Config,
    K3ForCausalLM,
    K3ForSequenceClassification,
    K3ForTokenClassification,
    K3Model,
    experts,
)
from modeling_k3.expert_groups import combine_groups
from modeling_k3.kda import K3DeltaAttention
from modeling_k3.persistence import K3Persistence
from tests.models import tiny_config

sys.path.insert(0, os.path.abspath(os.environ["OUTSIDE_TESTS"]))

from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_expert_parallel_mixin import ExpertParallelTesterMixin
from transformers_tests.test_modeling_common import ModelTesterMixin
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from transformers_tests.test_training_mixin import TrainingTesterMixin

for table, model_class in (
    (modeling_auto.MODEL_MAPPING_NAMES, K3Model),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, K3ForCausalLM),
    (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, K3ForSequenceClassification),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, K3ForTokenClassification),
):
    table[K3Config.model_type] = model_class.__name__

#: Tests that do not apply -> why. Those that need hardware or packages that are not there skip themselves.
NOT_FOR_K3 = {
    "test_generation_tester_mixin_inheritance": "transformers' generation tests are not in its source distribution; "
    "tests/integration/test_generate.py has ours",
    "test_bc_cache_name_forward": "it wants a DynamicCache; tests/unit/test_modeling_calls.py has the old cache name",
    "test_model_rope_scaling_frequencies": "K3 has no positions",
    "test_model_rope_with_partial_rotation": "K3 has no positions",
    "test_sdpa_can_dispatch_composite_models": "K3 is one model, not made of others; "
    "test_sdpa_can_dispatch_non_composite_models runs",
}


def lenient(test: Callable[..., None]) -> Callable[..., None]:
    """Let `from_pretrained` start missing tensors afresh, as the library does without being asked."""

    @functools.wraps(test)
    def run(self: Any) -> None:
        defaults = K3Persistence.from_pretrained.__func__.__kwdefaults__
        with patch.dict(defaults, strict=False):
            test(self)

    return run


def with_kda_weights(test: Callable[..., None]) -> Callable[..., None]:
    """Evaluate KDA in its exact form, whose matrix is the attention weights."""
    build = K3DeltaAttention.__init__

    def build_exact(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.implementation = "exact"

    @functools.wraps(test)
    def run(self: Any) -> None:
        with patch.object(K3DeltaAttention, "__init__", build_exact):
            test(self)

    return run


def beside_the_library(*arguments: Any) -> torch.Tensor:
    """Our grouped product for a CPU; the library's, which the tests watch, must give the same."""
    hidden, index, weights, *_, gate = arguments
    ours = combine_groups(*arguments)
    theirs = ALL_EXPERTS_FUNCTIONS.get_interface("grouped_mm", None)(gate.__self__, hidden, index, weights)
    torch.testing.assert_close(ours, theirs)
    return ours


class TinyK3:
    """The tiny model: a KDA layer with a dense feed-forward, an MLA layer with experts, AttnRes over both."""

    batch_size, seq_length, is_training, num_labels = 3, 7, True, 3
    causal_lm_class, base_model_class = K3ForCausalLM, K3Model

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
            setattr(self, name, getattr(self.get_config(), name))
        self.key_length = self.encoder_seq_length = self.seq_length

    def get_config(self, layers: str = "KM") -> K3Config:
        # One test shrinks the vocabulary to four tokens.
        return tiny_config(layers, num_labels=self.num_labels, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self) -> tuple[K3Config, dict[str, Any]]:
        ids = torch.randint(3, 150, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class K3ModelTest(
    ModelTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin, ExpertParallelTesterMixin, unittest.TestCase
):
    all_model_classes = (K3Model, K3ForCausalLM, K3ForSequenceClassification, K3ForTokenClassification)
    model_tester: Any = None

    def setUp(self) -> None:
        reason = NOT_FOR_K3.get(self._testMethodName)
        if reason is not None:
            self.skipTest(reason)
        self.model_tester = TinyK3(self)
        if "batched_and_grouped" in self._testMethodName:
            self.enterContext(patch.object(experts, "combine_groups", beside_the_library))
        self.config_tester = ConfigTester(self, config_class=K3Config, hidden_size=64)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()

    test_correct_missing_keys = lenient(ModelTesterMixin.test_correct_missing_keys)
    test_base_model_prefix_loads_base_weights = lenient(ModelTesterMixin.test_base_model_prefix_loads_base_weights)
    test_load_with_mismatched_shapes = lenient(ModelTesterMixin.test_load_with_mismatched_shapes)
    test_model_weights_reload_no_missing_tied_weights = lenient(
        ModelTesterMixin.test_model_weights_reload_no_missing_tied_weights
    )
    test_attention_outputs = with_kda_weights(ModelTesterMixin.test_attention_outputs)

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self) -> tuple[K3Config, dict[str, Any]]:
        # It wants the first layer's weights on the way to the output. KDA's are read off beside that way.
        return self.model_tester.get_config("MK"), self.model_tester.prepare_config_and_inputs_for_common()[1]

    def test_moe_models_record_router_logits(self) -> None:
        # It looks for a decorator in the model's file; ours is in the file of the experts.
        with patch.object(inspect, "getsource", return_value="@use_experts_implementation"):
            super().test_moe_models_record_router_logits()
