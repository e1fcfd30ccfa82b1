"""The demo's tokenizer: bytes as ids, followed by the block of control tokens of the release.

    0 .. 255     the byte values
    256 .. 511   the release's special ids 163584 .. 163839, same offsets, names and flags

All control tokens are there from the start, so a model trained here can later learn the chat format with the
vocabulary it has.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NUM_BYTES = 256
VOCAB_SIZE = 512

# Offset in the block: name, flagged special. What is not special in the release (the three markers, the reserved ids)
# stays in the text when special tokens are skipped while decoding.
_NAMED = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}

BOS_ID = NUM_BYTES + 0
EOS_ID = NUM_BYTES + 1
END_OF_MESSAGE_ID = NUM_BYTES + 2
UNK_ID = NUM_BYTES + 254
PAD_ID = NUM_BYTES + 255


def control_tokens() -> list[tuple[str, bool]]:
    """Name and special flag of ids 256 to 511, in order. Ids without a name of their own are reserved, not special."""
    return [_NAMED.get(offset, (f"<|reserved_token_{NUM_BYTES + offset}|>", False)) for offset in range(256)]


def printable_bytes() -> list[str]:
    """The usual byte-to-printable-character map of byte-level vocabularies, indexed by byte value.

    Visible Latin-1 characters stand for themselves; the other 68 bytes get the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(NUM_BYTES)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer of 512 ids. Saved, it loads with plain `AutoTokenizer`, without any code of this package.

    Its default `encode` is the release's control mode: names of control tokens in the text become their ids. For text
    that a user, a file or a tool wrote, use `encode_text`.
    """
    vocabulary = {character: byte for byte, character in enumerate(printable_bytes())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in control_tokens()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        pad_token="[PAD]",
        clean_up_tokenization_spaces=False,
    )


def encode_text(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Encode in text mode: whatever the text says, no id of a control token comes out.

    The library's `split_special_tokens=True` is not enough for that: it covers only tokens flagged special, and the
    markers `<|open|>`, `<|close|>`, `<|sep|>` are not.

    Args:
        tokenizer: any fast tokenizer; one with a text mode of its own is asked for it.
        text: anything.

    Returns:
        ids below the first control token, no beginning or end added.
    """
    if hasattr(tokenizer, "first_control_id"):
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [text] if backend.pre_tokenizer is None else [p for p, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]
