"""Server-side guard: a ping from a worker that the server does not know is answered with False.

LMCache 0.5.3 answers True to every ping (v1/multiprocess/modules/management.py:137). A server that restarts between two
heartbeats, or that has reaped a worker, then never hears of it again: ZeroMQ delivers the waiting ping to the new
process, and each store and retrieve of that worker runs into a time-out (LMCache#4642). The worker's heartbeat in
`adapters` registers again when it is told False.
"""

from typing import Any

from lmcache.v1.multiprocess.modules import management

__all__ = ["install"]


def install() -> None:
    """Patch the running server process; call before the server is built. Calling twice changes nothing."""
    module = management.ManagementModule
    if getattr(module, "kvstrata", False):
        return
    original = module.ping

    # LMCache compares the handler's annotations with the protocol's: they have to stay as they are.
    def ping(self: Any, instance_id: int | None) -> bool:
        original(self, instance_id)
        return instance_id is None or any(_knows(target, instance_id) for target in self._liveness_targets)

    module.ping = ping
    module.kvstrata = True


def _knows(target: Any, instance_id: int) -> bool:
    return any(instance_id in getattr(target, name, {}) for name in ("_engine_driven_contexts", "_cache_contexts"))
