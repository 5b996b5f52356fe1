"""The CUDA backend: devices, arenas, upload, graphs built node by node, eager launches."""
