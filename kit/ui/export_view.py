"""How exports look: room, progress, what the verification found, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from kit.runs.files import human_size
from kit.runs.store import ALIVE
from kit.ui import markup as m
from kit.ui.jobs import Job

MOST_FILES = 60
LOAD = {
    "adapter": 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{path}")',
    "merged-16bit": 'AutoModelForCausalLM.from_pretrained("{path}")',
    "merged-4bit": 'AutoModelForCausalLM.from_pretrained("{path}")',
    "gguf": "llama-cli -m {path}/FILE.gguf",
    "ollama": "ollama create NAME -f {path}/Modelfile",
}


def no_runs() -> str:
    """What stands where there is no run at all."""
    return m.empty(
        "No trained model yet",
        m.join([m.tag("a", "Train one", href="/new"), " first; then its weights can be taken from here."]),
    )


def notice(status: Mapping[str, Any], found: Sequence[str]) -> str:
    """What to know before exporting."""
    if not found:
        return m.empty("This run has no weights yet", "They come with its first checkpoint, or at its end.")
    if status["state"] in ALIVE:
        return m.page(m.note("This run is still training: what is exported is its last whole checkpoint.", "warn"))
    return ""


def size(needed: int, free: int) -> str:
    """Room that is taken while it is made, against what is free."""
    share = needed / max(1, free)
    level, word = ("fail", "not enough room") if share > 1 else ("warn", "tight") if share > 0.8 else ("ok", "fits")
    head = m.tag("div", m.tag("b", "Room on the disk") + m.badge(word, level), class_="spread")
    line = m.tag("p", f"about {human_size(needed)} while it is made, of {human_size(free)} free", class_="num dim")
    return m.page(m.card(head, m.bar(share, level, word), line))


def progress(job: Job | None) -> str:
    """The export under way, or why the last one failed."""
    if job is None or job.state == "done":
        return ""
    if job.state == "running":
        line = m.tag("p", m.tag("code", job.line or "Starting: Python and torch are loaded first …"), class_="dim")
        return m.page(m.card(m.tag("b", "Exporting and verifying"), line))
    return m.page(m.note("Stopped; nothing of it is left.")) if job.state == "stopped" else m.error(job.error)


def results(run_id: str, found: Mapping[str, Mapping[str, Any]], base: str | None = None) -> str:
    """Every export of the run, the latest first; `base` is the model that it trained."""
    if not found:
        return m.empty(
            "Nothing exported yet",
            "Choose a format above. Each export is held against the model as it was trained before it counts.",
        )
    ordered = sorted(found.items(), key=lambda pair: -_time(pair[1]))
    return m.page(m.tag("div", m.join(_result(run_id, name, one, base) for name, one in ordered), class_="stack-notes"))


def _time(one: Mapping[str, Any]) -> float:
    moment = one.get("time")
    return float(moment) if isinstance(moment, (int, float)) else 0.0


def _result(run_id: str, name: str, one: Mapping[str, Any], base: str | None) -> Markup:
    verification = one.get("verification")
    if not isinstance(verification, Mapping):
        level, word = "warn", "not verified"
    else:
        level, word = ("ok", "verified") if verification.get("verified") else ("fail", "not what was trained")
    head = m.tag("div", m.join([m.tag("b", name), m.badge(word, level)]), class_="spread")
    facts = m.join(
        [
            f"step {m.number(one.get('step'))}",
            human_size(one.get("bytes") or 0),
            f"stored as {one.get('stored')}",
            m.ago(one.get("time")),
        ],
        ", ",
    )
    parts = [head, m.tag("p", facts, class_="dim")]
    if isinstance(verification, Mapping):
        parts.append(_verification(verification))
    if isinstance(one.get("hub"), Mapping):
        parts.append(m.note(m.join(f"{key}: {value}  " for key, value in one["hub"].items()), "ok"))
    parts += [m.note(str(text)) for text in one.get("notes") or []]
    if level != "fail":
        parts.append(_files(run_id, name, one, base))
    return m.tag("div", m.join(parts), class_=f"verdict {level}")


def _verification(found: Mapping[str, Any]) -> Markup:
    """The figures beside the limits that they are held against, and the faults."""
    faults = m.join(m.note(str(fault), "fail") for fault in found.get("faults") or [])
    comparison, limits = found.get("comparison") or {}, found.get("limits") or {}
    rows = [
        [label, _number(_figure(comparison, keys)), words.format(_number(limits.get(limit)))]
        for label, keys, limit, words in FIGURES
    ]
    rows = [row for row in rows if row[1] != "–"]
    if "prompts" in comparison:
        rows.insert(0, ["held-out prompts", _number(comparison["prompts"]), ""])
    if not rows:
        return faults
    title = m.tag("p", "Held against the trained model:")
    return faults + title + m.table(["what", "found", "limit"], rows, numbers={1, 2})


FIGURES = (
    ("tokens on which both agree", ("token_agreement",), "agreement", "at least {}"),
    ("mean difference of log-probability (nats)", ("logp_difference_mean",), "mean", "at most {}"),
    ("largest difference", ("logp_difference_max",), "largest", "at most {}"),
)


def _figure(found: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((found[key] for key in keys if key in found), None)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else "–"


def _files(run_id: str, name: str, one: Mapping[str, Any], base: str | None) -> Markup:
    files = [file for file in one.get("files") or [] if isinstance(file, Mapping)]
    folder = str(one.get("path") or "")
    place = f"/runs/{quote(run_id)}/export/{quote(name)}"
    rows = [
        [
            m.tag("a", str(file.get("name")), href=f"{place}/{quote(str(file.get('name')))}", download=""),
            human_size(file.get("bytes") or 0),
            m.tag("code", str(file.get("sha256"))[:16], title=str(file.get("sha256"))),
        ]
        for file in files[:MOST_FILES]
    ]
    how = LOAD.get(str(one.get("holds") or name))
    load = (
        m.tag(
            "p",
            m.join(
                [m.tag("small", "load it: "), m.tag("code", how.format(path=folder, base=base or "THE BASE MODEL"))]
            ),
        )
        if how
        else Markup("")
    )
    return m.tag(
        "details",
        m.tag("summary", f"{len(files)} files in {folder}")
        + m.table(["file", "size", "sha256"], rows, numbers={1})
        + load,
        open="",
    )
