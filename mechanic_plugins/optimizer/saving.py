"""What Mechanic writes into a checkpoint, and what it accepts from one.

Every param group gets one entry, `mechanic_tuner`: a JSON string with the settings, the group's tuner, whether it is
held, and where the group's schedule stands. A string passes through torch.save, torch.distributed.checkpoint (flattened
or not), FSDP and DeepSpeed unchanged, and a later version may add to it. Tensors of a parameter's shape (see
`mechanic_plugins.weights.slots`) are beside the base's moments, so that they are sharded and resharded like them.
Everything loads with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mechanic_plugins.distributed.sharding import local
from mechanic_plugins.optimizer.learned import Learned
from mechanic_plugins.rule.decide import new_tuners
from mechanic_plugins.rule.settings import Settings
from mechanic_plugins.rule.tuner import Tuner
from mechanic_plugins.weights.slots import DELTA, MASTER, PREFIX, REF, is_16_bit, main_slot

__all__ = [
    "KEY",
    "check_tensors",
    "holds_tuner",
    "is_released",
    "merge",
    "read",
    "restore_float32",
    "scale_in",
    "split",
    "steps_in",
    "strip",
    "texts",
    "without_tuner",
]

StateDict = dict[str, Any]
Groups = Sequence[Mapping[str, Any]]

KEY = PREFIX + "tuner"
FORMAT = 1
"""Raised when a version writes what earlier ones cannot read."""
_KEYS = {"format", "settings", "tuners", "tuner", "calls", "frozen", "released", "last_lr", "peak_lr"}
_MAY_BE_NEGATIVE = ("signal", "s", "r", "q", "evidence")
_SQUARES = ("v", "change_square", "norm_square", "z_squares", "g_squares")
"""The square of any other number has to be finite."""
_REMEDY = (
    f"Load another checkpoint, or remove the keys that start with {PREFIX!r} from its param groups to let Mechanic "
    "start from scratch."
)


def texts(learned: Learned, groups: int) -> list[str]:
    """Each group's entry. Waits for the GPU if that has decided."""
    tuners = learned.wait_for_tuners()
    settings = _portable(learned.settings)
    entries = []
    for index in range(groups):
        content = {
            "format": FORMAT,
            "settings": settings,
            "tuners": len(tuners),
            "tuner": vars(tuners[index if len(tuners) > 1 else 0]),
            "calls": learned.calls,
            "frozen": learned.frozen,
            "released": learned.released,
            "last_lr": learned.course[index][0] if index in learned.course else None,
            "peak_lr": learned.course[index][1] if index in learned.course else None,
        }
        entries.append(json.dumps(content))
    return entries


def read(groups: Groups, settings: Settings) -> tuple[Learned, str | None]:
    """What the groups hold, and a message for the user if the settings were others.

    Raises:
        ValueError: They are damaged, of an earlier development version or a later one, or incompatible with these
            settings.
    """
    found = [_content(index, group) for index, group in enumerate(groups)]
    wanted = len(groups) if settings.scope == "group" else 1
    _check_kind(found, settings, wanted)
    tuners = [_tuner(index, each["tuner"], new_tuners(settings, 1)[0]) for index, each in enumerate(found)]
    # a callback may have copied some groups earlier than others, such as Lightning's finetuning: the latest one counts
    latest = max(range(len(found)), key=lambda index: tuners[index].steps)
    same = [each for each, tuner in zip(found, tuners, strict=True) if tuner.steps == tuners[latest].steps]
    for name in ("settings", "calls", "frozen", "released", *(["tuner"] if wanted == 1 else [])):
        if any(content[name] != found[latest][name] for content in same):
            raise ValueError(f"the checkpoint's param groups contradict each other in {name}: it is damaged. {_REMEDY}")
    learned = Learned(settings, tuners if settings.scope == "group" else [tuners[latest]])
    learned.frozen, learned.released = found[latest]["frozen"], found[latest]["released"]
    learned.calls = found[latest]["calls"]
    for index, content in enumerate(found):
        lrs = [_number(index, name, content[name]) for name in ("last_lr", "peak_lr") if content[name] is not None]
        if len(lrs) == 1 or (lrs and (lrs[0] > 0) != (lrs[1] > 0)):
            raise _damaged(index, "peak_lr", content["peak_lr"], f"a number that fits last_lr {content['last_lr']}")
        if lrs:
            learned.course[index] = lrs[0], lrs[1]
    return learned, _notice(found[0]["settings"], settings)


def holds_tuner(groups: Groups) -> bool:
    """Whether any of these param groups comes from a mechanized optimizer."""
    return any(str(key).startswith(PREFIX) for group in groups for key in group)


def without_tuner(group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's own entries."""
    return {key: value for key, value in group.items() if not str(key).startswith(PREFIX)}


def is_released(groups: Groups) -> bool:
    """Whether these param groups come from an optimizer after `freeze(release=True)`."""
    return all(KEY in group and _content(index, group)["released"] for index, group in enumerate(groups))


def steps_in(group: Mapping[str, Any]) -> int:
    """How many steps a saved group's tuner has made."""
    return int(_content(0, group)["tuner"]["steps"])


def scale_in(group: Mapping[str, Any]) -> float:
    """A saved group's scale.

    Raises:
        ValueError: It cannot be read.
    """
    return _number(0, "scale", _content(0, group)["tuner"].get("scale"))


# -------------------------------------------------------------------- one group's entry


def _content(index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    text = group.get(KEY)
    if text is None and holds_tuner([group]):
        raise ValueError(
            f"the checkpoint's param group {index} was written by a development version of mechanic-plugins before "
            f"0.3.0, which this version cannot read: go on from the weights alone. {_REMEDY}"
        )
    if text is None:
        raise ValueError(
            f"only some of the checkpoint's param groups hold Mechanic's tuner, group {index} does not: it is damaged. "
            f"{_REMEDY}"
        )
    try:
        content = json.loads(text)
        found = content["format"]
    except (TypeError, ValueError, KeyError) as error:
        raise _damaged(index, KEY, text, "JSON with a format") from error
    if isinstance(found, int) and found > FORMAT:
        raise ValueError(
            f"the checkpoint has format {found} of Mechanic's state, this version of mechanic-plugins reads formats up "
            f"to {FORMAT}: pip install --upgrade mechanic-plugins"
        )
    if found != FORMAT or not _KEYS <= content.keys():
        raise _damaged(index, KEY, text, f"format {FORMAT} with {', '.join(sorted(_KEYS))}")
    kinds = {"settings": dict, "tuner": dict, "tuners": int, "calls": int, "frozen": bool, "released": bool}
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            raise _damaged(index, name, content[name], f"a {kind.__name__}")
    if content["calls"] < 0 or isinstance(content["calls"], bool):
        raise _damaged(index, "calls", content["calls"], "a number of steps")
    return dict(content)


def _check_kind(found: Sequence[Mapping[str, Any]], settings: Settings, wanted: int) -> None:
    """Rejects what is no damage, but not this optimizer's."""
    was = found[0]["settings"]
    if was.get("rule") != settings.rule:
        raise ValueError(
            f"the checkpoint was saved with rule={was.get('rule')!r}, this optimizer has rule={settings.rule!r}, and "
            f"neither can go on from the other's state: pass rule={was.get('rule')!r} to mechanize(). {_REMEDY}"
        )
    other = "group" if settings.scope == "all" else "all"
    if any(content["tuners"] != wanted for content in found):
        raise ValueError(
            f"the checkpoint was saved with scope={other!r}, this optimizer has scope={settings.scope!r}: "
            f"pass scope={other!r} to mechanize()."
        )
    lists = found[0]["tuner"].get("s")
    if isinstance(lists, list) and len(lists) != settings.n:
        raise ValueError(
            f"the checkpoint was saved with {len(lists)} betas, this optimizer has {settings.n}: "
            "pass the same betas, as the option tuner_betas."
        )


def _tuner(index: int, numbers: Mapping[str, Any], blank: Tuner) -> Tuner:
    """The saved numbers, in `blank`. What a later version has added is ignored."""
    for name in blank.floats():
        if name not in numbers:
            raise _damaged(index, name, None, "a number")
        setattr(blank, name, _number(index, name, numbers[name]))
    for name in blank.lists():
        values, count = numbers.get(name), len(getattr(blank, name))
        if not isinstance(values, list) or len(values) != count:
            raise _damaged(index, name, values, f"a list of {count} numbers")
        setattr(blank, name, [_number(index, name, value) for value in values])
    return blank


def _number(index: int, name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    limit = 1e300 if name in _SQUARES else 1e150
    if not is_number or not abs(value) < limit:
        raise _damaged(index, name, value, f"a finite number below {limit:g}")
    if value < 0 and name not in _MAY_BE_NEGATIVE:
        raise _damaged(index, name, value, "a number >= 0")
    return float(value)


def _damaged(index: int, name: str, value: object, wanted: str) -> ValueError:
    shown = repr(value) if len(repr(value)) < 200 else f"{repr(value)[:200]}..."
    return ValueError(
        f"the checkpoint's {name} is {shown} in param group {index}, expected {wanted}: it is damaged. {_REMEDY}"
    )


def _portable(settings: Settings) -> dict[str, Any]:
    """The settings as they are after a round trip through JSON."""
    return {**asdict(settings), "betas": settings.betas and list(settings.betas)}


def _notice(theirs: Mapping[str, Any], settings: Settings) -> str | None:
    ours = _portable(settings)
    changed = {name: old for name, old in theirs.items() if name in ours and ours[name] != old}
    if not changed:
        return None
    listed = ", ".join(f"{name} was {value!r} and is {ours[name]!r}" for name, value in changed.items())
    options = {"betas": "tuner_betas", "eps": "tuner_eps"}
    as_options = ", ".join(f"{options.get(name, name)}={value!r}" for name, value in changed.items())
    return (
        f"the checkpoint was saved with different settings: {listed}. This optimizer's settings apply from now on. To "
        f"continue as before, pass the options {as_options}."
    )


# -------------------------------------------------------------------- tensors of a parameter's shape


def strip(groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> None:
    """Removes all of Mechanic's entries."""
    for entries in (*groups, *(entry for entry in state.values() if isinstance(entry, dict))):
        for key in [k for k in entries if str(k).startswith(PREFIX)]:
            del entries[key]


def split(state_dict: StateDict) -> tuple[StateDict, dict[Any, dict[str, Tensor]]]:
    """A copy for the base's own `load_state_dict`, and Mechanic's tensors by parameter id.

    torch casts every floating-point tensor it loads to the parameter's dtype, which would round the float32 masters
    of bf16 weights. The inner dicts may be an optimizer's live state: they are copied, never changed.
    """
    plain, ours = {}, {}
    for key, entries in state_dict["state"].items():
        if not isinstance(entries, dict):
            plain[key] = entries
            continue
        ours[key] = {k: v for k, v in entries.items() if str(k).startswith(PREFIX) and isinstance(v, Tensor)}
        if rest := without_tuner(entries):
            plain[key] = rest
    return {**state_dict, "state": plain}, ours


def merge(
    params: Mapping[Any, Any],
    ours: Mapping[Any, dict[str, Tensor]],
    state: dict[Any, dict[str, Any]],
    dtypes: Callable[[Tensor], dict[str, torch.dtype]],
) -> None:
    """Adds Mechanic's tensors (by parameter id) to the base's state, on the parameter's device.

    `dtypes` gives the slots of a parameter.
    """
    for key, entries in ours.items():
        if key not in params:
            continue
        p = params[key]
        kept = dtypes(p)
        for name, value in entries.items():
            if name in kept:
                state.setdefault(p, {})[name] = value.detach().clone().to(device=p.device, dtype=kept[name])


def restore_float32(params: Mapping[Any, Any], saved: Mapping[Any, Any], state: dict[Any, dict[str, Any]]) -> None:
    """Gives 16-bit weights the float32 state that they had, which torch rounds to their dtype when it loads.

    Such are float16 weights' moments, and numbers like NAdam's mu_product.
    """
    for key, entries in saved.items():
        p = params.get(key)
        if p is None or not is_16_bit(p.dtype) or not isinstance(entries, dict):
            continue
        for name, value in entries.items():
            loaded = state.get(p, {}).get(name)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if value.dtype == torch.float32 and is_16_bit(loaded.dtype):
                state[p][name] = value.detach().clone().to(loaded.device)


def check_tensors(state_dict: StateDict, groups: Sequence[Mapping[str, Any]], learned: Learned) -> None:
    """Validates the tensors of a mechanized state dict before anything is changed.

    Raises:
        ValueError: One is missing or damaged.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = dict(zip(ids, (p for group in groups for p in group["params"]), strict=True))
    entries = {i: e for i, e in state_dict["state"].items() if i in params}
    names = (REF, DELTA, MASTER)
    for i in [i for i, e in entries.items() if not isinstance(e, dict)]:
        raise ValueError(
            f"the checkpoint's state of parameter {i} is {str(entries[i])[:100]!r}, expected a dict: it is damaged. "
            f"{_REMEDY}"
        )
    for i, name, kept in [(i, name, e[name]) for i, e in entries.items() for name in names if name in e]:
        shape = tuple(params[i].shape)
        kind = "complex" if params[i].is_complex() else "floating-point"
        if not isinstance(kept, Tensor) or not (kept.is_complex() if kind == "complex" else kept.is_floating_point()):
            raise ValueError(
                f"the checkpoint's {name} of parameter {i} is {str(kept)[:100]!r}, expected a {kind} tensor of "
                f"shape {shape}: it is damaged. {_REMEDY}"
            )
        if kept.shape != params[i].shape:
            raise ValueError(
                f"the checkpoint's {name} has shape {tuple(kept.shape)} where the parameter has {shape}: it was saved "
                "from another model, or with the parameters in another order."
            )
        if not kept.is_meta and not local(kept).isfinite().all():
            raise ValueError(
                f"the checkpoint's {name} of parameter {i} is not finite, so every step would be skipped: it is "
                f"damaged. {_REMEDY}"
            )
    main = main_slot(learned.settings.rule)
    if not learned.tuners[0].steps or learned.released or not entries:
        return
    is_known = any(entries.values())  # an empty entry may be a frozen parameter's, but they cannot all be
    lacking = [i for i, e in entries.items() if main not in e and (e or not is_known)]
    if not lacking and main == REF:
        low = [i for i in entries if is_16_bit(params[i].dtype)]
        lacking = [i for i in low if MASTER not in entries[i]] if any(MASTER in entries[i] for i in low) else []
        main = MASTER
    if lacking:
        raise ValueError(
            f"the checkpoint has Mechanic's tuner but no {main} of parameter {lacking[0]}: without it the learned "
            f"scale is meaningless. {_REMEDY}"
        )
