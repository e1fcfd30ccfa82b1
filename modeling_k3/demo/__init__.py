"""The demo: a small K3 that was trained on text that every machine has; or train one from scratch, and report.

One module per concern, read in this order:

    corpus        which files are read, and which of them are held out
    tokenizer     bytes as ids, and the block of control tokens
    state         training state on disk: atomic, resumable, no pickle
    train         the loop; optimizer, schedule, balancing and quantisation come from `modeling_k3.training`
    measure       bits per byte, speed, memory
    display       what is shown meanwhile
    chart, report what is shown at the end
    card          a finished model with its card, as in examples/pico
    text          prompt in, streamed continuation out (also `k3 generate`)
    run           the whole of it, `k3 demo --train`
    start         `k3 demo`: the finished model of examples/pico

Nothing large is imported here, so that `import modeling_k3.demo` costs nothing.
"""

import logging
from pathlib import Path

# Where bitsandbytes is installed, the Trainer's imports bring it along, and it complains about an optional package of
# its own. Nothing here uses it, and a demo should not begin with a complaint.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def trained_path() -> Path:
    """Folder of a small trained K3 with its tokenizer: examples/pico of a clone, and in every wheel.

    Returns:
        The absolute path.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "pico"
    return installed if installed.is_dir() else package.parent / "examples" / "pico"


class UserError(ValueError):
    """Something the caller can put right: a path, an option, too little text. The message says what is allowed."""
