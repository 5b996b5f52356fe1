"""Walks the syntax tree of a chat template: Jinja2's semantics, metered, with the origin of every character.

Differences from Jinja2 that a template can see: `map`, `select` and the like return lists; printed lists count as
data; includes, imports, blocks, recursive loops, string formatting (`%`, `format`) and HTML escaping are not offered.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes

from runtime.frontend.sandbox import operators
from runtime.frontend.sandbox.filters import FILTERS
from runtime.frontend.sandbox.meter import MAX_CALL_DEPTH, MAX_RANGE, Meter, SandboxError
from runtime.frontend.sandbox.predicates import TESTS
from runtime.frontend.sandbox.scope import Function, Loop, Scope
from runtime.frontend.sandbox.strings import METHODS, need_int, need_text, type_name
from runtime.frontend.sandbox.values import (
    DictValue,
    ListValue,
    Namespace,
    TupleValue,
    Undefined,
    concat,
    make_dict,
    make_list,
    make_tuple,
    take_slice,
)


class TemplateRaised(SandboxError):
    """The template called `raise_exception`: it rejects the messages."""


class Evaluator:
    """Renders one template once. `line` is the line of the node at work."""

    def __init__(self, meter: Meter, variables: Mapping[str, Any]) -> None:
        self.meter = meter
        self.line = 1
        self.output: list[str] = []
        self.calls = 0
        functions: dict[str, Callable[..., Any]] = {
            "range": self._range, "namespace": self._namespace, "dict": self._dict, "raise_exception": self._raise}
        self.globals = Scope(None, {name: Function(name, run) for name, run in functions.items()} | dict(variables))

    def render(self, tree: nodes.Template) -> str:
        """The rendered prompt with origins. Raises SandboxError."""
        self.body(tree.body, Scope(self.globals, {}))
        if sum(map(len, self.output)) > self.meter.limits.output_chars:
            raise SandboxError(f"prints more than {self.meter.limits.output_chars} characters")
        return concat(self.output, self.meter)

    # Statements. Each returns None, "break" or "continue".

    def body(self, statements: list[nodes.Node], scope: Scope) -> str | None:
        for statement in statements:
            signal = _STATEMENTS[type(statement)](self, statement, scope)
            if signal is not None:
                return signal
        return None

    def _output(self, node: nodes.Output, scope: Scope) -> None:
        for child in node.nodes:
            text = child.data if isinstance(child, nodes.TemplateData) else operators.to_text(
                self.meter, self.value(child, scope))
            self.meter.step()
            if text:
                self.meter.chars(len(text))
                self.output.append(text)

    def _assign(self, node: nodes.Assign, scope: Scope) -> None:
        self.line = node.lineno
        self.store(node.target, self.value(node.node, scope), scope)

    def _assign_block(self, node: nodes.AssignBlock, scope: Scope) -> None:
        with self._capture() as parts:
            self.body(node.body, Scope(scope, {}))
        text = concat(parts, self.meter)
        value: Any = text if node.filter is None else self._filter(node.filter, scope, text)
        self.store(node.target, value, scope)

    def _if(self, node: nodes.If, scope: Scope) -> str | None:
        if self.value(node.test, scope):
            return self.body(node.body, scope)
        for branch in node.elif_:
            if self.value(branch.test, scope):
                return self.body(branch.body, scope)
        return self.body(node.else_, scope)

    def _for(self, node: nodes.For, scope: Scope) -> None:
        self.line = node.lineno
        items = operators.iterate(self.meter, self.value(node.iter, scope))
        if node.test is not None:
            kept = []
            for item in items:
                inner = Scope(scope, {})
                self.store(node.target, item, inner)
                if self.value(node.test, inner):
                    kept.append(item)
            items = kept
        loop = Loop(items)
        for position, item in enumerate(items):
            self.meter.step()
            loop.position = position
            inner = Scope(scope, {"loop": loop})
            self.store(node.target, item, inner)
            if self.body(node.body, inner) == "break":
                break
        if not items:
            self.body(node.else_, Scope(scope, {}))

    def _macro(self, node: nodes.Macro, scope: Scope) -> None:
        scope.variables[node.name] = self.macro(node.name, node, scope)

    def _call_block(self, node: nodes.CallBlock, scope: Scope) -> None:
        caller = self.macro("caller", node, scope)
        self.line = node.lineno
        self.output.append(operators.to_text(self.meter, self._call(node.call, scope, {"caller": caller})))

    def _filter_block(self, node: nodes.FilterBlock, scope: Scope) -> None:
        with self._capture() as parts:
            self.body(node.body, Scope(scope, {}))
        filtered = self._filter(node.filter, scope, concat(parts, self.meter))
        self.output.append(operators.to_text(self.meter, filtered))

    def _with(self, node: nodes.With, scope: Scope) -> str | None:
        inner = Scope(scope, {})
        for target, value in zip(node.targets, node.values, strict=True):
            self.store(target, self.value(value, scope), inner)
        return self.body(node.body, inner)

    def _scope(self, node: nodes.Scope, scope: Scope) -> str | None:
        return self.body(node.body, Scope(scope, {}))

    def store(self, target: nodes.Node, value: Any, scope: Scope) -> None:
        """Assigns to a name, a namespace member or a tuple of targets."""
        if isinstance(target, nodes.Name):
            scope.variables[target.name] = value
        elif isinstance(target, nodes.NSRef):
            namespace = scope.find(target.name)
            if not isinstance(namespace, Namespace):
                raise SandboxError(f"cannot assign to '{target.name}.{target.attr}': '{target.name}' is no namespace")
            namespace.members[target.attr] = value
        elif isinstance(target, nodes.Tuple | nodes.List):
            items = operators.iterate(self.meter, value)
            if len(items) != len(target.items):
                raise SandboxError(f"cannot unpack {len(items)} values into {len(target.items)} names")
            for part, item in zip(target.items, items, strict=True):
                self.store(part, item, scope)
        else:
            raise SandboxError("cannot assign to this expression")

    @contextmanager
    def _capture(self) -> Iterator[list[str]]:
        outer, self.output = self.output, []
        try:
            yield self.output
        finally:
            self.output = outer

    def macro(self, name: str, node: nodes.Macro | nodes.CallBlock, scope: Scope) -> Function:
        """A callable that renders the body of a macro."""
        names = [arg.name for arg in node.args]
        first_default = len(names) - len(node.defaults)

        def run(*args: Any, **kwargs: Any) -> str:
            inner = Scope(scope, {"varargs": make_tuple(args[len(names):], self.meter)})
            for position, parameter in enumerate(names):
                if position < len(args):
                    if parameter in kwargs:
                        raise SandboxError(f"macro '{name}' got two values for '{parameter}'")
                    inner.variables[parameter] = args[position]
                elif parameter in kwargs:
                    inner.variables[parameter] = kwargs.pop(parameter)
                elif position >= first_default:
                    inner.variables[parameter] = self.value(node.defaults[position - first_default], inner)
                else:
                    inner.variables[parameter] = Undefined(f"parameter '{parameter}' of macro '{name}'")
            if kwargs or len(args) > len(names):
                self._accept_extra(name, node, inner, len(args) > len(names), kwargs)
            self.calls += 1
            if self.calls > MAX_CALL_DEPTH:
                raise SandboxError(f"nests macro calls deeper than {MAX_CALL_DEPTH}")
            with self._capture() as parts:
                self.body(node.body, inner)
            self.calls -= 1
            return concat(parts, self.meter)

        return Function(name, run)

    def _accept_extra(self, name: str, node: nodes.Macro | nodes.CallBlock, inner: Scope, positional: bool,
                      named: dict[str, Any]) -> None:
        """Arguments beyond the parameters: only for a macro that reads varargs, kwargs or caller."""
        used = [child.name for child in node.find_all(nodes.Name)]
        self.meter.step(len(used))
        inner.variables["caller"] = named.pop("caller", Undefined("'caller'")) if "caller" in used else Undefined(
            "'caller'")
        if positional and "varargs" not in used:
            raise SandboxError(f"macro '{name}' takes fewer arguments")
        if named and "kwargs" not in used:
            raise SandboxError(f"macro '{name}' has no parameter '{next(iter(named))}'")
        inner.variables["kwargs"] = make_dict(named.items(), self.meter)

    # Expressions.

    def value(self, node: nodes.Node, scope: Scope) -> Any:
        """Value of an expression node."""
        self.meter.step()
        self.line = node.lineno
        return _EXPRESSIONS[type(node)](self, node, scope)

    def _name(self, node: nodes.Name, scope: Scope) -> Any:
        return scope.find(node.name)

    def _list(self, node: nodes.List, scope: Scope) -> Any:
        return make_list([self.value(item, scope) for item in node.items], self.meter)

    def _tuple(self, node: nodes.Tuple, scope: Scope) -> Any:
        return make_tuple([self.value(item, scope) for item in node.items], self.meter)

    def _dict_display(self, node: nodes.Dict, scope: Scope) -> Any:
        return make_dict([(operators.key_of(self.meter, self.value(pair.key, scope)), self.value(pair.value, scope))
                          for pair in node.items], self.meter)

    def _conditional(self, node: nodes.CondExpr, scope: Scope) -> Any:
        if self.value(node.test, scope):
            return self.value(node.expr1, scope)
        if node.expr2 is not None:
            return self.value(node.expr2, scope)
        return Undefined("the value of an if without else")

    def _and(self, node: nodes.And, scope: Scope) -> Any:
        return self.value(node.left, scope) and self.value(node.right, scope)

    def _or(self, node: nodes.Or, scope: Scope) -> Any:
        return self.value(node.left, scope) or self.value(node.right, scope)

    def _not(self, node: nodes.Not, scope: Scope) -> Any:
        return not self.value(node.node, scope)

    def _sign(self, node: nodes.UnaryExpr, scope: Scope) -> Any:
        operand = operators.defined(self.value(node.node, scope))
        if not isinstance(operand, int | float):
            raise SandboxError(f"a sign needs a number, not {type_name(operand)}")
        return operators.bounded(-operand if isinstance(node, nodes.Neg) else +operand)

    def _binary(self, node: nodes.BinExpr, scope: Scope) -> Any:
        left, right = self.value(node.left, scope), self.value(node.right, scope)
        self.line = node.lineno
        return operators.BINARY[node.operator](self.meter, operators.defined(left), operators.defined(right))

    def _concat(self, node: nodes.Concat, scope: Scope) -> str:
        return concat([operators.to_text(self.meter, self.value(part, scope)) for part in node.nodes], self.meter)

    def _compare(self, node: nodes.Compare, scope: Scope) -> bool:
        left = self.value(node.expr, scope)
        for operand in node.ops:
            right = self.value(operand.expr, scope)
            if not operators.COMPARE[operand.op](self.meter, left, right):
                return False
            left = right
        return True

    def _getattr(self, node: nodes.Getattr, scope: Scope) -> Any:
        return self.attribute(self.value(node.node, scope), node.attr)

    def _getitem(self, node: nodes.Getitem, scope: Scope) -> Any:
        value = self.value(node.node, scope)
        if isinstance(node.arg, nodes.Slice):
            bounds = [None if part is None else self.value(part, scope)
                      for part in (node.arg.start, node.arg.stop, node.arg.step)]
            return self.slice(value, bounds)
        return self.item(value, self.value(node.arg, scope))

    def _filter(self, node: nodes.Filter, scope: Scope, block: str | None = None) -> Any:
        """A filter expression, or the chain of a filter block, whose innermost input is the text of the block."""
        value: Any
        if node.node is None:
            value = block
        elif block is not None and isinstance(node.node, nodes.Filter):
            value = self._filter(node.node, scope, block)
        else:
            value = self.value(node.node, scope)
        args, kwargs = self.arguments(node, scope)
        self.line = node.lineno
        return self.filter(node.name, value, args, kwargs)

    def _test(self, node: nodes.Test, scope: Scope) -> bool:
        value = self.value(node.node, scope)
        args, kwargs = self.arguments(node, scope)
        self.line = node.lineno
        return self.test(node.name, value, args, kwargs)

    def _call(self, node: nodes.Call, scope: Scope, extra: dict[str, Any] | None = None) -> Any:
        callee = self.value(node.node, scope)
        args, kwargs = self.arguments(node, scope)
        self.line = node.lineno
        if not isinstance(callee, Function):
            operators.defined(callee)
            raise SandboxError(f"{type_name(callee)} cannot be called")
        return callee(*args, **kwargs, **(extra or {}))

    def arguments(self, node: "nodes.Call | nodes.Filter | nodes.Test", scope: Scope) -> tuple[
            list[Any], dict[str, Any]]:
        """Positional and named arguments of a call, filter or test."""
        args = [self.value(arg, scope) for arg in node.args]
        kwargs: dict[str, Any] = {str(pair.key): self.value(pair.value, scope) for pair in node.kwargs}
        if node.dyn_args is not None:
            args += operators.iterate(self.meter, self.value(node.dyn_args, scope))
        if node.dyn_kwargs is not None:
            named = self.value(node.dyn_kwargs, scope)
            if not isinstance(named, dict):
                raise SandboxError("** needs a mapping")
            self.meter.step(len(named))
            kwargs |= {str(need_text(key, "**")): value for key, value in named.items()}
        return args, kwargs

    def filter(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Applies a filter by name."""
        self.meter.step()
        if name not in FILTERS:
            raise SandboxError(f"there is no filter '{name}'")
        return FILTERS[name](self, value, *args, **kwargs)

    def test(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Applies a test by name."""
        self.meter.step()
        if name not in TESTS:
            raise SandboxError(f"there is no test '{name}'")
        return TESTS[name](self, value, *args, **kwargs)

    # Members. Attribute access tries methods first and then mapping keys, item access the other way round.

    def member(self, value: Any, name: Any) -> Any:
        """Item access, as filters with `attribute=` use it."""
        return self.item(value, name)

    def attribute(self, value: Any, name: str) -> Any:
        """`value.name`."""
        operators.defined(value)
        if name.startswith("__"):
            raise SandboxError(f"the attribute '{name}' is not available")
        if isinstance(value, Namespace):
            return value.members.get(name, Undefined(f"'{name}' of the namespace"))
        if isinstance(value, Loop):
            if name in ("cycle", "changed"):
                return self._loop_function(value, name)
            return value.member(name)
        method = self._method(value, name)
        if method is not None:
            return method
        if isinstance(value, dict):
            return value.get(name, Undefined(f"'{name}'"))
        return Undefined(f"'{name}' of {type_name(value)}")

    def item(self, value: Any, key: Any) -> Any:
        """`value[key]`."""
        operators.defined(value)
        if isinstance(value, dict):
            found = value.get(operators.key_of(self.meter, key), _MISSING)
            if found is not _MISSING:
                return found
        elif isinstance(key, int) and isinstance(value, str | list | tuple | range):
            if not -len(value) <= key < len(value):
                return Undefined(f"element {key} of {type_name(value)}")
            return operators.value_at(value, key) if isinstance(value, str) else value[key]
        if isinstance(key, str):
            return self.attribute(value, key)
        return Undefined(f"an element of {type_name(value)}")

    def slice(self, value: Any, bounds: list[Any]) -> Any:
        """`value[start:stop:step]`."""
        for bound in bounds:
            if bound is not None:
                need_int(bound, "a slice")
        if bounds[2] == 0:
            raise SandboxError("the step of a slice cannot be 0")
        index = slice(*bounds)
        if isinstance(value, str):
            self.meter.chars(len(range(*index.indices(len(value)))))
            return take_slice(value, index)
        if isinstance(value, list | tuple):
            return make_list(value[index], self.meter)
        operators.defined(value)
        raise SandboxError(f"{type_name(value)} cannot be sliced")

    def _method(self, value: Any, name: str) -> Function | None:
        """A method of a string, list or mapping; one that exists in Python but is not offered is an error."""
        if isinstance(value, str) and name in METHODS:
            run = METHODS[name]
            return Function(name, lambda *args, **kwargs: run(self.meter, value, *args, **kwargs))
        if isinstance(value, DictValue) and name in ("items", "keys", "values", "get"):
            methods: dict[str, Callable[..., Any]] = {
                "items": lambda: FILTERS["items"](self, value),
                "keys": lambda: make_list(value, self.meter),
                "values": lambda: make_list(value.values(), self.meter),
                "get": lambda key, default=None: value.get(operators.key_of(self.meter, key), default),
            }
            return Function(name, methods[name])
        if isinstance(value, ListValue | TupleValue) and name in ("index", "count"):
            def search(wanted: Any) -> Any:
                self.meter.step(len(value) + value.weight)
                return value.index(wanted) if name == "index" else value.count(wanted)

            return Function(name, search)
        if hasattr(_python_type(value), name):
            raise SandboxError(f"the attribute '{name}' of {type_name(value)} is not available")
        return None

    def _loop_function(self, loop: Loop, name: str) -> Function:
        def cycle(*options: Any) -> Any:
            if not options:
                raise SandboxError("loop.cycle needs values")
            return options[loop.position % len(options)]

        def changed(*values: Any) -> bool:
            now = make_tuple(values, self.meter)
            before, loop.previous = loop.previous, now
            return before is None or not operators.equal(self.meter, before, now)

        return Function(name, cycle if name == "cycle" else changed)

    # Global functions.

    def _range(self, *bounds: Any) -> range:
        if not 1 <= len(bounds) <= 3:
            raise SandboxError("range takes one to three integers")
        made = range(*(need_int(bound, "range") for bound in bounds))
        if len(made) > MAX_RANGE:
            raise SandboxError(f"a range has more than {MAX_RANGE} elements")
        return made

    def _namespace(self, *args: Any, **members: Any) -> Namespace:
        if len(args) > 1 or (args and not isinstance(args[0], dict)):
            raise SandboxError("namespace takes one mapping and named values")
        start = {str(key): value for key, value in args[0].items()} if args else {}
        self.meter.step(len(start))
        return Namespace(start | members)

    def _dict(self, *args: Any, **members: Any) -> DictValue:
        if len(args) > 1 or (args and not isinstance(args[0], dict)):
            raise SandboxError("dict takes one mapping and named values")
        return make_dict([*(args[0].items() if args else ()), *members.items()], self.meter)

    def _raise(self, message: Any = "") -> Any:
        raise TemplateRaised(operators.to_text(self.meter, message))


def _python_type(value: Any) -> type:
    """The built-in type behind a value: its methods hide mapping keys of the same name."""
    return next((kind for kind in (str, dict, list, tuple, bool, int, float, range) if isinstance(value, kind)), object)


_MISSING = object()

_STATEMENTS: dict[type, Callable[[Evaluator, Any, Scope], str | None]] = {
    nodes.Output: Evaluator._output,
    nodes.Assign: Evaluator._assign,
    nodes.AssignBlock: Evaluator._assign_block,
    nodes.If: Evaluator._if,
    nodes.For: Evaluator._for,
    nodes.Macro: Evaluator._macro,
    nodes.CallBlock: Evaluator._call_block,
    nodes.FilterBlock: Evaluator._filter_block,
    nodes.With: Evaluator._with,
    nodes.Scope: Evaluator._scope,
    nodes.Break: lambda evaluator, node, scope: "break",
    nodes.Continue: lambda evaluator, node, scope: "continue",
}

_EXPRESSIONS: dict[type, Callable[[Evaluator, Any, Scope], Any]] = {
    nodes.Const: lambda evaluator, node, scope: operators.bounded(node.value),
    nodes.TemplateData: lambda evaluator, node, scope: node.data,
    nodes.Name: Evaluator._name,
    nodes.List: Evaluator._list,
    nodes.Tuple: Evaluator._tuple,
    nodes.Dict: Evaluator._dict_display,
    nodes.CondExpr: Evaluator._conditional,
    nodes.And: Evaluator._and,
    nodes.Or: Evaluator._or,
    nodes.Not: Evaluator._not,
    nodes.Neg: Evaluator._sign,
    nodes.Pos: Evaluator._sign,
    nodes.Concat: Evaluator._concat,
    nodes.Compare: Evaluator._compare,
    nodes.Getattr: Evaluator._getattr,
    nodes.Getitem: Evaluator._getitem,
    nodes.Filter: Evaluator._filter,
    nodes.Test: Evaluator._test,
    nodes.Call: Evaluator._call,
    **dict.fromkeys((nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
                    Evaluator._binary),
}
