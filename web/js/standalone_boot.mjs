// Starts the panel of the gradio twin's page. (Not a .js file: ComfyUI would import it into its own page.)
import { start } from "./standalone.js";

start(document.getElementById("safe-scaler"), "../api/v1");
