"""What leaves a module beside its parameters and buffers has to be what it was before training.

`get_extra_state`, hooks on `state_dict` and methods that override it can put anything beside the weights, and a module that is
pickled takes along whatever pickle finds: Python attributes of the module, of its parameters and hooks, parts that were added
later: a count of rows, the last batch. No noise is on them, and nobody paid for them. What has not changed since `make_private`
cannot hold private data and passes; what has changed is refused by name (`fingerprint.py` tells).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from sparsedp.capture import is_own_hook
from sparsedp.errors import UnsupportedError
from sparsedp.fingerprint import UNKNOWN, fingerprint, parts_for_pickle, place_of, python_state
from sparsedp.tables.guard import unguarded_class

_TORCH = frozenset(vars(nn.Module()))  # attributes that torch's own modules have
_HOOKS = frozenset(name for name in _TORCH if name.startswith("_forward"))
_REGISTERED = ("_parameters", "_buffers", "_modules")
_EMPTY = (dict, OrderedDict, set)


def watch(module: nn.Module, before: Callable[[], None]) -> None:
    """From now on, `state_dict` and pickling of the module and of its parts refuse what changed. They call `before` first."""
    fresh = []
    for name, part in module.named_modules():
        if not isinstance(vars(part).get("state_dict"), _Watched):  # one that an earlier engine left knows of a change
            fresh.append(_Watched(part, name))
    try:
        for one in reversed(fresh):  # when all are in their places: a part that is watched itself counts by its name
            one.begin()
        for one in fresh:
            one.is_active = True
        for one in _watched(module):
            one.before.append(before)
    except BaseException:
        for one in fresh:
            one.remove()
        raise


def unwatch(module: nn.Module) -> None:
    """Makes modules ordinary again, but for those that something has changed in: they would let it out."""
    watched = list(_watched(module))
    kept: set[int] = set()
    try:
        for one in reversed(watched):  # parts before the modules that hold them, which need not ask them again
            if one.changed():
                kept |= {id(part) for part in one.module.modules()}
            else:
                one.is_active = False
    finally:
        for one in watched:
            one.is_active = True
    for one in watched:
        if id(one.module) not in kept:
            one.remove()


def loading(module: nn.Module) -> Callable[[], None]:
    """To call before a checkpoint is loaded; the function that it returns is to be called afterwards.

    What the checkpoint brings is as good as what was there: it was written under watch. What had changed before stays refused.
    """
    before = [(one, one.changed_attributes()) for one in _watched(module)]

    def loaded() -> None:
        for one, changed in reversed(before):  # parts before the modules that hold them
            one.renew(changed)

    return loaded


def _watched(module: nn.Module) -> Iterator[_Watched]:
    for part in module.modules():
        if isinstance(one := vars(part).get("state_dict"), _Watched):
            yield one


class _Watched:
    """Stands in a module's attribute `state_dict`, where it is called by the module's user, its parent, and pickle."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before: list[Callable[[], None]] = []
        self.replaced = vars(module).get("state_dict")  # somebody may have put another function there
        self.extras: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.switches: dict[str, tuple[bool, ...]] = {}
        self.is_active = self.is_copy = False
        vars(module)["state_dict"] = self
        if _pickles_its_own_way(module):
            vars(module)["__reduce_ex__"] = _WatchedReduction(self)

    def begin(self) -> None:
        """Takes what is there now for what was there before training."""
        self.extras = self._extras(self._call()) | self._tensor_attributes(_standard(self.module))
        self.attributes, self.switches = self._attributes(), self._switches()
        for name, value in self.extras.items():
            if value.endswith(UNKNOWN):
                raise UnsupportedError(
                    f"The state_dict of {self._title()} holds '{name}', which is neither a parameter nor a buffer of it and "
                    "holds something that cannot be pickled. Whether private data get into it in training could not be "
                    "seen. Keep it outside of get_extra_state, or make it of tensors, numbers and texts."
                )

    def _call(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).state_dict(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._require()
        state = self._call(*args, **kwargs)
        if not self.is_active:
            return state
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        is_part = bool(args) or kwargs.get("destination") is not None  # of a state_dict that another module makes
        extras = self._extras(state, prefix, is_part)
        changed = [
            *(name for name in _different(self.extras, extras) if name in extras or not _of_attributes(name)),
            *(name for name, value in extras.items() if value.endswith(UNKNOWN)),
        ]
        if changed:
            raise UnsupportedError(
                f"The state_dict of {self._title()} holds '{changed[0]}', which is neither a parameter nor a buffer of it "
                "(get_extra_state or a hook on state_dict put it there, or took it away) and has changed since make_private: "
                "it may tell of private data, without noise. Keep it outside of the module, or set it back to what it was."
            )
        return state

    def _require(self) -> None:
        for require in self.before:
            require()

    def changed(self) -> bool:
        """Whether anything here, or in the `state_dict` of a part, is not what it was."""
        try:
            self()
        except UnsupportedError:
            return True
        return bool(self.changed_attributes())

    def changed_attributes(self) -> list[str]:
        """What pickle would write otherwise than before, by name. All modules may be in training mode, or none of them."""
        now = self._switches()
        switched = [name for name in now if now[name] != self.switches[name] and len(set(now[name])) > 1]
        changed = _different(self.attributes, attributes := self._attributes())
        if self.is_copy:  # torch copies parameters without their Python attributes
            changed = [name for name in changed if name in attributes or not _of_attributes(name)]
        return changed + switched

    def renew(self, but: Iterable[str]) -> None:
        """Takes what is there now for what was there before training, but for some attributes."""
        kept = {name: self.attributes.get(name) for name in but if name not in self.switches}
        switches = {name: self.switches[name] for name in but if name in self.switches}
        self.begin()
        now = {**self.attributes, **kept}
        self.attributes = {name: value for name, value in now.items() if value is not None}
        self.switches |= switches

    def remove(self) -> None:
        attributes = vars(self.module)
        if self.replaced is None:
            del attributes["state_dict"]
        else:
            attributes["state_dict"] = self.replaced
        if isinstance(attributes.get("__reduce_ex__"), _WatchedReduction):
            del attributes["__reduce_ex__"]

    def __deepcopy__(self, memo: dict) -> _Watched:
        """A copy of the module is watched, too; what training does to the module does nothing to the copy."""
        self._require()
        other = _Watched.__new__(_Watched)
        memo[id(self)] = other
        other.module, other.name = copy.deepcopy(self.module, memo), self.name
        other.before, other.replaced = [], copy.deepcopy(self.replaced, memo)
        other.extras, other.attributes = dict(self.extras), dict(self.attributes)
        other.switches, other.is_active, other.is_copy = dict(self.switches), self.is_active, True
        return other

    def refuse_changed(self) -> None:
        self._require()
        if changed := self.changed_attributes():
            raise UnsupportedError(
                f"Attribute '{changed[0]}' of {self._title()} has changed since make_private: it may hold private data, and "
                "pickling the module would let them out. Save model.state_dict(), or set the attribute back to what it was."
            )

    def __reduce__(self) -> Any:
        """Where a module is pickled: it will be an ordinary one."""
        self.refuse_changed()
        if self.replaced is not None:
            return copy.copy, (self.replaced,)
        return getattr, (self.module, "state_dict")  # of its class: its attributes are not there yet

    def _title(self) -> str:
        return f"module '{self.name}' ({type(self.module).__name__})" if self.name else type(self.module).__name__

    def _extras(self, state: Mapping[str, Any], prefix: str = "", is_part: bool = False) -> dict[str, str]:
        """What `state_dict` gave beside parameters and buffers under their own names, and which of these are missing."""
        standard = _standard(self.module)
        missing = {name: "missing" for name in standard if prefix + name not in state}
        # A table without memory is elsewhere: its owners settle it, and hand it out.
        entries = {
            name: value
            for name, value in _under(state, prefix).items()
            if name not in standard or not standard[name].is_meta
        }
        if not is_part:  # then all of it is this module's
            entries |= {f"{key} (outside of '{prefix}')": state[key] for key in state if not key.startswith(prefix)}
            attributes = vars(state) if hasattr(state, "__dict__") else {}
            entries |= {f"attribute {name}": value for name, value in attributes.items() if name != "_metadata"}
        extras = {
            name: value
            for name, value in entries.items()
            if name not in standard or (place := place_of(value)) is None or place != place_of(standard[name])
        }
        versions = {
            f"{key[len(prefix) :]} (metadata)": fingerprint(value, {}, _watched_name)
            for key, value in getattr(state, "_metadata", {}).items()
            if key.startswith(prefix) or key == prefix[:-1]
        }
        return missing | versions | self._fingerprints(extras) | self._tensor_attributes(entries)

    def _tensor_attributes(self, tensors: Mapping[str, Any]) -> dict[str, str]:
        """Python attributes of parameters and buffers, which state_dict(keep_vars=True) gives along with them."""
        states = {f"{name}{_OF_TENSOR}": python_state(v) for name, v in tensors.items() if isinstance(v, Tensor)}
        return self._fingerprints({name: state for name, state in states.items() if state})

    def _attributes(self) -> dict[str, str]:
        """What pickling takes along beside the values of parameters and persistent buffers, by the names of attributes."""
        attributes = vars(self.module)
        kept = {
            f"{name} (values)": attributes["_buffers"].get(name) for name in attributes["_non_persistent_buffers_set"]
        }
        values = {name: fingerprint(value, {}, _watched_name) for name, value in kept.items()}
        try:
            made_by, made_of, state, *rest = parts_for_pickle(self.module)
        except Exception as error:  # so pickle cannot let anything out
            return values | {"__reduce__": type(error).__name__}
        names = _names(self.module)
        parts = self._without_own(state, names) if isinstance(state, dict) else {"__getstate__": state}
        return values | self._fingerprints({"__reduce__": [made_by, made_of, rest]} | parts, names)

    def _without_own(self, state: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
        """The attributes of a module, without what capture and this watch put there, and without empty ones of torch's."""
        ours = {
            key
            for name in ("_forward_hooks", "_forward_pre_hooks")
            for key, hook in dict(vars(self.module).get(name, {})).items()
            if is_own_hook(hook)
        }
        attributes: dict[str, Any] = {}

        def put(name: Any, value: Any) -> None:
            name = str(name)
            while name in attributes:  # an attribute may be called like a parameter
                name += " again"
            attributes[name] = value

        for name, value in state.items():
            if name in _HOOKS and type(value) in (dict, OrderedDict):
                value = {key: item for key, item in value.items() if key not in ours} | _attributes_of(value)
            elif value is self:
                value = self.replaced
            elif isinstance(value, _WatchedReduction) or (name == "training" and isinstance(value, bool)):
                continue
            if name in _REGISTERED and type(value) is dict:
                put(f"{name} (names)", list(value))
                for key, item in value.items():
                    place = place_of(item)
                    put(key, item if place is None else [unguarded_class(item), names[place]])
                    if place is not None and (attributes_of_tensor := python_state(item)):
                        put(f"{key}{_OF_TENSOR}", attributes_of_tensor)
            elif not (name in _TORCH and type(value) in _EMPTY and not value and not _attributes_of(value)):
                put(name, value)
        return attributes

    def _switches(self) -> dict[str, tuple[bool, ...]]:
        """What users turn on and off for a whole model. A pattern of them could tell something."""
        return {
            "training": tuple(vars(part).get("training") is True for part in self.module.modules()),
            "requires_grad": tuple(parameter.requires_grad for parameter in self.module.parameters()),
        }

    def _fingerprints(self, values: Mapping[str, Any], names: Mapping[Any, str] | None = None) -> dict[str, str]:
        if names is None:
            names = _names(self.module) if values else {}
        return {name: fingerprint(value, names, _watched_name) for name, value in values.items()}


class _WatchedReduction:
    """Stands in the attribute `__reduce_ex__` of a module whose class has a way of its own to be pickled.

    The state that it gives may leave out the attribute `state_dict`, and the watch that stands there.
    """

    def __init__(self, watched: _Watched) -> None:
        self.watched = watched

    def __call__(self, protocol: Any) -> Any:
        module = self.watched.module
        reduced = type(module).__reduce_ex__(module, protocol)
        state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
        if not isinstance(state, dict) or state.get("state_dict") is not self.watched:
            self.watched.refuse_changed()
        return reduced

    def __deepcopy__(self, memo: dict) -> _WatchedReduction:
        return _WatchedReduction(copy.deepcopy(self.watched, memo))

    def __reduce__(self) -> Any:
        return getattr, (self.watched.module, "__reduce_ex__")


_OF_TENSOR = " (attributes)"


def _of_attributes(name: str) -> bool:
    return name.endswith(_OF_TENSOR)


def _pickles_its_own_way(module: nn.Module) -> bool:
    return any(
        getattr(type(module), name, None) is not getattr(nn.Module, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )


def _watched_name(module: nn.Module) -> str | None:
    """The name of a module that is watched itself: what is in it is not looked at again."""
    one = vars(module).get("state_dict")
    return one.name if isinstance(one, _Watched) and one.module is module else None


def _attributes_of(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {}) if isinstance(value, OrderedDict) else {}


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]


def _standard(module: nn.Module) -> dict[str, Tensor]:
    """What torch's own `state_dict` has."""
    tensors: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {name: tensor for name, tensor in part._buffers.items() if name not in part._non_persistent_buffers_set}
        tensors.update(
            (prefix + name, tensor) for name, tensor in (part._parameters | kept).items() if tensor is not None
        )
    return tensors


def _names(module: nn.Module) -> dict[Any, str]:
    """The names of parameters and buffers, by their places and by their memory."""
    names: dict[Any, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if (place := place_of(tensor)) is not None:
            names |= {place: name, place[0]: name}
    return names
