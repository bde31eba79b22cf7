"""All dashboards, in the order in which a person reads them."""

from __future__ import annotations

from kvstrata.observe.dashboards import lmcache, overview, requests, storage, vllm
from kvstrata.observe.dashboards.panels import Board

__all__ = ["BOARDS"]

BOARDS: tuple[Board, ...] = (overview.BOARD, lmcache.BOARD, storage.BOARD, vllm.BOARD, requests.BOARD)
