"""A cluster to a JSON file and back, and how the file's cluster differs from the one that runs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster.cluster import Cluster
from amsp_jax.predict.cluster.network import Link, Network
from amsp_jax.predict.cluster.rates import Rates
from amsp_jax.strategy import Degree

FORMAT = 1

_LINE_LENGTH = 110
_ANEW = "Make it anew: python -m amsp_jax calibrate --out FILE"
# Usable memory of one device varies by so much between starts.
_MEMORY_TOLERANCE = 0.02

T = TypeVar("T")


def save_cluster(cluster: Cluster, path: str | os.PathLike[str]) -> None:
    """Writes the file, whole or not at all.

    Raises:
      OSError: the folder is not there or cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        # "x" does not write through a link that somebody put there.
        with temporary.open("x") as file:
            file.write(to_json(cluster))
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster of a file that `save_cluster` wrote, here or on another machine.

    Raises:
      UserError: no such file, not JSON or cut off, another format, a field missing, unknown or out of range.
    """
    try:
        return from_json(Path(path).read_text())
    except UserError as error:
        reason = str(error)
    # Not UTF-8, or a name that no path has.
    except (OSError, ValueError) as error:
        reason = f"it cannot be read: {getattr(error, 'strerror', None) or error}."
    raise UserError(f"cluster file {os.fspath(path)}: {reason} {_ANEW}")


def to_json(cluster: Cluster) -> str:
    """The text of a cluster file."""
    return _rendered({"format": FORMAT, **_cluster_to_json(cluster)}) + "\n"


def from_json(text: str) -> Cluster:
    """The cluster of such a text.

    Raises:
      UserError: as `load_cluster`.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        num_lines = len(text.splitlines())
        raise UserError(f"it is not JSON, or was cut off: {error.msg} at line {error.lineno} of {num_lines}.") from None
    except (ValueError, RecursionError):
        raise UserError("a number or a nesting in it is beyond what Python reads.") from None
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"it has no field 'format', which in a cluster file is {FORMAT}.")
    if (number := content.pop("format")) != FORMAT:
        raise UserError(f"format={number!r}, but this version reads {FORMAT}.")
    return _cluster_from_json(content)


def differences(cluster: Cluster, running: Cluster) -> list[str]:
    """One line for each way in which `cluster`, of a file, is not the `running` one: its numbers may not hold there.

    Versions are compared where both name them, memory where it is a device's own: what a CPU's host has free varies.
    """
    lines = [
        f"{what}: {there} in the file, {here} running"
        for what, there, here in (
            ("device kind", cluster.device_kind, running.device_kind),
            ("devices per node", cluster.devices_per_node, running.devices_per_node),
            ("nodes", cluster.num_nodes, running.num_nodes),
            *((name, version, running.versions.get(name, version)) for name, version in cluster.versions.items()),
        )
        if there != here
    ]
    own_memory = running.device_kind != "cpu"
    if own_memory and abs(cluster.memory_bytes - running.memory_bytes) > _MEMORY_TOLERANCE * cluster.memory_bytes:
        there, here = (f"{each.memory_bytes / 2**30:.1f} GiB" for each in (cluster, running))
        lines.append(f"usable memory: {there} in the file, {here} running")
    return lines


def _rendered(value: object, indent: str = "") -> str:
    """JSON with what fits on a line on one line, so that a point is a line and not six."""
    line = json.dumps(value, allow_nan=False)
    if len(indent + line) <= _LINE_LENGTH or not isinstance(value, dict | list | tuple):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        items = [f"{deeper}{json.dumps(name)}: {_rendered(item, deeper)}" for name, item in value.items()]
    else:
        items = [deeper + _rendered(item, deeper) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(items) + f"\n{indent}{end}"


def _cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    values = {field.name: getattr(cluster, field.name) for field in dataclasses.fields(cluster)}
    return {
        **values,
        "network": cluster.network and _network_to_json(cluster.network),
        "rates": cluster.rates and dataclasses.asdict(cluster.rates),
        "versions": dict(cluster.versions),
    }


def _network_to_json(network: Network) -> dict[str, Any]:
    return {
        "measured": [
            {"kind": str(kind), "intra": group.intra, "inter": group.inter, "points": points}
            for (kind, group), points in network.measured.items()
        ],
        "intra": network.intra and dataclasses.asdict(network.intra),
        "inter": network.inter and dataclasses.asdict(network.inter),
    }


def _cluster_from_json(content: object) -> Cluster:
    return _make(
        Cluster,
        content,
        "",
        name=_text,
        num_nodes=_integer,
        devices_per_node=_integer,
        device_kind=_text,
        memory_bytes=_integer,
        peak_flops=_optional(_number),
        source=_text,
        network=_optional(_network_from_json),
        rates=_optional(_rates_from_json),
        assumptions=_list_of(_text),
        versions=_mapping_of(_text),
        date=_optional(_text),
    )


def _network_from_json(value: object, where: str) -> Network:
    return _make(Network, value, where, measured=_measured_from_json, intra=_optional(_link), inter=_optional(_link))


def _measured_from_json(value: object, where: str) -> dict[tuple[str, Degree], Any]:
    points = _list_of(_tuple_of(_integer, _number))

    def read_row(row: object, at: str) -> tuple[tuple[str, Degree], Any]:
        fields = _make(dict[str, Any], row, at, kind=_text, intra=_integer, inter=_integer, points=points)
        return (fields["kind"], Degree(fields["intra"], fields["inter"])), fields["points"]

    rows = _list_of(read_row)(value, where)
    for (kind, group), uses in Counter(key for key, _ in rows).items():
        if uses > 1:
            raise UserError(f"{where}: {kind} {group} twice.")
    return dict(rows)


def _link(value: object, where: str) -> Link:
    slowdown = _list_of(_tuple_of(_integer, _number))
    return _make(Link, value, where, bytes_per_s=_number, latency_s=_number, slowdown=slowdown)


def _rates_from_json(value: object, where: str) -> Rates:
    return _make(
        Rates,
        value,
        where,
        matmul=_mapping_of(_list_of(_tuple_of(_integer, _integer, _integer, _number))),
        attention_flops_per_s=_tuple_of(_number, _number),
        memory_bytes_per_s=_number,
        overlap_slowdown=_number,
    )


# A reader takes a JSON value and where it stands, and returns the typed value or raises a UserError that names it.


def _make(cls: Callable[..., T], value: object, where: str, **readers: Callable[[Any, str], Any]) -> T:
    """`cls` from an object that has exactly the fields of `readers`."""
    if not isinstance(value, dict):
        raise _wrong(value, where, "an object")
    for problem, names in (("missing", readers.keys() - value), ("unknown", value.keys() - readers)):
        if names:
            raise UserError(f"{where or 'it'}: {problem}: {', '.join(sorted(names))}.")
    return cls(**{name: read(value[name], f"{where}.{name}".lstrip(".")) for name, read in readers.items()})


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, where, "text")
    return value


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, where, "an integer")
    if value < 1:
        raise _wrong(value, where, "at least 1")
    if value >= 2**63:
        raise _wrong(value, where, "below 2**63")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, where, "a number")
    # Beyond these a quotient of two is no number of use.
    if 0 < abs(value) < 1e-30 or 1e30 < abs(value) < math.inf:
        raise _wrong(value, where, "0, or between 1e-30 and 1e30")
    return value


def _optional(read: Callable[[Any, str], T]) -> Callable[[Any, str], T | None]:
    return lambda value, where: None if value is None else read(value, where)


def _list_of(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    def read_list(value: object, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(value))

    return read_list


def _tuple_of(*readers: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def read_tuple(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise _wrong(value, where, f"a list of {len(readers)}")
        return tuple(read(item, f"{where}[{i}]") for i, (read, item) in enumerate(zip(readers, value, strict=True)))

    return read_tuple


def _mapping_of(read: Callable[[Any, str], T]) -> Callable[[Any, str], Mapping[str, T]]:
    def read_mapping(value: object, where: str) -> Mapping[str, T]:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        return {name: read(item, f"{where}.{name}") for name, item in value.items()}

    return read_mapping


def _wrong(value: object, where: str, wanted: str) -> UserError:
    return UserError(f"{where}={value!r}, but it is {wanted}.")
