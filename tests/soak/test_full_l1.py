"""The whole proof beside an L1 that is full. Takes 5 minutes; run by `make soak`, not by CI."""

from __future__ import annotations

import pytest

from kvstrata.deploy import settings
from kvstrata.proof import verify
from tests.stack.conftest import docker_engine, stack, up_output
from tests.stack.harness import Stack
from tests.stack.test_full_l1 import fill, tight

__all__ = ["docker_engine", "stack", "tight", "up_output"]

pytestmark = pytest.mark.stack


def test_the_proof_passes_beside_a_full_l1(stack: Stack, tight: None) -> None:
    """Its prompts are as long as L1 keeps them; with a model of large chunks that is a note in its report."""
    stack.settle()
    fill(stack)
    report = verify.run(settings.load(stack.root, environ={}), stack.root)
    assert report.passed, (report.all_failures, report.notes)
