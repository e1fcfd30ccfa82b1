"""The demo's tokenizer: bytes as ids, followed by the block of control tokens of the release.

    0 .. 255     the byte values
    256 .. 511   the release's special ids 163584 .. 163839, same offsets, names and flags

All control tokens are there from the start, so a model trained here can later learn the chat format with the
vocabulary it has.
"""

from transformers import PreTrainedTokenizerBase

from modeling_k3.tokenization_k3 import K3Tokenizer

VOCAB_SIZE = 512
BOS_ID, EOS_ID, END_OF_MESSAGE_ID, PAD_ID = 256, 257, 258, 511


def build_tokenizer() -> K3Tokenizer:
    """The presets' byte-level tokenizer of 512 ids; text that it encodes can never become a control token."""
    return K3Tokenizer.byte_level()


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode in text mode, without ids for beginning or end.

    A K3Tokenizer keeps every control name in the text ordinary text. Other tokenizers are asked for the library's
    `split_special_tokens=True`, which covers what they flag special.
    """
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
