"""Load SDXL: names the base model. Reads its header only; the worker loads the weights."""

from __future__ import annotations

from typing import Any

from .. import trainer_core as core
from . import host
from .boundary import contained
from .handles import MODEL, ModelHandle
from .widgets import Declaration, choice, setting

TOY = "toy (built in, for a first try)"
OWN_VAE = "the model's own"


class SafeScalerLoadSDXL:
    CATEGORY = "Safe-Scaler"
    DESCRIPTION = "Chooses the SDXL base model to train on. Only its header is read here; nothing is loaded."
    FUNCTION = "execute"
    RETURN_TYPES = (MODEL,)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The base model, for Safe-Scaler Train. It holds a name, not weights.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Declaration]]:
        return {
            "required": {
                "checkpoint": choice(
                    [TOY, *host.file_names("checkpoints")],
                    "SDXL checkpoint to train on. The toy trains in minutes on any computer.",
                ),
                "precision": setting(
                    "precision.compute", tooltip="Number format of the computation; auto fits the GPU."
                ),
            },
            "optional": {
                "vae": choice([OWN_VAE, *host.file_names("vae")], "Another VAE than the checkpoint's own."),
                "prediction": setting("model.prediction_type", tooltip="What the model predicts; auto reads the file."),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, checkpoint: str | None = None, vae: str | None = None) -> bool | str:
        if checkpoint is not None and checkpoint != TOY and host.full_path("checkpoints", checkpoint) is None:
            return f"There is no checkpoint {checkpoint!r} any more. Press R to read the lists again and choose one."
        if vae is not None and vae != OWN_VAE and host.full_path("vae", vae) is None:
            return f"There is no VAE {vae!r} any more. Press R to read the lists again and choose one."
        return True

    @classmethod
    def IS_CHANGED(cls, checkpoint: str = TOY, vae: str | None = None, **_: Any) -> str:
        return f"{host.file_stamp('checkpoints', checkpoint)} {host.file_stamp('vae', vae or OWN_VAE)}"

    @contained
    def execute(
        self, checkpoint: str, precision: str, vae: str = OWN_VAE, prediction: str = "auto"
    ) -> tuple[ModelHandle]:
        path = "toy" if checkpoint == TOY else str(host.full_path("checkpoints", checkpoint) or checkpoint)
        info = core.inspect_model(path)
        settings: dict[str, Any] = {
            "model.path": path,
            "model.prediction_type": prediction,
            "precision.compute": precision,
        }
        if vae != OWN_VAE:
            settings["model.vae"] = str(host.full_path("vae", vae) or vae)
        core.check_vae(path, settings.get("model.vae"))
        return (ModelHandle(checkpoint, info.native_size, settings),)
