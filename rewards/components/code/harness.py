"""The program around a generated function: takes calls as JSON on stdin, prints one JSON line for each.

`ENCODE_AND_DECODE` is how plain values cross the border: the rules of `values`, for a process that can import nothing of
this library. `CODE` is what runs in the sandbox, in front of nothing but the generated source, which it reads from a file.
It holds no expected value, and nothing that it prints is believed: the lines are parsed and compared outside.
"""

__all__ = ["CODE", "ENCODE_AND_DECODE", "SOURCE_FILE"]

SOURCE_FILE = "solution.py"

ENCODE_AND_DECODE = """def encode(value, depth=0):
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 1 << 53 else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if depth < 100:
        for plain in (list, tuple, set, frozenset):
            if issubclass(kind, plain):
                items = [encode(item, depth + 1) for item in plain.__iter__(value)]
                if plain in (set, frozenset):
                    items.sort(key=repr)  # else another order in every process
                return {plain.__name__.replace("frozen", ""): items}
        if issubclass(kind, dict):
            return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]}
    raise TypeError("not a plain value: " + kind.__name__)


def decode(tagged):
    if not isinstance(tagged, dict):
        return tagged
    [(tag, content)] = tagged.items()
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return float.fromhex(content)
    if tag == "dict":
        return {decode(key): decode(item) for key, item in content}
    return {"list": list, "tuple": tuple, "set": set}[tag](decode(item) for item in content)"""

CODE = """
import itertools, json, os, sys

sys.set_int_max_str_digits(0) if hasattr(sys, "set_int_max_str_digits") else None
sys.setrecursionlimit(10000)
answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogatepass")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
request = json.loads(sys.stdin.read())
sys.stdin = open(os.devnull)


ENCODE_AND_DECODE


def listed(value):
    if issubclass(type(value), (bool, int, float, str, list, tuple, set, frozenset, dict)) or not hasattr(value, "__iter__"):
        return value
    return list(itertools.islice(value, 100000))


def answer(line):
    answers.write(json.dumps(line) + "\\n")
    answers.flush()


def main():
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    space = {"__name__": "solution", "__builtins__": __builtins__}
    exec(compile(request["before"], "setup.py", "exec"), space)
    exec(compile(source, "solution.py", "exec"), space)
    function = space.get(request["function"])
    if function is None and isinstance(space.get("Solution"), type):
        function = getattr(space["Solution"](), request["function"], None)
    if not callable(function):
        answer({"missing": True})
        return
    for args, kwargs, iterate in request["calls"]:
        try:
            value = function(*decode(args), **decode(kwargs))
            value = encode(listed(value) if iterate else value)
        except Exception as failure:
            answer({"raised": (type(failure).__name__ + ": " + str(failure))[:200]})
        else:
            answer({"value": value})


main()
""".replace("ENCODE_AND_DECODE", ENCODE_AND_DECODE)
