import sqlite3
import time

import pytest

from rewards import build_samples, load
from rewards.components.sql import find_query, judge, top_level_order

SETUP = """CREATE TABLE staff (name TEXT, age INTEGER, pay REAL, secret BLOB);
           INSERT INTO staff VALUES ('Ann', 30, 10.5, NULL), ('Bo', 20, 7.0, NULL), ('Cy', 20, 7.0, x'00ff');
           CREATE VIEW old AS SELECT name FROM staff WHERE age > 25;"""


def verdict(query, expected="SELECT name FROM staff", setup=SETUP, **options):
    return judge(query, setup, None, expected, **options)


def status(query, *arguments, **options):
    return verdict(query, *arguments, **options)[0]


def test_rows_are_compared_as_multisets():
    assert status("SELECT name FROM staff ORDER BY age, name DESC") == "ok"
    assert status("SELECT age FROM staff ORDER BY 1", "SELECT age FROM staff") == "ok"
    # a set would hide that 20 stands there twice
    assert verdict("SELECT DISTINCT age FROM staff", "SELECT age FROM staff") == ["wrong", "2 rows instead of 3"]
    assert (
        status("SELECT age FROM staff WHERE age > 20 UNION ALL VALUES (30), (20)", "SELECT age FROM staff") == "wrong"
    )


def test_order_counts_where_the_expected_query_orders():
    expected = "SELECT name FROM staff ORDER BY name DESC"
    assert status("SELECT name FROM staff ORDER BY 1 DESC", expected) == "ok"
    assert verdict("SELECT name FROM staff ORDER BY 1", expected) == ["wrong", "rows in another order"]
    assert status("SELECT name FROM staff ORDER BY 1", expected, ordered=False) == "ok"
    assert status("SELECT name FROM staff ORDER BY 1 DESC", "SELECT name FROM staff", ordered=True) == "wrong"


def test_ordering_is_told_from_what_only_looks_like_it():
    assert top_level_order("SELECT 1 Order  /* x */ By 1")
    for query in (
        "SELECT * FROM (SELECT 1 ORDER BY 1)",
        "SELECT 'order by'",
        'SELECT "order by" FROM [order by]',
        "SELECT 1 -- order by 1",
        "SELECT /* order by */ 1",
        "SELECT row_number() OVER (ORDER BY x) FROM t",
        "SELECT '",
    ):
        assert not top_level_order(query)


def test_numbers_are_compared_by_value_and_not_as_text():
    assert status("SELECT 7 FROM staff", "SELECT 7.0 FROM staff") == "ok"
    assert status("SELECT 0.1 + 0.2 FROM staff", "SELECT 0.3 FROM staff") == "ok"
    assert status("SELECT '7' FROM staff", "SELECT 7 FROM staff") == "wrong"
    assert status("SELECT NULL FROM staff", "SELECT 0 FROM staff") == "wrong"
    assert status("SELECT secret FROM staff", "SELECT secret FROM staff") == "ok"


def test_columns_count_by_place_not_by_name():
    assert status("SELECT name AS x, age FROM staff", "SELECT name, age FROM staff") == "ok"
    assert verdict("SELECT name FROM staff", "SELECT name, age FROM staff") == ["wrong", "1 columns instead of 2"]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM staff",
        "INSERT INTO staff VALUES ('D', 1, 1, NULL) RETURNING name",
        "UPDATE staff SET age = 1 RETURNING name",
        "CREATE TABLE x (a)",
        "PRAGMA table_info(staff)",
        "SELECT name FROM pragma_table_info('staff')",
        "SELECT sql FROM sqlite_master",
        "ATTACH DATABASE ':memory:' AS x",
        "VACUUM INTO '/tmp/x'",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd') FROM staff",
        "SELECT randomblob(1000000000)",
        "SELECT name FROM staff; DROP TABLE staff",
        "SELECT name FROM nobody",
        "-- SELECT name FROM staff",
        "",
        "\ud800",
        "\x00",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT name FROM staff " + "UNION ALL SELECT name FROM staff " * 100,
        "SELECT a.name FROM staff a, " + ", ".join(f"staff s{i}" for i in range(10)),
    ],
)
def test_what_is_no_reading_query_within_the_caps_is_wrong(query):
    assert status(query) == "wrong"


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT count(*) FROM " + ", ".join(f"staff s{i}" for i in range(40)),
    ],
)
def test_endless_queries_run_out_of_time(query):
    start = time.monotonic()
    assert status(query, seconds=0.2) == "timeout"
    assert time.monotonic() - start < 2


def test_constants_in_place_of_a_query_are_wrong():
    for query in (
        "SELECT 'Ann'",
        "VALUES ('Ann')",
        "WITH t AS (SELECT 'Ann') SELECT * FROM t",
    ):
        assert verdict(query, "SELECT name FROM old") == ["wrong", "reads no table"]
    assert status("SELECT name FROM staff WHERE age = 30", "SELECT name FROM old") == "ok"
    assert status("SELECT count(*) FROM staff", "SELECT count(*) FROM staff") == "ok"
    assert status("SELECT 2", "SELECT 1 + 1") == "ok"


def test_rows_of_the_data_set_that_are_at_fault_are_errors():
    assert status("SELECT 1", "SELECT nothing FROM staff") == "error"
    assert status("SELECT 1", setup="CREATE TABLE") == "error"
    assert status("SELECT 1", setup="ATTACH ':memory:' AS x") == "error"
    assert verdict("SELECT name FROM staff WHERE 0", "SELECT name FROM staff WHERE age > 90")[0] == "error"
    assert judge("SELECT 1", None, "/nowhere/at.all", "SELECT 1")[0] == "error"
    assert judge("SELECT 1", SETUP, None, None)[0] == "error"


def test_files_are_read_and_never_written(tmp_path):
    path = tmp_path / "my data?.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SETUP)
    connection.close()
    before = path.read_bytes()
    assert judge("SELECT name FROM old", None, str(path), "SELECT 'Ann' FROM old") == ["ok", None]
    assert judge("DELETE FROM staff", None, str(path), "SELECT 1 FROM staff")[0] == "wrong"
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == [path.name]
    sample = build_samples(["p"], ["SELECT name FROM old"], db_path=[path.name], reference=["SELECT name FROM old"])
    assert load("sql-exec", root=str(tmp_path)).is_correct(sample) == [True]


WITH = "with t as (select 1) select * from t"


@pytest.mark.parametrize(
    ("text", "query", "reason"),
    [
        ("SELECT 1", "SELECT 1", None),
        (f"<think>```sql\nSELECT 0\n```</think>{WITH}", WITH, None),
        ("Here:\n```sql\nSELECT 1;\n```\nDone.", "SELECT 1;", None),
        ("```SELECT 1```", "SELECT 1", None),
        ("<think>x</think><answer>SELECT 1</answer>", "SELECT 1", None),
        ("<answer>```sql\nSELECT 1\n```</answer>", "SELECT 1", None),
        ("", None, "blank"),
        ("I would select", None, "no query"),
        ("```sql\nSELECT 1", None, "unterminated"),
        ("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", None, "several blocks"),
        ("<answer>SELECT 1</answer><answer>SELECT 2</answer>", None, "duplicated_tag"),
        ("<answer>SELECT 1", None, "unterminated"),
        ("SELECT '\x00'", None, "not text"),
        ("<think>SELECT 1", None, "unterminated_think"),
    ],
)
def test_queries_are_found_and_what_is_not_one_query_has_a_reason(text, query, reason):
    assert find_query(text) == (query, reason)


def evaluate(*queries, columns=None, **params):
    size = len(queries)
    row = {"setup": SETUP, "reference": "SELECT name FROM old"} | (columns or {})
    samples = build_samples(["p"] * size, list(queries), **{name: [value] * size for name, value in row.items()})
    return load("sql-exec", **params).score(samples)


def test_a_batch_through_the_workers():
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    evaluation = evaluate("SELECT name FROM old", "SELECT name FROM staff", "no", endless, None, seconds=0.2)
    assert evaluation.statuses["accuracy"] == ["ok", "wrong", "format", "timeout", "format"]
    assert evaluation.totals == [1.1, 0.1, 0.0, 0.1, 0.0]
    assert evaluation.infos["accuracy"][1]["reason"] == "3 rows instead of 1"


def test_what_the_clock_cannot_interrupt_costs_a_worker_and_nothing_else(own_pool):
    slow = "SELECT printf('%.*c', 2000000000, 'x') FROM staff"  # one step of SQLite's machine
    evaluation = evaluate("SELECT name FROM old", slow, "SELECT name FROM old;", deadline=0.5)
    assert evaluation.statuses["accuracy"] == ["ok", "timeout", "ok"]


def test_a_query_must_be_right_on_every_database():
    other = SETUP.replace("'Ann', 30", "'Dee', 40")
    columns = {"setup": [SETUP, other]}
    evaluation = evaluate("SELECT name FROM old", "SELECT 'Ann' FROM staff LIMIT 1", columns=columns)
    assert evaluation.statuses["accuracy"] == ["ok", "wrong"]
    assert evaluate("SELECT 'Ann' FROM staff LIMIT 1").statuses["accuracy"] == ["ok"]


def test_expected_rows_may_be_given():
    for rows in ([["Bo", 20], ["Ann", 30], ["Cy", 20.0]], '[["Bo", 20], ["Ann", 30], ["Cy", 20]]'):
        columns = {"expected_rows": rows, "reference": None}
        assert evaluate("SELECT name, age FROM staff", columns=columns).statuses["accuracy"] == ["ok"]
    columns = {"expected_rows": [["Bo"], ["Ann"], ["Cy"]], "ordered": True}
    assert evaluate("SELECT name FROM staff", columns=columns).statuses["accuracy"] == ["wrong"]


@pytest.mark.parametrize(
    "columns",
    [
        {"setup": None},
        {"reference": None},
        {"reference": 7},
        {"reference": "SELECT"},
        {"expected_rows": "{"},
        {"expected_rows": [1]},
        {"expected_rows": [[[1]]]},
        {"setup": "nonsense"},
    ],
)
def test_rows_that_cannot_be_used_are_errors(columns):
    assert evaluate("SELECT name FROM old", columns=columns).statuses["accuracy"] == ["error"]
