"""What the panel shows and does, without ComfyUI: the run list, snapshots, pictures, commands, the HTTP requests.

ComfyUI's routes (`nodes/api.py`) and the gradio twin (`panel/app.py`) hand their requests to `PanelApi`.
Nothing here imports torch.
"""
