"""Headless core of Safe-Scaler. This module is the facade: `nodes/` imports nothing below it.

Importing it is cheap (< 0.3 s): what is not an error class is imported when it is first asked for, and torch,
diffusers and transformers when a function needs them. Nothing named here imports diffusers into a host's process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DatasetError,
    ModelFileError,
    NonFiniteError,
    Problem,
    ResourceError,
    TrainerError,
)

__version__ = "0.1.0"

_LATER = {
    "COMMANDS": "runs.protocol",
    "COVERAGE_PICTURE": "coverage_job",
    "FIELDS": "config_fields",
    "MEMORY_SIZES": "recipes",
    "NOTE_TOPICS": "events",
    "PANEL_HEARTBEAT_S": "panel.api",
    "PANEL_MAX_BODY": "panel.exchange",
    "PANEL_PREFIX": "panel.api",
    "PURPOSES": "recipes",
    "PanelApi": "panel.api",
    "PanelRequest": "panel.exchange",
    "PreviewCell": "preview_job",
    "RunFolder": "runs.folder",
    "RunInfo": "runs.registry",
    "RunOutcome": "runs.supervisor",
    "ScannedSet": "panel.data_sets",
    "StopRequested": "data.records",
    "Supervisor": "runs.supervisor",
    "TrainConfig": "config",
    "can_go_on": "runs.registry",
    "change_run": "prepare",
    "chart_pictures": "diagnostics.chart_pictures",
    "check_vae": "models.inspection",
    "config_hash": "runs.registry",
    "content_problem": "checkpoints.manifest",
    "create_coverage_job": "coverage_job",
    "create_preview_job": "preview_job",
    "create_run": "prepare",
    "data_set_id": "panel.data_sets",
    "describe_run": "runs.registry",
    "examine_dataset": "data.scan",
    "free_name": "runs.folder",
    "from_dict": "config_io",
    "hide_places": "panel.places",
    "inspect_model": "models.inspection",
    "list_runs": "runs.registry",
    "load_config": "config_io",
    "lora_files": "resume_choices",
    "lora_of_step": "resume_choices",
    "memory_sentence": "diagnostics.report_memory",
    "memory_settings": "recipes",
    "newest_good": "checkpoints.manifest",
    "newest_whole": "checkpoints.manifest",
    "newest_with_hash": "runs.registry",
    "open_readonly": "runs.record",
    "picture_of": "preview_job",
    "problem_groups": "diagnostics.report_text",
    "purpose_settings": "recipes",
    "read_coverage": "coverage_job",
    "read_lines": "config_lines",
    "read_run": "diagnostics.report_data",
    "refusal": "resume_rules",
    "resume_differences": "resume_choices",
    "scan_checkpoints": "checkpoints.manifest",
    "setting_differences": "resume_rules",
    "summary_sentences": "diagnostics.report_text",
    "to_dict": "config_io",
    "with_settings": "config_io",
    "write_report": "diagnostics.report",
    "write_share_sheet": "share_sheet",
    "write_teaching_set": "toy.demo_data",
}
"""Names that are imported when they are asked for, and the module that holds each."""

_OTHER_NAME = {
    "COVERAGE_PICTURE": "PNG_NAME",
    "PreviewCell": "Cell",
    "PANEL_HEARTBEAT_S": "HEARTBEAT_S",
    "PANEL_MAX_BODY": "MAX_BODY",
    "PANEL_PREFIX": "PREFIX",
    "PanelRequest": "Request",
    "describe_run": "describe",
    "scan_checkpoints": "scan",
}

if TYPE_CHECKING:
    from .checkpoints.manifest import content_problem as content_problem
    from .checkpoints.manifest import newest_good as newest_good
    from .checkpoints.manifest import newest_whole as newest_whole
    from .checkpoints.manifest import scan as scan_checkpoints
    from .config import TrainConfig as TrainConfig
    from .config_fields import FIELDS as FIELDS
    from .config_io import from_dict as from_dict
    from .config_io import load_config as load_config
    from .config_io import to_dict as to_dict
    from .config_io import with_settings as with_settings
    from .config_lines import read_lines as read_lines
    from .coverage_job import PNG_NAME as COVERAGE_PICTURE
    from .coverage_job import create_coverage_job as create_coverage_job
    from .coverage_job import read_coverage as read_coverage
    from .data.records import StopRequested as StopRequested
    from .data.scan import examine_dataset as examine_dataset
    from .diagnostics.chart_pictures import chart_pictures as chart_pictures
    from .diagnostics.report import write_report as write_report
    from .diagnostics.report_data import read_run as read_run
    from .diagnostics.report_memory import memory_sentence as memory_sentence
    from .diagnostics.report_text import problem_groups as problem_groups
    from .diagnostics.report_text import summary_sentences as summary_sentences
    from .events import NOTE_TOPICS as NOTE_TOPICS
    from .models.inspection import check_vae as check_vae
    from .models.inspection import inspect_model as inspect_model
    from .panel.api import HEARTBEAT_S as PANEL_HEARTBEAT_S
    from .panel.api import PREFIX as PANEL_PREFIX
    from .panel.api import PanelApi as PanelApi
    from .panel.data_sets import ScannedSet as ScannedSet
    from .panel.data_sets import data_set_id as data_set_id
    from .panel.exchange import MAX_BODY as PANEL_MAX_BODY
    from .panel.exchange import Request as PanelRequest
    from .panel.places import hide_places as hide_places
    from .prepare import change_run as change_run
    from .prepare import create_run as create_run
    from .preview_job import Cell as PreviewCell
    from .preview_job import create_preview_job as create_preview_job
    from .preview_job import picture_of as picture_of
    from .recipes import MEMORY_SIZES as MEMORY_SIZES
    from .recipes import PURPOSES as PURPOSES
    from .recipes import memory_settings as memory_settings
    from .recipes import purpose_settings as purpose_settings
    from .resume_choices import lora_files as lora_files
    from .resume_choices import lora_of_step as lora_of_step
    from .resume_choices import resume_differences as resume_differences
    from .resume_rules import refusal as refusal
    from .resume_rules import setting_differences as setting_differences
    from .runs.folder import RunFolder as RunFolder
    from .runs.folder import free_name as free_name
    from .runs.protocol import COMMANDS as COMMANDS
    from .runs.record import open_readonly as open_readonly
    from .runs.registry import RunInfo as RunInfo
    from .runs.registry import can_go_on as can_go_on
    from .runs.registry import config_hash as config_hash
    from .runs.registry import describe as describe_run
    from .runs.registry import list_runs as list_runs
    from .runs.registry import newest_with_hash as newest_with_hash
    from .runs.supervisor import RunOutcome as RunOutcome
    from .runs.supervisor import Supervisor as Supervisor
    from .share_sheet import write_share_sheet as write_share_sheet
    from .toy.demo_data import write_teaching_set as write_teaching_set


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LATER[name]}", __name__), _OTHER_NAME.get(name, name))
    globals()[name] = value
    return value


__all__ = [
    "AdapterError",
    "CheckpointError",
    "ConfigError",
    "DatasetError",
    "ModelFileError",
    "NonFiniteError",
    "Problem",
    "ResourceError",
    "TrainerError",
    "COVERAGE_PICTURE",
    "PANEL_HEARTBEAT_S",
    "PreviewCell",
    "PANEL_MAX_BODY",
    "PANEL_PREFIX",
    "PanelRequest",
    "__version__",
    "describe_run",
    "scan_checkpoints",
]
