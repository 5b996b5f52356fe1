"""Parses a chat template with Jinja2's parser and rejects what the evaluator does not offer."""

from collections.abc import Iterator

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from runtime.frontend.sandbox.meter import MAX_TEMPLATE_BYTES, MAX_TREE_DEPTH

EXPRESSIONS = (
    nodes.Const, nodes.TemplateData, nodes.Name, nodes.NSRef, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair,
    nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getattr, nodes.Getitem, nodes.Slice,
    nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos, nodes.Add,
    nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow,
)
STATEMENTS = (
    nodes.Template, nodes.Output, nodes.Assign, nodes.AssignBlock, nodes.If, nodes.For, nodes.Macro, nodes.CallBlock,
    nodes.FilterBlock, nodes.With, nodes.Scope, nodes.Break, nodes.Continue,
)


class SyntaxProblem(Exception):
    """The template cannot be used; `line` is 1-based."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class _Generation(Extension):
    """`{% generation %}` marks assistant tokens for training; at inference its body stands for itself."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def parse(source: str) -> nodes.Template:
    """Syntax tree of a template. Raises SyntaxProblem with the line.

    Whitespace options are those under which chat templates are written (trim_blocks, lstrip_blocks).
    """
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise SyntaxProblem(1, f"the template has {size} bytes; at most {MAX_TEMPLATE_BYTES} are allowed")
    environment = Environment(trim_blocks=True, lstrip_blocks=True,
                              extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        tree = Parser(environment, source).parse()
    except TemplateSyntaxError as error:
        raise SyntaxProblem(error.lineno, error.message or "syntax error") from None
    except RecursionError:
        raise SyntaxProblem(1, "the template nests too deeply") from None
    except (ValueError, OverflowError, AssertionError):  # numbers the lexer cannot convert
        raise SyntaxProblem(1, "a number or text constant cannot be converted") from None
    _check(tree)
    return tree


def _check(tree: nodes.Template) -> None:
    for node, depth, in_loop in _walk(tree):
        if not isinstance(node, EXPRESSIONS + STATEMENTS):
            raise SyntaxProblem(node.lineno, f"{type(node).__name__.lower()} is not available to chat templates")
        if depth > MAX_TREE_DEPTH:
            raise SyntaxProblem(node.lineno, f"the template nests deeper than {MAX_TREE_DEPTH}")
        if isinstance(node, nodes.For) and node.recursive:
            raise SyntaxProblem(node.lineno, "recursive loops are not available to chat templates")
        if isinstance(node, nodes.Break | nodes.Continue) and not in_loop:
            raise SyntaxProblem(node.lineno, "break and continue belong inside a loop")


def _walk(tree: nodes.Template) -> Iterator[tuple[nodes.Node, int, bool]]:
    """Every node with its depth and whether a loop of the same macro encloses it; no recursion."""
    pending: list[tuple[nodes.Node, int, bool]] = [(tree, 0, False)]
    while pending:
        node, depth, in_loop = pending.pop()
        yield node, depth, in_loop
        inside = isinstance(node, nodes.For) or (in_loop and not isinstance(node, nodes.Macro | nodes.CallBlock))
        for child in node.iter_child_nodes():
            pending.append((child, depth + 1, inside))


def free_names(tree: nodes.Template) -> frozenset[str]:
    """Names that the template reads; tells which parameters it knows."""
    return frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")

