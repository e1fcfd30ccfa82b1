"""K3Tokenizer: the released vocabulary as a fast tokenizer, and the chat template by segments.

    text mode      (default)                        names of control tokens are text: no id of the control block
    control mode   (split_special_tokens=False)     every name of the block becomes its id

Text that a user, a file or a tool wrote belongs into text mode. `apply_chat_template` encodes a conversation segment by
segment, so that only the markup of the format itself becomes control tokens.
"""

from .supported import VERSIONS_CHECKED  # isort: skip  # noqa: F401
import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.utils import logging, to_py_obj

from .chat import RenderedChat, render_chat
from .chat_reader import OutputReader, ParsedOutput, single_output
from .chat_tokens import BatchOptions, chat_options, encode_chats, split_batch, tool_schemas
from .markup import CLOSE, ENDS, MARKERS, OPEN, SEP
from .tokenizer_modes import TwoModeTokenizer
from .vocabulary import BLOCK_SIZE, build_backend, control_tokens, named_controls, read_ranks, to_bytes, write_ranks

logger = logging.get_logger(__name__)

#: First characters of the Jinja template that stands for the segments; any other template is rendered as it is.
TEMPLATE_MARK = "{#- Kimi K3 chat format."
_TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
_LAST_TAG = re.compile(f"({re.escape(OPEN)}|{re.escape(CLOSE)})((?:(?!<\\|).)*){re.escape(SEP)}", re.DOTALL)

#: Reading a message from text, for code that knows the library's templates but not this class. Calls are not covered.
RESPONSE_TEMPLATE: Mapping[str, Any] = {
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": f'{OPEN}message role="assistant"{SEP}',
    "fields": {
        "reasoning_content": {"open": f"{OPEN}think{SEP}", "close": [f"{CLOSE}think{SEP}", *ENDS]},
        "content": {"open": f"{OPEN}response{SEP}", "close": [f"{CLOSE}response{SEP}", *ENDS]},
    },
}


class K3Tokenizer(TwoModeTokenizer):
    """Fast tokenizer of Kimi K3, from `tiktoken.model` or from a converted `tokenizer.json`.

    Args:
        tokenizer_object: a `tokenizers.Tokenizer` with the control block, such as `build_backend` makes.
        tokenizer_file: path of a `tokenizer.json`; wins over `vocab_file`.
        vocab_file: path of a rank file (`tiktoken.model`).
        kwargs: of the library. `split_special_tokens` is True here unless given; it is not saved, for others read
            the same files.

    Raises:
        ValueError: none of the three is given, or the vocabulary lacks the control tokens of the chat format.
    """

    vocab_files_names = {"vocab_file": "tiktoken.model", "tokenizer_file": "tokenizer.json"}

    def __init__(
        self,
        tokenizer_object: Tokenizer | None = None,
        tokenizer_file: str | None = None,
        vocab_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        # The block is in the backend, or built from these names; the library would append what differs at the end.
        named = named_controls({"added_tokens_decoder": kwargs.pop("added_tokens_decoder", None)})
        if tokenizer_object is None and tokenizer_file is not None:
            tokenizer_object = Tokenizer.from_file(str(tokenizer_file))
        elif tokenizer_object is None and vocab_file is not None:
            ranks = read_ranks(vocab_file)
            tokenizer_object = build_backend(ranks, control_tokens(len(ranks), named))
        if tokenizer_object is None:
            raise ValueError("K3Tokenizer needs a tokenizer_object, a tokenizer_file or a vocab_file (tiktoken.model)")
        missing = [name for name in (*MARKERS, *ENDS) if tokenizer_object.token_to_id(name) is None]
        if missing:
            raise ValueError(f"this vocabulary is not Kimi K3's: it lacks {', '.join(missing)}")
        for key, name in (("bos", "[BOS]"), ("eos", "[EOS]"), ("unk", "[UNK]"), ("pad", "[PAD]")):
            kwargs.setdefault(f"{key}_token", name)
        if not kwargs.get("extra_special_tokens") and not kwargs.get("additional_special_tokens"):
            kwargs["extra_special_tokens"] = self._flagged(tokenizer_object, kwargs)
        if kwargs.get("chat_template") is None and _TEMPLATE_FILE.is_file():
            kwargs["chat_template"] = _TEMPLATE_FILE.read_text(encoding="utf-8")
        if kwargs.get("response_template") is None:
            kwargs["response_template"] = copy.deepcopy(dict(RESPONSE_TEMPLATE))
        # The release's own code is not needed, and a saved folder does not hold it.
        kwargs.pop("auto_map", None)
        kwargs.setdefault("split_special_tokens", True)
        super().__init__(tokenizer_object, **kwargs)
        # What is saved must say nothing of how and where it was loaded.
        for name in ("split_special_tokens", "is_local", "local_files_only"):
            self.init_kwargs.pop(name, None)

    def __repr__(self) -> str:
        return (
            f"K3Tokenizer(name_or_path={self.name_or_path!r}, base_tokens={self.first_control_id}, "
            f"control_tokens={BLOCK_SIZE}, padding_side={self.padding_side!r})"
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "K3Tokenizer":
        """Load; see the library's method. Code from the hub leaves it to the package where that is imported."""
        # For models the library does so; for tokenizers of registered configs it takes the hub's code when it may.
        package = sys.modules.get("modeling_k3")
        if package is not None and cls.__module__.startswith("transformers_modules."):
            return package.K3Tokenizer.from_pretrained(*args, **kwargs)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def byte_level(cls, **kwargs: Any) -> "K3Tokenizer":
        """The presets' tokenizer: bytes as ids 0 to 255, then the control block, 256 to 511."""
        ranks = {bytes([byte]): byte for byte in range(256)}
        return cls(tokenizer_object=build_backend(ranks, control_tokens(256), is_byte_level=True), **kwargs)

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """What the library does before `__init__`: nothing, `__init__` reads the files."""
        return kwargs

    @classmethod
    def _patch_mistral_regex(cls, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> Tokenizer:
        """The library's repair for another model's pattern must not touch this one."""
        return tokenizer

    def _flagged(self, backend: Tokenizer, kwargs: Mapping[str, Any]) -> list[str]:
        named = {str(kwargs[key]) for key in self.SPECIAL_TOKENS_ATTRIBUTES if kwargs.get(key)}
        tokens = sorted(backend.get_added_tokens_decoder().items())
        return [token.content for _, token in tokens if token.special and token.content not in named]

    def render_chat(self, messages: Any, tools: Any = None, **options: Any) -> RenderedChat:
        """Render one conversation to segments. Options as in `apply_chat_template`, effort unset means "max"."""
        chats, _ = self._render(messages, tools, options, add_generation_prompt=None, continued=False)
        return chats[0]

    def _render(
        self,
        conversation: Any,
        tools: Any,
        given: Mapping[str, Any],
        *,
        add_generation_prompt: bool | None,
        continued: bool | str,
    ) -> tuple[list[RenderedChat], bool]:
        given = dict(given)
        prompt = given.pop("add_generation_prompt", add_generation_prompt)
        is_prompted = not continued if prompt is None else bool(prompt)
        options = chat_options(given, add_generation_prompt=is_prompted, continued=continued)
        batch, is_batch = split_batch(conversation)
        schemas = tool_schemas(tools)
        return [render_chat(messages, schemas, options) for messages in batch], is_batch

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Any = None,
        documents: Any = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: Any = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        sanitize_control_tokens: bool = False,
        tokenizer_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation, or a batch of them, and encode it segment by segment.

        Whatever messages, names, tools and results say, only the markup of the format becomes control tokens. A
        template of your own (`chat_template`, here or on the tokenizer) is rendered by the library and encoded in
        control mode, which is unsafe for untrusted text unless `sanitize_control_tokens` is set.

        Args:
            conversation: messages, or a list of conversations. Empty: options and generation prompt alone.
            tools: JSON schemas or Python functions to declare.
            documents: ignored; the format has none.
            chat_template: a Jinja template in place of the segments.
            add_generation_prompt: end inside the assistant's turn. None: True, unless the last message is continued.
            continue_final_message: leave the last message open, in its answer or in the field named.
            tokenize: False for the text. Do not encode that for a model if it holds untrusted text.
            padding, truncation, max_length, return_tensors, return_dict: as in the library.
            return_assistant_tokens_mask: add `assistant_masks`, 1 for what assistant messages hold.
            sanitize_control_tokens: segments always are.
            tokenizer_kwargs: `padding_side`, `pad_to_multiple_of`, `return_attention_mask`.
            kwargs: `thinking` (True), `thinking_effort` ("max"; "high", "low", None), `tool_choice`,
                `response_format`, `response_schema`. Unknown names are ignored.

        Returns:
            BatchEncoding, ids with `return_dict=False`, text with `tokenize=False`.

        Raises:
            ValueError, TypeError: see `render_chat` and `ChatOptions`; images are refused.
        """
        if return_assistant_tokens_mask and not (return_dict and tokenize):
            raise ValueError("return_assistant_tokens_mask=True needs return_dict=True and tokenize=True")
        batching = {
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "return_tensors": return_tensors,
        }
        if not self._is_by_segments(chat_template):
            return self._apply_foreign_template(
                conversation,
                tools=tools,
                documents=documents,
                chat_template=chat_template,
                add_generation_prompt=bool(add_generation_prompt),
                continue_final_message=continue_final_message,
                tokenize=tokenize,
                return_dict=return_dict,
                return_assistant_tokens_mask=return_assistant_tokens_mask,
                sanitize_control_tokens=sanitize_control_tokens,
                tokenizer_kwargs=tokenizer_kwargs,
                **batching,
                **kwargs,
            )
        chats, is_batch = self._render(
            conversation, tools, kwargs, add_generation_prompt=add_generation_prompt, continued=continue_final_message
        )
        if not tokenize:
            texts = [chat.text for chat in chats]
            return texts if is_batch else texts[0]
        options = BatchOptions(
            **batching, pad_arguments=tokenizer_kwargs, with_assistant_mask=return_assistant_tokens_mask
        )
        encoded = encode_chats(self, chats, self.encode_text, options, is_batch=is_batch)
        return encoded if return_dict else encoded["input_ids"]

    def _is_by_segments(self, chat_template: str | None) -> bool:
        template = self.chat_template if chat_template is None else chat_template
        return template is None or (isinstance(template, str) and template.startswith(TEMPLATE_MARK))

    def _apply_foreign_template(self, conversation: Any, **arguments: Any) -> Any:
        if not arguments["sanitize_control_tokens"]:
            logger.warning_once(
                "A chat template of its own is encoded in control mode: names of control tokens in messages become "
                "control tokens. Pass sanitize_control_tokens=True for untrusted text."
            )
        view = copy.copy(self)
        view.split_special_tokens = False
        return super(K3Tokenizer, view).apply_chat_template(conversation, **arguments)

    def output_reader(self, start: str = "think") -> OutputReader:
        """A reader for streaming output. `start`: "think", "response" (thinking off) or "message"."""
        markers = {self.convert_tokens_to_ids(name): name for name in (*MARKERS, *ENDS)}
        return OutputReader(start, markers, self.token_bytes)

    def parse_output(self, output: str | Sequence[int], start: str = "think") -> ParsedOutput:
        """Read what a model wrote: ids, or text where ids are gone (see `chat_reader`).

        Args:
            output: without the prompt. Tensors are taken, also with a batch axis of one.
            start: element in which it begins: "think" after a generation prompt with thinking on, "response" with
                thinking off, "message" for a whole message.

        Raises:
            TypeError: a batch of several outputs.
        """
        reader = self.output_reader(start)
        reader.feed(output if isinstance(output, str) else single_output(output))
        return reader.finish()

    def parse_response(
        self, response: Any, schema: dict | None = None, *, prefix: Any = None, tools: Any = None
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The library's way to read output: an assistant message, ready to be appended to the conversation.

        Args:
            response: ids or text without the prompt, or a list of them.
            schema: a template of the library's kind; None for the format of the model.
            prefix: the prompt, ids or text; tells where the output begins. None: after a prompt with thinking on.
            tools: not needed; arguments keep the type that the model wrote.
        """
        if schema is not None or self.response_template != RESPONSE_TEMPLATE:
            return super().parse_response(response, schema, prefix=prefix, tools=tools)
        responses = response if isinstance(response, str) else to_py_obj(response)
        is_batch = not isinstance(responses, str) and bool(responses) and not isinstance(responses[0], int)
        rows = responses if is_batch else [responses]
        prefixes = prefix if prefix is None or isinstance(prefix, str) else to_py_obj(prefix)
        if not (is_batch and isinstance(prefixes, list) and prefixes and not isinstance(prefixes[0], int)):
            prefixes = [prefixes] * len(rows)
        messages = [
            self.parse_output(row, self._start_after(before)).message()
            for row, before in zip(rows, prefixes, strict=True)
        ]
        return messages if is_batch else messages[0]

    def _start_after(self, prefix: Any) -> str:
        if prefix is None:
            return "think"
        tags = _LAST_TAG.findall(prefix if isinstance(prefix, str) else self.decode(prefix))
        last = tags[-1] if tags else ("", "")
        return last[1] if last[0] == OPEN and last[1] in ("think", "response") else "message"

    def save_vocabulary(self, save_directory: str | os.PathLike, filename_prefix: str | None = None) -> tuple[str]:
        """Write the rank file of a release.

        Returns:
            Path of the file.
        """
        name = (f"{filename_prefix}-" if filename_prefix else "") + self.vocab_files_names["vocab_file"]
        path = Path(save_directory) / name
        base = self._tokenizer.get_vocab(with_added_tokens=False)
        write_ranks({to_bytes(token): rank for token, rank in base.items()}, path)
        return (str(path),)
