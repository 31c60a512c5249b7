"""How Numba compiles loops: machine code only for those that Python calls, the rest as LLVM IR to link.

Numba optimizes every function and emits its machine code, then links its IR into each caller and optimizes it
there again. Most functions of this package are only called by compiled ones; for these, types and IR suffice.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import binding as llvm
from numba.core import dispatcher, environment, ir, ir_utils, sigutils, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.untyped_passes import DeadBranchPrune, IRProcessing

from fastroof.progress import Phase

_log: Final = logging.getLogger("fastroof.compiled")

_ENVIRONMENT: Final = "_ZN08NumbaEnv"

# numba has no types for these
_Library: Any = JITCodeLibrary
_Pipeline: Any = Compiler
_Pass: Any = FunctionPass
_Functions: Any = vars(dispatcher)["_FunctionCompiler"]
_lookup_environment: Any = environment.lookup_environment
_normalized: Any = sigutils.normalize_signature
_Dispatcher: Any = CPUDispatcher
_Result: Any = CompileResult

current: Any = threading.local()
"""``is_callee`` of what this thread compiles, and as ``compilation`` its :class:`Compilation`."""


def is_callee() -> bool:
    """Return whether what this thread compiles now is called by a loop that it compiles."""
    return bool(getattr(current, "is_callee", False))


@contextmanager
def _compiling(*, for_callers: bool) -> Iterator[None]:
    before = is_callee()
    current.is_callee = for_callers
    try:
        yield
    finally:
        current.is_callee = before


class _CalleeLibrary(_Library):  # type: ignore[misc]
    """IR of a function and its callees, without machine code."""

    inlined = False

    def _optimize_final_module(self) -> None:
        # LLVM inlines by size, the optimized one: without this, lookups of GEMMs take twice the time
        if not self.inlined:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _EntryLibrary(_Library):  # type: ignore[misc]
    """Machine code of a function that Python calls, with the environments of all its callees."""

    _own: frozenset[str] = frozenset()

    def add_llvm_module(self, ll_module: Any) -> None:
        """Note what others may call, before callees are linked in."""
        self._own |= {one.name for one in ll_module.functions if not one.is_declaration}
        super().add_llvm_module(ll_module)

    def _optimize_final_module(self) -> None:
        # callees are called from here alone: LLVM drops arguments that they do not use, and inlines single
        # calls
        for one in self._final_module.functions:
            if not one.is_declaration and one.name not in self._own:
                one.linkage = "internal"
        super()._optimize_final_module()

    def _finalize_specific(self) -> None:
        super()._finalize_specific()
        for variable in self._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT) and not variable.is_declaration:
                known = _lookup_environment(variable.name)
                if known is not None:
                    self._codegen.set_env(variable.name, known)


@register_pass(mutates_CFG=False, analysis_only=False)  # type: ignore[no-untyped-call]
class _FixedFields(_Pass):  # type: ignore[misc]
    """Replaces fields that a tuple's class fixes by their values, so Numba drops branches before it types."""

    _name = "fixed_fields"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        function = state.func_ir

        def fields_of(variable: Any) -> dict[str, Any]:
            """Return the types of a tuple's fields, and values of those that are fixed."""
            source = ir_utils.get_definition(function, variable)  # type: ignore[no-untyped-call]
            of: Any = None
            if isinstance(source, ir.Arg):
                of = state.args[source.index]
            elif isinstance(source, ir.Expr) and source.op == "getattr":
                of = fields_of(source.value).get(source.attr)
            elif isinstance(source, ir.Global) and source.value is math:
                return {"inf": math.inf}  # which such fields are compared with
            if not issubclass(type(of), types.BaseNamedTuple):
                return {}
            return dict(zip(of.fields, of, strict=True)) | getattr(of.instance_class, "FIXED", {})

        for block in function.blocks.values():
            for assign in block.find_insts(ir.Assign):
                field = assign.value
                if isinstance(field, ir.Expr) and field.op == "getattr":
                    fixed = (ir_utils.guard(fields_of, field.value) or {}).get(field.attr)  # type: ignore[no-untyped-call]
                    if isinstance(fixed, int | float):
                        assign.value = ir.Const(fixed, field.loc)  # type: ignore[no-untyped-call]
                        function._definitions[assign.target.name] = [assign.value]
        return True


@register_pass(mutates_CFG=False, analysis_only=True)  # type: ignore[no-untyped-call]
class _NoteNames(_Pass):  # type: ignore[misc]
    """Notes what a loop names in the branches that Numba leaves, for :class:`Compilation`."""

    _name = "note_names"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        if (compilation := getattr(current, "compilation", None)) is not None:
            blocks = state.func_ir.blocks.values()
            values = [assign.value for block in blocks for assign in block.find_insts(ir.Assign)]
            names = [one.value for one in values if isinstance(one, ir.Global | ir.FreeVar)]
            compilation.names[state.func_id.func] = names
        return False


class Compilation(Phase):
    """A loop that Python calls is compiled with those that it reaches: at most all that are not cached.

    A loop that is typed reaches what its types leave of its branches, another one all that it names. Names of
    cached loops do not count, until one of them is not cached for the types of this compilation.
    """

    of = "of at most"
    # linking and optimizing takes 0.2 to 0.3 of what the rest takes
    rest = 0.25

    def __init__(self, loop: Any, cached: set[str]) -> None:
        super().__init__("compiling loops for this machine, once")
        self.names: dict[Any, list[Any]] = {}
        self._loop, self._cached = loop, cached
        self._compiled: set[Any] = set()
        self._depth = 0

    def begin(self, loop: Any) -> None:
        """Show and log the first loop; note each that is not cached."""
        if self._depth and loop.__name__ in self._cached:
            self._cached.clear()
        elif not self._depth:
            self.__enter__()
            _log.info("compiling %s: at most %d loops, once", loop.__name__, self.counted()[1])
        self._depth += 1

    def end(self, loop: Any, *, is_compiled: bool) -> bool:
        """Note a loop that is compiled, or was while this process waited; return whether all are."""
        self._compiled.add(loop)
        self.done += is_compiled
        self._depth -= 1
        if not self._depth:
            self.__exit__()
            seconds = time.monotonic() - self.began
            _log.info("compiled %s: %d loops in %.1f s", loop.__name__, self.done, seconds)
        return not self._depth

    def counted(self) -> tuple[int, int]:
        """Return how many loops are compiled, and how many will be at most."""
        reached = [self._loop]
        seen = {self._loop, *self._compiled.copy()}  # another thread compiles
        for loop in reached:  # which grows
            named = [loop.__globals__.get(name) for name in loop.__code__.co_names]
            named += [cell.cell_contents for cell in loop.__closure__ or ()]
            for one in self.names.get(loop, named):
                if isinstance(one, LoopDispatcher) and one.py_func not in seen:
                    seen.add(one.py_func)
                    if one.py_func.__name__ not in self._cached:
                        reached.append(one.py_func)
        return self.done, self.done + len(reached)


class _LoopPipeline(_Pipeline):  # type: ignore[misc]
    def __init__(
        self,
        typingctx: Any,
        targetctx: Any,
        library: Any,
        args: Any,
        return_type: Any,
        flags: Any,
        locals: Any,
    ) -> None:
        if flags.no_compile:
            library = _CalleeLibrary(targetctx.codegen(), "loop")
            library.inlined = flags.forceinline
        else:
            library = _EntryLibrary(targetctx.codegen(), "loop")
            library.enable_object_caching()
        super().__init__(typingctx, targetctx, library, args, return_type, flags, locals)

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for one in pipelines:
            one.add_pass_after(_FixedFields, IRProcessing)
            one.add_pass_after(_NoteNames, DeadBranchPrune)
            one.finalize()
        return pipelines


class _LoopCompiler(_Functions):  # type: ignore[misc]
    def _customize_flags(self, flags: Any) -> Any:
        flags.no_compile = flags.no_cpython_wrapper = is_callee()
        return flags


def _widened(of: Any) -> Any:
    """Return the type that an argument is passed as."""
    of = types.unliteral(of)  # type: ignore[no-untyped-call]
    return types.int64 if of in types.signed_domain else of


class Callee:
    """What stands for the machine code of a function that has none, as the key of its IR."""


class LoopDispatcher(_Dispatcher):  # type: ignore[misc]
    """Numba's dispatcher of a loop, which emits machine code when Python calls it and not before."""

    def __init__(self, function: Any, locals: Any, targetoptions: dict[str, Any]) -> None:
        super().__init__(function, locals, targetoptions, _LoopPipeline)
        self._compiler = _LoopCompiler(function, self.targetdescr, targetoptions, self.locals, _LoopPipeline)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the types of a call by a loop that compiles: one version for integers and constants."""
        with _compiling(for_callers=True):
            widened = {name: _widened(of) for name, of in kws.items()}
            return super().get_call_template(tuple(_widened(of) for of in args), widened)

    def _compile_for_args(self, *args: Any, **kws: Any) -> Any:
        # typing a loop may call another one from Python
        with _compiling(for_callers=False):
            return super()._compile_for_args(*args, **kws)

    def compile(self, sig: Any) -> Any:
        """Compile for a signature, unless that is done for its caller."""
        args = tuple(_normalized(sig)[0])
        # another thread may be compiling this very function for its caller
        with global_compiler_lock:
            known = self.overloads.get(args)
            if known is not None and isinstance(known.entry_point, Callee) and not is_callee():
                del self.overloads[args]
            try:
                return super().compile(sig)
            finally:
                # a cache of this package's loops, also where compiling failed
                if hasattr(self._cache, "end_turn"):
                    self._cache.end_turn(sig)

    def add_overload(self, cres: Any) -> None:
        """Note what was compiled; Python gets no way into IR."""
        if cres.entry_point is not None:
            super().add_overload(cres)
            return
        cres = cres._replace(entry_point=Callee())
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [cres.library])
        self.overloads[tuple(cres.signature.args)] = cres


def reduced_callee(compiled: Any) -> tuple[Any, ...]:
    """Return what rebuilds the result of compiling for callers."""
    compiled.library._ensure_finalized()
    fndesc = compiled.fndesc
    fndesc.typemap = fndesc.calltypes = None
    environments = tuple(compiled._find_referenced_environments())
    bitcode = compiled.library._final_module.as_bitcode()
    return bitcode, fndesc, compiled.environment, compiled.signature, compiled.reload_init, environments


def rebuilt_callee(target_context: Any, *parts: Any) -> Any:
    """Return the result of compiling for callers from its parts."""
    bitcode, fndesc, of_function, signature, reload_init, environments = parts
    for reload in reload_init:
        reload()
    library = _CalleeLibrary(target_context.codegen(), "loop")
    library._final_module = llvm.parse_bitcode(bitcode)
    library._finalize_final_module()
    return _Result(
        typing_context=target_context.typing_context,
        target_context=target_context,
        entry_point=None,
        typing_error=None,
        type_annotation="",
        signature=signature,
        library=library,
        objectmode=False,
        lifted=(),
        fndesc=fndesc,
        call_helper=None,
        environment=of_function,
        metadata=None,
        reload_init=reload_init,
        referenced_envs=environments,
    )
