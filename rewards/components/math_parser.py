r"""LaTeX into SymPy for `math_judge`, refusing what latex2sympy would drop, lower-case or read as something else.

That library reads `72_{13}`, `72'` and `72\ldots` as 72, `5(2)` and `70 2` as sums (mixed numbers), `X` as `x`, `x^T` as
`x`. Here subscripts on numbers, ellipses, approximations and numbers side by side are `Opaque`; case and primes count.
"""

import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

__all__ = ["MAX_BITS", "Opaque", "TooLarge", "Unreadable", "is_complex", "parsed"]

MAX_DEPTH = 30
MAX_BITS = 200_000  # of a number that gets evaluated: 60,000 decimal digits

# On answers of at most MAX_MATH_CHARS characters; fixed texts and runs of one class of characters.
_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\])(a?rc)?(sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm)(?![A-Za-z])"
)
_GAMMA = re.compile(r"\\([gG])amma(?![A-Za-z]|\s*\()")  # both are Euler's constant to the parser
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('{1,4})(?!')")
_DROPPED = re.compile(
    r"\\(?:ldots|cdots|dots|vdots|ddots|approx|simeq|sim)(?![A-Za-z])|\.\.|[\"'?&#@]"  # `&` outside of matrices
    r"|[0-9)\]]\s*_|(?:frac|sqrt)\s?\{[^{}]{0,80}\}(?:\{[^{}]{0,80}\})?\s*_|\{\}\s*_|_\s*\{\s*\}"  # subscripts on numbers
    r"|\\frac\s?\d\s?\d\d|\\sqrt\s?\d\d|[fgh]\^\{?-1\}?\s*\("  # displayed otherwise than it is read
)
_INDEXED = re.compile(r"\\(?:sum|prod|int|lim)(?![a-z])|(?<![A-Za-z])i\s*=")
_COMPLEX = re.compile(r"(?<![A-Za-z\\])[a-z]?i(?![A-Za-z])")


class TooLarge(ValueError):
    """The number would not fit in `MAX_BITS` bits."""


class Unreadable(ValueError):
    """The text is no mathematics that can be read in one way."""


class Opaque(Unreadable):
    """It can be compared as it is spelled, but not computed with: the parser would drop or change a part of it."""


@lru_cache(maxsize=512)
def parsed(text: str, complex_numbers: bool = False) -> Any:
    """The unevaluated expression.

    Raises:
        Unreadable: it has none; `Opaque` where the parser would give a wrong one.
        TooLarge: evaluating it would take too long.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if not _is_nested_well(text):
        raise Unreadable
    text = _spelled(text)
    if _DROPPED.search(text if "\\begin" not in text else text.replace("&", " ")):
        raise Opaque
    try:
        spelling = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
        spelled = normalize_latex(text, spelling)
        converter = _converter()(
            None, None if complex_numbers else True, False, config=ConversionConfig(lowercase_symbols=False)
        )
        converter.imaginary = complex_numbers and not _INDEXED.search(text)
        expression = converter.parse(spelled)
    except Opaque:
        raise
    except Exception as failure:
        raise Unreadable from failure
    if not isinstance(expression, sympy.Basic | sympy.MatrixBase):
        raise Unreadable
    if isinstance(expression, sympy.Basic) and _bits(expression) > MAX_BITS:
        raise TooLarge
    return expression


def is_complex(text: str) -> bool:
    """Whether the imaginary unit may stand in `text`, or math-verify takes it for complex for other reasons."""
    from math_verify.grader import should_treat_as_complex

    return bool(_COMPLEX.search(text)) or bool(should_treat_as_complex(text))


def _spelled(text: str) -> str:
    """Function names with their backslash, primes as part of the name."""
    text = _FUNCTIONS.sub(r"\\\1\2 ", text)
    text = _PI.sub(r"\\pi ", text).replace("\\bmod", "\\mod")
    text = _GAMMA.sub(r"\\mathrm{\1ammaletter}", text)
    return _PRIMES.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}rime}}", text)


@lru_cache(maxsize=1)
def _converter() -> Any:
    """latex2sympy's visitor, with what it drops or misreads refused."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    class Strict(_Latex2Sympy):  # type: ignore[misc]
        imaginary = False

        def convert_atom_expr(self, atom_expr: Any) -> Any:
            name, _, power = atom_expr.getText().partition("^")
            if name == "i" and self.imaginary:
                symbol = sympy.I
            elif name.startswith("I"):  # it becomes the imaginary unit, subscript and all
                symbol = sympy.Symbol(name, real=self.is_real)
            else:
                return super().convert_atom_expr(atom_expr)
            if not power:
                return symbol
            above = atom_expr.supexpr()
            exponent = self.convert_expr(above.expr()) if above.expr() else self.convert_atom(above.atom())
            return sympy.Pow(symbol, exponent, evaluate=False)

        def convert_atom(self, atom: Any) -> Any:
            number = atom.number_subexpr()
            if number and number.getText() != number.NUMBER().getText():
                raise Opaque
            return super().convert_atom(atom)

        def convert_postfix(self, postfix: Any) -> Any:
            value = super().convert_postfix(postfix)
            if any(op.transpose() for op in postfix.postfix_op()) and not getattr(value, "is_Matrix", False):
                raise Opaque
            return value

        def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
            values = [self.convert_postfix(part) for part in arr[i:]]
            if len(values) == 1:
                return values[0]
            texts = [part.getText() for part in arr[i:]]
            if not all(isinstance(value, sympy.Expr) for value in values):
                return super().convert_postfix_list(arr, i)
            if len(values) == 2 and _is_mixed(texts, values):
                return values[0] + values[1]
            if any(_are_numbers(*pair) for pair in pairwise(texts)):
                raise Opaque
            product = values[-1]
            for value in reversed(values[:-1]):
                product = self.mul_flat(value, product)
            return product

    return Strict


def _is_mixed(texts: list[str], values: list[Any]) -> bool:
    """A whole number with a proper fraction of whole numbers behind it."""
    whole, part = values
    return (
        texts[0].isdigit() and texts[1].startswith("\\frac") and bool(part.is_Rational and 0 < part < 1 and whole >= 0)
    )


def _are_numbers(left: str, right: str) -> bool:
    """`70 2` and `70{2}`: neither a number nor, as it is written, a product."""
    return left[-1:].isdigit() and left.strip("0123456789.{}") == "" and right.strip("0123456789.{}") == ""


def _is_nested_well(text: str) -> bool:
    """Whether braces pair and no bracket lies deeper than `MAX_DEPTH`: the parser takes seconds to find that out."""
    depth = braces = 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([{") - (character in ")]}")
        if braces < 0 or depth > MAX_DEPTH:
            return False
    return braces == 0


def _bits(expression: Any) -> float:
    """An upper bound, far from tight, of the bits of every number that evaluating `expression` makes."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length()))
    inner = [_bits(part) for part in expression.args if isinstance(part, sympy.Basic)]
    largest = max(inner, default=0.0)
    if isinstance(expression, sympy.Pow) and not expression.exp.free_symbols:
        if inner[1] <= 64:  # small enough to be looked at
            size = abs(complex(sympy.N(expression.exp, 15)))
            return float(max(inner[0], 1.0) * size) if size > 1 else largest
        return float(max(inner[0], 1.0) * 2.0 ** min(inner[1], 1000.0)) if inner[1] > 1 else largest
    if isinstance(expression, sympy.factorial):
        return float(largest * 2.0 ** min(largest, 1000.0))
    return largest if len(inner) < 2 else float(sum(inner))
