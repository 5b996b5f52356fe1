"""Names of a template: block scopes, the `loop` variable, callables."""

from collections.abc import Callable
from typing import Any

from runtime.frontend.sandbox.values import Undefined


class Scope:
    """Variables of one block; reads fall through to the enclosing blocks, writes stay here."""

    __slots__ = ("parent", "variables")

    def __init__(self, parent: "Scope | None", variables: dict[str, Any]) -> None:
        self.parent = parent
        self.variables = variables

    def find(self, name: str) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return Undefined(f"'{name}'")


class Loop:
    """The `loop` variable. Its depth counts recursive loops, of which there are none."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.position = 0
        self.previous: Any = None

    def member(self, name: str) -> Any:
        count, at = len(self.items), self.position
        members: dict[str, Any] = {
            "index": at + 1, "index0": at, "revindex": count - at, "revindex0": count - at - 1, "first": at == 0,
            "last": at == count - 1, "length": count, "depth": 1, "depth0": 0,
        }
        if name == "previtem":
            return self.items[at - 1] if at else Undefined("there is no previous item: loop.previtem")
        if name == "nextitem":
            return self.items[at + 1] if at + 1 < count else Undefined("there is no next item: loop.nextitem")
        return members.get(name, Undefined(f"'loop.{name}'"))


class Function:
    """Something a template can call."""

    __slots__ = ("name", "run")

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = name
        self.run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)
