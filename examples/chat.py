"""Talk to a K3 checkpoint from Python: messages in, reasoning, answer and tool calls out.

python examples/chat.py FOLDER "Where is the key?"
"""

import argparse

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


def main(arguments: list[str] | None = None) -> None:
    """Answer one question, calling the tool as often as the model wants, at most three times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a saved K3 checkpoint with its tokenizer")
    parser.add_argument("question")
    parser.add_argument("--effort", choices=["low", "high", "max"], default="low")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
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
        messages.append(output.message())
        if not output.tool_calls:
            return
        for call in output.tool_calls:
            print(f"call: {call.name}({call.arguments})")
            messages.append({"role": "tool", "name": call.name, "content": get_weather(call.arguments)})


if __name__ == "__main__":
    main()
