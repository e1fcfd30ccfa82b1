"""transformers' common tests of tokenizers over ours, on the toy vocabulary of the golden chats.

`make outside-test` runs this file beside `transformers_common.py`.
"""

import functools
import os
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest.mock import patch

from modeling_k3 import K3Tokenizer
from tests.chat_data import released_folder

sys.path.insert(0, os.path.abspath(os.environ["OUTSIDE_TESTS"]))

from transformers_tests.test_tokenization_common import TokenizerTesterMixin
from transformers_tests.test_tokenizers_backend_mixin import TokenizersBackendTesterMixin

#: Tests that do not apply -> why.
NOT_FOR_K3 = {
    "test_tokenizer_store_full_signature": "an argument is a backend in memory, which no config file can hold",
    "test_training_new_tokenizer": "training makes a vocabulary without the control block, which is refused",
    "test_training_new_tokenizer_with_special_tokens_change": "training makes a vocabulary without the control block, "
    "which is refused",
}


class _OnTheToyVocabulary:
    """Lays out a release with the toy vocabulary before the tests look for it."""

    tokenizer_class = rust_tokenizer_class = K3Tokenizer
    from_pretrained_id: Any = None

    @classmethod
    def setUpClass(cls) -> None:
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.from_pretrained_id = str(released_folder(Path(folder)))
        super().setUpClass()

    def setUp(self) -> None:
        reason = NOT_FOR_K3.get(self._testMethodName)
        if reason is not None:
            self.skipTest(reason)


class K3TokenizerTest(_OnTheToyVocabulary, TokenizerTesterMixin, unittest.TestCase):
    def test_tokenize_special_tokens(self) -> None:
        # Names of special tokens become their ids in control mode, which has to be asked for.
        in_control_mode = functools.partial(self.get_tokenizer, split_special_tokens=False)
        with patch.object(type(self), "get_tokenizer", in_control_mode):
            super().test_tokenize_special_tokens()


class K3BackendTest(_OnTheToyVocabulary, TokenizersBackendTesterMixin, unittest.TestCase):
    pass
