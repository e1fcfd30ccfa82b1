"""The two-minute demo: train a small K3 from scratch on text that every machine has, and report what came out.

One module per concern, read in this order:

    corpus        which files are read, and which of them are held out
    tokenizer     bytes as ids, and the block of control tokens
    optim         which parameter is updated how (Muon, AdamW), and the schedule
    balance       the routers' biases
    state         training state on disk: atomic, resumable, no pickle
    train         the loop
    measure       bits per byte, speed, memory
    display       what is shown meanwhile
    chart, report what is shown at the end
    text          prompt in, streamed continuation out (also `k3 generate`)
    run           the whole of it, `k3 demo`

Nothing is imported here, so that `import modeling_k3.demo` costs nothing.
"""


class UserError(ValueError):
    """Something the caller can put right: a path, an option, too little text. The message says what is allowed."""
