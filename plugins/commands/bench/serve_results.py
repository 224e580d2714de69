"""Files of a serving benchmark: its results as JSON, with the details of every request on demand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .output import write_json
from .record import MeasuredRequest


def save_results(arguments: argparse.Namespace, results: Mapping[str, Any], records: Sequence[MeasuredRequest]) -> None:
    """Writes `results` under --result-dir where --save-result or --save-detailed asks for it."""
    if not (arguments.save_result or arguments.save_detailed):
        return
    if arguments.save_detailed:
        results = {**results, **_details(records)}
    model = str(results["model_id"]).rstrip("/").rpartition("/")[2]
    load = f"{arguments.request_rate:g}qps"
    if arguments.max_concurrency is not None:
        load += f"-concurrency{arguments.max_concurrency}"
    name = arguments.result_filename or f"{arguments.backend}-{load}-{model}-{results['date']}.json"
    path = Path(arguments.result_dir).expanduser() / name
    write_json(str(path), results)
    print(f"result: {path}")


def _details(records: Sequence[MeasuredRequest]) -> dict[str, Any]:
    first = min(record.started for record in records)
    return _encodable({
        "input_lens": [record.prompt_len for record in records],
        "output_lens": [record.output_len for record in records],
        "start_times": [record.started - first for record in records],
        "ttfts": [record.ttft for record in records],
        "itls": [record.itls for record in records],
        "e2els": [record.latency for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    })  # fmt: skip


def _encodable(values: dict[str, Any]) -> dict[str, Any]:
    """The same values; characters that UTF-8 cannot encode (half of a surrogate pair) are replaced."""
    found: dict[str, Any] = json.loads(json.dumps(values).encode("utf-8", "replace"))
    return found
