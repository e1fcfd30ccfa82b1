"""Lets peft know K3's experts as soon as a program imports peft, and costs nothing before that."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType


def wire_peft() -> None:
    """Install `tuner.K3LoraModel` now, if peft is imported already, or right after its import. Idempotent."""
    if sys.modules.get("peft") is not None:
        _install()
    elif not any(isinstance(finder, _AfterPeft) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPeft())


def _install() -> None:
    try:
        from modeling_k3.adapters.tuner import install
    except ImportError as error:
        # A peft that is too old must not take other models down with it.
        warnings.warn(f"adapters on K3's experts are not available with this peft: {error}", stacklevel=2)
        return
    install()


class _AfterPeft(importlib.abc.MetaPathFinder):
    """Stands in front of the finders until peft is imported, and steps aside for everything else."""

    def __init__(self) -> None:
        self.is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find peft as the other finders do, with a loader that installs ours afterwards."""
        if fullname != "peft" or self.is_asking:
            return None
        self.is_asking = True
        try:
            spec = importlib.util.find_spec("peft")
        finally:
            self.is_asking = False
        # To be found is not yet to be imported: libraries ask whether peft is there.
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenInstall(spec.loader, self)
        return spec


class _ThenInstall(importlib.abc.Loader):
    """peft's own loader, and a step after it."""

    def __init__(self, loader: importlib.abc.Loader, finder: _AfterPeft) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As peft's own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run peft, give it its own loader back, then install."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        _install()
