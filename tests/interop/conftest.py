"""Engines and third parties for the interop tests."""

from __future__ import annotations

from tests.engine.conftest import engine_process

__all__ = ["engine_process"]
