"""Rendered conversations -> padded ids, attention mask and loss mask: the second half of `apply_chat_template`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import get_json_schema

from .chat import UNSET, ChatOptions, RenderedChat
from .tokenizer_modes import kept_part

#: What `self.pad` understands beside what is given to `apply_chat_template` itself.
_PAD_ARGUMENTS = ("padding_side", "pad_to_multiple_of", "return_attention_mask")


@dataclass(frozen=True)
class BatchOptions:
    """How ids become a batch. The library's names and meanings.

    Args:
        padding, truncation, max_length, return_tensors: as in a tokenizer call.
        pad_arguments: `padding_side`, `pad_to_multiple_of`, `return_attention_mask`; others are refused.
        with_assistant_mask: add `assistant_masks`, 1 for tokens of assistant messages.

    Raises:
        ValueError: an argument that has no meaning for segments, such as offsets.
    """

    padding: Any = False
    truncation: Any = False
    max_length: int | None = None
    return_tensors: Any = None
    pad_arguments: Mapping[str, Any] | None = None
    with_assistant_mask: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(set(self.pad_arguments or ()) - {*_PAD_ARGUMENTS, "split_special_tokens"})
        if unknown:
            raise ValueError(f"tokenizer_kwargs {unknown} are not supported for a chat; supported: {_PAD_ARGUMENTS}")


def chat_options(given: Mapping[str, Any], *, add_generation_prompt: bool, continued: bool | str) -> ChatOptions:
    """The options of a template call; names that the format does not know are ignored.

    Args:
        given: keyword arguments of the call. An effort that is not given is "max".
        add_generation_prompt: open the assistant's turn at the end.
        continued: False, True for the answer of the last message, or the name of the field that goes on.

    Raises:
        ValueError: see `ChatOptions`.
    """
    fields = {"content": "response", "response": "response", "reasoning_content": "think", "reasoning": "think"}
    if isinstance(continued, str) and continued not in fields:
        raise ValueError(f"continue_final_message {continued!r} is not allowed; allowed: {', '.join(fields)}")
    return ChatOptions(
        add_generation_prompt=add_generation_prompt,
        thinking=bool(given.get("thinking", True)),
        thinking_effort=given.get("thinking_effort", "max"),
        tool_choice=given.get("tool_choice"),
        response_format=given.get("response_format"),
        response_schema=given.get("response_schema", UNSET),
        image_prompts=given.get("image_prompts"),
        continued=fields[continued] if isinstance(continued, str) else "response" if continued else None,
    )


def split_batch(conversation: Any) -> tuple[list[Sequence[Any]], bool]:
    """A conversation, or a list of them, as a list of plain message lists.

    Returns:
        The conversations, and whether a batch was given: a list whose first element is a conversation.
    """
    messages = getattr(conversation, "messages", conversation)
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"conversation is a list of messages, not {type(messages).__name__}")
    is_batch = bool(messages) and (isinstance(messages[0], list | tuple) or hasattr(messages[0], "messages"))
    batch = [getattr(each, "messages", each) for each in messages] if is_batch else [messages]
    return [[_as_object(message) for message in each] for each in batch], is_batch


def _as_object(message: Any) -> Any:
    """Objects of client libraries become plain ones; what they leave unset counts as missing."""
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def tool_schemas(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tool declarations; Python functions are described by their docstring and type hints, as in the library."""
    if not tools:
        return None
    return [get_json_schema(tool) if callable(tool) else _as_object(tool) for tool in tools]


def encode_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[RenderedChat],
    encode: Callable[[str, bool], list[int]],
    options: BatchOptions,
    *,
    is_batch: bool,
) -> BatchEncoding:
    """Encode segment by segment, truncate at the tokenizer's truncation side, pad, make tensors.

    Args:
        tokenizer: pads.
        chats: rendered conversations.
        encode: text and whether control names count -> ids.
        options: see there.
        is_batch: a single conversation loses its batch axis unless tensors are made.
    """
    rows = [_row(chat, encode) for chat in chats]
    padding, truncation, max_length, _ = tokenizer._get_padding_truncation_strategies(
        padding=options.padding, truncation=options.truncation, max_length=options.max_length
    )
    if truncation != TruncationStrategy.DO_NOT_TRUNCATE and max_length is not None:
        kept = [kept_part(len(ids), max_length, tokenizer.truncation_side) for ids, _ in rows]
        rows = [(ids[part], mask[part]) for (ids, mask), part in zip(rows, kept, strict=True)]
    pad_arguments = {key: value for key, value in (options.pad_arguments or {}).items() if key in _PAD_ARGUMENTS}
    encoded = tokenizer.pad(
        {"input_ids": [ids for ids, _ in rows]}, padding=padding, max_length=max_length, **pad_arguments
    )
    data = dict(encoded)
    if options.with_assistant_mask:
        side = pad_arguments.get("padding_side") or tokenizer.padding_side
        data["assistant_masks"] = [
            _padded(mask, len(ids), side) for (_, mask), ids in zip(rows, data["input_ids"], strict=True)
        ]
    if not is_batch and options.return_tensors is None:
        data = {key: value[0] for key, value in data.items()}
    return BatchEncoding(data, tensor_type=options.return_tensors)


def _row(chat: RenderedChat, encode: Callable[[str, bool], list[int]]) -> tuple[list[int], list[int]]:
    """Ids of a conversation, and 1 for those of assistant messages."""
    pieces = [encode(segment.text, segment.allow_special) for segment in chat.segments]
    marked = {index for begin, end in chat.assistant for index in range(begin, end)}
    ids = [index for piece in pieces for index in piece]
    mask = [int(index in marked) for index, piece in enumerate(pieces) for _ in piece]
    return ids, mask


def _padded(mask: list[int], length: int, side: str) -> list[int]:
    zeros = [0] * (length - len(mask))
    return mask + zeros if side == "right" else zeros + mask
