"""Talk to a K3 checkpoint from Python: messages in, reasoning, answer and tool calls out.

python examples/chat.py FOLDER "Where is the key?"
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_k3  # noqa: F401  tells the Auto classes what K3 is


def get_weather(city: str) -> str:
    """
    The weather in a city.

    Args:
        city: Name of the city.
    """
    return f"21 degrees and clear in {city}"


def result_of(name: str, arguments: str) -> str:
    """Call the tool. What cannot be called gives a result that says so, for the model to read."""
    if name != get_weather.__name__:
        return f"error: there is no tool {name}"
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return "error: the arguments must be a JSON object"
    try:
        return get_weather(**given)
    except TypeError as error:
        return f"error: {error}"


def main(arguments: list[str] | None = None) -> None:
    """Answer one question, calling the tool as often as the model wants, at most three times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a saved K3 checkpoint with its tokenizer")
    parser.add_argument("question")
    parser.add_argument("--effort", choices=["low", "high", "max"], default="low")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.folder)
    except (OSError, ValueError) as error:
        parser.error(
            f"{options.folder}: give a folder with a checkpoint, or one of the hub. {error}".partition("\n")[0]
        )
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype="auto").eval()
    messages = [{"role": "user", "content": options.question}]
    for _ in range(3):
        # Encoded segment by segment: whatever the question says, it cannot become a control token.
        prompt = tokenizer.apply_chat_template(
            messages, tools=[get_weather], thinking_effort=options.effort, return_tensors="pt"
        )
        with torch.inference_mode():
            ids = model.generate(
                **prompt,
                max_new_tokens=options.max_new_tokens,
                eos_token_id=tokenizer.convert_tokens_to_ids(["<|end_of_msg|>", "[EOS]"]),
                pad_token_id=tokenizer.pad_token_id,
            )
        output = tokenizer.parse_output(ids[0, prompt["input_ids"].shape[1] :])
        print(f"reasoning: {output.reasoning}\nanswer: {output.content}")
        if not output.complete:
            print(f"(cut off inside {output.open})")
        # The message goes back as it was received, reasoning included: the model was trained on that.
        message = output.message()
        messages.append(message)
        if not output.tool_calls:
            return
        for index, call in enumerate(message["tool_calls"]):
            # The model numbers its calls and gives them no ids: results find their calls by ids made up here.
            call["id"] = f"call_{len(messages)}_{index}"
            name, given = call["function"]["name"], call["function"]["arguments"]
            print(f"call: {name}({given})")
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result_of(name, given)}
            )


if __name__ == "__main__":
    main()
