"""The markers of the fetched tests, which their own repository declares."""

import pytest

_MARKERS = (
    "accelerate_tests flash_attn_test flash_attn_3_test flash_attn_4_test all_flash_attn_test is_training_test "
    "is_tensor_parallel_test is_expert_parallel_test is_fsdp_test torch_compile_test torch_export_test generate "
    "is_pipeline_test is_staging_test not_device_test bitsandbytes deepspeed"
).split()


def pytest_configure(config: pytest.Config) -> None:
    for name in _MARKERS:
        config.addinivalue_line("markers", f"{name}: of transformers' own tests")
