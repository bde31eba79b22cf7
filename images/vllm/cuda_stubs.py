"""Write empty CUDA libraries for a torch that will never see a GPU.

PyPI's torch wheel is the CUDA build. Its libtorch_python is linked against libtorch_cuda, which is linked against
2.7 GB of CUDA libraries (a 1.9 GB download): they must be there to be loaded, though nothing on a CPU calls them. For
each one that is not installed this writes, next to torch's own libraries, a shared object with the right name, symbol
versions and the symbols that torch asks for; each is a function that returns 1, which is an error code in every one of
these libraries. What torch does call on a CPU stays real: cudart (it says that there is no driver), cupti, cufile.

x86-64 only; elsewhere it does nothing. The file format is that of the System V ABI (gABI chapters 4 and 5) with GNU
symbol versions.
"""

from __future__ import annotations

import platform
import re
import struct
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

STUBBED = re.compile(
    r"lib(cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|cusparseLt|nccl|nvrtc|nvshmem_host)\.so\.\d+"
)
#: Symbols without a version say by their name whose they are.
UNVERSIONED = {"nccl": "libnccl", "cusparseLt": "libcusparseLt", "curand": "libcurand", "nvshmem": "libnvshmem_host"}
RETURN_1 = bytes.fromhex("b801000000c3")  # mov eax, 1; ret
PAGE = 4096
DYNAMIC, VERNEED, VERSYM = 6, 0x6FFFFFFE, 0x6FFFFFFF
DYNSYM = 11


def elf_hash(name: str) -> int:
    """The hash of DT_HASH and of version names."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value


class Library:
    """What a shared object needs: `needed` library names and `undefined` (library, version, symbol), "" for none."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        offset, count = struct.unpack_from("<Q", self.data, 40)[0], struct.unpack_from("<H", self.data, 60)[0]
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, offset + 64 * i) for i in range(count)]
        symbols = self.section(DYNSYM)
        table = self.sections[symbols[6]]
        self.strings = self.data[table[4] : table[4] + table[5]]
        dynamic = self.section(DYNAMIC)
        tags = struct.iter_unpack("<qQ", self.data[dynamic[4] : dynamic[4] + dynamic[5]])
        self.needed = [self.text(value) for tag, value in tags if tag == 1]
        self.undefined = list(self.read_undefined(symbols))

    def section(self, kind: int) -> tuple[int, ...]:
        return next(section for section in self.sections if section[1] == kind)

    def text(self, offset: int) -> str:
        return self.strings[offset : self.strings.index(b"\0", offset)].decode()

    def read_undefined(self, symbols: tuple[int, ...]) -> list[tuple[str, str, str]]:
        versions: dict[int, tuple[str, str]] = {}
        need = self.section(VERNEED)
        entry = need[4]
        for _ in range(need[7]):
            _, count, file, aux, following = struct.unpack_from("<HHIII", self.data, entry)
            at = entry + aux
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, at)
                versions[index & 0x7FFF] = (self.text(file), self.text(name))
                at += step
            entry += following
        found = []
        versym = self.section(VERSYM)[4]
        for i in range(symbols[5] // 24):
            name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", self.data, symbols[4] + 24 * i)
            if section == 0 and name and info & 15 != 1:  # not a data object: those cannot be stubbed
                index = struct.unpack_from("<H", self.data, versym + 2 * i)[0] & 0x7FFF
                found.append((*versions.get(index, ("", "")), self.text(name)))
        return found


def stub(soname: str, symbols: dict[str, str]) -> bytes:
    """A shared object `soname` that defines `symbols` (name -> version, "" for none)."""
    versions = sorted({version for version in symbols.values() if version})
    strings = bytearray(b"\0")
    offsets: dict[str, int] = {}
    for text in [soname, *versions, *symbols]:
        if text not in offsets:
            offsets[text] = len(strings)
            strings += text.encode() + b"\0"
    names = list(symbols)
    # Read-only segment: headers, tables, code. Then the dynamic section, which the loader writes to.
    header, at = 64 + 4 * 56, {}
    # One bucket. chain[0] belongs to the null symbol; each symbol points to the next one, the last one to none
    hashes = struct.pack("<III", 1, len(names) + 1, 1 if names else 0) + struct.pack("<I", 0)
    hashes += b"".join(struct.pack("<I", i + 2 if i + 1 < len(names) else 0) for i in range(len(names)))
    verdef = bytearray()
    for index, name in enumerate([soname, *versions]):
        last = index == len(versions)
        verdef += struct.pack("<HHHHIII", 1, 0 if index else 1, index + 1, 1, elf_hash(name), 20, 0 if last else 28)
        verdef += struct.pack("<II", offsets[name], 0)
    versym = struct.pack("<H", 0)
    versym += b"".join(struct.pack("<H", versions.index(v) + 2 if v else 1) for v in symbols.values())
    size = header
    for key, blob in (("hash", hashes), ("str", strings), ("verdef", verdef), ("versym", versym)):
        size = (size + 7) & ~7
        at[key] = size
        size += len(blob)
    at["sym"] = (size + 7) & ~7
    at["text"] = (at["sym"] + 24 * (len(names) + 1) + 15) & ~15
    end = at["text"] + len(RETURN_1)
    at["dynamic"] = (end + PAGE - 1) & ~(PAGE - 1)
    table = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", offsets[name], 0x12, 0, 1, at["text"], len(RETURN_1)) for name in names
    )
    tags = [(14, offsets[soname]), (4, at["hash"]), (5, at["str"]), (6, at["sym"]), (10, len(strings)), (11, 24)]
    tags += [(0x6FFFFFF0, at["versym"]), (0x6FFFFFFC, at["verdef"]), (0x6FFFFFFD, len(versions) + 1), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    image = bytearray(at["dynamic"] + len(dynamic))
    image[:64] = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    )
    place = at["dynamic"]
    segments = [(1, 5, 0, end, PAGE), (1, 6, place, len(dynamic), PAGE), (2, 6, place, len(dynamic), 8)]
    for i, (kind, flags, offset, length, align) in enumerate(segments):
        struct.pack_into("<IIQQQQQQ", image, 64 + 56 * i, kind, flags, offset, offset, offset, length, length, align)
    struct.pack_into(
        "<IIQQQQQQ", image, 64 + 56 * 3, 0x6474E551, 6, 0, 0, 0, 0, 0, 16
    )  # a stack that is not executable
    blobs: dict[str, bytes | bytearray] = {
        "hash": hashes,
        "str": strings,
        "verdef": verdef,
        "versym": versym,
        "sym": table,
        "text": RETURN_1,
    }
    for key, blob in {**blobs, "dynamic": dynamic}.items():
        image[at[key] : at[key] + len(blob)] = blob
    return bytes(image)


def main(site: Path) -> None:
    """Write the stubs for the torch in `site`; what is installed under nvidia/ is left alone."""
    folder = site / "torch/lib"
    libraries = [Library(path) for path in sorted(folder.glob("*.so")) if path.read_bytes()[:4] == b"\x7fELF"]
    installed = {path.name for path in (site / "nvidia").rglob("*.so*")} if (site / "nvidia").is_dir() else set()
    wanted: dict[str, dict[str, str]] = defaultdict(dict)
    for library in libraries:
        for name in library.needed:
            if STUBBED.fullmatch(name) and name not in installed:
                wanted[name].update({})
    for library in libraries:
        for owner, version, symbol in library.undefined:
            prefix = next((p for p in UNVERSIONED if not owner and symbol.startswith(p)), "")
            name = owner or next((n for n in wanted if prefix and n.startswith(UNVERSIONED[prefix] + ".so")), "")
            if name in wanted:
                wanted[name].setdefault(symbol, version)
    for name, symbols in sorted(wanted.items()):
        (folder / name).write_bytes(stub(name, symbols))
        print(f"stub {name}: {len(symbols)} symbols")


if __name__ == "__main__" and platform.machine() == "x86_64":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["purelib"]))
