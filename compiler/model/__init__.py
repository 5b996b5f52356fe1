"""What the model is: dimensions from the artifact's configuration, weights bound by logical parameter."""
from compiler.model.bind import Binding, Product, bind
from compiler.model.spec import ModelError, ModelSpec, spec_from_config

__all__ = ["Binding", "ModelError", "ModelSpec", "Product", "bind", "spec_from_config"]
