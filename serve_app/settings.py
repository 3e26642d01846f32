"""What every settings model of the package is: frozen, complete in its description, and strict about names."""

from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """Base of every settings model: unknown fields are errors, and a field's docstring is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    def from_section(cls, additional_config: object, section: str) -> Self:
        """The model in one section of vLLM's `additional_config`; without that section, the defaults.

        Raises:
            ValueError: in one line, with each bad field's name, its value and its bound.
        """
        fields = additional_config.get(section, {}) if isinstance(additional_config, Mapping) else {}
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, problem['loc'])) or section}={problem['input']!r}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            raise ValueError(f'additional_config["{section}"]: ' + "; ".join(problems)) from None
