"""A conversation with a model: history with reasoning, and one cache that grows from turn to turn.

A KDA state cannot give a token back, so a cache is worth something only while every next prompt begins with exactly
the tokens it holds. What the model wrote is therefore kept as its own ids; only what is new is rendered and encoded.
Where that is not possible (an answer that does not follow the format, other options) the prompt is rendered afresh.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from modeling_k3 import K3Cache
from modeling_k3.chat_reader import Event, OutputReader, ParsedOutput
from modeling_k3.markup import END_OF_MESSAGE, ENDS, close_tag, control, open_tag
from modeling_k3.tokenization_k3 import K3Tokenizer

Show = Callable[[Event], None]


@dataclass
class ChatSettings:
    """How the model answers.

    Args:
        thinking: with a think channel.
        effort: "low", "high", "max", or None to say nothing about it.
        max_new_tokens: at most this many a turn, reasoning included.
        sampling: arguments of `generate`, over the model's own.
    """

    thinking: bool = True
    effort: str | None = "max"
    max_new_tokens: int = 2048
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One reply.

    Args:
        output: what was read.
        prompt_tokens: tokens of the prompt; `reused_tokens` of them were in the cache.
        new_tokens: tokens written, the end included.
        seconds: from the call to the last token.
    """

    output: ParsedOutput
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    seconds: float


class ChatSession:
    """A conversation. Append messages, call `reply`.

    Args:
        model: any K3 causal language model.
        tokenizer: its tokenizer.
        settings: may be replaced at any time by `configure`.
        tools: JSON schemas to declare.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: K3Tokenizer,
        settings: ChatSettings | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.settings = settings or ChatSettings()
        self.tools = list(tools)
        self.messages: list[dict[str, Any]] = []
        self._restart()

    def _restart(self) -> None:
        """Forget the tokens, keep the messages."""
        self._cache: K3Cache | None = None
        self._held: list[int] = []
        # Ids that say exactly the first `_covered` messages, or None if the next prompt must be rendered as a whole.
        self._transcript: list[int] | None = None
        self._covered = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the cache."""
        return len(self._held)

    def configure(self, settings: ChatSettings | None = None, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Change settings or tools. Effort and tools stand at the beginning of a prompt: the cache starts over."""
        before = (self.settings.thinking, self.settings.effort, self.tools)
        self.settings = settings or self.settings
        self.tools = self.tools if tools is None else list(tools)
        if before != (self.settings.thinking, self.settings.effort, self.tools):
            self._restart()

    def reset(self) -> None:
        """A new conversation."""
        self.messages.clear()
        self._restart()

    def system(self, text: str) -> None:
        """Append a system message."""
        self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        """Append a user message."""
        self.messages.append({"role": "user", "content": text})

    def result(self, call_id: str, text: str) -> None:
        """Append the result of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def drop_from(self, position: int) -> None:
        """Drop the messages from a position on, and the tokens if they say any of those."""
        del self.messages[position:]
        if self._covered > len(self.messages):
            self._restart()

    def prompt(self) -> list[int]:
        """The ids of the next prompt: the tokens of the turns so far as they were, and what is new."""
        whole = self._rendered(self.messages, add_generation_prompt=True)
        if self._transcript is None:
            ids, new = [], whole
        else:
            old = self._rendered(self.messages[: self._covered], add_generation_prompt=False)
            ids, new = list(self._transcript), whole[len(old) :]
        for segment in new:
            ids += self.tokenizer.encode_text(segment.text, segment.allow_special)
        return ids

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[Any]:
        chat = self.tokenizer.render_chat(
            messages,
            self.tools,
            thinking=self.settings.thinking,
            thinking_effort=self.settings.effort,
            add_generation_prompt=add_generation_prompt,
        )
        return chat.segments

    @torch.inference_mode()
    def reply(self, show: Show, should_stop: Callable[[], bool] = lambda: False) -> Turn:
        """Let the model answer, and append its message.

        Args:
            show: called with every event of the output as it comes.
            should_stop: asked after every token; the answer so far is kept.

        Raises:
            ValueError: the conversation cannot be rendered; nothing has changed.
            RuntimeError: generation failed. No message is added; the next prompt is computed from its beginning.
        """
        ids = self.prompt()
        began = time.monotonic()
        if self._cache is None or ids[: len(self._held)] != self._held or len(ids) <= len(self._held):
            self._cache, self._held = K3Cache(self.model.config), []
        reused, cache = len(self._held), self._cache
        reader = self.tokenizer.output_reader("think" if self.settings.thinking else "response")
        follower = _Follower(reader, show)
        batch = torch.tensor([ids], device=self.model.device)
        # Until generation has ended well, nobody knows what the cache holds.
        self._cache, self._held = None, []
        self.model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            cache=cache,
            generation_config=self._generation_config(),
            streamer=follower,
            stopping_criteria=StoppingCriteriaList([_Stop(should_stop)]),
        )
        everything = ids + follower.ids
        self._cache, self._held = cache, everything[: cache.get_seq_length()]
        output = reader.finish()
        self.messages.append(self._message(output))
        self._remember(everything, reader, output)
        return Turn(output, len(ids), reused, len(follower.ids), time.monotonic() - began)

    def _message(self, output: ParsedOutput) -> dict[str, Any]:
        message = output.message()
        for index, call in enumerate(message.get("tool_calls", ())):
            call["id"] = f"call_{len(self.messages)}_{index}"
        return message

    def _remember(self, everything: list[int], reader: OutputReader, output: ParsedOutput) -> None:
        """Keep the tokens of a turn if they say what its message says."""
        channel = reader.open_channel
        if output.well_formed:
            self._transcript = everything
        elif channel is not None:
            # Cut off inside a channel: close what is open.
            segments = close_tag(channel)
            if channel == "think":
                segments += [*open_tag("response"), *close_tag("response")]
            segments += [*close_tag("message"), control(END_OF_MESSAGE)]
            closing = [self.tokenizer.encode_text(text, is_control) for text, is_control in segments]
            self._transcript = everything + [index for ids in closing for index in ids]
        else:
            self._transcript = None
        self._covered = len(self.messages)

    def _generation_config(self) -> GenerationConfig:
        config = GenerationConfig.from_dict(
            {**self.model.generation_config.to_dict(), **self.settings.sampling, "max_length": None}
        )
        config.max_new_tokens = self.settings.max_new_tokens
        config.eos_token_id = [self.tokenizer.convert_tokens_to_ids(name) for name in ENDS]
        config.pad_token_id = self.tokenizer.pad_token_id
        config.return_dict_in_generate = False
        return config


class _Follower(BaseStreamer):
    """Hands every new token to the reader, and what it makes of them to the screen."""

    def __init__(self, reader: OutputReader, show: Show) -> None:
        self.reader, self.show = reader, show
        self.ids: list[int] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (first call, skipped) or new tokens."""
        if self._is_prompt:
            self._is_prompt = False
            return
        ids = value.reshape(-1).tolist()
        self.ids += ids
        for event in self.reader.feed(ids):
            self.show(event)

    def end(self) -> None:
        """Nothing is left to do: the reader is asked for its result afterwards."""


class _Stop(StoppingCriteria):
    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self.should_stop = should_stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.should_stop(), dtype=torch.bool, device=input_ids.device)
