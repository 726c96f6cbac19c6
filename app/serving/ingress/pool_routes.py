"""HAProxy's rules that send requests for models of other pools straight to their replicas.

The shared pool's replicas know where each model is, and pass requests on. A header of such an answer tells HAProxy the
pool, which it keeps in a map by model. It forgets the map when replicas change, because it starts anew. So nothing has
to be told to the HAProxy of each node, and what it does not know is a hop longer, and right.
"""

from dataclasses import dataclass
from pathlib import Path

from app.serving.pools import APPLICATION

_POOL, _MODEL = "res.hdr(x-rayloom-pool)", "res.hdr(x-rayloom-model)"
"""Only replicas know a model's name for sure: HAProxy and Python may read another one in an ambiguous request."""


@dataclass(frozen=True)
class Rules:
    """Rules of one of HAProxy's frontends."""

    lines: tuple[str, ...]
    """They find the model and its pool."""
    choice: str
    """It chooses the pool's backend, if that has a replica."""


def http_rules(pools: Path, wait_for_body: str) -> Rules:
    """Return the rules for HTTP, where the path names the model, or the body.

    Args:
        pools: an empty file, by which HAProxy's map of pools is named.
        wait_for_body: the rule that waits for a body, as far as HAProxy keeps it: 16 KiB.
    """
    in_body = "METH_POST { path /v1/chat/completions /v1/completions /v1/embeddings }"
    return _rules(
        "http",
        "http-request set-var(txn.model) path,field(4,/) if { path_beg /v1/models/ /v2/models/ }",
        f"{wait_for_body} if {in_body}",  # a longer body takes the hop
        f"http-request set-var(txn.model) req.body,json_query('$.model'),field(1,/) if {in_body}",
        pools=pools,
    )


def grpc_rules(pools: Path, wait_for_body: str, service: str) -> Rules:
    """Return the rules for unary gRPC calls, whose first field names the model. Arguments as for ``http_rules``."""
    unary = f"{{ path_beg {service} }} !{{ path_sub Stream Repository }}"
    return _rules(
        "unary",
        f"{wait_for_body} if {unary}",
        f"http-request set-var(txn.model) req.body,ungrpc(1) if {unary}",
        pools=pools,
    )


def _rules(protocol: str, *lines: str, pools: Path) -> Rules:
    backend = f"{protocol}-{APPLICATION}-%[var(txn.pool)]"
    return Rules(
        (
            *lines,
            f"http-request set-var(txn.pool) var(txn.model),map_str({pools}) if {{ var(txn.model) -m found }}",
            f"http-request set-var-fmt(txn.backend) {backend} if {{ var(txn.pool) -m found }}",
            f"http-response set-map({pools}) %[{_MODEL}] %[{_POOL}] if {{ {_POOL} -m found }}",
            "http-response del-header x-rayloom-pool",
            "http-response del-header x-rayloom-model",
        ),
        "use_backend %[var(txn.backend)] if { var(txn.backend) -m found } { var(txn.backend),nbsrv gt 0 }",
    )
