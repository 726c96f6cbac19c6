"""Which nodes of a Ray cluster may do a piece of work."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator

from app.amounts import suffices
from app.errors import RecipeError

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:{_WORD}/)?{_WORD}")
_SELECTOR = re.compile(rf"(?P<no>!?)(?:in\((?P<several>{_WORD}(?:, ?{_WORD})*)\)|(?P<one>{_WORD}))")
ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource for a kind of GPU."""
_ANY_SHARE = 0.001
"""Amount to reserve of such a resource. It is tiny, because the resource only marks nodes with that kind."""


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for key, selector in labels.items():
        if not _KEY.fullmatch(key) or not _SELECTOR.fullmatch(selector):
            raise RecipeError(
                f"{key}: {selector} is no label selector of Ray: give KEY: VALUE, !VALUE, in(A, B) or !in(A, B)"
            ).of("labels.selector")
    return labels


LabelSelector = Annotated[dict[str, str], AfterValidator(_check_labels)]
"""Conditions on a node's labels, in Ray's syntax: ``{market: spot}``, ``{zone: "!in(a, b)"}``."""


@dataclass(frozen=True)
class Placement:
    """What a node must have for one worker, task or replica."""

    resources: Mapping[str, float]
    """Amounts to reserve."""
    labels: Mapping[str, str] = field(default_factory=dict)
    fallback_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes to take where none with ``labels`` has room. Empty: there are no such nodes."""

    @property
    def options(self) -> dict[str, Any]:
        """Ray's options of an actor or a task that select the nodes."""
        selector = {"label_selector": dict(self.labels)} if self.labels else {}
        fallback = {"fallback_strategy": [{"label_selector": dict(self.fallback_labels)}]}
        return {**selector, **(fallback if self.fallback_labels else {})}

    def selects(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node, as listed by ``ray.nodes()``, is alive and has the labels or those of the fallback."""
        given = node.get("Labels") or {}
        accepted = [self.labels, self.fallback_labels] if self.fallback_labels else [self.labels]
        return bool(node["Alive"]) and any(
            all(_holds(selector, given.get(key)) for key, selector in labels.items()) for labels in accepted
        )

    def fits(self, node: Mapping[str, Any]) -> bool:
        """Return whether a node is selected and large enough."""
        held = node["Resources"]
        return self.selects(node) and all(
            suffices(held.get(kind, 0.0), amount) for kind, amount in self.resources.items()
        )


def _holds(selector: str, label: str | None) -> bool:
    """Return whether the selector accepts a node's label. None, a missing label, matches no value in the selector."""
    found = _SELECTOR.fullmatch(selector)
    assert found, selector
    named = found["several"].replace(" ", "").split(",") if found["several"] else [found["one"]]
    return (label in named) is not bool(found["no"])


def of_kind(accelerator: str | None) -> dict[str, float]:
    """Return the resource that selects nodes with this kind of GPU."""
    return {f"{ACCELERATOR}{accelerator}": _ANY_SHARE} if accelerator else {}
