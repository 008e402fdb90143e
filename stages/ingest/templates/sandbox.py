"""The environment of chat templates: jinja2's sandbox, with bounds of time and size.

jinja2's own sandbox restricts access, but a template may still loop forever and fill the memory. Here every operation
that takes time or makes a larger value first takes its cost from the `Budget` of the rendering:

    loop iterations, calls of macros      a step put into the template's syntax tree (`BoundedCode`)
    + * ** %                              jinja2's intercepted operators (`call_binop`)
    ~ a[b:c] a == b, a in b               code of our own around jinja2's (`BoundedCode`)
    {{ … }}                               jinja2's `finalize`
    calls, methods of text, format        `call`, methods.py
    filters and tests                     filters.py
    output of blocks and macros           `concat`

Nothing is evaluated at compile time, when there is no budget.
"""

from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType
from typing import Any

import jinja2
from jinja2 import nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pipeline.stages.ingest.templates import filters, methods
from pipeline.stages.ingest.templates.budget import MAX_INT_BITS, ValueTooLarge, active

SPEND = " spend"
"""A filter whose name no template can spell."""

NODES_PER_STEP = 8
CALL_STEPS = 2


class BoundedCode(CodeGenerator):
    """Generates a template's Python code, with the calls to the budget."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        if node.find(nodes.ScopedEvalContextModifier) is not None:
            raise jinja2.TemplateAssertionError("autoescape is not supported", 1)
        for loop in list(node.find_all(nodes.For)):
            if loop.test is not None:
                loop.test = nodes.And(_spends(1), loop.test)
            loop.body.insert(0, nodes.ExprStmt(_spends(_num_steps(loop.body))))
        macros: list[Any] = [*node.find_all(nodes.Macro), *node.find_all(nodes.CallBlock)]
        for macro in macros:
            macro.body.insert(0, nodes.ExprStmt(_spends(_num_steps(macro.body))))
        super().visit_Template(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._read(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._read(node.expr, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for pair in node.items:
            self._read(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        elif isinstance(node.arg, nodes.Slice):
            self.write("environment.made(")
            super().visit_Getitem(node, frame)
            self.write(")")
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._read(node.arg, frame)
            self.write(")")

    def _read(self, node: nodes.Expr, frame: Frame) -> None:
        """Write an expression whose value is compared or hashed."""
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write("environment.read(")
        self.visit(node, frame)
        self.write(")")


def _spends(num_steps: int) -> nodes.Filter:
    """An expression that spends steps and is true."""
    return nodes.Filter(nodes.Const(True), SPEND, [nodes.Const(num_steps)], [], None, None)


def _num_steps(body: list[nodes.Node]) -> int:
    """About the cost of running a body once. A body may be large."""
    return 1 + sum(1 for node in body for _ in node.find_all(nodes.Node)) // NODES_PER_STEP


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`: marks the assistant's text for training; here it renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers' `apply_chat_template` (trimmed blocks, loop controls, a few functions). Not
    supported are `lipsum`, `autoescape` and the filters that are not in `filters.FILTERS`."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            optimized=False,
            finalize=_written,
        )
        self.filters.clear()
        self.filters.update({SPEND: _spend, **filters.FILTERS})
        self.tests.update(filters.TESTS)
        del self.globals["lipsum"]
        self.globals["namespace"] = PublicNamespace
        self.globals["dict"] = TemplateDict()
        self.globals["raise_exception"] = _raise_exception

    @staticmethod
    def read(value: Any) -> Any:
        active.budget.read(value)
        return value

    @staticmethod
    def made(value: Any) -> Any:
        return filters.made(value)

    @staticmethod
    def joined(parts: tuple[Any, ...]) -> str:
        return _concat([part if isinstance(part, str) else str(_written(None, part)) for part in parts])

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        return _concat(pieces if isinstance(pieces, list) else list(pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return OPERATORS[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = active.budget
        budget.spend(CALL_STEPS + (len(args) + len(kwargs)) // 8)
        if isinstance(__obj, BuiltinFunctionType):
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            methods.check(__obj, args, kwargs)
        for arg in args:
            budget.read(arg)
        for name, arg in kwargs.items():
            if name not in ("_loop_vars", "_block_vars"):
                budget.read(arg)
        return filters.made(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is PublicNamespace and not attribute.startswith("_"):
            # The values in a namespace were checked before; jinja2's checks take ten times as long.
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return methods.bounded_format(self, value.__self__, is_map=value.__name__ == "format_map")


def _concat(pieces: list[str]) -> str:
    active.budget.make(sum(map(len, pieces)))
    return "".join(pieces)


@pass_eval_context  # so that jinja2 does not try it on constants when it compiles
def _written(_: Any, value: Any) -> Any:
    """Finalize the value of {{ … }} before it becomes text."""
    if type(value) is str:
        active.budget.make(len(value))
    elif value is not None:
        active.budget.make(active.budget.read(value))
    return value


def _spend(value: bool, num_steps: int) -> bool:
    active.budget.spend(num_steps)
    return value


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        active.budget.make(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        active.budget.make_list(len(left) + len(right))
    return left + right


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return left * right
    for sequence, times in ((left, right), (right, left)):
        if isinstance(times, int):
            if isinstance(sequence, str):
                active.budget.make(len(sequence) * max(times, 0))
            elif isinstance(sequence, list | tuple):
                active.budget.make_list(len(sequence) * max(times, 0))
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        _check_bits(left.bit_length() * right)
    return left**right


def _modulo(left: Any, right: Any) -> Any:
    return methods.percent(left, right) if isinstance(left, str) else left % right


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_INT_BITS:
        raise ValueTooLarge(f"it makes a number of {num_bits} bits, the limit is {MAX_INT_BITS}")


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": _add, "*": _multiply, "**": _power, "%": _modulo}


class PublicNamespace(Namespace):
    """`namespace()` without names that begin with an underscore: templates are untrusted, and Python's special names
    are the way out of a sandbox. It does not write out its values, because one may be the namespace itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that a template may call a name `self`
        names = dict(*args[1:], **kwargs)
        for name in names:
            _require_public(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _require_public(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.TemplateError(f"names in a namespace can't begin with an underscore: {str(name)!r}")


class TemplateDict:
    """`dict()`, without the other methods of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))
