"""Environments of other packages, in a process of their own: `generation.environment: verifiers:NAME@PYTHON`.

    verifiers:NAME            an environment of the package `verifiers` (0.1) whose actions are tools
    process:FILE.py:Class     a class as TRL and OpenEnv's examples write them: reset(**row), tools as methods, get_reward()
    ...@PYTHON                the interpreter that has the package, when it is another one than this

One process serves all completions of a run: this file, run by that interpreter, speaks lines of JSON. Nothing of the package is
imported here. Where it dies, or gives no answer in time, the next `reset` starts another; completions that were open get an error
as the tool's answer, and no reward. After `DEATHS` in a row the run ends as failed, with a checkpoint. Standard library only.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

PREFIXES = ("verifiers:", "process:")
DEATHS = 3
"""Processes that may end one after the other before the run does."""
ANSWER_SECONDS = 300.0
"""How long one answer may take."""
LOADING_SECONDS = 1800.0
"""The same for a process that has not loaded its environment yet, and for the environment's rows: both may download data."""
LOOK_SECONDS = 0.2
"""Between two looks whether a process that is silent still lives."""
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}


class EnvironmentProcessError(RuntimeError):
    """The process of an environment cannot be started, or says that it cannot do what is asked."""


class EnvironmentDied(EnvironmentProcessError):
    """The process of an environment ended in the middle of something, or had to be ended."""


class EnvironmentLost(EnvironmentProcessError):
    """The process was started anew since this completion began, and knows nothing of it."""


class EnvironmentProcess:
    """The process of one environment, started at the first request."""

    def __init__(self, spec: str) -> None:
        self.spec, _, self.python = spec.partition("@")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded = False
        self._deaths = 0
        self._requests = itertools.count()
        self.numbers = itertools.count()
        self.forgotten: deque[int] = deque()
        """Numbers of completions that are no more; the process is told with the next request."""
        atexit.register(self._at_exit, os.getpid())

    def ask(self, **request: Any) -> Any:
        """The answer to a request.

        Raises:
            EnvironmentDied: the process ended, or had to be ended.
            EnvironmentLost: it knows nothing of this completion.
            EnvironmentProcessError: with what the other side says.
        """
        with self._lock:
            if self._process is None:
                self._start()
            request["request"] = next(self._requests)
            request["forget"] = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
            try:
                answer = self._exchange(request)
            except EnvironmentDied:
                self.close()
                self._deaths += 1
                raise
            if "error" not in answer:
                self._loaded = True
                return answer["answer"]
        raise (EnvironmentLost if answer.get("lost") else EnvironmentProcessError)(f"{self.spec}: {answer['error']}")

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises `EnvironmentDied`, and leaves the process as it is."""
        limit = ANSWER_SECONDS if self._loaded and request["do"] != "rows" else LOADING_SECONDS
        process = self._process
        assert process is not None
        try:
            line = _line_for(process, json.dumps(request, default=str).encode() + b"\n", limit)
        except TimeoutError:
            raise EnvironmentDied(
                f"The process of {self.spec} gave no answer to '{request['do']}' within {limit:g} s and was ended."
            ) from None
        except (OSError, ValueError):  # ValueError: closed by another thread
            line = b""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            raise EnvironmentDied(
                f"The process of {self.spec} ended (exit code {process.poll()}); what it said is above."
            )
        try:
            answer = json.loads(line)
            if answer["request"] == request["request"] and ("answer" in answer or "error" in answer):
                return answer  # type: ignore[no-any-return]
        except (ValueError, TypeError, KeyError):
            pass
        raise EnvironmentDied(
            f"The process of {self.spec} was ended: to request {request['request']} it answered {line[:200]!r}. The environment "
            "must not write to descriptors that it did not open."
        )

    def reset(self, **request: Any) -> Any:
        """The answer to `reset`, by another process where this one is gone. Raises `EnvironmentProcessError`."""
        while True:
            try:
                answer = self.ask(do="reset", **request)
            except EnvironmentDied as error:
                if self._deaths < DEATHS:
                    continue
                raise EnvironmentProcessError(
                    f"{error} That was {self._deaths} times in a row; the run cannot go on."
                ) from None
            self._deaths = 0
            return answer

    def close(self) -> None:
        """Ends the process, and what it has started."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait()

    def _at_exit(self, owner: int) -> None:
        if os.getpid() == owner:  # a fork of this process leaves it alone
            self.close()

    def _start(self) -> None:
        command = [self.python or sys.executable, os.path.abspath(__file__), self.spec]
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not self.python}
        try:
            process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=kept,
                start_new_session=True,  # Ctrl-C is for the trainer, which may still finish its step
            )
        except OSError as error:
            raise EnvironmentProcessError(f"{self.spec}: {self.python} cannot be started ({error}).") from None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._loaded = process, False


def _line_for(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
    """What a process answers to a request: a line, or nothing where it ended. Raises `TimeoutError`, `OSError`, `ValueError`."""
    assert process.stdin is not None
    assert process.stdout is not None
    unsent, received, until = memoryview(request), b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in received:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {key.fileobj for key, _ in selector.select(min(left, LOOK_SECONDS))}
            if process.stdout in ready:
                said = os.read(process.stdout.fileno(), 1 << 16)
                if not said:
                    return b""
                received += said
            elif process.stdin in ready:
                unsent = unsent[os.write(process.stdin.fileno(), unsent) :]
                if not unsent:
                    selector.unregister(process.stdin)
            elif not ready and process.poll() is not None:  # a process that it forked holds the pipe open
                return b""
    return received


@functools.cache
def process_of(spec: str) -> EnvironmentProcess:
    """The one process for a specification."""
    return EnvironmentProcess(spec)


def rows_of(spec: str) -> list[dict[str, Any]]:
    """The rows that an environment brings: prompt, answer and the rest. Raises `EnvironmentProcessError`."""
    rows: list[dict[str, Any]] = process_of(spec).ask(do="rows")
    return rows


@functools.cache
def environment_class(spec: str) -> type:
    """A class with the environment's tools as methods, for `generation.environment`. Raises `EnvironmentProcessError`."""
    process = process_of(spec)
    described = process.ask(do="describe")
    methods: dict[str, Any] = {tool["name"]: _method(tool) for tool in described["tools"]}
    if described["rewards"]:
        methods["get_reward"] = lambda self: self._reward([])
    return type("ForeignEnvironment", (Foreign,), {**methods, "_process": process})


class Foreign:
    """One completion's place in an environment's process."""

    _process: EnvironmentProcess

    def __init__(self) -> None:
        self._id = next(self._process.numbers)
        weakref.finalize(self, self._process.forgotten.append, self._id).atexit = False

    def reset(self, **columns: Any) -> str | None:
        """Begins a row anew; what is said to the model beside its prompt."""
        return self._process.reset(id=self._id, row=columns)  # type: ignore[no-any-return]

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return str(self._process.ask(do="call", id=self._id, name=name, arguments=dict(arguments)))

    def _reward(self, messages: Sequence[Any]) -> float | None:
        """What the completion is worth; None, which TRL leaves out, where the process that knew it has died."""
        try:
            return self._process.ask(do="reward", id=self._id, messages=list(messages))  # type: ignore[no-any-return]
        except (EnvironmentDied, EnvironmentLost):
            return None


def rubric(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float | None]:
    """The rewards of a verifiers environment's own rubric: `reward.functions: [{path: kit.environments.foreign:rubric}]`.

    None for a completion whose process has died. Raises `EnvironmentProcessError` where the rubric fails.
    """
    return [environment._reward(messages) for messages, environment in zip(completions, environments, strict=True)]


def _method(tool: Mapping[str, Any]) -> Callable[..., str]:
    """A tool as a function with the signature and the docstring that its JSON schema says."""
    schema = tool["parameters"] or {}
    required = schema.get("required", [])
    parameters, lines = [], []
    for name, about in sorted(schema.get("properties", {}).items(), key=lambda item: item[0] not in required):
        known = [
            TYPES[one] for one in ([about.get("type")] if isinstance(about.get("type"), str) else []) if one in TYPES
        ]
        kind: Any = Literal[tuple(about["enum"])] if about.get("enum") else known[0] if known else str
        default = inspect.Parameter.empty if name in required else about.get("default")
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        )
        lines.append(f"    {name}: {' '.join(str(about.get('description') or name).split())}")

    def call(self: Foreign, *args: Any, **given: Any) -> str:
        named = dict(zip((one.name for one in parameters), args, strict=False))
        return self._call(tool["name"], named | given)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__name__ = call.__qualname__ = tool["name"]
    call.__signature__ = inspect.Signature([own, *parameters], return_annotation=str)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": str}
    said = str(tool["description"] or tool["name"]).strip().partition("\n")[0]
    call.__doc__ = "\n".join([said, *(["", "Args:", *lines] if lines else [])])
    return call


# --- the other side: what runs in the environment's interpreter ---------------------------------------------------------


class OfVerifiers:
    """An environment of `verifiers` 0.1 whose actions are tools."""

    def __init__(self, name: str) -> None:
        try:
            import verifiers
        except ImportError:
            raise RuntimeError(
                f"the package verifiers is not installed in {sys.executable}. Install it there, or name another interpreter: "
                f"verifiers:{name}@/path/to/python"
            ) from None
        if not hasattr(verifiers, "load_environment"):
            raise RuntimeError(
                f"verifiers {verifiers.__version__} has no load_environment: its environments are programs that talk to a model "
                "server. Install 'verifiers<0.2' for environments with tools"
            )
        try:
            self.environment = verifiers.load_environment(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise RuntimeError(
                f"no environment '{name}' ({type(error).__name__}: {error}). It is a package that is installed beside verifiers "
                f"(prime env install {name}), with a function load_environment"
            ) from None
        if not getattr(self.environment, "tool_map", None):
            raise RuntimeError(
                f"'{name}' ({type(self.environment).__name__}) has no tools: environments that answer every message are not run "
                "here. One of the class ToolEnv or StatefulToolEnv is"
            )
        self.rewards = False

    def tools(self) -> list[dict[str, Any]]:
        return [
            {"name": one.name, "description": one.description, "parameters": one.parameters}
            for one in self.environment.tool_defs
        ]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.environment.get_dataset()]

    def reset(self, row: dict[str, Any]) -> Any:
        from verifiers.types import State

        task = {"answer": row.get("reference") or row.get("answer") or "", **row}
        if isinstance(info := task.get("info"), str):
            task["info"] = json.loads(info)
        state = State(input={name: task.get(name) for name in State.INPUT_FIELDS if name in task})
        state.update(
            task=task,
            trajectory=[],
            trajectory_id="",
            is_completed=False,
            metrics={},
            tool_defs=self.environment.tool_defs,
        )
        if hasattr(self.environment, "setup_state"):
            asyncio.run(self.environment.setup_state(state))
        return None, state

    def call(self, state: Any, name: str, arguments: dict[str, Any]) -> str:
        environment = self.environment
        try:
            if hasattr(environment, "update_tool_args"):
                arguments = environment.update_tool_args(name, arguments, [], state)
            return str(asyncio.run(environment.call_tool(name, arguments, "0")).content)
        except Exception as error:  # a failing call is the model's to see, as the environment words it
            return str(environment.error_formatter(error))

    def reward(self, state: Any, messages: list[dict[str, Any]]) -> float:
        from verifiers.types import AssistantMessage, RolloutTiming, ToolCall, ToolMessage

        said: list[Any] = []
        for message in messages:
            if message["role"] == "tool":
                said.append(ToolMessage(role="tool", content=str(message.get("content")), tool_call_id="0"))
                continue
            calls = [call.get("function", call) for call in message.get("tool_calls") or []]
            asked = [
                ToolCall(id="0", name=one["name"], arguments=json.dumps(one.get("arguments") or {})) for one in calls
            ]
            said.append(
                AssistantMessage(role="assistant", content=message.get("content") or "", tool_calls=asked or None)
            )
            state["trajectory"].append({"prompt": state.get("prompt"), "completion": said[-1:]})
        state["completion"], state["is_completed"], state["timing"] = said, True, RolloutTiming()
        asyncio.run(self.environment.rubric.score_rollout(state))
        return float(state["reward"])


class OfClass:
    """A class with `reset(**row)`, tools as methods, and perhaps `get_reward()`."""

    def __init__(self, path: str) -> None:
        where, _, name = path.rpartition(":")
        try:
            if where.endswith(".py"):
                found = importlib.util.spec_from_file_location("environment_of_others", where)
                assert found is not None
                assert found.loader is not None
                module = importlib.util.module_from_spec(found)
                sys.modules[found.name] = module
                found.loader.exec_module(module)
            else:
                module = importlib.import_module(where)
            self.make = getattr(module, name)
        except (ImportError, OSError, AttributeError, ValueError) as error:
            raise RuntimeError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from None
        self.rewards = hasattr(self.make(), "get_reward")

    def tools(self) -> list[dict[str, Any]]:
        found = inspect.getmembers(type(self.make()), predicate=inspect.isfunction)
        return [
            _described(one) for name, one in found if not name.startswith("_") and name not in ("reset", "get_reward")
        ]

    def rows(self) -> list[dict[str, Any]]:
        raise RuntimeError("a class brings no rows; name the data in data.source")

    def reset(self, row: dict[str, Any]) -> Any:
        environment = self.make()
        return environment.reset(**row), environment

    def call(self, state: Any, name: str, arguments: dict[str, Any]) -> str:
        answer = getattr(state, name)(**arguments)
        return str(asyncio.run(answer) if inspect.iscoroutine(answer) else answer)

    def reward(self, state: Any, messages: list[dict[str, Any]]) -> float | None:
        value = state.get_reward()
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        return None if value is None else float(value)


def _described(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a method, from its type hints and the `Args:` block of its docstring."""
    text = inspect.getdoc(function) or function.__name__
    lines = [line.strip().partition(":") for line in text.splitlines()]
    about = {name.partition(" (")[0]: said.strip() for name, colon, said in lines if colon}
    named = {kind: name for name, kind in TYPES.items()} | {kind.__name__: name for name, kind in TYPES.items()}
    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    properties = {
        one.name: {"type": named.get(one.annotation, "string"), "description": about.get(one.name, "")}
        | ({} if one.default is inspect.Parameter.empty else {"default": one.default})
        for one in parameters
    }
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    return {
        "name": function.__name__,
        "description": text,
        "parameters": {"properties": properties, "required": required},
    }


def serve(spec: str) -> None:
    """Answers requests, a line each, and ends with its input, also in the middle of a call.

    The pipes are moved away from descriptors 0 and 1, which every program that the environment starts inherits: those
    read nothing, and what they and the environment print goes to stderr.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout = sys.stderr
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_until_the_end, args=(requests, lines), daemon=True).start()
    environment: OfVerifiers | OfClass | None = None
    states: dict[int, Any] = {}
    while True:
        request = json.loads(lines.get())
        said: dict[str, Any] = {"request": request["request"]}
        try:
            for number in request["forget"]:
                states.pop(number, None)
            do, number = request["do"], request.get("id", -1)
            if do in ("call", "reward") and number not in states:
                raise EnvironmentLost("what it knew of this completion is lost: its process was started anew")
            kind, _, name = spec.partition(":")
            environment = environment or (OfVerifiers(name) if kind == "verifiers" else OfClass(name))
            if do == "describe":
                answer: Any = {"tools": environment.tools(), "rewards": environment.rewards}
            elif do == "rows":
                answer = environment.rows()
            elif do == "reset":
                answer, states[number] = environment.reset(request["row"])
            elif do == "call":
                answer = environment.call(states[number], request["name"], request["arguments"])
            else:
                answer = environment.reward(states[number], request["messages"])
            line = json.dumps(said | {"answer": answer}, default=str)
        except Exception as error:
            lost = isinstance(error, EnvironmentLost)
            line = json.dumps(said | {"error": str(error) or type(error).__name__, "lost": lost})
        answers.write(line + "\n")
        answers.flush()


def _read_until_the_end(requests: Iterable[str], lines: queue.SimpleQueue[str]) -> None:
    """Hands requests on; when the trainer is gone this process ends at once, with what it has started."""
    for line in requests:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    serve(sys.argv[1])
