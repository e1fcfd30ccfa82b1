"""Fixtures of the parity tests: golden models, loaded once per session and kind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import modeling_k3
from tests.parity.golden import Case
from tests.parity.recording import Record, run_prompt

LoadCase = Callable[..., PreTrainedModel]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of width 64 gain nothing from threads, and lose by a factor of ten where other processes run too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> LoadCase:
    """Load a case's model as a user would, through `from_pretrained` of a directory in the case's dtype.

    `load_case(case, **options)` passes options to `from_pretrained`; `double=True` converts the loaded model to fp64.
    Models are shared: a test that changes one loads its own from `case.materialise`.
    """
    directories: dict[str, Path] = {}
    models: dict[tuple[Any, ...], PreTrainedModel] = {}

    def load(case: Case, double: bool = False, **options: Any) -> PreTrainedModel:
        if case.name not in directories:
            directories[case.name] = case.materialise(tmp_path_factory.mktemp(case.name))
        options = {"dtype": case.compute_dtype, **options}
        key = (case.name, double, *sorted((name, str(value)) for name, value in options.items()))
        if key not in models:
            model = modeling_k3.K3ForCausalLM.from_pretrained(directories[case.name], **options).eval()
            models[key] = model.double() if double else model
        return models[key]

    return load


@pytest.fixture(scope="session")
def prompt_record(load_case: LoadCase) -> Callable[[Case], Record]:
    """The recorded one-shot forward of a case with default options, run once per session."""
    records: dict[str, Record] = {}

    def record(case: Case) -> Record:
        if case.name not in records:
            records[case.name] = run_prompt(load_case(case), case)
        return records[case.name]

    return record
