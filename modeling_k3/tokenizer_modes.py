"""Text mode and control mode of one fast tokenizer.

    text mode      (split_special_tokens=True)    names of control tokens are text: no id of the control block
    control mode   (split_special_tokens=False)   every name of the block becomes its id

In the library that switch leaves out tokens not flagged special, such as the three markers of the chat format. Here it
covers the whole block.
"""

import copy
import os
import re
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from tokenizers import AddedToken, Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PaddingStrategy, TruncationStrategy

from .class_maps import complete_class_map, label_code
from .vocabulary import BLOCK_SIZE, RUN_CHARACTERS, SLICE_CHARACTERS, limited, to_bytes

_SURROGATE = re.compile("[\ud800-\udfff]")
# Texts up to this length, and this many of them, are remembered: the tags of a chat come again and again.
_SHORT_CHARACTERS = 64
_SHORT_TEXTS = 4096
# What the library takes from its own encodings, which a text that was cut beforehand does not have.
_NOT_OF_CUT_TEXTS = (
    "return_offsets_mapping",
    "return_overflowing_tokens",
    "return_special_tokens_mask",
    "return_token_type_ids",
    "return_length",
)


class TwoModeTokenizer(PreTrainedTokenizerFast):
    """A fast tokenizer whose vocabulary ends with a block of control tokens, see `vocabulary`.

    Args:
        tokenizer_object: the backend, in control mode.
        kwargs: of the library.
    """

    def __init__(self, tokenizer_object: Tokenizer, **kwargs: Any) -> None:
        self._tokenizer = tokenizer_object
        self._derived: dict[str, Tokenizer] = {}
        self._short_texts: dict[tuple[str, bool], list[int]] = {}
        super().__init__(**kwargs)
        self._tokenizer.encode_special_tokens = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_derived": {}, "_short_texts": {}}

    @property
    def first_control_id(self) -> int:
        """First id of the control block: the number of base tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    def save_pretrained(
        self, save_directory: str | os.PathLike, *args: Any, with_code: bool | None = None, **kwargs: Any
    ) -> tuple[str, ...]:
        """Save; see the library's method for all other arguments.

        Args:
            with_code: add the code and its place in `tokenizer_config.json`, for use without this package. None: only
                for a class that was registered to carry its code.
        """
        view = self
        if with_code is not None and with_code != (self._auto_class is not None):
            # The library asks the object. A view of the same class, for `super` and for the files that are copied.
            view = copy.copy(self)
            view._auto_class = "AutoTokenizer" if with_code else None
        files = super(TwoModeTokenizer, view).save_pretrained(save_directory, *args, **kwargs)
        complete_class_map(Path(save_directory))
        if view._auto_class is not None:
            label_code(Path(save_directory))
        return files

    def push_to_hub(self, repo_id: str, *, token: bool | str | None = None, **kwargs: Any) -> Any:
        """Upload the tokenizer's files and code, and no card; arguments as in the library.

        Raises:
            TypeError: an unknown argument.
        """
        known = ("commit_message", "commit_description", "create_pr", "revision")
        unknown = sorted(set(kwargs) - {*known, "private"})
        if unknown:
            raise TypeError(
                f"unknown arguments {', '.join(unknown)}; allowed are repo_id, token, private, {', '.join(known)}"
            )
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=kwargs.pop("private", None), exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, with_code=True)
            return self._upload_modified_files(folder, repo, files_timestamps={}, token=token, **kwargs)

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        self._forget()
        return super()._add_tokens(new_tokens, special_tokens=special_tokens)

    def update_post_processor(self) -> None:
        """Follow `add_bos_token` and `add_eos_token`, in both modes."""
        self._forget()
        super().update_post_processor()

    def _forget(self) -> None:
        self._derived, self._short_texts = {}, {}

    def _backend(self, name: str) -> Tokenizer:
        """A sibling of the backend over the same model: "text" and "control" for ids, "call" for text-mode calls.

        In text mode the whole block counts as special, and special names are not looked for: the flag of the library
        alone would leave out the three markers. Calls have one of their own, for the library sets padding on it.
        """
        if name not in self._derived:
            source = self._tokenizer
            sibling = Tokenizer(source.model)
            for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
                if getattr(source, part) is not None:
                    setattr(sibling, part, getattr(source, part))
            first = self.first_control_id
            added = sorted(source.get_added_tokens_decoder().items())
            sibling.add_tokens(
                [_flag(token, name != "control" and first <= index < first + BLOCK_SIZE) for index, token in added]
            )
            sibling.encode_special_tokens = name != "control"
            self._derived[name] = sibling
        return self._derived[name]

    def encode_text(self, text: str, allow_special: bool = False) -> list[int]:
        """Encode without anything added. The fast path: no offsets are computed.

        Args:
            text: any.
            allow_special: True for control mode.

        Returns:
            ids; in text mode all below the control block (tokens added to the vocabulary later excepted).
        """
        if len(text) <= _SHORT_CHARACTERS and (known := self._short_texts.get((text, allow_special))) is not None:
            return list(known)
        whole = join_surrogates(text)
        if allow_special and len(whole) > RUN_CHARACTERS:
            parts = list(limited(whole))
        else:
            parts = [whole[at : at + SLICE_CHARACTERS] for at in range(0, len(whole), SLICE_CHARACTERS)]
        backend = self._backend("control" if allow_special else "text")
        encodings = backend.encode_batch_fast(parts, add_special_tokens=False)
        ids = [index for encoding in encodings for index in encoding.ids]
        if len(text) <= _SHORT_CHARACTERS and len(self._short_texts) < _SHORT_TEXTS:
            self._short_texts[text, allow_special] = list(ids)
        return ids

    def encode(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding: Any = False,
        truncation: Any = None,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Encode a text to ids, in text mode unless `split_special_tokens=False`. Arguments as in the library."""
        is_text_mode = kwargs.get("split_special_tokens", self.split_special_tokens)
        adds = add_special_tokens and (self.add_bos_token or self.add_eos_token)
        is_plain = isinstance(text, str) and not (text_pair or padding or truncation or max_length is not None or adds)
        if is_plain and not set(kwargs) - {"split_special_tokens"}:
            return self.encode_text(text, allow_special=not is_text_mode)
        return super().encode(
            text, text_pair, add_special_tokens, padding=padding, truncation=truncation, max_length=max_length, **kwargs
        )

    def _encode_plus(
        self, text: Any, text_pair: Any = None, split_special_tokens: bool | None = None, **kwargs: Any
    ) -> BatchEncoding:
        is_text_mode = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        text, text_pair = _each(text, join_surrogates), _each(text_pair, join_surrogates)
        if not is_text_mode and text_pair is None and not kwargs.get("is_split_into_words") and _is_cut(text):
            return self._encode_cut(text, **kwargs)
        # The library works on the backend of the object it is given: the safe one unless control mode is asked for.
        view = copy.copy(self)
        view.__dict__["_tokenizer"] = self._backend("call") if is_text_mode else self._tokenizer
        return super(TwoModeTokenizer, view)._encode_plus(
            text, text_pair=text_pair, split_special_tokens=bool(is_text_mode), **kwargs
        )

    def _encode_cut(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        """Control mode for texts that the length limits cut: a cut may go through the name of a control token."""
        refused = [name for name in _NOT_OF_CUT_TEXTS if kwargs.get(name)]
        if refused:
            raise ValueError(f"{', '.join(refused)}: not available in control mode for a text this long")
        is_batch = not isinstance(text, str)
        rows = [self.encode_text(each, allow_special=True) for each in (text if is_batch else [text])]
        limit = kwargs.get("max_length")
        if kwargs.get("truncation_strategy") not in (None, TruncationStrategy.DO_NOT_TRUNCATE) and limit is not None:
            rows = [row[kept_part(len(row), limit, self.truncation_side)] for row in rows]
        return self.pad(
            {"input_ids": rows if is_batch or kwargs.get("return_tensors") else rows[0]},
            padding=kwargs.get("padding_strategy", PaddingStrategy.DO_NOT_PAD),
            max_length=limit,
            **{
                key: kwargs.get(key)
                for key in ("pad_to_multiple_of", "padding_side", "return_attention_mask", "return_tensors")
            },
        )

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if ids and not (min(ids) >= 0 and max(ids) < len(self)):
            wrong = next(index for index in ids if not 0 <= index < len(self))
            raise ValueError(f"token id {wrong} is outside the vocabulary; allowed: 0 to {len(self) - 1}")
        # The backend takes the letters of a name for bytes, which is right for ASCII alone.
        first = self.first_control_id
        added = {index: self._tokenizer.id_to_token(index) for index in set(ids) if index >= first}
        names = {index: name for index, name in added.items() if not name.isascii()}
        if names and skip_special_tokens:
            entries = self._tokenizer.get_added_tokens_decoder()
            ids = [index for index in ids if not (index in names and entries[index].special)]
        pieces: list[str] = []
        for is_name, run in groupby(ids, names.__contains__):
            if is_name:
                pieces += [names[index] for index in run]
            else:
                pieces.append(super()._decode(list(run), skip_special_tokens, clean_up_tokenization_spaces, **kwargs))
        return "".join(pieces)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of one token; a control token stands for its name.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        name = self._tokenizer.id_to_token(index) if index >= 0 else None
        if name is None:
            raise ValueError(f"token id {index} is outside the vocabulary; allowed: 0 to {len(self) - 1}")
        return to_bytes(name) if index < self.first_control_id else name.encode("utf-8")

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        # What the last call padded and cut to is no part of the tokenizer.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        return super()._save_pretrained(*args, **kwargs)


def _flag(token: AddedToken, is_control: bool) -> AddedToken:
    """A token as it is, or flagged special."""
    return AddedToken(
        token.content,
        special=token.special or is_control,
        normalized=token.normalized,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
    )


def kept_part(length: int, limit: int, side: str) -> slice:
    """What truncation leaves of a row: its beginning, or its end if the side is "left"."""
    return slice(limit) if side == "right" else slice(max(length - limit, 0), None)


def join_surrogates(text: str) -> str:
    """Join pairs of surrogates to the character they stand for; a lone one becomes U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _each(text: Any, change: Callable[[str], str]) -> Any:
    """Change every text in an argument of a tokenizer call; what is no text is left for the library to refuse."""
    if isinstance(text, str):
        return change(text)
    return type(text)(_each(each, change) for each in text) if isinstance(text, list | tuple) else text


def _is_cut(text: Any) -> bool:
    """Whether the length limits cut this text, or one of these."""
    if isinstance(text, str):
        return len(text) > RUN_CHARACTERS and len(list(limited(text))) > 1
    return isinstance(text, list | tuple) and any(_is_cut(each) for each in text if isinstance(each, str))
