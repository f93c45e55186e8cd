"""Changes of code by rule: one operator, operand, condition, constant, call, keyword, statement at a time.

A change is named by file, function, operator and a number within the function, so it keeps its name when
lines move. `mutants` plants them.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What is given back as it came: an order, a copy, a graph that is cut.
PLAIN = ("reversed", "sorted", "abs", "clone", "detach", "copy", "float", "contiguous")


Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Mutant:
    """One change of a function of `file`; of a statement of the module where `function` is "".

    `make` gives the text of the module with it, `digest` is of the function before it. `tests` must notice
    it; where there are none, those that run its line. `verdict` is "killed", "timed out", "survived",
    "unclear" or "no test here".
    """

    name: str
    file: str
    function: str
    line: int
    before: str
    after: str
    make: Callable[[], str] = field(repr=False)
    digest: str = ""
    tests: tuple[str, ...] = ()
    verdict: str = ""
    killers: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """A line of the results."""
        return {name: value for name, value in vars(self).items() if name not in ("make", "tests")}


def by_rule(file: str, root: Path) -> Iterator[Mutant]:
    """Each mutant of a module, from the root of the project."""
    lines = (root / file).read_text(encoding="utf-8").splitlines()
    for name, function in functions(ast.parse("\n".join(lines))):
        first, counts = first_line(function), dict[str, int]()
        source = "\n".join(lines[first - 1 : function.end_lineno])
        digest, line = hashlib.sha256(source.encode()).hexdigest()[:12], first
        for node in places(function):
            line = getattr(node, "lineno", line)  # a comprehension's `for` has none
            for operator, new in changes(node):
                before = ast.unparse(node).strip().splitlines()[0]
                number = counts[operator] = counts.get(operator, 0) + 1
                after = (
                    "" if new is None else ast.unparse(ast.fix_missing_locations(new)).strip().splitlines()[0]
                )
                yield Mutant(
                    f"{file}::{name}::{operator} {number}", file, name, line, before, after,
                    partial(_changed, lines, function, node, new), digest,
                )  # fmt: skip


def _changed(lines: Sequence[str], function: Function, old: ast.AST, new: ast.AST | None) -> str:
    """The text of a module with a node of a function replaced."""
    changed = ast.unparse(ast.fix_missing_locations(_Replace(old, new).visit(function)))
    indented = textwrap.indent(changed, " " * function.col_offset)
    return "\n".join([*lines[: first_line(function) - 1], indented, *lines[function.end_lineno :], ""])


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What may stand in place of a node: the operator's name, and the new node (None: nothing at all)."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            yield "compare", ast.Compare(node.left, [SWAPS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in SWAPS and not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, SWAPS[type(operator)](), node.right)
            yield "left alone", node.left
            yield "right alone", node.right
        case ast.BinOp(op=ast.BitXor() | ast.BitOr() | ast.BitAnd() | ast.LShift() | ast.RShift()):
            yield "left alone", node.left
            yield "right alone", node.right
        case ast.BoolOp(op=operator, values=values):
            yield "and-or", ast.BoolOp(SWAPS[type(operator)](), values)
            for index in range(len(values)):
                others = [*values[:index], *values[index + 1 :]]
                yield "dropped operand", others[0] if len(others) == 1 else ast.BoolOp(operator, others)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield "always", body
            yield "never", orelse
        case ast.If() | ast.While():
            for value in (False, True)[: 1 if isinstance(node, ast.While) else 2]:
                changed = copy.copy(node)
                changed.test = ast.Constant(value)
                yield "always" if value else "never", changed
        case ast.comprehension(ifs=[_, *others]):
            yield "dropped filter", ast.comprehension(node.target, node.iter, others, node.is_async)
        case ast.ExceptHandler(type=ast.AST()):
            yield (
                "other exception",
                ast.ExceptHandler(ast.Name("ZeroDivisionError", ast.Load()), node.name, node.body),
            )
        case ast.With(items=[_, *others]) if others:
            yield "dropped context", ast.With(others, node.body)
        case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)) if (lower is None) != (upper is None):
            yield "slice", ast.Subscript(node.value, ast.Slice(upper, lower), node.ctx)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "dropped call", None
        case ast.Delete() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", None
        case ast.Return(value=value) if value and ast.unparse(value) != "None":
            yield "early return", ast.Return(ast.Constant(None))
        case ast.AugAssign(op=operator) if type(operator) in SWAPS:
            yield "arithmetic", ast.AugAssign(node.target, SWAPS[type(operator)](), node.value)
        case ast.Call():
            yield from _calls(node)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    match node.args:
        case [first, second, *others] if (
            called not in OTHERS
            and not {type(first), type(second)} & {ast.Starred}  # min and max are of a set
        ):
            yield "swapped arguments", ast.Call(node.func, [second, first, *others], node.keywords)
    if called in OTHERS and isinstance(node.func, ast.Name):
        yield "other function", ast.Call(ast.Name(OTHERS[called], ast.Load()), node.args, node.keywords)
    if called in ("min", "max") and not node.keywords and len(node.args) == 2:
        yield "one argument", node.args[0]
        yield "one argument", node.args[1]
    if called in PLAIN and len(node.args) == 1 - isinstance(node.func, ast.Attribute):
        yield "unwrapped", node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]
    for index, keyword in enumerate(node.keywords):
        if keyword.arg:
            kept = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield "dropped keyword", ast.Call(node.func, node.args, kept)


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    texts = [isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides]
    return any(texts) or any(isinstance(side, ast.JoinedStr) for side in sides)


class _Replace(ast.NodeTransformer):
    """Copies a tree with a node in the place of another one."""

    def __init__(self, old: ast.AST, new: ast.AST | None) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.copy_location(self.new or ast.Pass(), node)
        return super().visit(copy.copy(node))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, name, [self.visit(v) if isinstance(v, ast.AST) else v for v in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """The outermost functions of a module, with their qualified names."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, scope = waiting.pop()
        for node in ast.iter_child_nodes(scope):
            if isinstance(node, Function):
                yield prefix + node.name, node
            elif isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.If | ast.Try | ast.With):
                waiting.append((prefix, node))


def first_line(function: Function) -> int:
    """Its decorators' too."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def places(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function that count: no annotations, messages of errors, assertions or docstrings."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
            continue
        yield node
        children = [child for name, child in ast.iter_fields(node) if name not in ("annotation", "returns")]
        flat = [each for child in children for each in (child if isinstance(child, list) else [child])]
        waiting += reversed([each for each in flat if isinstance(each, ast.AST)])
