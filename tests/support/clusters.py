"""A cluster's file without links: a node with little memory, as a laptop that was calibrated."""

from pathlib import Path

ONE_NODE = """
description = "a small computer"
sources = ["nothing: it is made up"]
[device]
name = "a core"
kind = "cpu"
bandwidth_gb_s = 20
launch_us = 10
[device.products.fp32]
peak_tflops = 0.08
[node]
devices = 8
memory_gb = 8
bandwidth_gb_s = 100
"""


def one_node(folder: Path) -> Path:
    path = folder / "small.toml"
    path.write_text(ONE_NODE)
    return path
