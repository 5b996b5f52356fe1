"""One op, one room: each module defines one op kind (shape rule, NumPy reference, cost). Importing registers all."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
