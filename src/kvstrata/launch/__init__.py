"""`kvstrata-launch`: process 2 of the containers, under Docker's init. Standard library only."""

from __future__ import annotations

import sys

__all__ = ["main"]

USAGE = "usage: kvstrata-launch vllm <arguments> | lmcache | engine | relay | hold | health <one of these>"


def main(argv: list[str] | None = None) -> int:
    """Entry point. Imports by role, so that a health check, which runs every few seconds, stays cheap."""
    args = sys.argv[1:] if argv is None else argv
    match args:
        case ["health", service]:
            from kvstrata.launch import health

            return health.check(service)
        case ["vllm", *rest]:
            from kvstrata.launch import vllm

            return vllm.run(rest)
        case ["lmcache"]:
            from kvstrata.launch import lmcache

            return lmcache.run()
        case ["engine"]:
            from kvstrata.launch import engine

            return engine.run()
        case ["relay"]:
            from kvstrata.launch import relay

            return relay.run()
        case ["hold"]:
            from kvstrata.launch import supervise

            return supervise.hold()
    print(USAGE, file=sys.stderr)
    return 2
