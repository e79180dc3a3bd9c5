"""Say which part of a cluster's name is wrong, and which name is meant."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from piper_simulator.cluster.device import CPU
from piper_simulator.cluster.stacks import GENERAL, STACKS, stacks_of

EXAMPLES = (
    f"Names are such as h100x8, 'h100x8*4', 'a100x8*2+h100x8*2', h100x8@eager, h100-80g-sxm:8, {CPU}, or a file that "
    f"ends in .toml or .json (docs/clusters.md lists the devices and stacks)"
)
_COUNTED = re.compile(r"([a-z][a-z0-9-]*?)[:x](\d+)(?:\*(\d+))?", re.ASCII)
_REVERSED = re.compile(r"(\d+)\s*[x:*]\s*([a-z][a-z0-9-]*)", re.ASCII)
_OPEN = re.compile(r"(.*[a-z0-9])([x:*])", re.ASCII)


def unknown_cluster(name: str, devices: Collection[str], aliases: Mapping[str, str]) -> str:
    """Return a message on a name of no cluster: the wrong part, the nearest that is right, and examples."""
    places, at, stack = name.strip().lower().partition("@")
    known = (*aliases, *devices)
    problem = _spaces(name)
    for place in () if problem else places.split("+"):
        problem = problem or _place(place, known, aliases)
    if not problem:
        match = _COUNTED.fullmatch(places.split("+")[0])
        problem = _stack(at, stack, aliases.get(match[1], match[1]) if match else "")
    stop = "" if problem.endswith("?") else "."
    return f"unknown cluster {name!r}: {problem}{stop} {EXAMPLES}"


def _spaces(name: str) -> str:
    whole = "".join(name.split())
    return f"write it without spaces, {whole!r}" if whole != name.strip() else ""


def _place(place: str, known: Collection[str], aliases: Mapping[str, str]) -> str:
    """Return the fault of the nodes of one device, such as "h100x8*0"; "" if there is none."""
    if place.partition(":")[0] == CPU:
        return f"{CPU} stands alone, without counts, stacks and other nodes"
    if match := _COUNTED.fullmatch(place):
        if match[1] not in known:
            return _no_device(match[1], known, aliases)
        return _count(place, match)
    if place in known:
        return f"how many devices a node has is missing; did you mean {_eight(place, aliases)}?"
    device = re.split(r"[x:*]", place)[0]
    return _order(place, device in known) or _no_device(device or place, known, aliases)


def _count(place: str, match: re.Match[str]) -> str:
    """Return the fault of the counts of devices and nodes; "" if there is none."""
    for what, n in (("devices", match[2]), ("nodes", match[3])):
        if n and not int(n):
            return f"{place} has 0 {what}; at least 1 is needed"
    starts = any(n and n.startswith("0") for n in match.groups()[1:])
    return f"{place}: a count begins with a 0" if starts else ""


def _order(place: str, is_device: bool) -> str:
    """Return the fault of the form of a place, which may begin with a device; "" for another fault."""
    if match := _REVERSED.fullmatch(place):
        return f"the device comes first; write {match[2]}x{match[1]}"
    if match := _OPEN.fullmatch(place):
        what = "nodes" if match[2] == "*" else "devices of a node"
        return f"the number of {what} is missing behind {place!r}"
    if not place:
        return "a device is missing"
    wanted = f"{place!r} is not <device>x<devices of a node>*<nodes>, with whole numbers"
    return wanted if is_device else ""


def _no_device(device: str, known: Collection[str], aliases: Mapping[str, str]) -> str:
    near = get_close_matches(device, known, 1)
    meant = f"did you mean {_eight(near[0], aliases)}?" if near else f"there are {', '.join(known)}"
    return f"there is no device {device!r}; {meant}"


def _eight(device: str, aliases: Mapping[str, str]) -> str:
    """Return a node of eight such devices by name."""
    return f"{device}x8 ({aliases[device]})" if device in aliases else f"{device}:8"


def _stack(at: str, stack: str, device: str) -> str:
    """Return the fault of the name of a stack."""
    if at and not stack:
        return "the name of a stack is missing behind '@'"
    if "+" in stack or "@" in stack:
        return "one stack is named, at the end, for all nodes"
    near = get_close_matches(stack, STACKS, 1)
    here = ", ".join((*GENERAL, *stacks_of(device)))
    meant = f"did you mean {near[0]}?" if near else f"for {device} there are {here}"
    return f"there is no stack {stack!r}; {meant}"
