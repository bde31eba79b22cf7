"""What `docker compose ps` says, the same for old and new versions of Compose."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["ServiceState", "parse_ps"]


@dataclass(frozen=True)
class ServiceState:
    """One container as `docker compose ps --all` shows it. `ports`: (host address, published, target)."""

    service: str
    container: str
    container_id: str
    image: str
    state: str
    health: str
    exit_code: int
    ports: tuple[tuple[str, int, int], ...]

    @property
    def ok(self) -> bool:
        """Running, and healthy where there is a health check."""
        return self.state == "running" and self.health in ("healthy", "")


def parse_ps(text: str) -> list[ServiceState]:
    """Output of `docker compose ps --format json`: one array (old versions) or one object a line (since 2.21)."""
    text = text.strip()
    if not text:
        return []
    lines = [line for line in text.split("\n") if line.strip()]
    rows = json.loads(text) if text.startswith("[") else [json.loads(line) for line in lines]
    return sorted((_state(row) for row in rows), key=lambda state: state.service)


def _state(row: dict[str, Any]) -> ServiceState:
    published = [p for p in row.get("Publishers") or [] if p["PublishedPort"]]
    return ServiceState(
        service=row["Service"],
        container=row["Name"],
        container_id=row["ID"],
        image=row.get("Image", ""),
        state=row["State"],
        health=row.get("Health") or "",
        exit_code=int(row.get("ExitCode") or 0),
        ports=tuple(sorted({(p.get("URL", ""), int(p["PublishedPort"]), int(p["TargetPort"])) for p in published})),
    )
