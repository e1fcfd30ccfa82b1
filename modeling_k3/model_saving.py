"""How K3 models are saved: our writing, the library's where it must be, and uploads of either."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from .byte_sizes import parse_size
from .hub_code import HubUpload, code_options, set_class_map, write_code
from .hub_source import CARD_FILE
from .hub_upload import SAVE_OPTIONS, UPLOAD_OPTIONS, check_options, open_repository, upload
from .load_plan import Layout
from .quantizer import block_to_write, is_released_block
from .saving import Staging, check_nothing_is_lost, layout_to_write, released_items, report_recast, vision_items
from .tensor_writer import write_checkpoint
from .weight_report import WeightReport


class K3Saving(HubUpload, WeightReport):
    """Saving of all K3 models."""

    _k3_layout: Layout | None = None
    _k3_disk: Mapping[str, Tensor] = {}

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        variant: str | None = None,
        vision: bool = False,
        with_code: bool | None = None,
        tokenizer: Any = None,
        card: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save under the released names, in the layout that was read (see `saving`), in one atomic step.

        Args:
            save_directory: made if it is not there; may be the one the model was loaded from.
            is_main_process: other processes write nothing.
            state_dict: what to save instead of the model's own tensors.
            push_to_hub: upload afterwards, to `repo_id`, with `hub_upload.UPLOAD_OPTIONS`. A card on the hub stays
                unless `card` says something.
            max_shard_size, variant: of one file; written into the file names.
            vision: carry the vision tensors of the loaded checkpoint over, untouched.
            with_code: add code, class map and card (`hub_code`). None: with `push_to_hub`, or a registered class.
            tokenizer, card: saved along with the code; see `hub_card.check_card`. A README.md that is there stays.
            kwargs: the above, `repository` for the card, and `hub_upload.SAVE_OPTIONS`. Adapters, the library's names
                (`save_original_format=False`), distributed checkpoints and other quantisations are left to the library.

        Raises:
            ValueError: a size that is none; `vision` without vision tensors; a part in the place of the whole; a card
                or a class that cannot be uploaded. Nothing is made then.
            TypeError: an unknown argument.
            NotADirectoryError: `save_directory` is a file.
        """
        limit, target = parse_size(max_shard_size, "max_shard_size"), Path(save_directory)
        check_options(kwargs, ("repo_id", "repository", *UPLOAD_OPTIONS, *SAVE_OPTIONS), is_upload=push_to_hub)
        code = code_options(self, target, push_to_hub or self.is_remote_code(), with_code, tokenizer, card, kwargs)
        tensors = None if self._saves_by_library(kwargs) else dict(state_dict or self.state_dict())
        written: list[str] = []
        if tensors is None or any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
            before = _stamps(target)
            own = {name: value for name, value in kwargs.items() if name in SAVE_OPTIONS}
            options = {"state_dict": state_dict, "max_shard_size": max_shard_size, "variant": variant, **own}
            # The library would upload before the code is there.
            super().save_pretrained(target, is_main_process, push_to_hub=False, **options)
            if not self.should_save_on_this_rank(is_main_process):
                return
            if code is not None and (target / "config.json").is_file():
                write_code(target, self, target, **code)
            written = [name for name, stamp in _stamps(target).items() if before.get(name) != stamp]
        elif target.is_file():
            raise NotADirectoryError(f"save_directory={str(target)!r} is a file")
        elif is_main_process:
            written = self._write(target, tensors, limit, variant, vision, code)
        if push_to_hub and is_main_process:
            # A card that lies there from before, perhaps by hand, goes where there is none.
            written += [CARD_FILE] if code is not None and (target / CARD_FILE).is_file() else []
            repo = open_repository(kwargs.get("repo_id") or target.name, kwargs)
            upload(target, written, repo, kwargs, not card, variant)

    def _write(
        self,
        target: Path,
        tensors: dict[str, Tensor],
        limit: int,
        variant: str | None,
        vision: bool,
        code: dict[str, Any] | None,
    ) -> list[str]:
        """Write a checkpoint in one atomic step; returns the names of its files."""
        layout = layout_to_write(self, self._k3_layout)
        items = list(released_items(self, tensors, layout, self._k3_disk))
        items += vision_items(layout) if vision else []
        report_recast(items, layout)
        check_nothing_is_lost(target, layout, items, self.config.num_hidden_layers)
        target.mkdir(parents=True, exist_ok=True)
        with Staging(target) as staging:
            self._write_side_files(staging.path)
            if code is not None:
                write_code(staging.path, self, target, **code)
            write_checkpoint(
                staging.path,
                items,
                limit,
                variant=variant,
                digits=5 if self.config.released_config is None else 6,
                total_parameters=self.num_parameters(),
            )
            written = [path.name for path in staging.path.iterdir()]
            staging.commit(variant)
        return written

    def _saves_by_library(self, options: dict[str, Any]) -> bool:
        quantizer = self.__dict__.get("hf_quantizer")
        is_foreign = quantizer is not None and not is_released_block(quantizer.quantization_config)
        asks_for_it = options.get("distributed_checkpoint") or not options.get("save_original_format", True)
        return bool(is_foreign or asks_for_it or self.__dict__.get("_hf_peft_config_loaded"))

    def _write_side_files(self, folder: Path) -> None:
        """config.json without a class map, and generation_config.json."""
        self.config.dtype, self.config.architectures = self.dtype, [type(self).__name__.removeprefix("FSDP")]
        if (block := block_to_write(self)) is not None:
            self.config.quantization_config = block
        self.config.save_pretrained(folder)
        set_class_map(folder, None)
        if self.can_generate():
            self.generation_config.save_pretrained(folder)


def _stamps(folder: Path) -> dict[str, int]:
    """Name and time of change of what lies in a folder."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} if folder.is_dir() else {}
