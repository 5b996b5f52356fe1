"""From kernel specs to CUDA C++ sources (Jinja) and cubins (NVRTC), with a content-keyed cache."""
