"""The empty CUDA libraries: the loader takes them, and whatever calls into one gets an error code."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the stubs are for x86-64")
SCRIPT = Path(__file__).resolve().parents[2] / "images/vllm/cuda_stubs.py"


@pytest.fixture(scope="module")
def stubs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_stubs", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_every_symbol_is_found_and_returns_an_error_code(stubs: ModuleType, tmp_path: Path, count: int) -> None:
    names = {f"cublasCall{i}": "libcublas.so.13" if i % 2 else "" for i in range(count)}
    path = tmp_path / "libcublas.so.13"
    path.write_bytes(stubs.stub("libcublas.so.13", names))
    library = ctypes.CDLL(str(path))
    assert [getattr(library, name)() for name in names] == [1] * count
    with pytest.raises(AttributeError):
        _ = library.cublasOther


def test_a_library_that_asks_by_version_gets_its_symbols(stubs: ModuleType, tmp_path: Path) -> None:
    """dlvsym finds the version; the wrong version is not found."""
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(stubs.stub("libnccl.so.2", {"ncclSend": "NCCL_2", "plain": ""}))
    handle = ctypes.CDLL(str(path))._handle
    dlvsym = ctypes.CDLL(None).dlvsym
    dlvsym.restype = ctypes.c_void_p
    dlvsym.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]
    assert dlvsym(handle, b"ncclSend", b"NCCL_2")
    assert not dlvsym(handle, b"ncclSend", b"NCCL_3")


def test_only_what_is_needed_and_not_installed_is_written(stubs: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / "site"
    folder = site / "torch/lib"
    folder.mkdir(parents=True)
    (folder / "libtorch_cuda.so").write_bytes(real_library())
    (site / "nvidia/nccl/lib").mkdir(parents=True)
    stubs.main(site)
    # a C library object needs none of the CUDA libraries, so nothing may appear
    assert [p.name for p in folder.iterdir()] == ["libtorch_cuda.so"]


def real_library() -> bytes:
    """A shared object with version needs that is there wherever these tests run."""
    path = importlib.util.find_spec("_ctypes")
    assert path and path.origin
    return Path(path.origin).read_bytes()


def test_it_runs_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "torch/lib").mkdir(parents=True)
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True)
