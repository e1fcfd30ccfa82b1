"""From one format to another: what `k3 convert` does.

    tokenizer    the release's rank file -> `tokenizer.json`, which needs no code

Nothing is imported here, so that `import modeling_k3.conversion` costs nothing.
"""
