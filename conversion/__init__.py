"""From one format to another: what `k3 convert` does.

    tokenizer    the release's rank file -> `tokenizer.json`, which needs no code
    convert      layouts, number formats of the experts, vision tensors, shards
    job          how a conversion is written: resumable, complete or absent
    verify       two checkpoints compared, by tensors and by logits with routes forced
    tiny         a seeded random checkpoint in the released layout, with golden logits
    cli          the commands

Nothing is imported here, so that `import modeling_k3.conversion` costs nothing.
"""
