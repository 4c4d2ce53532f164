"""Every awkward input agrees with its expected.json through the public API; the test prints the table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer_core.config import BucketConfig, DatasetConfig
from trainer_core.data import decode_picture, examine_dataset, scan_dataset
from trainer_core.errors import DatasetError, TrainerError
from trainer_core.networks import load_lora

from .conftest import NATIVE, Case, load_generator

NAMES = [entry[0] for entry in load_generator().CASES]


def check_pixels(case: Case, wanted: dict[str, Any], problems: list[str]) -> None:
    pixels = decode_picture(case.data / wanted["file"], "white").astype(int)
    height, width = pixels.shape[:2]
    for point in wanted.get("points", []):
        x, y = min(width - 1, int(point["at"][0] * width)), min(height - 1, int(point["at"][1] * height))
        if np.abs(pixels[y, x] - point["rgb"]).max() > point["tol"]:
            problems.append(f"{wanted['file']} at {point['at']}: {pixels[y, x].tolist()} is not {point['rgb']}")
    if wanted.get("distinct_levels_min", 0) > len(np.unique(pixels[..., 0])):
        problems.append(f"{wanted['file']}: grey levels were lost")
    if "mean_rgb" in wanted and np.abs(pixels.mean(axis=(0, 1)) - wanted["mean_rgb"]).max() > 2:
        problems.append(f"{wanted['file']}: mean {pixels.mean(axis=(0, 1))}")


def check_item(case: Case, wanted: dict[str, Any], row: dict[str, Any] | None, text: str, problems: list[str]) -> None:
    file = wanted["file"]
    if row is None:
        problems.append(f"{file} is not in the report")
        return
    if wanted["usable"] != "either" and row["usable"] != wanted["usable"]:
        problems.append(f"{file}: usable is {row['usable']} ({row['reason']})")
        return
    if not row["usable"]:
        reasons = wanted.get("reason_any_of") or wanted["else_report_any_of"]
        if not any(reason in row["reason"].lower() for reason in reasons):
            problems.append(f"{file}: reason {row['reason']!r} has none of {reasons}")
        if wanted.get("else_report_names", "") not in row["reason"]:
            problems.append(f"{file}: {row['reason']!r} does not name {wanted['else_report_names']}")
        return
    if "upright_size" in wanted and row["upright_size"] != wanted["upright_size"]:
        problems.append(f"{file}: size {row['upright_size']}")
    captions = wanted.get("caption_any_of", [wanted["caption"]] if "caption" in wanted else None)
    if captions is not None and row["caption"] not in captions:
        problems.append(f"{file}: caption {row['caption']!r} is not in {captions}")
    step = case.expected.get("bucket_sides_divisible_by", 8)
    if any(side < 8 or side % step for side in row["bucket"]):
        problems.append(f"{file}: bucket {row['bucket']}")
    if row["usable"]:
        check_pixels(case, wanted, problems)


def check_pictures(case: Case) -> list[str]:
    problems: list[str] = []
    options = case.options()
    if "first" in case.expected["settings"]:
        options["recursive"] = True  # both versions of the stale cache case side by side
    report = examine_dataset(DatasetConfig(path=str(case.data), **options), BucketConfig(), NATIVE).to_json()
    rows = {row["file"]: row for row in report["items"]}
    text = "\n".join([*report["warnings"], *(w for row in report["items"] for w in row["warnings"])]).lower()
    for wanted in case.expected["items"]:
        check_item(case, wanted, rows.get(wanted["file"]), text, problems)
    extra = set(rows) - {wanted["file"] for wanted in case.expected["items"]}
    problems += [f"{file} should not be in the report" for file in sorted(extra)]
    problems += [f"{name} must not count" for name in case.expected["ignored"] if name in rows]
    low, high = np.broadcast_to(case.expected["usable_count"], 2).tolist()
    usable = sum(row["usable"] for row in rows.values())
    if not low <= usable <= high:
        problems.append(f"{usable} usable, not {low} to {high}")
    for alternatives in case.expected["warn_any_of"]:
        if not any(word in text for word in alternatives):
            problems.append(f"no warning holds one of {alternatives}")
    outcome = case.expected["run"]["outcome"]
    if outcome == "trains" and report["error"] or outcome == "refuses" and not report["error"]:
        problems.append(f"should be {outcome}: {report['error']}")
    return problems


def check_weights(case: Case) -> list[str]:
    problems: list[str] = []
    for wanted in case.expected["items"]:
        path = case.data / wanted["file"]
        try:
            found = load_lora(path)
        except TrainerError as error:
            if wanted["usable"] and "refuse_or_warn_any_of" not in wanted:
                problems.append(f"{wanted['file']} refused: {error}")
            elif not any(word in str(error).lower() for word in wanted.get("reason_any_of", [])):
                problems.append(f"{wanted['file']}: {error}")
            elif wanted["file"] not in str(error):
                problems.append(f"{wanted['file']} is not named: {error}")
            continue
        if not wanted["usable"]:
            problems.append(f"{wanted['file']} should be refused")
        # by value: the reader turns the diffusers names of these files into kohya's
        scales = wanted["scale"]
        scales = sorted(scales.values()) if isinstance(scales, dict) else [scales]
        if sorted(found.scales.values()) != pytest.approx(scales):
            problems.append(f"{wanted['file']}: scales {found.scales}")
        words = wanted.get("refuse_or_warn_any_of")
        if words and not any(word in " ".join(found.warnings).lower() for word in words):
            problems.append(f"{wanted['file']}: no warning in {found.warnings}")
    return problems


@pytest.mark.parametrize("name", NAMES)
def test_case_agrees_with_its_expectation(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    check = check_weights if case.expected.get("kind_of_input") == "lora" else check_pictures
    problems = check(case)
    print(f"{name:26} {case.expected['kind']:14} {'agrees' if not problems else 'DIFFERS'}")
    assert problems == []


def test_there_are_32_cases() -> None:
    assert len(NAMES) == 32


def test_nested_pictures_are_pointed_out_when_not_recursive(cases: dict[str, Case]) -> None:
    case = cases["nested_same_stem"]
    with pytest.raises(DatasetError, match="sub-folders: cats \\(1\\), dogs \\(2\\)"):
        scan_dataset(DatasetConfig(path=str(case.data)), BucketConfig(), NATIVE)


def test_set_without_pictures_is_refused_by_folder_and_endings(cases: dict[str, Case]) -> None:
    case = cases["zero_images"]
    with pytest.raises(DatasetError, match="No pictures found in .*zero_images.*\\.png \\.apng \\.jpg") as caught:
        scan_dataset(DatasetConfig(path=str(case.data)), BucketConfig(), NATIVE)
    assert "2 other files" in str(caught.value)
