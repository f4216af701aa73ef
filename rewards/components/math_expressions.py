r"""Parse single LaTeX expressions into SymPy, compare their values, and check that an answer is worked out.

latex2sympy parses `72_{13}`, `72'` and `72\ldots` as 72, `5(2)` and `70 2` as sums (mixed numbers), `X` as `x`, `x^T` as `x`.
This module raises `Opaque` for subscripts on numbers, ellipses, approximations and adjacent numbers; case and primes count.
math-verify compares two expressions, and a numerical comparison confirms the result, because math-verify accepts too much.
An answer that repeats the question has the right value, but is not accepted (`worked_out`, `is_copied`).

>>> def is_worked_out(reference, answer):
...     return worked_out(parsed(reference), parsed(answer))
>>> is_worked_out(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), is_worked_out(r"\frac{\sqrt{2}}{2}", r"\cos(\frac{\pi}{4})")
(True, False)
>>> is_worked_out("4t", "3t+4-6t+7t-4"), is_worked_out("2x+2", "2(x+1)")
(False, True)
>>> is_copied(r"2^{10}", "1024", "What is $2^{10}$?"), is_copied("1024", "1024", "Is 1024 a power of two?")
(True, False)
"""

import re
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

from rewards.components.math_text import (
    MAX_MATH_CHARS,
    bare,
    decimals,
    match_form,
    number,
    plain,
    same_number,
    same_text,
    split,
    without_layout,
)

MAX_DEPTH = 30
MAX_BITS = 200_000  # limit for an evaluated number: 60,000 decimal digits

# These match answers of at most MAX_MATH_CHARS characters. Each is a fixed text or a run of one class of characters.
_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\])(a?rc)?(sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm)(?![A-Za-z])"
)
_GAMMA = re.compile(r"\\([gG])amma(?![A-Za-z]|\s*\()")  # the parser reads both as Euler's constant
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('{1,4})(?!')")
_DROPPED = re.compile(
    r"\\(?:ldots|cdots|dots|vdots|ddots|approx|simeq|sim)(?![A-Za-z])|\.\.|[\"'?&#@:]"  # `&` outside of matrices
    r"|[0-9)\]]\s*_|(?:frac|sqrt)\s?\{[^{}]{0,80}\}(?:\{[^{}]{0,80}\})?\s*_|\{\}\s*_|_\s*\{\s*\}"  # subscripts on numbers
    r"|\\frac\s?\d\s?\d\d|\\sqrt\s?\d\d|[fgh]\^\{?-1\}?\s*\("  # LaTeX displays these differently from how they are parsed
)
_INDEXED = re.compile(r"\\(?:sum|prod|int|lim)(?![a-z])|(?<![A-Za-z])i\s*=")
_COMPLEX = re.compile(r"(?<![A-Za-z\\])[a-z]?i(?![A-Za-z])")


class TooLarge(ValueError):
    """The value needs more than `MAX_BITS` bits."""


class Unreadable(ValueError):
    """The text is not mathematics, or is ambiguous."""


class Opaque(Unreadable):
    """The text can be compared as text only, because the parser would drop or change a part of it."""


@lru_cache(maxsize=512)
def parsed(text: str, complex_numbers: bool = False) -> Any:
    """Parse LaTeX into an unevaluated SymPy expression.

    Raises:
        Unreadable: `text` is no expression; `Opaque` if the parser would misread it.
        TooLarge: evaluating the expression would take too long.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    if not _is_nested_well(text):
        raise Unreadable
    text = _PI.sub(r"\\pi ", _FUNCTIONS.sub(r"\\\1\2 ", text)).replace("\\bmod", "\\mod")
    text = _GAMMA.sub(r"\\mathrm{\1ammaletter}", text)
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}rime}}", text)  # part of the name
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
    """Whether `text` may contain the imaginary unit, or math-verify treats it as complex for another reason."""
    from math_verify.grader import should_treat_as_complex

    return bool(_COMPLEX.search(text)) or bool(should_treat_as_complex(text))


@lru_cache(maxsize=1)
def _converter() -> Any:
    """Return latex2sympy's visitor class with a check for the parts that it would drop or misread."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    class Strict(_Latex2Sympy):  # type: ignore[misc]
        imaginary = False

        def convert_atom_expr(self, atom_expr: Any) -> Any:
            name, _, power = atom_expr.getText().partition("^")
            if name == "i" and self.imaginary:
                symbol = sympy.I
            elif name.startswith("I"):  # latex2sympy reads I, even with a subscript, as the imaginary unit
                symbol = sympy.Symbol(name, real=self.is_real)
            else:
                return super().convert_atom_expr(atom_expr)
            if not power:
                return symbol
            script = atom_expr.supexpr()
            exponent = self.convert_expr(script.expr()) if script.expr() else self.convert_atom(script.atom())
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
            # Adjacent numbers (`70 2`, `70{2}`) are neither one number nor a clear product.
            numbers = [text.strip("0123456789.{}") == "" for text in texts]
            if any(all(both) and left[-1:].isdigit() for left, both in zip(texts, pairwise(numbers), strict=False)):
                raise Opaque
            product = values[-1]
            for value in reversed(values[:-1]):
                product = self.mul_flat(value, product)
            return product

    return Strict


def _is_mixed(texts: list[str], values: list[Any]) -> bool:
    """Whether the two factors are a mixed number: a whole number before a proper fraction."""
    integer, part = values
    return (
        texts[0].isdigit()
        and texts[1].startswith("\\frac")
        and bool(part.is_Rational and 0 < part < 1 and integer >= 0)
    )


def _is_nested_well(text: str) -> bool:
    """Whether braces pair and brackets nest at most `MAX_DEPTH` deep; the parser takes seconds to fail on others."""
    depth = braces = 0
    for character in text:
        braces += (character == "{") - (character == "}")
        depth += (character in "([{") - (character in ")]}")
        if braces < 0 or depth > MAX_DEPTH:
            return False
    return braces == 0


def _bits(expression: Any) -> float:
    """Return a loose upper bound for the bits of every number in the evaluation of `expression`."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length()))
    inner = [_bits(part) for part in expression.args if isinstance(part, sympy.Basic)]
    largest = max(inner, default=0.0)
    if isinstance(expression, sympy.Pow) and not expression.exp.free_symbols:
        if inner[1] <= 64:  # small enough to evaluate
            size = abs(complex(sympy.N(expression.exp, 15)))
            return float(max(inner[0], 1.0) * size) if size > 1 else largest
        return float(max(inner[0], 1.0) * 2.0 ** min(inner[1], 1000.0)) if inner[1] > 1 else largest
    if isinstance(expression, sympy.factorial):
        return float(largest * 2.0 ** min(largest, 1000.0))
    return largest if len(inner) < 2 else float(sum(inner))


class Unevaluated(Exception):
    """The answer is not worked out as far as the reference."""


def same_expression(expected: str, answer: str, final: bool = False) -> bool:
    """Whether two single expressions are equal.

    Raises:
        Unevaluated: they are equal, but with `final` the answer is not worked out far enough.
    """
    import sympy
    from math_verify import verify

    complex_numbers = is_complex(expected) or is_complex(answer)
    left, right = parsed(expected, complex_numbers), parsed(answer, complex_numbers)
    if isinstance(right, sympy.Eq) and not isinstance(left, sympy.Eq):
        return False  # math-verify would compare only the last side
    slow = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    computable = all(isinstance(side, sympy.Expr) and not side.has(*slow) for side in (left, right))
    # Compare values first: SymPy may take minutes to simplify the difference (it turns `123454321 log 2` into 2^123454321).
    if computable and not _confirmed(left, right):
        return False
    if verify(left, right, timeout_seconds=None, allow_set_relation_comp=True):
        same = computable or _confirmed(left, right)
    elif not computable or left.has(sympy.Float) or right.has(sympy.Float):
        same = _is_one_equation(left, right)
    else:
        same = bool(left.free_symbols | right.free_symbols) and _same_where_real(left, right)
    if same and final and not worked_out(left, right):
        raise Unevaluated
    return same


def _same_where_real(left: Any, right: Any) -> bool:
    """Whether the answer (`right`) has the reference's real value wherever the reference has one, by rules for logarithms.

    Accepts `\\ln(xy)` and `\\ln(x/y)` for `\\ln x+\\ln y` and `\\ln x-\\ln y`. The converse is refused, because it has fewer
    real values, and so is `\\sqrt{x^2}` for `x`.
    """
    import sympy

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    powers = [power for power in left.atoms(sympy.Pow) | right.atoms(sympy.Pow) if power.free_symbols]
    if len(symbols) > 3 or not all(power.exp.is_Rational for power in powers):
        return False
    positive = {symbol: sympy.Symbol(f"{symbol}_", positive=True) for symbol in symbols}
    if sympy.expand_log((left - right).subs(positive).doit()).expand() != 0:
        return False
    has_compared = False
    for size, *signs in product((1, 99), *[(1, -1)] * len(symbols)):
        point = {
            symbol: sign * (size + at + sympy.Rational(1, 7))
            for at, (symbol, sign) in enumerate(zip(symbols, signs, strict=True))
        }
        expected, value = _real_value(left, point), _real_value(right, point)
        if expected is not None and (value is None or not _near(expected, value)):
            return False
        has_compared = has_compared or expected is not None
    return has_compared


def _real_value(side: Any, point: dict[Any, Any]) -> Any:
    """Return the expression's value at `point`; None if a logarithm or root in it has no real value.

    Returns None even if imaginary parts cancel, as in `\\ln x-\\ln y` of two negative numbers.
    """
    import sympy

    roots = [power.base for power in side.atoms(sympy.Pow) if power.free_symbols and not power.exp.is_Integer]
    arguments = [_value(part.subs(point)) for part in (*roots, *(log.args[0] for log in side.atoms(sympy.log)))]
    return _value(side.subs(point)) if all(part is not None and part.is_positive for part in arguments) else None


def _is_one_equation(left: Any, right: Any) -> bool:
    """Whether `lhs - rhs` of both equations differs only by a constant factor, compared at three points."""
    import sympy

    if not (isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq)):
        return False
    if not all(isinstance(side, sympy.Expr) for equation in (left, right) for side in equation.args):
        return False
    left_difference, right_difference = left.lhs - left.rhs, right.lhs - right.rhs
    ratios = []
    for shift in range(3):
        point = _point(left_difference, right_difference, 3 * shift)
        top, bottom = _value(left_difference.subs(point)), _value(right_difference.subs(point))
        if not top or not bottom:
            return False
        ratios.append(top / bottom)
    return all(bool(abs(ratio - ratios[0]) <= abs(ratios[0]) * 1e-12) for ratio in ratios)


def _point(left: Any, right: Any, shift: int = 0) -> dict[Any, Any]:
    """Return a rational number for each symbol of both expressions."""
    import sympy

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    return {symbol: sympy.Rational(7 + 4 * at + shift, 5 + at) for at, symbol in enumerate(symbols)}


def _confirmed(left: Any, right: Any) -> bool:
    """Whether two expressions are numerically equal at one point of their variables, relative to their size."""
    import sympy

    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return all(_confirmed(left_value, right_value) for left_value, right_value in zip(left, right, strict=True))
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):  # equations without a solution need not be equal
        is_solved = all(sympy.solve(equation, equation.free_symbols) for equation in (left, right))
        return _is_one_equation(left, right) or is_solved
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return True
    point = _point(left, right)
    left_value, right_value = _value(left.subs(point)), _value(right.subs(point))
    if left_value is None or right_value is None:
        return True
    if left.has(sympy.Float) or right.has(sympy.Float):
        return bool(abs(left_value - right_value) <= max(abs(left_value), abs(right_value)) / 1000)
    return _near(left_value, right_value)


def _near(left: Any, right: Any) -> bool:
    """Whether two values agree in 12 digits, or both cancelled to no certain digit, as `\\sqrt2 \\sqrt2 - 2` does."""
    import sympy

    parts = (*left.as_real_imag(), *right.as_real_imag())
    # The tiny 1 / 2004! has 30 certain digits.
    if all(part == 0 or (part.is_Float and part._prec < 10) for part in parts):
        return True
    return bool(abs(left - right) <= max(abs(left), abs(right)) * sympy.Float("1e-12"))


def _value(expression: Any, digits: int = 30) -> Any:
    """Return the expression's complex value, or None if it has no finite one."""
    import sympy

    try:
        value = sympy.N(expression, digits)
        if not all(part.is_Number for part in value.as_real_imag()):  # N does not evaluate some functions, such as Mod
            value = sympy.N(expression.doit(), digits)
        is_finite = all(part.is_Number and part.is_finite for part in value.as_real_imag())
    except Exception:
        return None
    return value if is_finite else None


def approximates(expected: str, answer: str) -> bool:
    """Whether a decimal is `expected`, rounded or truncated to the decimal's digits."""
    digits, decimal = decimals(answer), number(answer)
    value = _value(parsed(expected, False)) if digits is not None and decimal is not None else None
    if digits is None or decimal is None or value is None or not value.is_real:
        return False
    exact, decimal = Fraction(str(value)) * 10**digits, decimal * 10**digits
    is_truncated = digits > 0 and 0 <= abs(exact) - abs(decimal) < 1 and exact * decimal >= 0
    return is_truncated or bool(abs(exact - decimal) <= Fraction(1, 2))


_LONGER = 1.5
"""Largest allowed ratio of numbers, letters and functions in an answer to those in the reference."""


def worked_out(reference: Any, answer: Any) -> bool:
    """Whether `answer`, which equals `reference`, is computed as far as the reference.

    Both are unevaluated SymPy objects. A constant may contain no functions or integer powers of numbers that the reference
    lacks, and no root of a larger number than the reference's. No answer may have like terms or factors that SymPy
    combines, or be much longer than the reference. If the reference is a set or interval, an inequality must be solved for
    its letter. Factors before brackets need not be multiplied out: `2(x + 1)` is accepted for `2x + 2`.
    """
    import sympy
    from sympy.core.parameters import distribute

    relational = sympy.core.relational.Relational
    if isinstance(reference, sympy.Set) and isinstance(answer, sympy.Basic) and answer.has(relational):
        sides = [sorted(part.args, key=lambda side: bool(side.free_symbols)) for part in answer.atoms(relational)]
        return all(not number.free_symbols and letter.is_Symbol for number, letter in sides)
    expected, contents = _contents(reference), _contents(answer)
    if (
        contents.size > _LONGER * expected.size + bool(expected.letters)
        or (expected.letters and contents.letters > 2 * expected.letters)
        or contents.largest_root > expected.largest_root
        or not (contents.letters or contents.operations <= expected.operations)
    ):
        return False
    if not isinstance(answer, sympy.Expr):
        return True
    try:
        evaluated = answer.doit()
        with distribute(False):
            collected = answer.doit()
    except Exception:
        return True
    return _contents(evaluated).letters >= contents.letters and _contents(collected).size >= contents.size


class _Contents(NamedTuple):
    """The contents of an expression.

    `size` counts numbers, constants, letters and functions, `letters` the letters alone. `operations` names the functions
    and the powers of numbers. `largest_root` is the largest number under a root, as numerator times denominator.
    """

    size: int
    letters: int
    operations: frozenset[str]
    largest_root: int


def _contents(expression: Any) -> _Contents:
    """Count the contents of an expression or of a matrix's cells; 1 and -1 do not count, a fraction counts as two numbers."""
    import sympy

    plain_types = (sympy.Add, sympy.Mul, sympy.Tuple, sympy.Set, sympy.core.relational.Relational)
    size = letters = largest_root = 0
    operations: set[str] = set()
    for cell in expression if isinstance(expression, sympy.MatrixBase) else (expression,):
        for part in sympy.preorder_traversal(cell):
            if not isinstance(part, sympy.Basic):
                continue
            letters += part.is_Symbol
            is_operation = bool(part.args) and not isinstance(part, plain_types)
            if isinstance(part, sympy.Pow):
                base, exponent = part.args
                if base.is_Rational and not exponent.is_Integer:
                    largest_root = max(largest_root, abs(base.p * base.q))
                is_operation = exponent.is_Integer and abs(exponent) != 1 and base.is_number and base is not sympy.E
            if is_operation:
                operations.add(type(part).__name__)
            if part.is_Rational:
                size += (abs(part.p) != 1) + (part.q != 1)
            elif not part.is_Boolean or part.args:  # the flags of an interval's ends are Booleans and do not count
                size += not part.args or is_operation
    return _Contents(size, letters, frozenset(operations), largest_root)


def is_copied(answer: str, reference: str, prompt: str) -> bool:
    """Whether `answer` is copied from `prompt`, spelled differently from `reference`.

    Spaces, layout, units, names (`x =`), the order of lists and trailing zeros make no different spelling; a fraction
    instead of a decimal does.
    """
    if not prompt or len(answer) > MAX_MATH_CHARS or _same_spelling(plain(reference), plain(answer, letters=True)):
        return False
    return any(_contains(_squeezed(prompt), text) for text in {_squeezed(answer), bare(plain(answer))} if text)


def _contains(text: str, part: str) -> bool:
    """Whether `text` contains `part` between word boundaries: `11+2` and `1+23` do not contain `1+2`."""
    before = r"(?<![A-Za-z0-9\\_.^])" if part[0].isalnum() else ""
    after = r"(?![A-Za-z0-9_^]|\.\d)" if part[-1].isalnum() else ""
    return re.search(before + re.escape(part) + after, text) is not None


def _same_spelling(expected: str, answer: str) -> bool:
    expected_parts, answer_parts = split(expected).parts, split(answer).parts
    if sorted(map(match_form, expected_parts)) == sorted(map(match_form, answer_parts)) or same_text(expected, answer):
        return True
    return None not in (decimals(expected), decimals(answer)) and bool(same_number(expected, answer))


@lru_cache(maxsize=256)
def _squeezed(text: str) -> str:
    return bare(without_layout(text))
