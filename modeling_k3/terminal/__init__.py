"""`k3 chat`: talk to a model in the terminal.

    session   the conversation: history with reasoning, one cache across turns, generation
    tools     declared tools, and a stub that answers
    screen    what is shown: streaming, reasoning dimmed
    loop      input, commands, turns
    start     from a folder to a conversation

Nothing is imported here, so that `import modeling_k3.terminal` costs nothing.
"""
