import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import rewards
from rewards import Context, Preset, Score, build_samples
from rewards.isolation import IsolatedComponent, Pool, Task, content_key, forget, recall, remember

HERE = str(Path(__file__).parent)


def call(function, *arguments, **options):
    return Task(f"isolated_calls:{function}", arguments, **options)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not is_running(pid)


def test_results_come_in_order_as_plain_values(pool):
    outcomes = pool.run([call("double", n) for n in range(300)])
    assert [outcome.value for outcome in outcomes] == [2 * n for n in range(300)]
    assert pool.run([call("pair", 2)])[0].value == [2, {"twice": 4}]
    assert pool.run([]) == []


def test_an_overrun_is_a_timeout_and_costs_the_others_nothing(pool):
    tasks = [call("double", n) for n in range(40)]
    tasks.insert(20, call("wait", 60))
    start = time.monotonic()
    outcomes = pool.run(tasks, deadline=0.3)
    assert time.monotonic() - start < 2.0
    assert statuses(outcomes) == ["ok"] * 20 + ["timeout"] + ["ok"] * 20
    assert outcomes[20].reason == "over the deadline of 0.3 s"
    assert 0.3 <= outcomes[20].seconds < 1.0


@pytest.mark.parametrize("function", ["hang_in_c", "ignore_signals"])
def test_items_that_ignore_signals_are_killed(pool, function):
    assert statuses(pool.run([call(function), call("double", 1)], deadline=0.3)) == ["timeout", "ok"]


def test_threads_share_a_pool(pool):
    got = {}

    def work(number):
        got[number] = [o.value for o in pool.run([call("double", number)] * 50)]

    threads = [threading.Thread(target=work, args=[n]) for n in range(6)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert got == {n: [2 * n] * 50 for n in range(6)}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (call("fail", "boom"), "ValueError: boom"),
        (call("crash"), "ended (signal 11)"),
        (call("unreadable"), "not JSON serializable"),
        (call("not_a_number"), "Out of range float values"),
        (call("huge"), "bytes of JSON, more than"),
        (call("ask"), "EOFError"),
        (call("nothing_of_the_kind"), "AttributeError"),
        (Task("no_such_module:f"), "ModuleNotFoundError"),
        (Task("__main__:f"), "package.module:function"),
        (call("double", lambda: None), "cannot be sent to a worker"),
    ],
)
def test_a_failure_is_an_error_of_its_item_with_the_reason(pool, task, reason):
    outcomes = pool.run([call("double", 1), task, call("double", 2)])
    assert statuses(outcomes) == ["ok", "error", "ok"]
    assert reason in outcomes[1].reason


def test_a_function_that_gives_up_in_time_is_a_timeout_and_its_worker_lives(pool):
    before = {o.value for o in pool.run([call("pid")] * 50)}
    outcomes = pool.run([call("give_up")] * 3, deadline=1.5)
    assert [(o.status, o.reason) for o in outcomes] == [("timeout", "over the deadline of 1.5 s")] * 3
    assert {o.value for o in pool.run([call("pid")] * 50)} <= before


def test_an_item_that_stops_by_itself_gets_its_grace_period(pool):
    before = {o.value for o in pool.run([call("pid")] * 50)}
    outcomes = pool.run([call("give_up", 0.5, grace=20.0)] * 2, deadline=0.2)
    assert [(o.status, o.reason) for o in outcomes] == [("timeout", "over the deadline of 0.2 s")] * 2
    assert {o.value for o in pool.run([call("pid")] * 50)} <= before
    assert statuses(pool.run([call("wait", 60, grace=20.0)] * 2, deadline=0.2)) == ["timeout"] * 2
    assert {o.value for o in pool.run([call("pid")] * 50)} <= before
    start = time.monotonic()
    assert statuses(pool.run([call("ignore_signals", grace=0.3)], deadline=0.2)) == ["timeout"]
    assert 0.5 <= time.monotonic() - start < 5.0


def test_memory_is_limited_per_item(pool):
    outcomes = pool.run([call("eat", 50), call("eat", 4000), call("eat", 60)], memory_mb=200)
    assert statuses(outcomes) == ["ok", "error", "ok"]
    assert outcomes[1].reason.startswith("MemoryError")
    assert statuses(pool.run([call("eat", 300)], memory_mb=500)) == ["ok"]


def test_workers_that_have_grown_are_replaced_between_items():
    pool = Pool(2)
    outcomes = pool.run([call("leak", 8)] * 40, memory_mb=100)
    assert statuses(outcomes) == ["ok"] * 40
    # Never more than what fits: the limit lies 100 MiB above the loaded code.
    assert max(outcome.value for outcome in outcomes) * 8 <= 100
    pool.close()


def test_no_core_files_and_no_main_module_of_ours(pool):
    assert pool.run([call("limits")])[0].value == [0, 0]
    assert pool.run([call("main_module")])[0].value.endswith("worker.py")


def test_children_of_a_killed_item_go_with_it(pool, tmp_path):
    file = tmp_path / "pid"
    assert statuses(pool.run([call("with_child", str(file))], deadline=0.5)) == ["timeout"]
    assert gone(int(file.read_text()))


def test_slow_tasks_are_tried_last_and_take_no_other_its_time(pool):
    before = {o.value for o in pool.run([call("pid")] * 50)}
    tasks = [call("wait", 60, grace=1.0)] * 10 + [call("double", n) for n in range(30)]
    outcomes = pool.run(tasks, deadline=0.8, budget=1.6)
    # 10 x 0.1 s for two workers, then 30 quick ones; 1.1 s are left for two of those that hang
    assert statuses(outcomes[10:]) == ["ok"] * 30
    assert {o.status for o in outcomes[:10]} == {"timeout", "infra"}
    assert {o.reason for o in outcomes[:10] if o.status == "timeout"} == {"over the deadline of 0.8 s"}
    reason = "other tasks used the batch's budget of 1.6 s"
    assert {o.reason for o in outcomes[:10] if o.status == "infra"} == {reason}
    assert {o.value for o in pool.run([call("pid")] * 50)} <= before


def test_a_spent_budget_kills_only_what_cannot_be_interrupted(pool):
    before = {o.value for o in pool.run([call("pid")] * 50)}
    start = time.monotonic()
    reason = "other tasks used the batch's budget of 0.2 s"
    for tasks in ([call("wait", 60, grace=20.0)] * 2, [call("wait", 60, grace=20.0)] * 12):
        outcomes = pool.run(tasks, deadline=10.0, budget=0.2)
        assert {(o.status, o.reason) for o in outcomes[:2]} == {("infra", reason)}
        assert set(statuses(outcomes)) == {"infra"}
        assert {o.value for o in pool.run([call("pid")] * 50)} <= before
    assert statuses(pool.run([call("wait", 60), call("ignore_signals", grace=0.1)], budget=0.2)) == ["infra"] * 2
    assert not {o.value for o in pool.run([call("pid")] * 50)} & before
    assert time.monotonic() - start < 10


def test_a_slow_task_has_its_whole_deadline_in_the_end(pool):
    tasks = [call("wait", 0.3, grace=1.0), call("wait", 60, grace=1.0), call("double", 1)]
    assert statuses(pool.run(tasks, deadline=0.6, budget=30.0)) == ["ok", "timeout", "ok"]


def test_workers_that_died_while_idle_are_replaced(pool):
    for pid in {o.value for o in pool.run([call("pid")] * 50)}:
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
    assert statuses(pool.run([call("double", 1)] * 8)) == ["ok"] * 8


def test_without_workers_items_are_infra(monkeypatch):
    pool = Pool(2)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    outcomes = pool.run([call("double", 1)] * 3)
    assert statuses(outcomes) == ["infra"] * 3
    assert "no worker process could be started: FileNotFoundError" in outcomes[0].reason
    monkeypatch.setattr(sys, "executable", "/bin/false")
    outcomes = pool.run([call("double", 1)] * 3)
    assert statuses(outcomes) == ["infra"] * 3
    assert "exit code 1" in outcomes[0].reason
    monkeypatch.undo()
    assert statuses(pool.run([call("double", 1)] * 3)) == ["ok"] * 3
    pool.close()


def test_a_forked_child_has_workers_of_its_own(pool):
    mine = {o.value for o in pool.run([call("pid")] * 50)}
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            workers = {o.value for o in pool.run([call("pid")] * 50)}
            os.write(write, b"apart" if not workers & mine else b"shared")
            pool.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"apart"
    assert {o.value for o in pool.run([call("pid")] * 50)} <= mine


def test_a_file_named_rewards_in_another_folder_does_not_hide_the_library(tmp_path, monkeypatch):
    """The working folder is a checkout of the library, and a reward function came from a file `rewards.py`."""
    library = str(Path(rewards.__file__).parents[1])
    (tmp_path / "rewards.py").write_text("")
    monkeypatch.chdir(library)
    monkeypatch.setattr(sys, "path", [*(entry for entry in sys.path if entry != library), library, str(tmp_path)])
    pool = Pool(1)
    try:
        (outcome,) = pool.run([Task("rewards.components.json_schema:leaf_f1", ({"a": 1}, {"a": 1}))])
    finally:
        pool.close()
    assert (outcome.status, outcome.value) == ("ok", 1.0), outcome.reason


PARENT = """
import sys, time
sys.path.insert(0, {here!r})
from rewards.isolation import Pool, Task
pool = Pool(2)
print(*{{o.value for o in pool.run([Task("isolated_calls:pid")] * 50)}}, flush=True)
{then}
"""


def parent(then):
    code = PARENT.format(here=HERE, then=then)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_workers_end_with_the_interpreter():
    process = parent("")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.wait(20) == 0
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("function", ["hang_in_c", "wait"])
def test_workers_end_when_their_parent_is_killed_even_while_they_hang(function):
    arguments = "(600,)" if function == "wait" else "()"
    process = parent(f"pool.run([Task('isolated_calls:{function}', {arguments})] * 2, deadline=600)")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.3)
    process.kill()
    process.wait(20)
    assert all(gone(pid) for pid in pids)


def test_a_folder_named_like_a_package_beside_ones_data_changes_nothing(tmp_path):
    (tmp_path / "sympy").mkdir()
    (tmp_path / "sympy" / "__init__.py").write_text("raise RuntimeError('not the package')")
    code = (
        "from rewards import build_samples, load\n"
        r"samples = build_samples(['?'], [r'\boxed{\frac{2}{4}+x}'], answer=['x+1/2'])"
        "\nprint(load('math-verify', deadline=60.0).score(samples).totals)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.stdout == "[1.0]\n", ran


@dataclass(frozen=True, kw_only=True)
class Doubled(IsolatedComponent):
    name: str = "doubled"
    high: float = 100.0
    function: str = "double"
    factor: int = 1

    def task(self, sample, ctx):
        if not sample.text:
            return Score(None, "format", {"reason": "blank"})
        return call(self.function, *sample.columns["arguments"], info={"extracted": sample.text})

    def verdict(self, sample, result):
        return Score(float(self.factor * result), "ok", {"extracted": sample.text})


def evaluate(component, *rows):
    texts, arguments = zip(*rows, strict=True)
    samples = build_samples(["p"] * len(rows), list(texts), arguments=list(arguments))
    return Preset([(component, 1.0)]).score(samples, Context())


def test_a_component_scores_in_a_worker():
    evaluation = evaluate(Doubled(), ("a", [3]), ("", []), ("c", [None]), ("d", [5]))
    # 2 x 3 = 6, 2 x 5 = 10
    assert evaluation.values["doubled"] == [6.0, 0.0, 0.0, 10.0]
    assert evaluation.statuses["doubled"] == ["ok", "format", "error", "ok"]
    assert evaluation.infos["doubled"][2]["extracted"] == "c"
    assert evaluation.infos["doubled"][2]["reason"].startswith("TypeError")
    assert evaluation.latencies["doubled"][0] > 0.0


def test_a_task_or_verdict_that_raises_is_an_error_of_its_item():
    evaluation = evaluate(Doubled(), ("a", None), ("b", [2]), ("c", ["x"]))
    assert evaluation.statuses["doubled"] == ["error", "ok", "error"]  # 2 * "x" = "xx" is no number
    assert "ValueError" in evaluation.infos["doubled"][2]["reason"]


def test_a_component_that_overruns_keeps_the_others(own_pool):
    evaluation = evaluate(Doubled(function="wait", deadline=0.2), ("a", [0.0]), ("b", [60]), ("c", [0.01]))
    assert evaluation.statuses["doubled"] == ["ok", "timeout", "ok"]
    assert evaluation.infos["doubled"][1] == {"extracted": "b", "reason": "over the deadline of 0.2 s"}


def test_equal_tasks_run_once_and_are_remembered(tmp_path):
    marks = tmp_path / "marks"
    for _ in range(3):
        evaluation = evaluate(Doubled(function="count"), *[("a", [str(marks)])] * 4)
        assert evaluation.values["doubled"] == [1.0] * 4
    assert marks.read_text() == "x"


@pytest.mark.parametrize("change", [{"version": "2"}, {"factor": 2}])
def test_another_version_or_configuration_is_not_taken_from_the_cache(tmp_path, change):
    marks = tmp_path / "marks"
    evaluate(Doubled(function="count"), ("a", [str(marks)]))
    evaluate(Doubled(function="count", deadline=1.5, name="other"), ("a", [str(marks)]))
    assert marks.read_text() == "x"
    evaluate(Doubled(function="count", **change), ("a", [str(marks)]))
    assert marks.read_text() == "xx"


def test_content_keys_differ_by_type_and_are_equal_for_equal_values():
    keys = [content_key(v) for v in (1, 1.0, True, "1", b"1", [1], (1,), None, "\ud800", {"a": 1})]
    assert len(set(keys)) == len(keys)
    assert None not in keys
    text = "reference"
    assert content_key(text, text) == content_key("".join(["refer", "ence"]), "reference")
    assert content_key(object()) is None


def test_plain_results_are_remembered_until_there_are_too_many(monkeypatch):
    from rewards.isolation import cache

    forget()
    monkeypatch.setattr(cache, "_MAX_RECENT", 2)
    remember({"a": [1], "b": 2, "large": "x" * 100_000, "not plain": {1}})
    recall(["a"])["a"].append("changed by the caller")
    assert recall(["a", "b", "large", "not plain"]) == {"a": [1], "b": 2}
    remember({"c": 3})
    remember({"d": 4})
    assert recall("abcd") == {"d": 4}
