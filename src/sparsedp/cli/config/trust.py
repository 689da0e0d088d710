"""Which code a configuration may name, and how it is found.

A configuration is data that may come from anybody, and "package.module:callable" in it is code that runs. It may name

- what `sparsedp.data`, `sparsedp.models` and `sparsedp.nn` export,
- what is defined in a file beside the configuration that the user named on the command line,
- what is defined in a package that the user named with --trust.

It must be defined there, not imported: `mine:os.system` and `mine:check_output`, which mine.py imports, are refused. The folder
of a run is no configuration that the user named, and code beside the files in it is refused: otherwise whoever hands the folder
over would decide what runs.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from sparsedp.errors import ConfigError, SparseDPWarning

BUNDLED_MODULES = ("sparsedp.data", "sparsedp.models", "sparsedp.nn")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="PACKAGE",
        action="append",
        default=[],
        type=_package,
        help="let the configuration name code of this package or module, installed or in the current directory",
    )


def add_code_argument(parser: argparse.ArgumentParser) -> None:
    """For commands that go on with a run."""
    parser.add_argument(
        "--code", metavar="CONFIG", help="the configuration beside which the run's own code lies, if it has any"
    )


def _package(text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected the name of a package or module, such as my_models; got {text!r}")
    return text


@dataclass(frozen=True)
class Code:
    """Where the code of one configuration may come from."""

    configuration: Path | None = None  # as the user named it: code may lie beside it
    trusted: tuple[str, ...] = ()  # packages and modules
    also_beside: tuple[Path, ...] = ()  # further folders whose files it may name
    # Of a run that goes on: what it was started with, the SHA-256 of each module's file.
    digests: Mapping[str, str] = field(default_factory=dict)
    run: Path | None = None  # the folder of that run

    def find(self, address: str, key: str) -> Callable[..., Any]:
        """The callable at "package.module:name"; `key` of the configuration names it."""
        module_name, _, name = address.partition(":")
        if module_name in BUNDLED_MODULES:
            return _bundled(module_name, name, address, key)
        folder = self._folder(module_name)
        if self._is_trusted(module_name):
            module = self._import_trusted(module_name, folder, address, key)
        elif folder is not None:
            module = self._import_beside(module_name, folder, address, key)
        else:
            raise ConfigError(self._refusal(module_name, address, key))
        value: Any = module
        for part in name.split("."):
            # A class may hold a factory. A module that stands in the namespace leads elsewhere.
            if value is not module and not isinstance(value, type):
                raise ConfigError(f"{key}: {address}: only a class may stand before the last part of the name")
            if part.startswith("__") or not hasattr(value, part):
                raise ConfigError(f"{key}: {address}: {module_name} has no {name!r}")
            value = getattr(value, part)
        if not callable(value):
            raise ConfigError(f"{key}: {address} is not callable")
        home = getattr(value, "__module__", None)
        if isinstance(value, types.ModuleType) or not isinstance(home, str):
            home = type(value).__module__
        if not (home == module_name or self._is_trusted(home) or self._is_loaded_from_beside(home)):
            raise ConfigError(
                f"{key}: {address} is not defined in {module_name} but in {home}. Write a function of your own around "
                f"it, or give --trust {home.partition('.')[0]}"
            )
        return value

    def call(self, address: str, section: str, options: dict[str, Any], *arguments: Any) -> Any:
        """What the callable at `address` returns, which a section names as its `kind` and gives `options`."""
        function = self.find(address, f"{section}.kind")
        try:
            inspect.signature(function).bind(*arguments, **options)
        except TypeError as error:
            raise ConfigError(f"{section}.options: {address} cannot be called with them: {error}") from error
        return function(*arguments, **options)

    def file_of(self, address: str) -> Path | None:
        """The file of a callable that was found."""
        path = getattr(sys.modules.get(address.partition(":")[0]), "__file__", None)
        return None if path is None else Path(path)

    def is_beside(self, address: str) -> bool:
        """Whether a callable is found beside the configuration, and by nothing else."""
        module_name = address.partition(":")[0]
        return module_name not in BUNDLED_MODULES and not self._is_trusted(module_name)

    # ------------------------------------------------------------------ packages that the user named

    def _is_trusted(self, module_name: str) -> bool:
        return any(f"{module_name}.".startswith(f"{package}.") for package in self.trusted)

    def _import_trusted(self, module_name: str, folder: Path | None, address: str, key: str) -> types.ModuleType:
        top = module_name.partition(".")[0]
        if folder is not None:
            _search_first(folder)
        elif top not in sys.modules and PathFinder.find_spec(top) is None:
            directory = str(Path.cwd())  # as `python -m` does, but behind what is installed
            sys.path += [directory] if PathFinder.find_spec(top, [directory]) is not None else []
        module = _import(module_name, address, key, "neither installed nor in the current directory")
        changed = self._changed(module_name, _file(module))
        if changed is not None:
            warnings.warn(f"{changed}.", SparseDPWarning, stacklevel=2)
        return module

    # ------------------------------------------------------------------ files beside the configuration

    def _folder(self, module_name: str) -> Path | None:
        """The folder beside whose configuration a file or folder of that name lies."""
        top = module_name.partition(".")[0]
        beside = None if self.configuration is None else self.configuration.absolute().parent
        for folder in (*([] if beside is None or _is_of_a_run(beside) else [beside]), *self.also_beside):
            if (folder / f"{top}.py").is_file() or (folder / top).is_dir():
                return folder
        return None

    def _import_beside(self, module_name: str, folder: Path, address: str, key: str) -> types.ModuleType:
        parts = module_name.split(".")
        where: Any = [str(folder)]
        spec: ModuleSpec | None = None
        importlib.invalidate_caches()  # the files may be newer than what the system was last asked
        for depth in range(1, len(parts) + 1):
            spec = PathFinder.find_spec(".".join(parts[:depth]), where)
            if spec is None:
                raise ConfigError(f"{key}: there is no module {'.'.join(parts[:depth])!r} for {address} in {folder}")
            self._require_within(folder, spec, address, key)
            where = spec.submodule_search_locations or []
        assert spec is not None
        self._require_from(folder, sys.modules.get(parts[0]), address, key)
        changed = self._changed(module_name, None if spec.origin is None else Path(spec.origin))
        if changed is not None:
            raise ConfigError(f"{key}: {changed}. If that is meant, give --trust {module_name}")
        _search_first(folder)
        module = _import(module_name, address, key, f"not in {folder}")
        self._require_from(folder, module, address, key)
        return module

    def _require_from(self, folder: Path, module: types.ModuleType | None, address: str, key: str) -> None:
        """Refuses a module that has the name of the user's file and is another."""
        if module is not None and not _lies_in(module, folder):
            raise ConfigError(
                f"{key}: {address}: another module has the name {module.__name__!r} ({_file(module) or 'built in'}). Give "
                f"the file in {folder} another name"
            )

    def _require_within(self, folder: Path, spec: ModuleSpec, address: str, key: str) -> None:
        """A link that leads out of the folder leads to code that does not lie beside the configuration."""
        places = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or [])
        for place in places:
            if not Path(place).resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"{key}: {address}: {place} leads out of the folder of {self._shown()}, to {Path(place).resolve()}. If "
                    f"you know that code, give --trust {spec.name}"
                )

    def _is_loaded_from_beside(self, module_name: str) -> bool:
        folder, module = self._folder(module_name), sys.modules.get(module_name)
        return folder is not None and module is not None and _lies_in(module, folder)

    # ------------------------------------------------------------------ messages

    def _shown(self) -> str:
        return "the configuration" if self.configuration is None else str(self.configuration)

    def _changed(self, module_name: str, file: Path | None) -> str | None:
        """What to say if a run is to go on with other code than it was started with."""
        before = self.digests.get(module_name)
        if before is None or file is None or not file.is_file() or digest(file) == before:
            return None
        return f"{file} is not what {self.run} was started with: the file has another content"

    def _refusal(self, module_name: str, address: str, key: str) -> str:
        top = module_name.partition(".")[0]
        if self.configuration is None and self.run is not None:
            return (
                f"{key}: {self.run} names the code {address}, and the folder of a run is not trusted to choose what runs here. "
                f"Name the configuration beside which you have that code (--code CONFIG), or give --trust {top}"
            )
        if self.configuration is not None and _is_of_a_run(self.configuration.absolute().parent):
            return (
                f"{key}: {self.configuration} lies in the folder of a run, which is not trusted to choose what runs here, and "
                f"names the code {address}. If you know that code, give --trust {top}"
            )
        return (
            f"{key}: {address} is neither in a file beside {self._shown()} nor in a package that you trust. If you know "
            f"that code, give --trust {top}"
        )


def _bundled(module_name: str, name: str, address: str, key: str) -> Callable[..., Any]:
    module = importlib.import_module(module_name)
    value = getattr(module, name, None) if name in module.__all__ and not name.startswith("write_") else None
    if not callable(value):
        raise ConfigError(f"{key}: {address}: {module_name} has no {name!r} that a configuration may name")
    return value


def _import(module_name: str, address: str, key: str, where: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        raise ConfigError(f"{key}: there is no module {error.name!r} for {address}, {where}") from error


def _search_first(folder: Path) -> None:
    """Puts the folder first in the search path, as for a script: for what the user's module imports, and for worker processes."""
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _is_of_a_run(folder: Path) -> bool:
    """Whether a folder is that of a run, or within one: what lies there may have been handed over with it."""
    folder = folder.resolve()
    return any(
        (place / "private" / "config.yaml").is_file() and (place / "release").is_dir()
        for place in (folder, *folder.parents)
    )


def _file(module: types.ModuleType) -> Path | None:
    path = getattr(module, "__file__", None)
    return None if path is None else Path(path)


def _lies_in(module: types.ModuleType, folder: Path) -> bool:
    places = [module.__file__] if getattr(module, "__file__", None) else list(getattr(module, "__path__", []))
    return bool(places) and all(Path(str(place)).resolve().is_relative_to(folder.resolve()) for place in places)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
