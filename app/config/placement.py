"""Which nodes of a Ray cluster may do a piece of work."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:{_WORD}/)?{_WORD}")
_SELECTOR = re.compile(rf"(?P<no>!?)(?:in\((?P<several>{_WORD}(?:, ?{_WORD})*)\)|(?P<one>{_WORD}))")
ACCELERATOR = "accelerator_type:"
"""How the name of Ray's resource for a kind of GPU begins."""
_ANY_SHARE = 0.001
"""What is reserved of such a resource, which only says that a node has the kind."""


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, selector in labels.items():
        if not _KEY.fullmatch(key) or not _SELECTOR.fullmatch(selector):
            raise ValueError(
                f"{key}: {selector} is no label selector of Ray: give KEY: VALUE, !VALUE, in(A, B) or !in(A, B)"
            )
    return labels


LabelSelector = Annotated[dict[str, str], AfterValidator(_check_labels)]
"""Conditions on the labels of a node, as Ray writes them: ``{market: spot}``, ``{zone: "!in(a, b)"}``."""


@dataclass(frozen=True)
class Placement:
    """What a node must have for one worker, task or replica."""

    resources: Mapping[str, float]
    """Amounts that are reserved."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def selects(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node, as ``ray.nodes()`` lists it, is alive and has the labels."""
        given = node.get("Labels") or {}
        return bool(node["Alive"]) and all(_holds(selector, given.get(key)) for key, selector in self.labels.items())

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node that it selects is large enough."""
        held = node["Resources"]
        return self.selects(node) and all(amount <= held.get(kind, 0.0) for kind, amount in self.resources.items())


def _holds(selector: str, label: str | None) -> bool:
    """Return whether a node with this label, or without one, is selected. A node without it is none of those named."""
    found = _SELECTOR.fullmatch(selector)
    assert found, selector
    named = found["several"].replace(" ", "").split(",") if found["several"] else [found["one"]]
    return (label in named) is not bool(found["no"])


def of_kind(accelerator: str | None) -> dict[str, float]:
    """Return the resource that selects nodes with this kind of GPU."""
    return {f"{ACCELERATOR}{accelerator}": _ANY_SHARE} if accelerator else {}
