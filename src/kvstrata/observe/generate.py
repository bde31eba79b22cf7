"""Writes the files that are made from code: the dashboards and docs/metrics.md.

python -m kvstrata.observe.generate            write them
python -m kvstrata.observe.generate --check    exit 1 and name those that are stale
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvstrata.observe import metrics_page, sources

__all__ = ["files", "main", "stale"]

_ROOT = Path(__file__).resolve().parents[3]


def files(root: Path) -> dict[Path, str]:
    """Path to text of every generated file."""
    # Grafana's types are a requirement of the developer alone; whoever runs the stack has the JSON.
    from kvstrata.observe.dashboards.all import BOARDS
    from kvstrata.observe.dashboards.build import to_json

    made = {root / sources.DASHBOARDS / f"{board.uid}.json": to_json(board) for board in BOARDS}
    return {**made, root / "docs" / "metrics.md": metrics_page.text()}


def stale(root: Path) -> list[Path]:
    """Generated files that are not what the code makes, and dashboards that no code makes."""
    wanted = files(root)
    other = [path for path in (root / sources.DASHBOARDS).glob("*.json") if path not in wanted]
    return sorted(other + [p for p, text in wanted.items() if not p.is_file() or p.read_text(encoding="utf-8") != text])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    found = stale(_ROOT)
    if parser.parse_args().check:
        for path in found:
            print(f"found:    {path.relative_to(_ROOT)} is not what the code makes", file=sys.stderr)
        if found:
            print("to fix:   python -m kvstrata.observe.generate", file=sys.stderr)
        return 1 if found else 0
    wanted = files(_ROOT)
    for path in found:
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
        print(path.relative_to(_ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
