"""The loops as an object file: what Numba makes of them, with C's names, for a chosen CPU."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target

from fastroof.compiled.c_api import C_FACTS, C_FUNCTIONS, C_LIBRARY
from fastroof.compiled.c_simulation import C_SIMULATION
from fastroof.compiled.code_cache import cache_folders, cached_files, code_version, store
from fastroof.compiled.jit import OPTIONS
from fastroof.compiled.llvm import PLAIN
from fastroof.compiled.shipped_loops import Cpu, read_shipped, shipped_cpus
from fastroof.errors import BackendError
from fastroof.progress import Phase

# now and not at the first call, as the version of compiled loops
_SOURCE: Final = Path(__file__).read_bytes()

DEFAULT_CPU: Final = "x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else "generic"
"""Haswell, Zen and what came after; elsewhere whatever the architecture has at least."""

TARGETS: Final = ("x86_64-linux-gnu", "aarch64-linux-gnu")
"""Systems that code can be made for, whatever this one is."""

FUNCTIONS: Final = (*C_FUNCTIONS, *C_FACTS, *C_SIMULATION)
"""What fastroof_step.h declares and nothing else: all that a program sees of the code."""

_COMPILERS_OWN: Final = ("memcpy", "memset", "memmove")
"""What a compiler may call in any program: of libc."""


def object_code(cpu: str | None = None, target: str | None = None) -> bytes:
    """Compile the functions of fastroof_step.h, position-independent; they call nothing but POSIX.

    ``cpu`` is LLVM's name of the oldest CPU to run on: x86-64-v3, x86-64-v2, znver4, neoverse-n1, ...;
    ``host`` is this machine's. By default x86-64-v3, on other architectures what all of them have.
    ``target`` is one of :data:`TARGETS`, by default this system.
    """
    if target is not None and target not in TARGETS:
        raise BackendError(f"there is no object code for {target!r}: {', '.join(TARGETS)} can be targets")
    return _object_code(_default_cpu(target) if cpu is None else cpu, target)


def _default_cpu(target: str | None) -> str:
    if target is None:
        return DEFAULT_CPU
    return "x86-64-v3" if target.startswith("x86_64") else "generic"


@lru_cache(8)
def _object_code(cpu: str, target: str | None) -> bytes:
    if PLAIN:
        raise BackendError("NUMBA_DISABLE_JIT or NUMBA_BOUNDSCHECK is set: object code is made without them")
    # numba optimizes for this machine first, whatever the code is for
    numbas = cpu_target.target_context.codegen().magic_tuple()
    folders, name = cache_folders(), _file_name(cpu, target, numbas)
    code = next(cached_files(folders, name), None)
    if code is None and cpu != "host":
        code = _shipped([_file_name(cpu, target, other) for other in shipped_cpus(numbas)])
    if code is None:
        with Phase("compiling the object file for C, once"):
            code = _compiled(cpu, target)
        store(folders, name, code)
    return code


def _file_name(cpu: str, target: str | None, numbas: Cpu) -> str:
    """Name cached code by what decides it, next to the version of the cache's folder."""
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    made_for = target or llvm.get_default_triple(), cpu, host if cpu == "host" else ()
    identity = hashlib.sha256(repr((_SOURCE, made_for, numbas)).encode())
    return f"object-{identity.hexdigest()}.loop"


def _shipped(names: Sequence[str]) -> bytes | None:
    """Return the first of these files that came with the wheel, undamaged."""
    version = code_version()
    for name in names:
        with suppress(OSError, ValueError):
            return read_shipped(version, name)
    return None


def _compiled(cpu: str, target: str | None) -> bytes:
    machine = _target_machine(cpu, target)
    module = llvm.parse_bitcode(_bitcode())
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    for _ in range(2):
        builder.getModulePassManager().run(module, builder)
    _check(module)
    return bytes(machine.emit_object(module))


@cache
def _bitcode() -> bytes:
    """Compile once a process, for no CPU yet: it takes seconds."""
    module: Any = None
    names = {}
    for name, (function, signature) in (C_FUNCTIONS | C_FACTS | C_SIMULATION).items():
        compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, OPTIONS)
        compiled.compile()
        names[compiled._wrapper_name] = name
        part = llvm.parse_assembly(compiled._library.get_llvm_str())
        if module is None:
            module = part
        else:
            module.link_in(part)
    for value in [*module.functions, *module.global_variables]:
        if value.name in names:
            value.name = names[value.name]
        elif not value.is_declaration:
            # then its callers' checks of what it never returns fall away, and Python with them
            value.linkage = "internal"
    return bytes(module.as_bitcode())


_MAKE_MACHINE: Final = """
import sys
import llvmlite.binding as llvm
try:
    llvm.initialize_all_targets()
except RuntimeError:
    pass
llvm.Target.from_triple(sys.argv[2]).create_target_machine(cpu=sys.argv[1])
"""


def _target_machine(cpu: str, target: str | None) -> Any:
    features = ""
    triple = target or llvm.get_default_triple()
    if cpu == "host":
        if target is not None and not triple.startswith(f"{platform.machine()}-"):
            raise BackendError(f"host is a {platform.machine()}, which is no CPU of the target {target}")
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    elif cpu != _default_cpu(target):
        # LLVM reports an unknown CPU only on standard error, and goes on without
        made = subprocess.run(
            [sys.executable, "-c", _MAKE_MACHINE, cpu, triple], capture_output=True, text=True, check=False
        )
        if not cpu or made.returncode or "not a recognized processor" in made.stderr:
            raise BackendError(
                f"LLVM knows no CPU {cpu!r} of {triple}: {_default_cpu(target)}, host, or a name that "
                "clang's -march or -mcpu takes"
            )
    if target is not None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    chosen = llvm.Target.from_triple(triple)
    return chosen.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")


def _check(module: Any) -> None:
    """Hold the object to what a C program has: it would not link otherwise."""
    allowed = {*C_LIBRARY, *_COMPILERS_OWN}
    values = [*module.functions, *module.global_variables]
    missing = [v.name for v in values if v.is_declaration and not v.name.startswith("llvm.")]
    if not allowed.issuperset(missing):
        unknown = ", ".join(sorted(set(missing) - allowed))
        raise BackendError(f"the compiled loops call {unknown}: this version of Numba is not supported here")
