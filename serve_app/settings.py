"""What every settings model of the package is: frozen, complete in its description, and strict about names."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Base of every settings model: unknown fields are errors, and a field's docstring is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)
