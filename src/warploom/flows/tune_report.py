"""The files a tuned kernel leaves: cubin, readable diff, manifest, deployable store entry."""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import Any

from warploom.files import write_bytes_atomically, write_text_atomically
from warploom.flows.tuned import SCHEMA, TuneReport
from warploom.integrations.deploy import FolderStore, content_key
from warploom.report.pages import Figure
from warploom.report.sass_html import Summary, diff_html
from warploom.report.sass_tables import diff_lines
from warploom.sass.flow.diff import diff


def write_report(report: TuneReport) -> None:
    """Write tuned.cubin, the readable diff, the manifest and the deployable store entry."""
    folder, target = report.folder, report.target
    diffs = diff(target.cubin, report.cubin, target.kernel)
    text = "\n".join(line.plain for one in diffs for line in diff_lines(one))
    files = {
        "cubin": folder / "tuned.cubin",
        "diff": folder / "diff.txt",
        "diff_html": folder / "diff.html",
        "manifest": folder / "manifest.json",
    }
    write_bytes_atomically(files["cubin"], report.cubin.data)
    write_text_atomically(files["diff"], text + "\n")
    write_text_atomically(
        files["diff_html"], diff_html(target.cubin, report.cubin, diffs, page_summary(report))
    )
    summary = _summary(report)
    # Without a win it is empty, and installing it changes nothing.
    (folder / "store").mkdir(parents=True, exist_ok=True)
    if report.changed:
        store = FolderStore(folder / "store")
        launch = target.launch.to_json() if target.launch else None
        store.put(
            target.cubin.data,
            report.cubin.data,
            target.kernel,
            target.cubin.arch,
            result=summary["result"],
            launch=launch,
        )
        files["store"] = folder / "store"
        if target.build is not None:
            files["kernel"] = folder / "kernel"
            target.build.with_cubin(report.cubin.data, files["kernel"])
    write_text_atomically(files["manifest"], json.dumps(summary, indent=1) + "\n")
    report.files = files


def page_summary(report: TuneReport) -> Summary:
    """What the page says before the diff: how much faster, what was tried, what was checked."""
    search, settings = report.search, report.settings
    measured = settings.measure == "gpu"
    kind = "measured" if measured else "predicted"
    refused = search.tally["refused by the editor"] + search.tally["refused by the verifier"]
    failed = search.scored - search.outcomes["ok"]
    tried = f"{search.scored:,} candidates of the player {settings.player}"
    tried += f"; {failed or 'none'} failed a test." if measured else "."
    about = "no win: nothing was faster" if not report.changed else "beside the original"
    timing = f"A/A control: {report.timing.control}." if report.timing else ""
    tested = "Not tested: it did not run on a GPU."
    if report.check is not None:
        tested = f"Tested: {'pass' if report.check.passed else report.check.detail}."
    return Summary(
        [
            Figure(f"{report.speedup:.4f}", "times as fast", about, kind),
            Figure(f"{search.scored:,}", "candidates", f"{search.seconds:.1f} s", "counted"),
            Figure(f"{refused:,}", "refused", "by static rules", "counted"),
        ],
        [
            ("What was tried", [tried]),
            ("Is it right", [f"Static verdict: {report.verdict}.", tested]),
            ("How sure is it", [timing] if timing else ["Not timed: the model scored it."]),
        ],
        [(0.0, 1.0), *((seconds, best) for seconds, _, best in search.curve)],
    )


def _summary(report: TuneReport) -> dict[str, Any]:
    target, settings, search = report.target, report.settings, report.search
    measured = settings.measure == "gpu"
    return {
        "schema": SCHEMA,
        "key": content_key(target.cubin.data),
        "kernel": target.kernel,
        "arch": target.cubin.arch,
        "compiler": target.cubin.compiler,
        "cubin": "tuned.cubin",
        "sha256": hashlib.sha256(report.cubin.data).hexdigest(),
        "original_sha256": hashlib.sha256(target.cubin.data).hexdigest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "launch": target.launch.to_json() if target.launch else None,
        "result": {
            "changed": report.changed,
            "speedup": round(report.speedup, 5),
            "speedup_is": "measured" if measured else "modelled, not measured",
            "static_verdict": str(report.verdict),
            "tested_verdict": report.check.to_json() if report.check else "not tested",
            "errors_against_float64": dict(report.errors) or "not measured",
            "timing_verdict": report.timing.to_json() if report.timing else "not measured",
            "search": settings.player,
            "moves": sorted(settings.moves),
            "budget_s": settings.seconds,
            "seconds": round(search.seconds, 2),
            "seed": settings.seed,
            "scored": search.scored,
            "outcomes": dict(search.outcomes),
            "actions": dict(search.tally),
            "interrupted": search.interrupted,
        },
    }
